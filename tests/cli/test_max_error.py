"""`--max-error`: nodes stay off devices that are too inexact, and the whole bundle is within the maximum."""

import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxplace
from onnxplace.driver import compile as compile_module
from onnxplace.measure.trial import run_trials
from tests.conftest import FAST_PIPELINE
from tests.support.bad_input import SHAPE
from tests.support.commands import only_json
from tests.support.half_device import half_kind as half_kind

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")
DEVICES = ("--devices", "half:0,cpu:0")
ALONE = FAST_PIPELINE.replace("m-etf", "single")
GIVEN = FAST_PIPELINE.replace("estimate=true", "costs=costs.csv")
# The difference of two products that are almost equal: errors of 2^-11 become some thousand times as large.
CANCELLING = """<ir_version: 8, opset_import: ["": 17]> cancelling (float[4, 64] x) => (float[4, 64] y)
{
    [left] a = MatMul(x, v)
    [right] b = MatMul(x, w)
    [difference] y = Sub(a, b)
}"""


@pytest.fixture
def cancelling(tmp_path):
    model = parser.parse_model(CANCELLING)
    weight = np.random.default_rng(0).standard_normal((64, 64)).astype(np.float32)
    for name, factor in (("v", 1), ("w", 0.999)):
        model.graph.initializer.append(numpy_helper.from_array(weight * np.float32(factor), name))
    onnx.save(model, tmp_path / "cancelling.onnx")
    write_costs(tmp_path, {"left": "1e-8", "right": "1e-8", "difference": "refused"})
    return tmp_path / "cancelling.onnx"


def write_costs(folder, half_seconds):
    rows = [f"{name},1e-5,{seconds}" for name, seconds in half_seconds.items()]
    header = ("# onnxplace-costs 1", "node,seconds cpu/2,seconds half/Half 1")
    (folder / "costs.csv").write_text("\n".join([*header, *rows]) + "\n")


def count_nodes(data):
    return {device["id"]: device["nodes"] for device in data["devices"]}


@pytest.mark.parametrize(
    ("maximum", "nodes"), [("1e-1", {"half:0": 5, "cpu:0": 0}), ("1e-6", {"half:0": 0, "cpu:0": 5})]
)
def test_the_maximum_decides_whether_a_device_of_float16_gets_nodes(run_cli, model_file, maximum, nodes):
    command = ("compile", model_file, *SHAPE, *DEVICES, "--pipeline", ALONE, "--max-error", maximum)
    data = only_json(run_cli(*command, "--json"))
    assert count_nodes(data) == nodes
    is_limited = maximum == "1e-6"
    assert ("limit-errors{maximum=" in data["pipeline"]) == is_limited
    assert any(note["code"] == "C008" for note in data["diagnostics"]) == is_limited


def test_the_default_placer_keeps_nodes_off_an_inexact_device(run_cli, model_file, tmp_path):
    write_costs(tmp_path, dict.fromkeys(("left", "right", "relu", "tanh", "sum"), "1e-8"))
    given = ("compile", model_file, *SHAPE, *DEVICES, "--costs", "costs.csv", "--force", "--json")
    assert count_nodes(only_json(run_cli(*given)))["cpu:0"] == 0
    assert count_nodes(only_json(run_cli(*given, "--max-error", "1e-6")))["half:0"] == 0


def test_a_model_that_amplifies_errors_is_placed_again_until_the_whole_is_within_the_maximum(run_cli, cancelling):
    command = ("compile", cancelling, *DEVICES, "--pipeline", GIVEN, "--max-error", "0.01")
    data = only_json(run_cli(*command, "--json"))
    assert count_nodes(data) == {"half:0": 0, "cpu:0": 3}
    assert float(data["pipeline"].partition("maximum=")[2].partition("}")[0]) < 0.01
    assert onnxplace.verify("cancelling.bundle").outputs[0].max_rel_error <= 0.01


def test_where_no_round_is_within_the_maximum_the_best_is_named_and_nothing_is_left(refused, cancelling, monkeypatch):
    monkeypatch.setattr(compile_module, "MAX_ERROR_ROUNDS", 2)
    words = ("P065", "the bundle's error is", "at least, allowed are 0.01", "--max-error")
    refused(3, words, "compile", cancelling, *DEVICES, "--pipeline", GIVEN, "--max-error", "0.01")


def test_without_an_exact_device_the_node_is_named(refused, model_file):
    words = ("P065", "'left'", "every device", "cpu:0")
    refused(3, words, "compile", model_file, *SHAPE, "--devices", "half:0", "--pipeline", ALONE, "--max-error", "1e-6")


@pytest.mark.parametrize("maximum", ["0", "-1", "nan", "inf"])
def test_a_maximum_is_above_zero(refused, model_file, maximum):
    refused(2, ("--max-error", "above 0", f"got {maximum}"), "compile", model_file, *SHAPE, "--max-error", maximum)


def test_python_takes_the_same_maximum(model_file):
    with pytest.raises(onnxplace.UsageError, match="expected a number above 0, got -1"):
        onnxplace.compile(model_file, max_error=-1)
    bundle = onnxplace.compile(model_file, devices="half:0,cpu:0", shape={"batch": 4}, pipeline=ALONE, max_error=1e-6)
    assert {device.id: device.nodes for device in bundle.manifest.devices} == {"half:0": 0, "cpu:0": 5}


def test_verify_compares_within_the_precision_of_devices_and_says_so(run_cli, model_file):
    compiled = run_cli("compile", model_file, *SHAPE, *DEVICES, "--pipeline", ALONE)
    table = [line.split() for line in compiled.out.splitlines()]
    assert ["half:0", "float16"] in [[row[0], row[-1]] for row in table if row]
    assert ["cpu:0", "float32"] in [[row[0], row[-1]] for row in table if row]
    result = run_cli("verify", "model.bundle")
    assert result.code == 0
    assert "compared within float16's precision, because half:0 computes in it" in result.out
    data = only_json(run_cli("verify", "model.bundle", "--json"))
    assert data["precisions"] == {"half:0": "float16"}


def test_verify_says_nothing_of_devices_that_have_no_work(run_cli, model_file):
    run_cli("compile", model_file, *SHAPE, *DEVICES, "--pipeline", ALONE, "--max-error", "1e-6")
    result = run_cli("verify", "model.bundle")
    assert "precision" not in result.out
    assert only_json(run_cli("verify", "model.bundle", "--json"))["precisions"] == {"cpu:0": "float32"}


def test_verify_reports_errors_beyond_the_precision_of_devices(run_cli, cancelling):
    run_cli("compile", cancelling, *DEVICES, "--pipeline", GIVEN)
    assert run_cli("verify", "cancelling.bundle").code == 1
    report = json.loads(run_cli("verify", "cancelling.bundle", "--json").out)
    assert report["outputs"][0]["max_rel_error"] > 0.02
    assert "; there, float32 is computed in float16 (products, " in report["explanation"]["message"]


def test_the_report_shows_in_which_type_devices_compute(run_cli, model_file, tmp_path):
    run_cli("compile", model_file, *SHAPE, *DEVICES, "--pipeline", ALONE, "--report", "page.html")
    assert "Half 1, computes in float16" in (tmp_path / "page.html").read_text()


def test_a_maximum_needs_the_devices_on_this_machine(refused, model_file):
    words = ("T011", "cuda:0")
    refused(2, words, "compile", model_file, *SHAPE, "--machine", "H100", "--max-error", "1e-3")


def test_a_trial_on_a_device_of_float16_compares_no_other_sizes(cancelling, tmp_path):
    """Rounding alone may change an output by more than any tolerance."""
    symbolic = onnx.load(cancelling)
    for value in (*symbolic.graph.input, *symbolic.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    bundle = onnxplace.compile(
        symbolic, tmp_path / "bundle", devices="half:0,cpu:0", shape={"batch": 4}, pipeline=GIVEN
    )
    assert run_trials([bundle], {"x": np.ones((4, 64), np.float32)}, cached=False)
    assert not onnxplace.verify(bundle).equal
