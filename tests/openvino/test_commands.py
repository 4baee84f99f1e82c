"""The command line with OpenVINO: devices, plan, compile, run, verify, bench and doctor."""

import json

import numpy as np
import onnx
import pytest
from onnx import parser

from onnxplace.bundle.bundle import Bundle
from onnxplace.machine.isolated_sessions import list_taken_nodes, open_session
from onnxplace.machine.ort_sessions import make_session_options
from tests.openvino.devices import OPENVINO, place
from tests.support.command_checks import (
    test_bench_measures_both as test_bench_measures_both,
    test_run_writes_the_outputs as test_run_writes_the_outputs,
)
from tests.support.commands import only_json

SECOND = "openvino/cpu:1"
BUNDLES = {
    OPENVINO: {".*": OPENVINO},
    f"cpu:0,{OPENVINO}": {"left|relu": OPENVINO, ".*": "cpu:0"},
    f"cpu:1,{OPENVINO}": {"left|relu": OPENVINO, ".*": "cpu:1"},
    f"{OPENVINO},{SECOND}": {"left|relu": OPENVINO, ".*": SECOND},
}
QUICK = ("--placer", "auto{seconds=0.1}")


@pytest.fixture(params=BUNDLES)
def bundle_path(request, model_file, tmp_path):
    bundle = place(onnx.load(model_file), tmp_path / "b", request.param, BUNDLES[request.param], shape={"batch": 4})
    assert {segment.device for segment in bundle.manifest.segments} == set(request.param.split(","))
    return bundle.path


def test_verify_compares_the_results_at_several_sizes(run_cli, bundle_path):
    result = run_cli("verify", bundle_path, "--json")
    found = only_json(result)
    assert (result.code, found["equal"]) == (0, True), result.err
    assert all(output["max_rel_error"] < 1e-5 for output in found["outputs"])


def test_openvino_takes_every_node_of_its_segments(bundle_path):
    bundle = Bundle.open(bundle_path)
    for segment in bundle.manifest.segments:
        device = next(item for item in bundle.target.devices if item.id == segment.device)
        if device.kind == "openvino/cpu":
            options = make_session_options([0], entries={"session.record_ep_graph_assignment_info": "1"})
            session = open_session(bundle.file(segment.file), options, device.address)
            assert len(list_taken_nodes(session, device.address)) >= segment.nodes


def test_compile_with_measured_costs_makes_a_bundle_that_is_equal(run_cli, model_file, tmp_path):
    arguments = ("--devices", f"cpu:0,{OPENVINO}", "--shape", "batch=4", *QUICK, "--json")
    compiled = run_cli("compile", model_file, "-o", tmp_path / "b", *arguments)
    assert compiled.code == 0, compiled.err
    (note,) = [note for note in only_json(compiled)["diagnostics"] if note["code"] == "C003"]
    assert note["where"] == OPENVINO
    assert note["message"].startswith("takes 5 of 5 nodes")
    assert run_cli("verify", tmp_path / "b").code == 0


def test_plan_compares_strategies_by_costs_of_both(run_cli, model_file, tmp_path):
    arguments = ("--devices", f"cpu:0,{OPENVINO}", "--shape", "batch=4")
    costs = tmp_path / "costs.json"
    compiled = run_cli("compile", model_file, "-o", tmp_path / "b", *arguments, *QUICK, "--save-costs", costs)
    assert compiled.code == 0, compiled.err
    planned = run_cli("plan", model_file, *arguments, "--costs", costs)
    assert planned.code == 0, planned.err
    assert "least latency: " in planned.out


def test_devices_describes_the_processor(run_cli):
    (found,) = [item for item in only_json(run_cli("devices", "--json"))["accelerators"] if item["id"] == OPENVINO]
    expected = {
        "provider": "OpenVINOExecutionProvider",
        "package": "onnxruntime-ep-openvino",
        "precision": "float32",
        "needs_static_shapes": False,
        "problem": None,
    }
    assert {key: found[key] for key in expected} == expected
    assert found["version"].startswith("1.")
    (line,) = [line for line in run_cli("devices").out.splitlines() if line.startswith(f"{OPENVINO}: ")]
    assert "takes elementwise operators, matrix products, convolutions, quantised operators" in line


def test_hardware_that_is_not_there_is_refused_with_what_is(run_cli, model_file):
    for name in ("openvino/npu:0", "openvino/gpu:7"):
        result = run_cli("compile", model_file, "--devices", name)
        assert result.code == 2
        assert f"error[T011] {name}: onnxruntime-ep-openvino offers {OPENVINO}" in result.err


@pytest.mark.slow
def test_doctor_opens_the_processor_and_checks_the_contract(run_cli, tmp_path):
    """Within the time that it has: what is left is skipped."""
    output = tmp_path / "report.json"
    result = run_cli("doctor", "--devices", OPENVINO, "--seconds", "15", "--output", output)
    statuses = {item["check"]: item["status"] for item in json.loads(output.read_text())["checks"]}
    assert statuses["open"] == "ok", result.out
    assert statuses["contract"] in ("ok", "skipped"), result.out


TEXTS = """<ir_version: 9, opset_import: ["": 20]>
g (string[n] words, float[n, 4] x) => (bool[n] same, string[n] joined, float[n, 4] y)
<float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}> {
    [equal] same = Equal(words, words) [join] joined = StringConcat(words, words)
    [product] a = MatMul(x, w) [last] y = Relu(a) }"""
LOOP = """<ir_version: 9, opset_import: ["": 20]> g (int64 limit, float[n, 4] x) => (float[m, 4] y) {
    [first] a = Relu(x)
    [spin] b = Loop (limit, , a) <body = round (int64 i, bool go, float[n, 4] c) => (bool again, float[n, 4] d) {
        again = Identity(go) d = Neg(c) }>
    [last] y = Neg(b) }"""


SEQUENCE = """<ir_version: 9, opset_import: ["": 20]> g (float[n, 4] x) => (float[n, 4] y) <int64 zero = {0}> {
    [first] a = Relu(x) [pack] s = SequenceConstruct(a, x) [take] b = SequenceAt(s, zero) [last] y = Tanh(b) }"""


@pytest.mark.parametrize(
    ("text", "refused"),
    [(TEXTS, {"equal", "join"}), (LOOP, {"spin", "last"}), (SEQUENCE, {"pack", "take"})],
    ids=["texts", "loop", "sequence"],
)
def test_nodes_with_texts_and_values_of_unknown_rank_are_refused(run_cli, tmp_path, text, refused):
    """OpenVINO ends the process with texts or returns nothing, and takes a value of unknown rank for a number."""
    onnx.save(parser.parse_model(text), tmp_path / "model.onnx")
    costs = tmp_path / "costs.json"
    arguments = ("--devices", f"cpu:0,{OPENVINO}", "--shape", "n=3", *QUICK, "--save-costs", costs)
    compiled = run_cli("compile", tmp_path / "model.onnx", "-o", tmp_path / "b", *arguments)
    assert compiled.code == 0, compiled.err
    nodes = json.loads(costs.read_text())["nodes"]
    assert {name for name, node in nodes.items() if "refused" in node["seconds"].values()} == refused
    assert run_cli("verify", tmp_path / "b").code == 0


def test_nodes_that_compute_with_whole_numbers_of_64_bits_are_refused(run_cli, tmp_path):
    """OpenVINO computes them in 32 bits."""
    text = """<ir_version: 9, opset_import: ["": 20]> g (int64[n] i, float[n] x) => (int64[n] j, float[n] y) {
        [square] a = Mul(i, i) [sum] j = Add(a, i) [relu] y = Relu(x) }"""
    onnx.save(parser.parse_model(text), tmp_path / "model.onnx")
    costs, values = tmp_path / "costs.json", tmp_path / "values.npz"
    np.savez(values, i=np.array([-6696874842932477345, 3 << 31, 1]), x=np.ones(3, dtype=np.float32))
    arguments = ("--devices", f"cpu:0,{OPENVINO}", "--inputs", values, *QUICK, "--save-costs", costs)
    compiled = run_cli("compile", tmp_path / "model.onnx", "-o", tmp_path / "b", *arguments)
    assert compiled.code == 0, compiled.err
    nodes = json.loads(costs.read_text())["nodes"]
    refused = {name for name, node in nodes.items() if "refused" in node["seconds"].values()}
    assert refused == {"square", "sum"}
    assert run_cli("verify", tmp_path / "b", "--inputs", values).code == 0
