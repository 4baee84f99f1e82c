"""Graphs that ONNX Runtime cannot run are refused before any work."""

import pytest
from onnx import TensorProto, helper

from tests.support.bad_input import parse_graph, store

pytestmark = pytest.mark.usefixtures("no_gpus")


# Estimating must refuse what measuring refuses: the bundle would not run.
BOTH_PIPELINES = pytest.mark.parametrize(
    "pipeline", ["optimize,profile,m-etf,split,emit", "optimize,profile{estimate=true},m-etf,split,emit"]
)


@BOTH_PIPELINES
def test_an_operator_that_onnx_runtime_does_not_know_is_named_with_its_node(refused, tmp_path, pipeline):
    model = parse_graph("(float[4] x) => (float[4] y) { [fine] z = Relu(x) [odd_one] y = Frobnicate(z) }")
    store(model, tmp_path / "m.onnx")
    refused(2, ("odd_one", "Frobnicate"), "compile", "m.onnx", "--pipeline", pipeline)


def test_an_operator_of_an_unknown_domain_is_named_with_its_domain(refused, tmp_path, fast_pipeline):
    store(parse_graph("(float[4] x) => (float[4] y) { [odd_one] y = acme.Bar(x) }"), tmp_path / "m.onnx")
    refused(2, ("odd_one", "acme.Bar"), "compile", "m.onnx", "--pipeline", fast_pipeline)


def test_a_misspelt_operator_gets_the_nearest_one(refused, tmp_path):
    store(parse_graph("(float[4] x) => (float[4] y) { [odd_one] y = Sigmoidd(x) }"), tmp_path / "m.onnx")
    refused(2, ("Sigmoidd", "did you mean 'Sigmoid'?"), "compile", "m.onnx")


def test_an_operator_without_similar_names_does_not_list_all_operators(refused, tmp_path):
    store(parse_graph("(float[4] x) => (float[4] y) { [odd_one] y = Qqqqqqqq(x) }"), tmp_path / "m.onnx")
    assert len(refused(2, ("Qqqqqqqq",), "compile", "m.onnx")) < 500


@BOTH_PIPELINES
def test_an_opset_that_onnx_runtime_does_not_know_is_named(refused, tmp_path, pipeline):
    store(parse_graph("(float[4] x) => (float[4] y) { y = Relu(x) }", opset=99), tmp_path / "m.onnx")
    refused(2, ("opset 99", "older opset"), "compile", "m.onnx", "--pipeline", pipeline)


def test_a_cycle_is_shown_node_by_node(refused, tmp_path):
    nodes = "[first] a = Add(x, c) [second] b = Relu(a) [third] c = Tanh(b) [last] y = Relu(c)"
    store(parse_graph(f"(float[4] x) => (float[4] y) {{ {nodes} }}"), tmp_path / "m.onnx")
    expected_words = refused(2, ("m.onnx", "cycle", "first", "second", "third"), "compile", "m.onnx")
    assert "last" not in expected_words


def test_a_value_without_a_producer_is_named_with_its_reader(refused, tmp_path):
    store(parse_graph("(float[4] x) => (float[4] y) { [sum] y = Add(x, ghost) }"), tmp_path / "m.onnx")
    refused(2, ("sum", "ghost"), "compile", "m.onnx")


def test_an_output_without_a_producer_is_named(refused, tmp_path):
    store(parse_graph("(float[4] x) => (float[4] ghost) { y = Relu(x) }"), tmp_path / "m.onnx")
    refused(2, ("output", "ghost"), "compile", "m.onnx")


def test_a_value_with_two_producers_is_named_with_the_second(refused, tmp_path):
    nodes = "[one] y = Relu(x) [two] y = Tanh(x)"
    store(parse_graph(f"(float[4] x) => (float[4] y) {{ {nodes} }}"), tmp_path / "m.onnx")
    refused(2, ("two", "'y'", "two producers"), "compile", "m.onnx")


@pytest.mark.parametrize(("index", "size", "words"), [(4, 4, ("sparse", "invalid")), (0, 1 << 30, ("dense", "bytes"))])
def test_sparse_weights_that_cannot_be_made_dense_are_refused_by_name(refused, tmp_path, index, size, words):
    model = parse_graph(f"(float[{size}] x) => (float[{size}] y) {{ y = Add(x, thin) }}")
    values = helper.make_tensor("thin", TensorProto.FLOAT, [1], [1.0])
    indices = helper.make_tensor("thin_indices", TensorProto.INT64, [1], [index])
    model.graph.sparse_initializer.append(helper.make_sparse_tensor(values, indices, [size]))
    store(model, tmp_path / "m.onnx")
    refused(2, ("thin", *words), "compile", "m.onnx")


def test_a_model_without_outputs_is_refused(refused, tmp_path, fast_pipeline):
    model = parse_graph("(float[4] x) => (float[4] y) { y = Relu(x) }")
    del model.graph.output[:]
    store(model, tmp_path / "m.onnx")
    refused(2, ("m.onnx", "output"), "compile", "m.onnx", "--pipeline", fast_pipeline)


@pytest.mark.parametrize(
    "weight",
    [
        pytest.param(
            TensorProto(data_type=99, dims=[4], raw_data=bytes(16)),
            id="unknown-type",
        ),
        pytest.param(
            TensorProto(data_type=0, dims=[4], raw_data=bytes(16)),
            id="no-type",
        ),
        pytest.param(
            TensorProto(data_type=1, dims=[-4]),
            id="negative",
        ),
        pytest.param(
            TensorProto(data_type=1, dims=[4], raw_data=b"1"),
            id="short",
        ),
    ],
)
def test_a_weight_that_contradicts_itself_is_named(refused, tmp_path, fast_pipeline, weight):
    model = parse_graph("(float[4] x) => (float[4] y) { y = Add(x, odd_weight) }")
    model.graph.initializer.append(weight)
    model.graph.initializer[0].name = "odd_weight"
    store(model, tmp_path / "m.onnx")
    refused(2, ("odd_weight",), "compile", "m.onnx", "--pipeline", fast_pipeline)
