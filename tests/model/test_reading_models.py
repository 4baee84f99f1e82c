"""Weights, shapes, nodes and sizes of a model file: read, or refused in one line with exit code 2."""

from typing import Any

import numpy as np
import pytest
from onnx import AttributeProto, ModelProto, TensorProto, helper, numpy_helper, parser

import onnxplace
from onnxplace import FeedError, ModelError
from onnxplace.feeds.feeds import Declared, check_feeds
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind, build_op_graph
from tests.support.model_texts import IF, X, find_then_branch, parse_graph
from tests.support.random_models import run_plain
from tests.support.random_placements import RandomPlacement, assert_same, compiled_with, run_together

pytestmark = pytest.mark.usefixtures("no_gpus")


# ---------------------------------------------------------------------------------------------- weights


def make_weight(dims: list[int], kind: int = TensorProto.FLOAT, **fields: Any) -> TensorProto:
    return TensorProto(name="odd_weight", data_type=kind, dims=dims, **fields)


ODD_WEIGHTS = pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(make_weight([4], float_data=[1, 2]), id="few-floats"),
        pytest.param(make_weight([4], float_data=[1] * 5), id="many-floats"),
        pytest.param(make_weight([4]), id="no-data"),
        pytest.param(make_weight([4], float_data=[1] * 4, raw_data=bytes(16)), id="both"),
        pytest.param(make_weight([4], int64_data=[1] * 4), id="other-field"),
        pytest.param(make_weight([4], float_data=[1] * 4, int32_data=[1]), id="two-fields"),
        pytest.param(make_weight([4], TensorProto.INT64, int64_data=[1]), id="few-int64"),
        pytest.param(make_weight([4], TensorProto.INT32, int32_data=[1]), id="few-int32"),
        pytest.param(make_weight([4], TensorProto.BOOL, int32_data=[1]), id="few-bools"),
        pytest.param(make_weight([4], TensorProto.FLOAT16, int32_data=[1]), id="few-halves"),
        pytest.param(make_weight([4], TensorProto.DOUBLE, double_data=[1]), id="few-doubles"),
        pytest.param(make_weight([4], TensorProto.UINT64, uint64_data=[1]), id="few-uint64"),
        pytest.param(make_weight([4], TensorProto.STRING, string_data=[b"a"]), id="few-strings"),
        pytest.param(make_weight([4], TensorProto.STRING, raw_data=b"abcd"), id="raw-strings"),
        pytest.param(make_weight([4], TensorProto.COMPLEX64, float_data=[1] * 4), id="few-complex"),
        pytest.param(make_weight([5], TensorProto.INT4, int32_data=[1] * 2), id="few-int4"),
        pytest.param(make_weight([1 << 62, 1 << 62], float_data=[1]), id="overflow"),
        pytest.param(make_weight([1 << 62, 1 << 62, 0]), id="overflow-and-empty"),
        pytest.param(make_weight([1] * 100_000, float_data=[1]), id="rank"),
    ],
)


@ODD_WEIGHTS
def test_a_weight_whose_data_does_not_fit_is_named(require_refusal, tensor):
    model = parse_graph("(float[4] x) => (float[4] y) { z = Relu(x) y = Add(z, odd_weight) }")
    model.graph.initializer.append(tensor)
    require_refusal(model, "M008", "'odd_weight'", "export it again")


@ODD_WEIGHTS
@pytest.mark.parametrize("inside", [False, True])
def test_a_constant_whose_data_does_not_fit_is_named(require_refusal, tensor, inside):
    model = (
        parse_graph(IF.replace("thin", "k"))
        if inside
        else parse_graph("(float[4] x) => (float[4] y) { y = Add(x, k) }")
    )
    node = helper.make_node("Constant", [], ["k"])
    node.attribute.append(helper.make_attribute("value", tensor))
    (find_then_branch(model) if inside else model.graph).node.insert(0, node)
    require_refusal(model, "M008", "'odd_weight'")


@pytest.mark.parametrize("kind", [TensorProto.COMPLEX64, TensorProto.INT4, TensorProto.FLOAT16, TensorProto.BOOL])
def test_weights_in_typed_fields_are_read(kind):
    model = parse_graph("(float[3] x) => (float[3] y) { y = Relu(x) }")
    model.graph.initializer.append(helper.make_tensor("w", kind, [3], [1, 0, 1]))
    assert "w" in load(model).initializers


# ---------------------------------------------------------------------------------------------- declared shapes


def build_with_input(*dims: int | str) -> ModelProto:
    model = parse_graph("(float[4] x) => (float[4] y) { y = Relu(x) }")
    model.graph.input[0].CopyFrom(helper.make_tensor_value_info("x", TensorProto.FLOAT, dims))
    return model


@pytest.mark.parametrize("dims", [(-5,), (4, -2), (1 << 62,), (1,) * 65, (1,) * 100_000], ids=lambda d: str(d[:3]))
@pytest.mark.parametrize("pipeline", ["", "optimize,profile{repeat=1},m-etf,split,emit"])
def test_an_input_of_an_impossible_shape_is_refused(require_refusal, fast_pipeline, dims, pipeline):
    require_refusal(build_with_input(*dims), "M008", "'x'", "export it again", pipeline=pipeline or fast_pipeline)


def test_a_size_of_minus_one_is_unknown(require_refusal, run_cli, tmp_path, fast_pipeline):
    model = build_with_input(-1, 4)
    del model.graph.output[0].type.tensor_type.shape.dim[:]
    require_refusal(model, "M020", "--shape x.0=1")
    assert run_cli("compile", tmp_path / "m.onnx", "--shape", "x.0=2", "--pipeline", fast_pipeline).code == 0
    assert run_cli("verify", tmp_path / "m.bundle", "--shape", "x.0=3").code == 0


@pytest.mark.parametrize("pipeline", ["", "optimize,profile{repeat=1},m-etf,split,emit"])
def test_sizes_beyond_all_memory_are_refused(require_refusal, fast_pipeline, pipeline):
    size = (1 << 31) - 1
    require_refusal(build_with_input(size, size), "M008", "--shape", pipeline=pipeline or fast_pipeline)


def test_inputs_beyond_the_memory_of_this_machine_are_refused(require_refusal):
    pipeline = "optimize,profile{repeat=1},m-etf,split,emit"
    require_refusal(build_with_input(1 << 24, 1 << 24), "M022", "'x'", "--shape", pipeline=pipeline)


def test_a_long_list_of_dimensions_is_shortened(require_refusal):
    model = parse_graph("(float[4] x) => (float[4] y) { y = Relu(x) }")
    names = [f"dimension_{number}" for number in range(10_000)]
    model.graph.input.append(helper.make_tensor_value_info("wide", TensorProto.FLOAT, names[:60]))
    for start in range(60, len(names), 60):
        model.graph.input.append(
            helper.make_tensor_value_info(f"x{start}", TensorProto.FLOAT, names[start : start + 60])
        )
    require_refusal(model, "M020", "dimension_0, ", "and 9990 more", "--shape dimension_0=1,")


# ---------------------------------------------------------------------------------------------- nodes


NODES = {
    "(float[4] x) => (float[4] y) { [odd] y = Reshape() }": "has 0 inputs, expected 2",
    "(float[4] x) => (float[4] y) { [odd] y = Add(x, x, x) }": "has 3 inputs, expected 2",
    "(float[4] x) => (float[4] y) { [odd] y, z = Relu(x) }": "has 2 outputs, expected 1",
    "(float[4] x) => (float[4] y) { [odd] y = Sum() }": "has 0 inputs, expected 1 or more",
    "(float[4] x) => (float[4] y) { [odd] y = Cast(x) }": "lacks the attribute 'to'",
    '(float[4] x) => (float[4] y) { [odd] y = Softmax <axis = "one"> (x) }': "has 'axis' of type STRING, expected INT",
    "(float[4] x, bool c) => (float[4] y) { [odd] y = If(c) }": "lacks the attribute 'else_branch'",
}


@pytest.mark.parametrize(("text", "expected_words"), NODES.items(), ids=NODES.values())
def test_a_node_that_does_not_fit_its_operator_is_named(require_refusal, text, expected_words):
    require_refusal(parse_graph(text), "M008", "'odd'", "of opset 17", expected_words)


def test_a_node_of_a_subgraph_that_does_not_fit_its_operator_is_named(require_refusal):
    require_refusal(
        parse_graph(IF.replace("u = Add(x, thin)", "[odd] u = Add(x)")), "M008", "'odd'", "has 1 inputs, expected 2"
    )


def test_empty_names_at_the_end_stand_for_omitted_inputs(tmp_path):
    model = parse_graph("(float[4] x) => (float[4] y) { y = Clip(x) }")
    model.graph.node[0].input.extend(["", ""])
    assert_same(run_together(compiled_with(model, RandomPlacement(), tmp_path), [{"x": X}]), [[X]])


@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("value_ints", AttributeProto.INT, {"i": 3}),
        ("value_floats", AttributeProto.TENSOR, {"t": numpy_helper.from_array(X)}),
        ("value", AttributeProto.INT, {"i": 3}),
        ("sparse_value", AttributeProto.TENSOR, {"t": numpy_helper.from_array(X)}),
        ("value_other", AttributeProto.INT, {"i": 3}),
    ],
)
def test_a_constant_whose_type_contradicts_its_name_is_refused(require_refusal, name, kind, value):
    model = parse_graph("(float[4] x) => (float[4] y) { y = Add(x, k) }")
    node = helper.make_node("Constant", [], ["k"], "odd")
    node.attribute.append(AttributeProto(name=name, type=kind, **value))
    model.graph.node.insert(0, node)
    require_refusal(model, "M008", "'odd'", name)


@pytest.mark.parametrize("output", ["", None])
def test_a_constant_with_an_empty_output_is_dropped(run_cli, tmp_path, fast_pipeline, output):
    model = parse_graph("(float[4] x) => (float[4] y) { y = Relu(x) }")
    model.graph.node.insert(0, helper.make_node("Constant", [], [] if output is None else [output], value_int=3))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    result = run_cli("compile", tmp_path / "m.onnx", "--pipeline", fast_pipeline)
    assert result.code == (0 if output == "" else 2), result.err


@pytest.mark.parametrize("old", [b"left_one", b"Relu", b"number_n", b"w_1", b"rows_of_z"])
def test_names_that_are_not_text_are_refused(require_refusal, tmp_path, old):
    graph = "<float[rows_of_z] z> { [left_one] z = Relu(x) y = Add(z, w_1) }"
    model = parse_graph(f"(float[number_n] x) => (float[number_n] y) {graph}")
    model.graph.initializer.append(numpy_helper.from_array(X[:1], "w_1"))
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString().replace(old, old[:-1] + b"\xff"))
    require_refusal(tmp_path / "m.onnx", "M002", "not text")


@pytest.mark.parametrize("kind", [64, -1])
def test_element_types_that_onnx_does_not_have_are_refused(require_refusal, kind):
    model = build_with_input(4)
    model.graph.input[0].type.tensor_type.elem_type = kind
    require_refusal(model, "'x'")
    model = parse_graph("(float[4] x) => (seq(float[4]) y) { y = SequenceConstruct(x) }")
    model.graph.output[0].type.sequence_type.elem_type.tensor_type.elem_type = kind
    require_refusal(model, "M008", "'y'", f"element type {kind}")


@pytest.mark.parametrize("kind", [64, -1, 1 << 40])
def test_a_cast_to_a_type_that_onnx_does_not_have_is_refused(run_cli, tmp_path, kind):
    model = parse_graph("(float[4] x) => (float[4] y) { z = Cast <to = 1> (x) y = Relu(z) }")
    model.graph.node[0].attribute[0].i = kind
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString())
    pipeline = "optimize,profile{repeat=1},m-etf,split,emit"
    result = run_cli("compile", tmp_path / "m.onnx", "--pipeline", pipeline)
    assert (result.code, result.err[:8]) == (2, "error[M0"), result.err


ODD_RANKS = [
    "(float[4] x) => (float[4, 4] y) { y = Gemm(x, x) }",
    "(float x) => (float[4, 4] y) { y = Gemm(x, x) }",
    "(float x) => (float y) { y = MatMul(x, x) }",
    "(float[4] x) => (float[4] y) { y = ConvTranspose(x, x) }",
    "(float[4] x) => (float[4] y) { y, h = GRU <hidden_size = 4> (x, x, x) }",
    '(float[4] x) => (float[4] y) { y = Einsum <equation = "ij,jk->ik"> (x) }',
    "(float[4] x) => (float[4] y) { p = Constant <value = int64[2] {-3, -3}> () y = Pad(x, p) }",
]


@pytest.mark.parametrize("text", ODD_RANKS)
def test_costs_of_models_that_cannot_run_are_estimated_without_a_crash(run_cli, tmp_path, fast_pipeline, text):
    (tmp_path / "m.onnx").write_bytes(parse_graph(text).SerializeToString())
    assert run_cli("compile", tmp_path / "m.onnx", "--pipeline", fast_pipeline).code in (0, 2)


def test_a_custom_operator_named_like_a_view_is_not_a_view():
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "own": 1]> g (float[4] x) => (float[4] y) { y = own.Identity(x) }'
    )
    assert build_op_graph(load(model), {}).alias.tolist() == [-1, -1]


# ---------------------------------------------------------------------------------------------- too much of something


def test_the_description_of_a_long_cycle_is_shortened(require_refusal):
    count = 20_000
    nodes = [helper.make_node("Neg", [f"v{i}"], [f"v{(i + 1) % count}"], f"n{i}") for i in range(count)]
    model = parse_graph("(float[4] x) => (float[4] v0) { y = Relu(x) }")
    model.graph.node.extend(nodes)
    require_refusal(model, "M008", "a cycle: n", "... (19990 more)")


def test_functions_with_too_many_nested_calls_are_refused(require_refusal):
    count = 3000
    model = parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17, "own": 1]> g (float[4] x) => (float[4] y) { y = own.f0(x) }'
    )
    for index in range(count):
        node = helper.make_node(f"f{index + 1}", ["a"], ["b"], domain="own")
        if index == count - 1:
            node = helper.make_node("Neg", ["a"], ["b"])
        opsets = [helper.make_opsetid("", 17), helper.make_opsetid("own", 1)]
        model.functions.append(helper.make_function("own", f"f{index}", ["a"], ["b"], [node], opsets))
    require_refusal(model, "M008", "100 deep")


def test_a_long_list_of_missing_inputs_is_shortened():
    inputs = [Declared(f"input_{number}", "tensor(float)", (2,)) for number in range(1000)]
    with pytest.raises(FeedError) as caught:
        check_feeds({}, inputs)
    assert "'input_9', and 990 more" in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_metadata_that_is_not_utf8_is_read_with_replacements(tmp_path):
    """Nothing depends on it, so no such model is refused."""
    model = parser.parse_model('<ir_version: 9, opset_import: ["": 18]> g (float[3] x) => (float[3] y) { y = Neg(x) }')
    model.producer_name = model.doc_string = model.graph.doc_string = "MARK"
    model.metadata_props.add(key="MARK", value="MARK")
    (tmp_path / "m.onnx").write_bytes(model.SerializeToString().replace(b"MARK", b"caf\xe9"))
    metadata = load(tmp_path / "m.onnx").metadata
    assert metadata.producer_name == metadata.description == metadata.graph_description == "caf\ufffd"
    assert metadata.custom_metadata_map == {"caf\ufffd": "caf\ufffd"}


def test_a_map_as_input_is_refused_with_or_without_a_value():
    """No feed could be right: an OrtValue holds no map."""
    text = """<ir_version: 8, opset_import: ["": 17, "ai.onnx.ml": 3]>
    g (map(int64, float) x) => (float[N, M] y) { y = ai.onnx.ml.DictVectorizer<int64_vocabulary=[1, 2]>(x) }"""
    model = load(parser.parse_model(text))
    for samples in ({}, {"x": {1: 2.0}}):
        with pytest.raises(ModelError, match=r"M020.*input 'x'.*map\(int64,tensor\(float\)\).*\n.*DictVectorizer"):
            bind(model, {}, samples)


@pytest.mark.parametrize("options", [{"effort": "low", "trial": False}, {}])
@pytest.mark.parametrize("place", [0, 1])
def test_an_input_that_is_declared_twice_is_refused(tmp_path, options, place):
    model = parser.parse_model('<ir_version: 9, opset_import: ["": 18]> g (float[3] x) => (float[3] y) { y = Neg(x) }')
    model.graph.input.insert(place, model.graph.input[0])
    with pytest.raises(ModelError, match=r"M008.* g: input 'x' is declared 2 times, expected once"):
        onnxplace.compile(model, tmp_path / "bundle", devices="cpu:0", **options)


def test_an_input_with_a_default_value_may_be_declared_twice(tmp_path):
    text = """<ir_version: 9, opset_import: ["": 18]> g (float[3] z, float[3] x) => (float[3] y)
    <float[3] x = {1, 2, 3}> { y = Add(x, z) }"""
    model = parser.parse_model(text)
    model.graph.input.append(model.graph.input[1])
    onnxplace.compile(model, tmp_path / "bundle", devices="cpu:0", effort="low", trial=False)
    feeds = {"z": np.ones(3, np.float32)}
    with onnxplace.InferenceSession(tmp_path / "bundle") as session:
        assert [item.name for item in session.get_inputs()] == ["z"]
        assert_same(session.run(None, feeds), run_plain(model.SerializeToString(), [feeds])[0])
