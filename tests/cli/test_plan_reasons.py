"""What `plan` says about its figures: what a request is, what limits it, and what would change it."""

import json
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper, parser

from tests.support.decoders import optimum_decoder

# Rows of a Softmax along the other axis are only split if the size of the batch is fixed.
ROWS = """<ir_version: 8, opset_import: ["": 17]>
rows (float[batch, 4096] x) => (float[batch, 1] y) {
    a = Softmax(x)  b = Softmax(a)  c = Softmax(b)  d = Softmax(c)  y = ReduceMax<axes = [1]>(d) }"""
LARGE = ("--shape", "batch=65536", "--machine", "4xH100-NVLink")


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    onnx.save(parser.parse_model(ROWS), "rows.onnx")
    return tmp_path


def plan(run_cli, *arguments):
    result = run_cli("plan", *arguments, "--json")
    assert result.code == 0, result.err
    return json.loads(result.out)


def test_each_row_says_what_limits_its_latency_and_json_has_all_parts_of_it(run_cli):
    result = run_cli("plan", "rows.onnx", *LARGE)
    assert result.code == 0, result.err
    _, _, header, *rows = result.out.splitlines()
    assert header.endswith("  limited by")
    assert rows[0].startswith("one device")
    data = plan(run_cli, "rows.onnx", *LARGE)
    for item in data["strategies"]:
        assert sum(part["seconds"] for part in item["parts"]) == pytest.approx(item["step_seconds"] or 0)
    largest = data["strategies"][0]["parts"][0]
    assert rows[0].endswith(
        f"  {largest['kind']} {100 * largest['seconds'] / data['strategies'][0]['step_seconds']:.0f} %"
    )
    small = run_cli("plan", "rows.onnx", "--shape", "batch=1", "--machine", "H100").out
    assert "  calls 67 %: 1 at 50 µs\n" in small


@pytest.mark.parametrize(
    ("shapes", "sizes", "expected"),
    [
        ({"x": ["batch", 8]}, "batch=32", "a batch of 32"),
        ({"x": ["batch", "seq"]}, "batch=32,seq=4", "of batch=32, seq=4"),
        ({"x": [32, 8]}, "", "of x=[32, 8]"),
        ({name: [index, 8] for index, name in enumerate("abcde", 1)}, "", "of a=[1, 8], b=[2, 8], c=[3, 8], 2 more"),
    ],
)
def test_a_plan_says_what_a_request_is(run_cli, shapes, sizes, expected):
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in shapes.items()]
    nodes = [helper.make_node("Relu", [name], [f"{name}_out"]) for name in shapes]
    outputs = [helper.make_tensor_value_info(f"{name}_out", TensorProto.FLOAT, None) for name in shapes]
    opsets = [helper.make_opsetid("", 17)]
    onnx.save(
        helper.make_model(helper.make_graph(nodes, "g", values, outputs), opset_imports=opsets, ir_version=8), "g.onnx"
    )
    given = ("--shape", sizes) if sizes else ()
    result = run_cli("plan", "g.onnx", *given, "--machine", "L4")
    assert result.out.splitlines()[1] == f"a request is {expected}"
    assert plan(run_cli, "g.onnx", *given, "--machine", "L4")["request"] == expected
    assert run_cli("plan", "g.onnx", *given, "--machine", "L4", "--fit").out.startswith(f"a request is {expected}\n")


# -------------------------------------------------------------------------------------------------------- fixed sizes


def read_milliseconds(text):
    return [float(word) for word in text.split() if word.replace(".", "").isdecimal()]


def test_plan_says_what_fixed_sizes_would_give_and_with_them_it_is_so(run_cli):
    (advice,) = (data := plan(run_cli, "rows.onnx", *LARGE))["advice"]
    assert advice.startswith("with --fixed-sizes, batch can be split: ")
    best = min(item["step_seconds"] for item in data["strategies"] if item["step_seconds"])
    fixed = plan(run_cli, "rows.onnx", *LARGE, "--fixed-sizes")
    assert fixed["advice"] == []
    best_fixed = min(item["step_seconds"] for item in fixed["strategies"] if item["step_seconds"])
    assert read_milliseconds(advice) == pytest.approx([best_fixed * 1e3, best * 1e3], rel=0.05)
    assert f"\n{advice}\n" in run_cli("plan", "rows.onnx", *LARGE).out
    several = run_cli("plan", "rows.onnx", *LARGE, "--machine", "T4").out
    assert f"\n4xH100-SXM-NVLink4: {advice}\n" in several
    assert several.count("--fixed-sizes") == 1


def test_compile_names_fixed_sizes_where_they_would_help_and_only_there(run_cli):
    helped = run_cli("compile", "rows.onnx", *LARGE, "-o", "open.bundle")
    assert helped.code == 0, helped.err
    assert "note[P069] rows: with --fixed-sizes, batch can be split: " in helped.err
    for name, options in {"small": ("batch=1",), "fixed": ("batch=65536", "--fixed-sizes")}.items():
        result = run_cli("compile", "rows.onnx", "--shape", *options, *LARGE[2:], "-o", f"{name}.bundle")
        assert result.code == 0, result.err
        assert "P069" not in result.err


# ------------------------------------------------------------------------------------------------- weights, and sizes


def save_product(threshold=1024):
    """Write a model with external data: weights that are split, and constants of a node that is folded."""
    random = np.random.default_rng(0)
    weights = {"rows": np.array([-1], np.int64), "columns": np.array([64], np.int64)}
    weights |= {f"w{i}": random.standard_normal(shape, np.float32) for i, shape in enumerate([(256, 4096), (4096, 64)])}
    text = """<ir_version: 8, opset_import: ["": 17]> product (float[batch, 256] x) => (y) {
        shape = Concat<axis = 0>(rows, columns)
        a = MatMul(x, w0)  b = Relu(a)  c = MatMul(b, w1)  y = Reshape(c, shape) }"""
    model = parser.parse_model(text)
    model.graph.initializer.extend(numpy_helper.from_array(array, name) for name, array in weights.items())
    onnx.save(model, "product.onnx", save_as_external_data=True, location="w.data", size_threshold=threshold)


MACHINE = ("--shape", "batch=16384", "--machine", "4xL4")


@pytest.mark.parametrize("threshold", [1024, 0])
def test_a_plan_for_a_machine_needs_no_weights_file(run_cli, threshold):
    save_product(threshold)
    with_weights = plan(run_cli, "product.onnx", *MACHINE)
    assert any("sharded" in item["name"] and item["step_seconds"] for item in with_weights["strategies"])
    Path("w.data").unlink()
    without = plan(run_cli, "product.onnx", *MACHINE)
    if threshold:  # else the constant that is folded is absent, too
        assert without == with_weights
    assert without["strategies"][0]["weight_bytes"] == with_weights["strategies"][0]["weight_bytes"]
    assert plan(run_cli, "product.onnx", "--devices", "cpu:0", "--shape", "batch=8", "--estimate")["strategies"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "--devices", "cpu:0"),
        ("compile", "--machine", "4xL4"),
        ("compile", "--devices", "cpu:0", "--effort", "low"),
    ],
)
def test_what_reads_weights_says_that_their_file_is_missing(refused, arguments):
    save_product()
    Path("w.data").unlink()
    command, *options = arguments
    words = ("error[M005] weight 'w0': its external data file is missing: w.data",)
    refused(2, words, command, "product.onnx", "--shape", "batch=8", *options)


def test_a_weights_file_that_is_there_is_checked_although_it_is_not_read(refused):
    save_product()
    Path("w.data").write_bytes(b"short")
    refused(2, ("error[M005] weight 'w0': its external data is too short",), "plan", "product.onnx", *MACHINE)


def test_estimates_know_the_sizes_of_values_that_onnx_does_not_infer(run_cli):
    onnx.save(optimum_decoder(), "decoder.onnx")
    sizes = "batch_size=4,sequence_length=1,past_sequence_length=32"
    data = plan(run_cli, "decoder.onnx", "--shape", sizes, "--machine", "H100")
    assert not [note for note in data["diagnostics"] if note["code"] == "C002"]
    fixed = plan(run_cli, "decoder.onnx", "--shape", sizes, "--machine", "H100", "--fixed-sizes")
    peaks = [item["strategies"][0]["peak_bytes"] for item in (data, fixed)]
    assert peaks[0] == pytest.approx(peaks[1], rel=0.01)
