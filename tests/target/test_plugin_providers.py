"""Providers that are packages or libraries: their names, those that people use, and libraries that cannot be loaded."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnx
import onnxruntime
import pytest

from onnxplace.errors import UsageError
from onnxplace.machine.hardware import find_link_technology
from onnxplace.target import plugin_providers
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.hosts import split_host
from onnxplace.target.kind_table import find_kind, is_known_kind, list_kind_names, resolve_short_name
from onnxplace.target.plugin_providers import LIBRARIES_VARIABLE, RECORDS, has_family, parse_kind_name
from tests.conftest import FAST_PIPELINE
from tests.support.commands import only_json

# Entries of libraries, after the head of ONNX Runtime's C interface: GetApi, and the first function of an OrtApi.
SOURCES = {
    "without_entries": "int unrelated;",
    "crashes_at_loading": "#include <stdlib.h>\n__attribute__((constructor)) void begin(void) { abort(); }",
    "of_another_version": """
        struct api { void *(*create_status)(int, const char *); };
        struct base { const struct api *(*get_api)(unsigned); };
        void *CreateEpFactories(const char *name, const struct base *base) {
            return base->get_api(1)->create_status(1, "needs version 99 of ONNX Runtime");
        }
        void *ReleaseEpFactory(void *factory) { return 0; }""",
    "of_a_newer_version": """
        struct base { void **(*get_api)(unsigned); };
        void *CreateEpFactories(const char *name, const struct base *base) { return *base->get_api(9999); }
        void *ReleaseEpFactory(void *factory) { return 0; }""",
}


@pytest.fixture
def name_library(monkeypatch):
    """Let a provider's library be at a path, as users do it, and forget it at the end."""
    monkeypatch.setattr(plugin_providers, "_loaded", dict(plugin_providers._loaded))

    def name(provider, path):
        monkeypatch.setenv(LIBRARIES_VARIABLE, f"{provider}={path}")
        has_family.cache_clear()
        resolve_short_name.cache_clear()

    yield name
    has_family.cache_clear()
    resolve_short_name.cache_clear()


def test_commands_on_other_devices_do_not_load_the_code_for_providers():
    script = (
        "from onnxplace.machine.hardware import local_target; local_target('cpu:0'); import sys; print(*sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    loaded = done.stdout.split()
    assert "onnxplace.target.kind_table" in loaded
    assert "onnxplace.target.plugin_providers" not in loaded


def build_library(folder, name):
    """Return the path of a library of `SOURCES`."""
    if (compiler := shutil.which("gcc")) is None:
        pytest.skip("there is no gcc")
    path = folder / f"{name}.so"
    command = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path)]
    subprocess.run(command, input=SOURCES[name], text=True, check=True)
    return path


def check_that_the_rest_works(run_cli, provider, words, model_file, folder):
    """Check the sentence about a provider's library, and that a bundle for the CPU compiles next to it."""
    refused = run_cli("compile", model_file, "-o", folder / "b", "--devices", f"{provider}/npu:0")
    assert (refused.code, refused.out) == (2, "")
    assert refused.err.startswith(f"error[T011] {provider}/npu:0: ")
    assert words in refused.err.splitlines()[0]
    arguments = ("--devices", "cpu:0", "--shape", "batch=4", "--pipeline", FAST_PIPELINE)
    compiled = run_cli("compile", model_file, "-o", folder / "b", *arguments)
    assert compiled.code == 0, compiled.err
    listed = {item["id"]: item["problem"] for item in only_json(run_cli("devices", "--json"))["accelerators"]}
    assert words in listed[f"{provider}/npu:0"]


def test_a_missing_library_is_named(run_cli, name_library, model_file, tmp_path):
    name_library("missing", tmp_path / "nothing.so")
    check_that_the_rest_works(run_cli, "missing", f"{tmp_path / 'nothing.so'} does not exist", model_file, tmp_path)


def test_a_text_is_no_library(run_cli, name_library, model_file, tmp_path):
    (tmp_path / "text.so").write_text("nothing to load")
    name_library("text", tmp_path / "text.so")
    check_that_the_rest_works(run_cli, "text", "ONNX Runtime cannot load its library", model_file, tmp_path)


def test_a_library_that_crashes_ends_a_process_of_its_own(run_cli, name_library, model_file, tmp_path):
    name_library("crashing", build_library(tmp_path, "crashes_at_loading"))
    words = "crashes_at_loading.so failed in a process of its own: SIGABRT"
    check_that_the_rest_works(run_cli, "crashing", words, model_file, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("without_entries", "undefined symbol: CreateEpFactories"),
        ("of_another_version", "needs version 99 of ONNX Runtime"),
        ("of_a_newer_version", "failed in a process of its own: SIGSEGV"),
    ],
)
def test_a_library_of_something_else_is_refused(run_cli, name_library, model_file, tmp_path, source, words):
    provider = source.replace("_", "-")
    name_library(provider, build_library(tmp_path, source))
    check_that_the_rest_works(run_cli, provider, words, model_file, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.02, 0.5])
def test_a_truncated_library_is_refused(run_cli, name_library, model_file, tmp_path, share):
    """The library of ONNX Runtime itself, as far as a download got."""
    whole = next((Path(onnxruntime.__file__).parent / "capi").glob("onnxruntime_pybind11_state*.so")).read_bytes()
    (tmp_path / "cut.so").write_bytes(whole[: int(len(whole) * share)])
    provider = f"cut-{share * 100:.0f}"
    name_library(provider, tmp_path / "cut.so")
    check_that_the_rest_works(run_cli, provider, str(tmp_path / "cut.so"), model_file, tmp_path)


@pytest.mark.parametrize("text", ["/opt/libnpu.so", "npu=", "Npu=/opt/libnpu.so", "my npu=/opt/libnpu.so"])
def test_a_library_needs_a_name_and_a_path(run_cli, monkeypatch, text):
    monkeypatch.setenv(LIBRARIES_VARIABLE, text)
    result = run_cli("devices")
    assert result.code == 2
    assert f"{LIBRARIES_VARIABLE}: expected NAME=PATH with a name of lower-case letters" in result.err
    assert f"got {text!r}" in result.err


def test_names_of_kinds_are_provider_and_type():
    assert parse_kind_name("openvino/gpu") == ("openvino", "gpu")
    assert parse_kind_name("nv-tensorrt-rtx/gpu") == ("nv-tensorrt-rtx", "gpu")
    assert [parse_kind_name(name) for name in ("openvino", "openvino/tpu", "node1/npu", "/npu", "")] == [None] * 5


def test_a_host_is_not_a_provider():
    assert split_host("node1/openvino/gpu:1") == ("node1", "openvino/gpu:1")
    assert split_host("openvino/gpu:1") == ("", "openvino/gpu:1")
    assert split_host("node1/npu:0") == ("node1", "npu:0")


def test_a_host_cannot_be_called_as_a_provider(run_cli):
    result = run_cli("hosts", "--hosts", "node1,openvino")
    assert result.code == 2
    assert "error[T005] --hosts: openvino/npu:0 is a device of the execution provider openvino" in result.err


@pytest.mark.parametrize("family", RECORDS)
def test_a_known_provider_that_is_not_installed_says_how_to_get_it(family, run_cli):
    if has_family(family):
        pytest.skip("it is installed")
    kind = f"{family}/{RECORDS[family].types[0]}"
    result = run_cli("devices", "--devices", f"{kind}:0")
    assert result.code == 2
    assert result.err.startswith(f"error[T011] {kind}:0: ")
    assert find_kind(kind).install_hint in result.err.splitlines()[1]
    assert kind not in list_kind_names()


def test_a_provider_that_nobody_has_heard_of_and_that_is_not_there_is_no_kind(run_cli):
    assert not is_known_kind("unheard/npu")
    assert run_cli("devices", "--devices", "unheard/npu:0").code == 2


class FakeKind:
    """A kind with devices of which some are usable."""

    def __init__(self, name, usable):
        self.name, self._usable = name, usable

    def list_hardware(self):
        return tuple(plugin_providers.Hardware(index, "", 0, 0) for index in range(2))

    def find_problem(self, address):
        return None if address.index in self._usable else "it is broken"


@pytest.mark.parametrize(
    ("kind", "index", "expected"),
    [
        ("npu", 0, ("a/npu", 1)),  # the first one is broken
        ("npu", 1, ("b/npu", 0)),
        ("npu", 3, None),
        ("gpu", 0, ("cuda", 1)),
        ("gpu", 1, ("a/gpu", 0)),
        ("gpu", 2, ("webgpu", 0)),
        ("igpu", 0, None),
    ],
)
def test_short_names_stand_for_usable_devices_in_order(monkeypatch, name_library, kind, index, expected):
    usable = {"cpu": {0}, "cuda": {1}, "webgpu": {0}, "a/npu": {1}, "b/npu": {0, 1}, "a/gpu": {0}, "a/igpu": set()}
    monkeypatch.setattr("onnxplace.target.kind_table.list_kind_names", lambda: tuple(usable))
    monkeypatch.setattr("onnxplace.target.kind_table.find_kind", lambda name: FakeKind(name, usable[name]))
    resolve_short_name.cache_clear()
    assert resolve_short_name(kind, index) == expected


class FakeDevice:
    """A device of a provider, with memory of its own or without."""

    ep_name, ep_vendor, ep_metadata = "FakeExecutionProvider", "Fake", {}
    device = SimpleNamespace(metadata={})

    def __init__(self, memory):
        self._memory = memory

    def memory_info(self, kind):
        return self._memory


@pytest.mark.parametrize(
    ("kind", "memory", "via"),
    [("npu", None, "memory"), ("gpu", "memory of its own", "host"), ("igpu", "memory of its own", "memory")],
)
def test_values_of_devices_that_use_the_memory_of_the_host_need_no_copy(monkeypatch, kind, memory, via):
    loaded = plugin_providers.LoadedProvider({kind: [FakeDevice(memory)]})
    monkeypatch.setitem(plugin_providers._loaded, "openvino", loaded)
    assert find_link_technology("cpu:0", f"openvino/{kind}:0") == via
    assert find_link_technology(f"openvino/{kind}:0", "cpu:0") == via
    assert find_link_technology(f"openvino/{kind}:0", "webgpu:0") == "host"


def test_malformed_libraries_do_not_disturb_devices_of_other_kinds(monkeypatch):
    monkeypatch.setenv(LIBRARIES_VARIABLE, "malformed")
    assert is_known_kind("cpu")
    has_family.cache_clear()
    with pytest.raises(UsageError, match="U005"):
        is_known_kind("other/npu")


# ------------------------------------------------------------------------------------- what an unknown provider takes


class FakeSession:
    """A session of which a provider took the nodes, or the CPU."""

    def __init__(self, provider):
        self.ep_name = provider

    def get_provider_graph_assignment_info(self):
        return [self]


@pytest.fixture
def pretend_provider(monkeypatch):
    """Return a kind of devices whose provider takes graphs without some operators, whole or not at all."""
    monkeypatch.setattr(plugin_providers, "_list_named", lambda: {"pretended": "libpretended.so"})
    loaded = plugin_providers.LoadedProvider({"npu": [FakeDevice(None)]})
    monkeypatch.setitem(plugin_providers._loaded, "pretended", loaded)
    has_family.cache_clear()

    def pretend(refused, fails=False):
        def open_graph(self, model, options, address, entries):
            if refused & {node.op_type for node in onnx.load_from_string(model).graph.node}:
                if fails:
                    raise RuntimeError("[ONNXRuntimeError] : 1 : FAIL : it cannot do this")
                return FakeSession("CPUExecutionProvider")
            return FakeSession("FakeExecutionProvider")

        monkeypatch.setattr(plugin_providers.ProviderKind, "create_session", open_graph)
        plugin_providers._probe.cache_clear()
        return plugin_providers.make_provider_kind("pretended/npu")

    yield pretend
    plugin_providers._probe.cache_clear()
    plugin_providers.make_provider_kind.cache_clear()
    has_family.cache_clear()


ADDRESS = DeviceAddress("pretended/npu", 0)


@pytest.mark.parametrize("fails", [False, True], ids=["leaves them to the CPU", "fails"])
@pytest.mark.parametrize(
    ("refused", "taken"),
    [
        ({"QuantizeLinear"}, ["elementwise operators", "matrix products", "convolutions", "float16"]),
        ({"Conv", "QuantizeLinear"}, ["elementwise operators", "matrix products", "float16"]),
        (set(), [*plugin_providers.PROBES]),
    ],
)
def test_a_provider_is_usable_if_it_takes_one_of_several_graphs(pretend_provider, refused, taken, fails):
    kind = pretend_provider(refused, fails)
    assert kind.find_problem(ADDRESS) is None
    assert kind.list_taken(ADDRESS) == taken


def test_a_provider_that_takes_nothing_cannot_be_used(pretend_provider):
    kind = pretend_provider({"Relu"})
    problem = "it opens, but leaves every node to the CPU: its driver or backend is missing"
    assert kind.find_problem(ADDRESS) == problem
    assert (
        pretend_provider({"Relu"}, fails=True).find_problem(ADDRESS) == "ONNX Runtime cannot open it: it cannot do this"
    )


def test_every_graph_that_providers_are_tried_with_runs():
    for text in plugin_providers.PROBES.values():
        model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> probe {text}')
        onnx.checker.check_model(model, full_check=True)
        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        (item,) = session.get_inputs()
        kind = np.float16 if "float16" in item.type else np.float32
        assert np.isfinite(session.run(None, {item.name: np.ones(item.shape, kind)})[0]).all()


def test_devices_says_what_a_provider_takes(pretend_provider, run_cli, monkeypatch):
    pretend_provider({"QuantizeLinear"})
    monkeypatch.setattr("onnxplace.machine.hardware.probe_device", lambda device: None)  # it runs in another process
    words = "takes elementwise operators, matrix products, convolutions, float16"
    assert words in run_cli("devices", "--devices", "cpu:0").out


def test_migraphx_computes_float32_as_it_is_unless_float16_is_asked_for(monkeypatch):
    kind = plugin_providers.make_provider_kind("migraphx/gpu")
    monkeypatch.setattr(plugin_providers, "_is_built_in", lambda family: family == "migraphx")
    for options, value in (({}, "0"), ({"precision": "float16"}, "1")):
        ((_, entries),) = kind.list_providers(DeviceAddress("migraphx/gpu", 1, options=options))
        assert entries == {"device_id": "1", "migraphx_fp16_enable": value}


def test_an_npu_of_amd_computes_in_bfloat16_which_its_software_converts_to():
    assert plugin_providers.make_provider_kind("vitisai/npu").precision(DeviceAddress("vitisai/npu", 0)) == "bfloat16"


class FailingSession:
    """A session whose run with other sizes fails, and all later ones, as OpenVINO's do."""

    def __init__(self):
        self.is_hurt = False

    def run(self, names, feeds):
        self.is_hurt |= feeds["x"] < 0
        if self.is_hurt:
            raise RuntimeError("sizes do not fit")
        return [feeds["x"]]

    def get_providers(self):
        return ["OpenVINOExecutionProvider"]


def test_a_session_that_failures_hurt_is_opened_anew():
    opened = []

    def open_session():
        opened.append(FailingSession())
        return opened[-1]

    session = plugin_providers._RenewedSession(open_session)
    assert session.get_providers() == ["OpenVINOExecutionProvider"]
    for number in range(1, 4):
        assert session.run(None, {"x": 1}) == [1]
        with pytest.raises(RuntimeError, match="do not fit"):
            session.run(None, {"x": -1})
        assert len(opened) == number + 1


def test_a_failure_is_raised_as_it_is_where_the_session_cannot_be_opened_anew():
    sessions = [FailingSession()]
    session = plugin_providers._RenewedSession(lambda: sessions.pop())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="do not fit"):
            session.run(None, {"x": -1})


def test_openvino_computes_in_the_caller_s_thread_where_it_has_one():
    record = RECORDS["openvino"]
    (text,) = record.sets_options("cpu", "float32", 1).values()
    expected = {"INFERENCE_PRECISION_HINT": "f32", "INFERENCE_NUM_THREADS": "1", "NUM_STREAMS": "0"}
    assert json.loads(text) == {"CPU": expected}
    (text,) = record.sets_options("cpu", "bfloat16", 2).values()
    assert json.loads(text) == {"CPU": {"INFERENCE_PRECISION_HINT": "bf16", "INFERENCE_NUM_THREADS": "2"}}
