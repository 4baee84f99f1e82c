"""Shape inference leaves sizes open that a model cannot have, where that of ONNX ends the process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

from onnxplace.model.loading import load
from onnxplace.model.lowering import bind, infer_static_shapes
from onnxplace.model.shape_inference import infer_shapes

WEIGHTS = """int64[1] s = {0}, int64[1] e = {-1}, int64[1] a = {2}, int64[1] back = {-1}, int64[1] two = {2},
    int64[6] pads = {0, 0, -2, 0, 0, -2}, int64[2, 2] places = {0, 0, 1, 1}, bool yes = {1}"""


def parse(body: str, opset: int = 21, size: int | str = "L", functions: str = "") -> ModelProto:
    header = f'<ir_version: 10, opset_import: ["": {opset}, "local": 1]>'
    model = parser.parse_model(f"{header} g (float[N, 4, {size}] x) => (y) <{WEIGHTS}> {{ {body} }} {functions}")
    model.graph.initializer.append(numpy_helper.from_array(np.ones((4, 4, 3), np.float32), "w"))
    return model


# Each computes a negative size for the last axis of `x` if that has fewer than three rows, and reads it.
IMPOSSIBLE = {
    "a slice of a convolution": "c = Conv(x, w) y = Slice(c, s, e, a)",
    "a slice backwards": "c = Conv(x, w) y = Slice(c, back, s, a, back)",
    "a slice of a pool": "c = MaxPool<kernel_shape = [3]>(x) y = Slice(c, s, e, a)",
    "a slice of what padding leaves": "c = Pad(x, pads) y = Slice(c, s, e, a)",
    "slices one behind the other": "c = Slice(x, s, e, a) d = Conv(c, w) f = Slice(d, s, e, a) y = Slice(f, s, e, a)",
    "a slice of filled rows": "h = Shape<start = 2>(x) k = Sub(h, two) c = ConstantOfShape(k) y = Slice(c, s, e, s)",
    "a slice of a branch": """y = If(yes)<then_branch = t () => (o) { c = Conv(x, w) o = Slice(c, s, e, a) },
        else_branch = f () => (p) { p = Relu(x) }>""",
    "a lookup": "c = Conv(x, w) d = Cast<to = 7>(c) y = GatherND(x, d)",
    "a part of a convolution": "c = Conv(x, w) d, f = Split<axis = 2, num_outputs = 2>(c) y = Slice(d, s, e, a)",
}


@pytest.mark.parametrize("size", [0, 1])
@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_size_that_a_model_cannot_have_is_left_open(name: str, size: int) -> None:
    model = bind(load(parse(IMPOSSIBLE[name])), {"N": 2, "L": size}, {})
    assert "y" not in infer_static_shapes(model)


@pytest.mark.parametrize("name", IMPOSSIBLE)
def test_a_size_that_is_impossible_at_all_sizes_is_left_open(name: str) -> None:
    model = parse(IMPOSSIBLE[name], size=1)
    inferred = infer_shapes(infer_shapes(model), data_prop=True)
    assert [node.op_type for node in inferred.graph.node] == [node.op_type for node in model.graph.node]
    assert "y" not in infer_static_shapes(bind(load(model), {"N": 2}, {}))


def test_a_declared_size_of_minus_one_is_an_open_one() -> None:
    types = load(parse("y = Slice(x, s, e, a)", size=-1)).types
    assert len(types["y"].tensor_type.shape.dim) == 3


@pytest.mark.parametrize("opset", [9, 10, 11, 13])
def test_every_version_of_slice_is_guarded(opset: int) -> None:
    body = "y = Slice(c, s, e, a)" if opset > 9 else "y = Slice<starts = [0], ends = [-1], axes = [2]>(c)"
    model = bind(load(parse(f"c = Conv(x, w) {body}", opset)), {"N": 2, "L": 1}, {})
    assert "y" not in infer_static_shapes(model)


def test_slices_in_functions_are_guarded() -> None:
    function = """<domain: "local", opset_import: ["": 21]> part (x, w, s, e, a) => (y)
        { c = Conv(x, w) y = Slice(c, s, e, a) }"""
    model = parse("y = local.part(x, w, s, e, a)", size=1, functions=function)
    assert infer_shapes(model).graph.output[0].name == "y"


def test_nodes_that_no_runtime_takes_are_not_inferred() -> None:
    for body in ("y, z = Split<axis = 1, num_outputs = 1>(x)", "y = GatherND<batch_dims = -7>(x, places)"):
        assert infer_shapes(parse(body)).graph.output[0].name == "y"


def test_other_sizes_are_those_that_onnx_infers() -> None:
    body = """c = Conv(x, w) d = Slice(c, s, e, a) h = Shape(d) k = Slice(h, s, e, s) t = Concat<axis = 0>(k, back)
        y = Reshape(d, t)"""
    model = parse(body, size=20)
    expected = onnx.shape_inference.infer_shapes(onnx.shape_inference.infer_shapes(model), data_prop=True)
    actual = infer_shapes(infer_shapes(model), data_prop=True)
    sizes = [
        {value.name: [dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in item.graph.value_info}
        for item in (expected, actual)
    ]
    assert sizes[0] == sizes[1]
    assert actual.graph.output == expected.graph.output


@pytest.mark.slow
def test_a_slice_behind_a_convolution_compiles_along_a_symbolic_axis(tmp_path: Path) -> None:
    onnx.save(parse("c = Conv(x, w) d = Slice(c, s, e, a) y = Relu(d)"), tmp_path / "m.onnx")
    for command in ("compile", "plan"):
        arguments = [command, "m.onnx", "--devices", "cpu:0,cpu:1", "--shape", "N=4,L=20"]
        done = subprocess.run(
            [sys.executable, "-m", "onnxplace", *arguments], cwd=tmp_path, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
