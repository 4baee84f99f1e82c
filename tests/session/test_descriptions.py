"""Descriptions of inputs and outputs: those of ONNX Runtime, also where the model declares none."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from pathlib import Path

import onnx
import onnxruntime
import pytest
from onnx import ModelProto, TensorProto, helper, parser

import onnxplace
from onnxplace.bundle.bundle import Bundle
from tests.support.random_placements import RandomPlacement, compiled_with

HEADER = '<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]> '
TENSOR = helper.make_tensor_type_proto(TensorProto.FLOAT, ["N", 4])
MODELS = {
    "a contrib operator": "g (float[N, 4] x) => (y) { a = Neg(x) y = com.microsoft.Gelu(a) }",
    "behind a contrib operator": "g (float[N, 4] x) => (y) { a = com.microsoft.QuickGelu(x) y = Exp(a) }",
    "a product": "g (float[N, 4] x, float[4, 5] w) => (y) { y = MatMul(x, w) }",
    "a scalar": "g (float[N, 4] x) => (y) { y = ReduceMean <keepdims = 0> (x) }",
    "sizes of the data": "g (float[N, 4] x) => (y) { y = NonZero(x) }",
    "a reshape": "g (float[N, 4] x, int64[2] s) => (y) { y = Reshape(x, s) }",
    "an open size": "g (float[N, 4] x) => (float[N, ?] y) { y = Concat <axis = 1> (x, x) }",
    "a weight": "g (float[N, 4] x) => (y, w) <float[2] w = {1, 2}> { y = Neg(x) }",
    "a sequence": "g (float[N, 4] x) => (y) { y = SequenceConstruct(x, x) }",
    "an optional": "g (float[N, 4] x) => (y) { a = Neg(x) y = Optional(a) }",
}


def describe(session) -> list[tuple[str, str, list]]:
    return [(item.name, item.type, item.shape) for item in (*session.get_inputs(), *session.get_outputs())]


def open_plain(model: ModelProto) -> onnxruntime.InferenceSession:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options)


def compile_split(model: ModelProto, folder: Path) -> Bundle:
    return compiled_with(model, RandomPlacement((0, 1)), folder, optimized=False, dimensions={"N": 3})


@pytest.mark.parametrize("name", MODELS)
def test_outputs_are_described_as_onnx_runtime_describes_them(tmp_path: Path, name: str):
    model = parser.parse_model(HEADER + MODELS[name])
    with onnxplace.InferenceSession(compile_split(model, tmp_path)) as session:
        assert describe(session) == describe(open_plain(model))


@pytest.mark.parametrize("is_sequence", [False, True])
def test_optional_inputs_have_the_shape_of_their_tensor(tmp_path: Path, is_sequence: bool):
    kind = helper.make_optional_type_proto(helper.make_sequence_type_proto(TENSOR) if is_sequence else TENSOR)
    inputs = [helper.make_value_info("x", TENSOR), helper.make_value_info("o", kind)]
    nodes = [helper.make_node("OptionalHasElement", ["o"], ["y"]), helper.make_node("Neg", ["x"], ["z"])]
    outputs = [helper.make_tensor_value_info("y", TensorProto.BOOL, []), helper.make_value_info("z", TENSOR)]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=8)
    onnx.checker.check_model(model)
    described = onnxplace.model.load(model)
    shapes = [list(onnxplace.model.model.declaration_of(value, described).shape or ()) for value in described.inputs]
    assert shapes == [item.shape for item in open_plain(model).get_inputs()]


def test_a_wrong_declaration_does_not_hide_the_size(tmp_path: Path):
    model = parser.parse_model(HEADER + "g (float[N, 4] x) => (float[N, 7] y) { y = Concat <axis = 1> (x, x) }")
    with onnxplace.InferenceSession(compile_split(model, tmp_path)) as session:
        assert session.get_outputs()[0].shape == ["N", 8]


def test_notebooks_show_bundles_of_every_origin():
    assert "_repr_html_" in vars(Bundle)
    assert Bundle._repr_html_.__module__ == Bundle.__module__  # and nothing else has to be imported first
