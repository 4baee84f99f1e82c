"""An NPU that does not take every node: measured, placed, cut around, and what a bundle leaves to the host is noted."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.measure import host_nodes
from onnxplace.measure.host_nodes import report_host_nodes
from tests.conftest import FAST_PIPELINE
from tests.support.commands import only_json

TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[64, 64] x) => (float[64, 64] y) {
    [product] a = MatMul(x, w)
    [relu] b = Relu(a)
    [erf] c = Erf(b)
    [last] y = MatMul(c, w)
}"""
QUANTISED = """<ir_version: 8, opset_import: ["": 17]>
g (float[8, 64] x) => (float[8, 64] y) <float s = {0.02}, uint8 z = {128}> {
    [q0] xq = QuantizeLinear(x, s, z)
    [d0] xd = DequantizeLinear(xq, s, z)
    [relu] a = Relu(xd)
    [q1] aq = QuantizeLinear(a, s, z)
    [d1] ad = DequantizeLinear(aq, s, z)
    [erf] b = Erf(ad)
    [q2] bq = QuantizeLinear(b, s, z)
    [d2] y = DequantizeLinear(bq, s, z)
}"""
QUICK = ("--placer", "auto{seconds=0.1}")
DEVICES = ("--devices", "cpu:0,qnn/npu:0", *QUICK)


def model(text: str = TEXT) -> ModelProto:
    proto = parser.parse_model(text)
    if "w)" in text:
        weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32) / 8
        proto.graph.initializer.append(numpy_helper.from_array(weight, "w"))
    return proto


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    onnx.save(model(), "model.onnx")
    return tmp_path


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the bundle `measured`, and with its costs, measured once: `costs.json`."""
    folder = tmp_path_factory.mktemp("measured")
    measure(model(), folder)
    return folder


def measure(proto: ModelProto, folder: Path) -> None:
    """Compile with measured costs, and save these."""
    options = {"devices": "cpu:0,qnn/npu:0", "placer": "auto{seconds=0.1}", "save_costs": folder / "costs.json"}
    onnxplace.compile(proto, output=folder / "measured", cache=False, **options)


def read_npu_seconds(folder: Path) -> dict[str, float | str]:
    """Return the measured costs on the NPU by node."""
    nodes = json.loads((folder / "costs.json").read_text())["nodes"]
    npu = next(key for key in next(iter(nodes.values()))["seconds"] if key.startswith("qnn"))
    return {node: entry["seconds"][npu] for node, entry in nodes.items()}


def write_costs(measured: Path, seconds: dict[str, float | str]) -> None:
    """Write a cost file in which a node takes 10 ms on the CPU, and this on the NPU."""
    data = json.loads((measured / "costs.json").read_text())
    for node, entry in data["nodes"].items():
        entry["seconds"] = {key: seconds[node] if key.startswith("qnn") else 0.01 for key in entry["seconds"]}
    Path("given.json").write_text(json.dumps({"format": data["format"], "version": 1, "nodes": data["nodes"]}))


def test_costs_say_what_it_refuses_and_a_slow_one_gets_no_work(measured):
    seconds = read_npu_seconds(measured)
    assert [node for node, value in seconds.items() if value == "refused"] == ["erf"]
    assert 0 < seconds["product"] < 1
    manifest = Bundle.open(measured / "measured").manifest
    (note,) = (note.message for note in manifest.diagnostics if note.code == "C003")
    assert note.startswith("takes 3 of 4 nodes, not 1 Erf; measured in 2 runs of nodes; opening took ")
    assert {segment.device for segment in manifest.segments} == {"cpu:0"}  # simulated: slow


def test_a_fast_one_gets_what_it_takes_in_segments_around_what_it_refuses(run_cli, folder, measured):
    seconds = read_npu_seconds(measured)
    write_costs(measured, {node: value if value == "refused" else 0.002 for node, value in seconds.items()})
    data = only_json(run_cli("compile", "model.onnx", *DEVICES, "--costs", "given.json", "-o", "out", "--json"))
    segments = Bundle.open("out").manifest.segments
    assert [(item.device, item.nodes) for item in segments] == [("qnn/npu:0", 2), ("cpu:0", 1), ("qnn/npu:0", 1)]
    assert "C007" not in {note["code"] for note in data["diagnostics"]}
    assert run_cli("verify", "out").code == 0


def test_a_bundle_whose_costs_are_wrong_is_told_what_the_host_computes(run_cli, folder, measured):
    write_costs(measured, dict.fromkeys(("product", "relu", "erf", "last"), 0.002))
    data = only_json(run_cli("compile", "model.onnx", *DEVICES, "--costs", "given.json", "-o", "out", "--json"))
    (note,) = (note for note in data["diagnostics"] if note["code"] == "C007")
    assert note["where"] == "qnn/npu:0"
    assert note["message"] == "the host computes 1 node of its segments, such as Erf 'erf'"
    assert note["hint"] == "measure the costs here; to allow it, and to count its time: qnn/npu:0{fallback=true}"
    assert run_cli("verify", "out").code == 0


def test_what_the_host_computes_is_read_from_compiled_models_else_segments_are_opened(run_cli, folder, monkeypatch):
    Path("map.json").write_text('{".*": "qnn/npu:0"}')
    pipeline = FAST_PIPELINE.replace("join=never", "join=never,device_map=map.json")
    assert run_cli("compile", "model.onnx", "--devices", "qnn/npu:0", "--pipeline", pipeline, "-o", "out").code == 0
    bundle = Bundle.open("out")
    records = tuple(item.model_copy(update={"compiled": ()}) for item in bundle.manifest.segments)
    uncompiled = Bundle(bundle.path, bundle.manifest.model_copy(update={"segments": records}))
    (note,) = report_host_nodes(uncompiled)
    assert note.message == "the host computes 1 node of its segments, such as Erf 'erf'"
    monkeypatch.setattr(host_nodes, "open_session", lambda *_: pytest.fail("it was opened when it was written"))
    assert report_host_nodes(bundle) == [note]


def test_alone_it_is_infeasible_unless_the_host_may_run_what_it_refuses(run_cli, folder):
    refused = run_cli("compile", "model.onnx", "--devices", "qnn/npu:0", *QUICK, "-o", "out")
    assert refused.code == 3
    assert "error[P004] qnn/npu:0 does not take Erf 'erf'" in refused.err
    allowed = run_cli("compile", "model.onnx", "--devices", "qnn/npu:0{fallback=true}", *QUICK, "-o", "out")
    assert allowed.code == 0
    assert "takes 3 of 4 nodes, not 1 Erf" in allowed.err
    assert "C007" not in allowed.err


def test_quantised_operators_are_taken_with_their_quantisers(tmp_path):
    measure(model(QUANTISED), tmp_path)
    seconds = read_npu_seconds(tmp_path)
    assert [node for node, value in seconds.items() if value != "refused"] == ["d0", "relu", "q1"]


def test_symbolic_sizes_are_measured_at_the_sizes_of_the_compile(run_cli, folder):
    symbolic = TEXT.replace("float[64, 64] x", "float[N, 64] x").replace("float[64, 64] y", "float[N, 64] y")
    onnx.save(model(symbolic), "n.onnx")
    data = only_json(run_cli("compile", "n.onnx", *DEVICES, "--shape", "N=16", "-o", "out", "--json"))
    assert any(note["message"].startswith("takes 3 of 4 nodes") for note in data["diagnostics"])
