"""Classifiers as sklearn and LightGBM converters write them: operators of ai.onnx.ml, and a ZipMap at the end."""

import numpy as np
import pytest
from onnx import ModelProto, NodeProto, TensorProto, TypeProto, helper

from onnxplace import OnnxplaceError
from onnxplace.model.loading import load
from onnxplace.model.tensors import format_type, parse_type
from onnxplace.passes.segments.write_segments import infer_boundary_types
from tests.support.random_models import reference
from tests.support.random_placements import RandomPlacement, assert_same, compiled_with, run_together

pytestmark = pytest.mark.usefixtures("no_gpus")

ML = "ai.onnx.ml"
STRINGS = {"int64": TensorProto.INT64, "string": TensorProto.STRING}


def linear_classifier(labels: str) -> NodeProto:
    names = {"classlabels_ints": [0, 1, 2]} if labels == "int64" else {"classlabels_strings": ["a", "b", "c"]}
    coefficients = [number / 10 for number in range(12)]
    return helper.make_node(
        "LinearClassifier",
        ["scaled"],
        ["label", "scores"],
        "classify",
        domain=ML,
        coefficients=coefficients,
        intercepts=[0.1, -0.2, 0.3],
        multi_class=1,
        post_transform="SOFTMAX",
        **names,
    )


def tree_classifier(labels: str) -> NodeProto:
    """Return one tree, in which the first feature decides between two leaves.

    One leaf votes for the first class, the other for the last class.
    """
    names = {"int64": {"classlabels_int64s": [0, 1, 2]}, "string": {"classlabels_strings": ["a", "b", "c"]}}[labels]
    return helper.make_node(
        "TreeEnsembleClassifier",
        ["scaled"],
        ["label", "scores"],
        "classify",
        domain=ML,
        nodes_treeids=[0, 0, 0],
        nodes_nodeids=[0, 1, 2],
        nodes_featureids=[0, 0, 0],
        nodes_modes=["BRANCH_LEQ", "LEAF", "LEAF"],
        nodes_values=[0.5, 0.0, 0.0],
        nodes_truenodeids=[1, 0, 0],
        nodes_falsenodeids=[2, 0, 0],
        class_treeids=[0, 0],
        class_nodeids=[1, 2],
        class_ids=[0, 2],
        class_weights=[1.0, 1.0],
        post_transform="NONE",
        **names,
    )


def zipmap(labels: str) -> NodeProto:
    names = {"int64": {"classlabels_int64s": [0, 1, 2]}, "string": {"classlabels_strings": ["a", "b", "c"]}}[labels]
    return helper.make_node("ZipMap", ["normal"], ["probabilities"], "zip", domain=ML, **names)


def classifier(node: NodeProto, labels: str, declared: bool = True) -> ModelProto:
    nodes = [
        helper.make_node("Scaler", ["x"], ["scaled"], "scale", domain=ML, offset=[0.1] * 4, scale=[2.0] * 4),
        node,
        helper.make_node("Normalizer", ["scores"], ["normal"], "normalise", domain=ML, norm="L1"),
        zipmap(labels),
    ]
    mapped = helper.make_map_type_proto(STRINGS[labels], helper.make_tensor_type_proto(TensorProto.FLOAT, None))
    kind = helper.make_sequence_type_proto(mapped)
    outputs = [
        helper.make_tensor_value_info("label", STRINGS[labels], ["n"]),
        helper.make_value_info("probabilities", kind if declared else TypeProto()),
    ]
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["n", 4])]
    graph = helper.make_graph(nodes, "classifier", inputs, outputs)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid(ML, 3)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=8)


FEEDS = [{"x": np.random.default_rng(n).standard_normal((n, 4)).astype(np.float32)} for n in (1, 5)]


@pytest.mark.parametrize("labels", ["int64", "string"])
@pytest.mark.parametrize("make_node", [linear_classifier, tree_classifier])
@pytest.mark.parametrize("devices", [(0, 1), (0, 0, 1, 1), (0,)], ids=str)
def test_classifiers_cut_anywhere_give_the_results_of_the_whole_model(tmp_path, labels, make_node, devices):
    model = classifier(make_node(labels), labels)
    bundle = compiled_with(model, RandomPlacement(devices), tmp_path, dimensions={"n": 3})
    assert len({segment.device for segment in bundle.manifest.segments}) == len(set(devices))
    assert_same(run_together(bundle, FEEDS), reference(model, FEEDS))


def test_the_type_of_a_zipmap_need_not_be_declared(tmp_path):
    model = classifier(linear_classifier("int64"), "int64", declared=False)
    assert_same(
        run_together(compiled_with(model, RandomPlacement((0, 1)), tmp_path, dimensions={"n": 3}), FEEDS),
        reference(model, FEEDS),
    )


def test_commands_compile_run_and_verify_a_classifier(run_cli, tmp_path, fast_pipeline):
    (tmp_path / "m.onnx").write_bytes(classifier(tree_classifier("string"), "string").SerializeToString())
    (tmp_path / "map.json").write_text('{"scale": "cpu:0", "classify|normalise|zip": "cpu:1"}')
    pipeline = fast_pipeline.replace("coplace{join=never}", f"coplace{{join=never,device_map={tmp_path / 'map.json'}}}")
    ran = run_cli("compile", tmp_path / "m.onnx", "--shape", "n=3", "--pipeline", pipeline, "--strict")
    assert ran.code == 0, ran.err
    for command in ("run", "verify"):
        ran = run_cli(command, tmp_path / "m.bundle", "--shape", "n=4")
        assert ran.code == 0, ran.err


def test_only_types_of_crossing_values_are_inferred(monkeypatch):
    model = load(classifier(linear_classifier("int64"), "int64"))
    monkeypatch.setattr("onnxplace.passes.segments.write_segments._is_complete", lambda _: False)
    assert set(infer_boundary_types(model, ["scores"])) == {"scores"}


@pytest.mark.parametrize(
    "text",
    [
        "tensor(float)",
        "seq(map(int64,tensor(float)))",
        "seq(map(string,tensor(float)))",
        "map(int64,map(string,tensor(double)))",
        "optional(seq(tensor(int8)))",
        "sparse_tensor(float)",
    ],
)
def test_types_in_the_spelling_of_onnxruntime_are_parsed(text):
    assert format_type(parse_type(text, [])) == text


def test_a_scalar_has_a_shape_and_an_unknown_rank_has_none():
    assert parse_type("tensor(float)", []).tensor_type.HasField("shape")
    assert not parse_type("tensor(float)", None).tensor_type.HasField("shape")
    assert not parse_type("seq(tensor(float))", []).sequence_type.elem_type.tensor_type.HasField("shape")


@pytest.mark.parametrize("text", ["opaque(a,b)", "seq(opaque(a,b))", "map(odd,tensor(float))", "tensor(odd)", "", "?"])
def test_types_that_onnx_does_not_have_are_unknown(text):
    assert parse_type(text, []) is None


def test_a_value_whose_type_is_unknown_at_a_cut_is_named(monkeypatch):
    model = load(classifier(linear_classifier("int64"), "int64"))
    monkeypatch.setattr("onnxplace.passes.segments.write_segments._is_complete", lambda _: False)
    monkeypatch.setattr("onnxplace.passes.segments.write_segments.parse_type", lambda *_: None)
    with pytest.raises(OnnxplaceError, match=r"M008.*'scores'"):
        infer_boundary_types(model, ["scores"])
