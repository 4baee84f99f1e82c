"""Measured time and memory of devices, links and processes, next to predictions."""

import pickle
import threading
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper, save

import onnxplace
from onnxplace.bundle.bundle import record_crossing_values
from onnxplace.errors import ExecutionError
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.measure import device_usage, memory_use
from onnxplace.measure.device_usage import TracedRequests, count_value_bytes, measure_usage
from onnxplace.measure.memory_use import (
    BundleMemory,
    ProcessMemory,
    StoredFeeds,
    can_measure_memory,
    measure_memory,
)
from onnxplace.pipeline.registry import find_plugin
from onnxplace.runtime.interface import Event
from onnxplace.target.device_kinds import Hardware

MIB = 1 << 20
only_linux = pytest.mark.skipif(not can_measure_memory(), reason="only Linux tells the most a process held")


# ---------------------------------------------------------------------------------------------- traces


def make_events(begin: float, run: float, copy: float) -> tuple[Event, ...]:
    """A computes x, which B requested before; B then copies it, does something else for 1 s, and runs twice."""
    computed, arrived = begin + run, begin + run + 0.5 + copy
    return (
        Event("B", "wait", "x", 0.0, computed + 0.5),
        Event("A", "run", "A-0", begin, computed),
        Event("B", "copy", "x", computed + 0.5, arrived),
        Event("B", "run", "B-0", arrived + 1, arrived + 3),
        Event("B", "run", "B-1", arrived + 3, arrived + 7),
    )


def test_a_device_is_busy_while_it_neither_waits_nor_copies():
    traced = TracedRequests()
    for run in (10.0, 2.0, 3.0):
        traced.add(make_events(1.0, run, 0.25))
    first, *others = (SimpleNamespace(id=name) for name in ("A-0", "B-0", "B-1"))
    assert traced.busy([first]) == 3.0, "the median: one of them was disturbed"
    assert traced.busy(others) == (1 + 2) + 4
    assert traced.busy([]) == 0.0


def test_copies_and_transfers_are_distinguished():
    traced = TracedRequests()
    for copy in (0.25, 9.0, 0.25):
        traced.add(make_events(1.0, 2.0, copy))
    assert (traced.copying("B"), traced.copying("A")) == (0.25, 0.0)
    assert traced.transfer("x", "A-0", "A", "B") == 0.5 + 0.25, "from when it was made, as it was asked for before"


def test_a_value_computed_long_ago_takes_only_its_copy():
    traced = TracedRequests()
    late = [Event("B", "wait", "x", 8.0, 8.0), Event("B", "copy", "x", 8.0, 8.5), Event("B", "run", "B-0", 8.5, 9.0)]
    traced.add((*make_events(1.0, 2.0, 0.25)[1:2], *late))
    assert traced.transfer("x", "A-0", "A", "B") == 0.5


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (np.zeros((3, 4), "f4"), 48),
        (np.zeros((0, 4), "f8"), 0),
        (np.array(True), 1),
        ([np.zeros(3, "i8"), np.zeros(1, "u1")], 25),
        (np.array(["a", "äb"], object), 4),
        (None, 0),
        ([], 0),
        ({"a": 1.0}, 9),
    ],
)
def test_bytes_of_values_of_any_type(value, size):
    assert count_value_bytes(value) == size


# ---------------------------------------------------------------------------------------------- a whole step


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> onnxplace.Bundle:
    """Six matrices of 4 MiB, three on each device, and one value of 1 KiB per row that crosses."""
    folder, width = tmp_path_factory.mktemp("observed"), 1024
    matrix = np.random.default_rng(0).standard_normal((width, width)).astype(np.float32)
    weights = [numpy_helper.from_array(matrix + index, f"w{index}") for index in range(6)]
    nodes = [helper.make_node("MatMul", [f"x{i}", f"w{i}"], [f"x{i + 1}"], name=f"n{i}") for i in range(6)]
    inputs_and_outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", width]) for name in ("x0", "x6")]
    graph = helper.make_graph(nodes, "observed", inputs_and_outputs[:1], inputs_and_outputs[1:], weights)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    save(model, folder / "m.onnx")
    (folder / "map.json").write_text('{"n[012]": "cpu:0", ".*": "cpu:1"}')
    steps = f"optimize,profile{{estimate=true}},coplace{{join=never,device_map={folder / 'map.json'}}},m-etf,split,emit"
    return onnxplace.compile(
        folder / "m.onnx", folder / "bundle", devices="cpu:0,cpu:1,cpu:2", shape={"n": 2}, pipeline=steps
    )


def make_feeds(bundle, **sizes):
    return random_feeds(bundle.inputs, {**bundle.manifest.dimensions, **sizes})


def test_figures_are_measured_on_the_inputs(bundle):
    few, many = (measure_usage(bundle, make_feeds(bundle, n=n), 3, with_memory=False) for n in (2, 512))
    (small,), (large,) = few.links, many.links
    assert (small.source, small.destination, small.values) == ("cpu:0", "cpu:1", 1)
    assert (small.bytes, small.predicted_bytes) == (2 * 4096, 2 * 4096)
    assert (large.bytes, large.predicted_bytes) == (512 * 4096, 2 * 4096)
    assert 0 < small.seconds != small.predicted_seconds
    assert small.predicted_seconds == large.predicted_seconds
    for before, after in zip(few.devices[:2], many.devices[:2]):
        assert 0 < before.busy_seconds < after.busy_seconds, "256 times the work"
        assert before.busy_seconds != before.predicted_busy_seconds == after.predicted_busy_seconds > 0
        assert before.peak_bytes is None, "memory was not asked for"
    assert (few.process.running_bytes, few.notes) == (None, ())


def test_a_device_without_work_is_idle(bundle):
    (idle,) = measure_usage(bundle, make_feeds(bundle), 1, with_memory=False).devices[2:]
    assert (idle.id, idle.busy_seconds, idle.predicted_busy_seconds, idle.predicted_peak_bytes) == ("cpu:2", 0, 0, 0)


def test_a_failed_recording_is_noted_and_the_rest_is_measured(bundle, monkeypatch):
    def fails(bundle):
        raise ExecutionError("X010", "no room", where="cpu:1", hint="buy some")

    monkeypatch.setattr(device_usage, "record_crossing_values", fails)
    measured_values: list[dict] = []
    monkeypatch.setattr(
        device_usage,
        "measure_memory",
        lambda bundle, values, *others: measured_values.append(values) or BundleMemory(),
    )
    usage = measure_usage(bundle, make_feeds(bundle), 1, with_memory=True)
    (note,) = usage.notes
    assert (note.code, note.where, note.hint) == ("X010", "cpu:1", "buy some")
    assert note.message == "values that cross between devices were not recorded: no room"
    assert usage.links[0].bytes is None
    assert usage.links[0].seconds > 0
    assert list(measured_values[0]) == ["x0"]


# ---------------------------------------------------------------------------------------------- memory


@pytest.fixture(scope="module")
def values(bundle) -> dict:
    """Feeds for 1024 rows, and the values that cross with them: 4 MiB each."""
    feeds = make_feeds(bundle, n=1024)
    with find_plugin("runtimes", "onnxruntime")().open(record_crossing_values(bundle)) as session:
        return {**feeds, **session.run(feeds).outputs}


@pytest.fixture(scope="module")
def processes() -> dict[str, ProcessMemory]:
    """What the process of each device was found to need; "" is that of the whole bundle."""
    return {}


@pytest.fixture
def measured_once(monkeypatch, processes):
    """Start no process for a job that an earlier test measured with these values."""
    measure = memory_use._run_in_child

    def measure_once(job):
        if job.device not in processes:
            processes[job.device] = measure(job)
        return processes[job.device]

    monkeypatch.setattr(memory_use, "_run_in_child", measure_once)


@only_linux
def test_each_device_is_measured_alone_and_the_process_as_a_whole(bundle, values, measured_once):
    notifications: list[tuple[str, int, int]] = []
    memory = measure_memory(bundle, values, lambda *arguments: notifications.append(arguments))
    assert memory.notes == ()
    assert notifications == [("memory of the process", 0, 3), ("memory of cpu:0", 1, 3), ("memory of cpu:1", 2, 3)]
    weights, rows = 12 * MIB, 4 * MIB
    assert set(memory.device_bytes) == {"cpu:0", "cpu:1"}
    for device_bytes in memory.device_bytes.values():  # its three matrices, its inputs, and its outputs
        assert weights + 2 * rows < device_bytes < weights + 6 * rows
    assert 2 * weights + 2 * rows < memory.process.own_bytes < memory.process.running_bytes
    assert memory.process.opening_bytes > 2 * weights


@only_linux
def test_the_process_is_the_measurement_of_a_single_device(tmp_path, model_file):
    alone = onnxplace.compile(model_file, tmp_path / "b", devices="cpu:0", shape={"batch": 4}, placer="single")
    names: list[str] = []
    memory = measure_memory(alone, make_feeds(alone), lambda name, *_: names.append(name))
    assert names == ["memory of the process"]
    assert memory.device_bytes == {"cpu:0": memory.process.own_bytes}
    assert memory.process.own_bytes < 3 * MIB // 2, "two weights of 16 KiB: what any process takes is left out"


@only_linux
def test_a_device_without_its_received_values_is_left_out(bundle, values, measured_once):
    memory = measure_memory(bundle, {"x0": values["x0"]})
    assert set(memory.device_bytes) == {"cpu:0"}
    assert memory.notes == ()


def test_nothing_is_measured_except_on_linux(bundle, values, monkeypatch, tmp_path):
    monkeypatch.setattr(memory_use, "_CLEAR_REFS", tmp_path / "nowhere")
    assert measure_memory(bundle, values) == BundleMemory()


@only_linux
def test_a_process_that_fails_is_noted_by_device(bundle, values, measured_once, processes):
    processes.pop("cpu:1", None)
    wrong = {**values, "x3": values["x3"][:, :7]}
    memory = measure_memory(bundle, wrong)
    (note,) = memory.notes
    assert note.message.startswith("the memory of cpu:1 was not measured: segment cpu1-000 failed")
    assert note.code == "X001"
    assert "\n" not in note.message
    assert set(memory.device_bytes) == {"cpu:0"}
    assert memory.process is not None


@only_linux
def test_nothing_is_measured_if_values_cannot_be_stored(bundle, values, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    memory = measure_memory(bundle, values)
    assert (memory.process, memory.device_bytes) == (None, {})
    assert "the memory of the process was not measured" in memory.notes[0].message


def test_values_round_trip_through_files(tmp_path):
    values = {
        "float": np.arange(6, dtype=np.float32).reshape(2, 3),
        "transposed": np.arange(6, dtype=np.int64).reshape(2, 3).T,
        "scalar": np.array(True),
        "empty": np.zeros((0, 3), np.float16),
        "brain": np.ones(3, ml_dtypes.bfloat16),
        "text": np.array(["a", "b"], object),
        "list": [np.ones(2), np.zeros(3)],
        "absent": None,
    }
    stored: StoredFeeds = pickle.loads(pickle.dumps(StoredFeeds.write(values, tmp_path)))
    assert set(stored) == set(values)
    assert len(stored) == len(values)
    for name, value in values.items():
        loaded = stored[name]
        if isinstance(value, np.ndarray):
            assert (loaded.dtype, loaded.shape) == (value.dtype, value.shape)
        np.testing.assert_equal(loaded, value)
    assert stored["float"] is not stored["float"], "mapped again, so that its memory is free after the last use"
    assert set(stored.select(["float", "absent", "more"])) == {"float", "absent"}
    with pytest.raises(KeyError):
        stored["more"]


def test_the_peak_memory_of_gpus_is_measured(monkeypatch):
    used, over = iter([100, 150, 900]), threading.Event()

    def gpus(*, plugins):
        now = next(used, 300)
        if now == 300:
            over.set()
        return [
            ("cuda:0", Hardware(0, "fake", 1000, 1000 - now), None),
            ("cuda:1", Hardware(1, "other", 1000, 0), None),
        ]

    monkeypatch.setattr(memory_use, "list_accelerators", gpus)
    monkeypatch.setattr(memory_use, "GPU_POLL_SECONDS", 0)
    with memory_use._watch_gpus(["cuda:0"]) as most:
        assert over.wait(120)
    assert most == {"cuda:0": 800}


@pytest.mark.parametrize("devices", [[], ["cuda:0"]])
def test_without_gpus_nothing_is_polled(monkeypatch, devices):
    monkeypatch.setattr(
        memory_use, "list_accelerators", lambda plugins: () if devices else pytest.fail("it was not requested")
    )
    with memory_use._watch_gpus(devices) as most:
        pass
    assert most == {}


def test_crossing_values_are_not_recorded_if_memory_does_not_suffice(bundle, monkeypatch):
    monkeypatch.setattr(device_usage, "available_memory_bytes", lambda: 1000)
    recorded, notes = device_usage._record_crossing(find_plugin("runtimes", "onnxruntime")(), bundle, {})
    assert recorded is None
    assert "1000 are free" in notes[0].message
