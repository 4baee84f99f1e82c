"""Which cores devices compute on: of one node of memory where possible, pinned while they open and in their process."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, strategies as st

import onnxplace
from onnxplace.errors import ModelError, TargetError
from onnxplace.machine import hardware
from onnxplace.machine.hardware import assign_cores, find_cores, find_node, require_device
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options, may_pin
from onnxplace.runtimes.execution import segments
from onnxplace.target import kind_table, plugin_providers
from onnxplace.target.device_kinds import ISOLATE, DeviceAddress, DeviceKind
from onnxplace.target.kind_table import find_kind, is_isolated
from onnxplace.target.plugin_providers import make_provider_kind
from onnxplace.target.target import Device, default_link
from onnxplace.utils.ort import build_one_node_model
from tests.support.copies import compile_copies, make_feeds

needs_pinning = pytest.mark.skipif(not may_pin(), reason="threads cannot be kept on cores here")


@pytest.fixture
def make_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that pretends a machine whose cores are near these nodes, by core."""

    def make(nodes: list[int]) -> None:
        for core, node in enumerate(nodes):
            (tmp_path / f"cpu{core}" / f"node{node}").mkdir(parents=True)
            (tmp_path / f"cpu{core}" / "node_of_nothing").mkdir()
        monkeypatch.setattr(hardware, "CORES_FOLDER", tmp_path)
        monkeypatch.setattr(hardware, "available_cores", lambda: tuple(range(len(nodes))))

    return make


@pytest.mark.parametrize(
    ("nodes", "sizes", "expected"),
    [
        ([0, 0, 1, 1], [2, 2], [(0, 1), (2, 3)]),
        ([0, 1, 0, 1], [2, 2], [(0, 2), (1, 3)]),  # numbers of cores go to and fro between nodes
        ([0, 1, 0, 1], [1, 1, 1, 1], [(0,), (2,), (1,), (3,)]),
        ([0, 0, 0, 1, 1, 1], [2, 3, 1], [(0, 1), (3, 4, 5), (2,)]),  # the first node has only one core left
        ([0, 0, 1, 1], [3, 1], [(0, 1, 2), (3,)]),  # no node has enough
        ([0, 0, 11, 2], [1, 1, 1, 1], [(0,), (1,), (3,), (2,)]),
        ([0, 1], [1, 1, 1], [(0,), (1,), (0,)]),  # too few: they share
        ([0, 0], [5], [(0, 1)]),
    ],
)
def test_the_cores_of_a_device_are_near_one_memory(
    make_machine: Any, nodes: list[int], sizes: list[int], expected: list[tuple[int, ...]]
) -> None:
    make_machine(nodes)
    assert assign_cores(sizes) == expected


@given(st.lists(st.integers(0, 3), min_size=1, max_size=12), st.lists(st.integers(1, 6), max_size=6))
def test_cores_are_shared_only_where_they_are_too_few(nodes: list[int], sizes: list[int]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hardware, "available_cores", lambda: tuple(range(len(nodes))))
        patch.setattr(hardware, "find_node", lambda core: nodes[core])
        assigned = assign_cores(sizes)
    assert [len(cores) for cores in assigned] == [min(size, len(nodes)) for size in sizes]
    assert all(len(set(cores)) == len(cores) for cores in assigned)
    if sum(sizes) <= len(nodes):
        every = [core for cores in assigned for core in cores]
        assert len(set(every)) == len(every)
        if assigned:
            counts = [nodes.count(node) for node in set(nodes)]
            assert len({nodes[core] for core in assigned[0]}) == 1 or max(counts) < sizes[0]


def test_a_system_that_does_not_say_has_one_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hardware, "CORES_FOLDER", tmp_path)
    assert find_node(3) == 0


def test_a_span_has_the_cores_of_its_processors(make_machine: Any) -> None:
    make_machine([0, 0, 1, 1])
    devices = [
        Device("cpu:0-1", 1 << 30, cores=4, processors=("cpu:0", "cpu:1")),
        Device("cpu:0", 1 << 30, cores=2, processors=("cpu:0",)),
        Device("openvino/cpu:1", 1 << 30, cores=1, processors=("cpu:1",)),
        Device("webgpu:0", 1 << 30),
    ]
    assert find_cores(devices) == {"cpu:0-1": (0, 1, 2, 3), "cpu:0": (0, 1), "openvino/cpu:1": (2,)}


def test_devices_show_their_node_where_there_are_several(make_machine: Any, run_cli: Any) -> None:
    make_machine([0, 1, 0, 1])
    shown = run_cli("devices", "--devices", "cpu:0,cpu:1,cpu")
    assert shown.code == 0
    lines = [line.split() for line in shown.out.splitlines() if line.startswith("cpu:")]
    assert "node of memory" in shown.out
    assert [line[-1] for line in lines[:2]] == ["0", "1"]
    assert lines[2][-2:] == ["0,", "1"]


def test_devices_of_one_node_do_not_show_it(make_machine: Any, run_cli: Any) -> None:
    make_machine([0, 0])
    shown = run_cli("devices", "--devices", "cpu:0,cpu:1")
    assert shown.code == 0
    assert "node of memory" not in shown.out


# -------------------------------------------------------------------------------------------- sessions on their cores


@needs_pinning
def test_weights_are_first_touched_on_the_cores_of_their_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device opens its segments in a thread that is pinned to its cores."""
    here = sorted(os.sched_getaffinity(0))
    bundle = compile_copies(tmp_path, cores=2)
    expected = find_cores(bundle.target.devices)
    opened, open_segment = dict[str, set[int]](), segments.open_segment

    def note(bundle: Any, record: Any, device: Any) -> Any:
        opened[device.id] = os.sched_getaffinity(0)
        return open_segment(bundle, record, device)

    monkeypatch.setattr(segments, "open_segment", note)
    with onnxplace.InferenceSession(bundle) as session:
        session.run(["y"], make_feeds(1))
        engine = session._session.engine  # type: ignore[attr-defined]
        assert {item.id: item.cores for item in engine._devices.values()} == expected
    assert opened == {name: {cores[0]} for name, cores in expected.items()}
    assert sorted(os.sched_getaffinity(0)) == here


@needs_pinning
def test_threads_of_a_session_are_pinned_to_the_other_cores_of_its_device() -> None:
    options = make_session_options((4, 6, 7))
    assert options.get_session_config_entry("session.intra_op_thread_affinities") == "7;8"


def read_affinity(_: Any) -> set[int]:
    return os.sched_getaffinity(0)


@needs_pinning
def test_the_process_of_an_isolated_device_has_its_cores() -> None:
    core = max(os.sched_getaffinity(0))
    device = DeviceAddress("cpu", 0, options={ISOLATE: "true"}, cores=1)
    session = open_session(build_one_node_model(), make_session_options((core,)), device)
    assert session.call(read_affinity) == {core}
    session.close()


def test_a_core_that_is_not_there_does_not_keep_a_process_from_opening() -> None:
    device = DeviceAddress("cpu", 0, options={ISOLATE: "true"}, cores=1)
    session = open_session(build_one_node_model(), make_session_options((4000,)), device)
    assert session.get_inputs()
    session.close()


# ---------------------------------------------------------------------------------------------- providers with cores


@pytest.mark.parametrize(
    ("kind", "cores", "options", "expected"),
    [
        ("openvino/cpu", 2, {}, True),
        ("openvino/cpu", 1, {}, False),  # it computes in the caller's thread
        ("openvino/cpu", 2, {ISOLATE: "false"}, False),
        ("openvino/cpu", 4, {}, False),  # all cores
        ("openvino/cpu", 0, {}, False),  # no target says that they are shared
        ("openvino/gpu", 1, {}, False),
        ("cpu", 1, {}, False),
        ("cpu", 4, {ISOLATE: "true"}, True),
    ],
)
def test_a_provider_that_pins_threads_itself_is_isolated_on_a_part_of_the_cores(
    monkeypatch: pytest.MonkeyPatch, kind: str, cores: int, options: dict[str, str], expected: bool
) -> None:
    monkeypatch.setattr(kind_table, "count_cores", lambda: 4)
    assert is_isolated(DeviceAddress(kind, 0, options=options, cores=cores)) == expected


def test_a_device_stays_isolated_where_the_main_thread_is_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kind_table, "count_cores", lambda: 4)
    placed = segments.PlacedDevice(Device("openvino/cpu:0", 1 << 30, cores=2, processors=("cpu:0",)), (0, 1))
    monkeypatch.setattr(kind_table, "count_cores", lambda: 1)
    assert is_isolated(placed.memory.address)


def test_links_between_providers_on_cores_are_those_of_cores() -> None:
    ends = Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30)
    usual = default_link(*ends)
    for other in ("openvino/cpu:0", "openvino/cpu:1"):
        link = default_link(ends[0], Device(other, 1 << 30))
        assert (link.latency_seconds, link.bytes_per_second) == (usual.latency_seconds, usual.bytes_per_second)
    gpu = default_link(Device("openvino/cpu:0", 1 << 30), Device("cuda:0", 1 << 30))
    assert gpu.latency_seconds == find_kind("cuda").link_latency_seconds


# ------------------------------------------------------------------------------------------------ options of providers


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, {"A": {"hint": "f32", "threads": "1"}}),
        ({"A": {"streams": "2"}}, {"A": {"hint": "f32", "threads": "1", "streams": "2"}}),
        ({"A": {"hint": "bf16"}, "B": {"x": "y"}}, {"A": {"hint": "bf16", "threads": "1"}, "B": {"x": "y"}}),
    ],
)
def test_given_options_of_a_configuration_keep_the_others(given: Any, expected: Any) -> None:
    own = {"load_config": json.dumps({"A": {"hint": "f32", "threads": "1"}}), "device_type": "A"}
    kind: Any = make_provider_kind("openvino/cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin_providers.ProviderKind, "_provider_options", lambda *_: own)
        text = {"option.load_config": json.dumps(given)} if given else {}
        options = kind._list_options(DeviceAddress(kind.name, 0, options=text))
    assert json.loads(options.pop("load_config")) == expected
    assert options == {"device_type": "A"}


@pytest.mark.parametrize("text", ["nonsense", "[1]", '"text"', '{"A": 3}'])
def test_a_configuration_that_is_no_table_is_left_to_the_provider(text: str) -> None:
    kind: Any = make_provider_kind("openvino/cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plugin_providers.ProviderKind, "_provider_options", lambda *_: {"load_config": '{"A": {}}'})
        options = kind._list_options(DeviceAddress(kind.name, 0, options={"option.load_config": text}))
    assert options == {"load_config": text}


class Refusing(DeviceKind):
    """A kind whose provider refuses an option."""

    name, title, providers, memory = "webgpu", "a GPU", {"gpu": "CPUExecutionProvider"}, ""

    def list_hardware(self) -> tuple[()]:
        return ()

    def find_problem(self, address: DeviceAddress) -> str | None:
        return None

    def list_providers(self, address: DeviceAddress) -> list[tuple[str, dict[str, str]]]:
        return []


@pytest.mark.parametrize("value", ["1", "bad"])
def test_an_option_that_the_provider_refuses_is_named(monkeypatch: pytest.MonkeyPatch, value: str) -> None:
    def open_or_refuse(model: Any, options: Any, address: DeviceAddress) -> Any:
        if address.options.get("option.speed") == "bad":
            raise ModelError("M004", "cannot be opened: unknown speed")
        return SimpleNamespace()

    monkeypatch.setattr(hardware, "find_kind", lambda name: Refusing())
    monkeypatch.setattr(hardware, "open_session", open_or_refuse)
    device = Device("webgpu:0", 1 << 30, options={"option.speed": value})
    if value == "1":
        require_device(device)
        return
    with pytest.raises(TargetError, match=r"T011.*webgpu:0: its provider refuses speed=bad: .*unknown speed"):
        require_device(device)


def test_only_the_provider_of_a_device_gets_its_options(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT has CUDA behind it, which would refuse the options of TensorRT."""
    sessions = list[Any]()
    fake = SimpleNamespace(InferenceSession=lambda *_, providers, **__: sessions.append(providers))
    monkeypatch.setitem(sys.modules, "onnxruntime", fake)
    monkeypatch.setattr("onnxplace.target.device_kinds.import_onnxruntime", lambda: fake)
    address = DeviceAddress("cuda", 0, options={"provider": "tensorrt", "option.trt_cuda_graph_enable": "1"})
    find_kind("cuda").create_session(b"", None, address, {"user_compute_stream": "7"})
    (((first, own), (second, behind), last),) = sessions
    assert (first, second, last) == ("TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider")
    assert own["trt_cuda_graph_enable"] == "1"
    assert "trt_cuda_graph_enable" not in behind
    assert own["user_compute_stream"] == behind["user_compute_stream"] == "7"
