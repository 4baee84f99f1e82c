"""Names of sizes: those that only say that a size is unknown, and those that have a meaning."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import ShardingRecord, StateRecord
from onnxplace.errors import FeedError
from onnxplace.feeds.dimensions import dimension_keys
from onnxplace.measure.step_inputs import choose_step_inputs
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.model import declaration_of
from onnxplace.model.tensors import says_unknown
from onnxplace.session.run_arguments import RequestChecks
from tests.support.random_models import reference
from tests.support.random_placements import RandomPlacement, assert_same, compiled_with, run_together

UNKNOWN = ("?", "*", "None", "none", "-1", "-", "dynamic", "unk__1", "unk_12", "unknown", "Unknown_dim_3", "", " ")


def build_images(*names: str | None) -> ModelProto:
    """Return a model of images whose height and width have these names."""
    return build_model([("x", [1, 2, *names])], [1, 2], [("GlobalAveragePool", "r", "p"), ("Flatten", "p", "y")])


def build_pair(name: str) -> ModelProto:
    """Return a model that joins two vectors whose sizes have one name."""
    nodes = [("Exp", "z", "e"), ("Concat", "r e", "y")]
    return build_model([("x", [name]), ("z", [name])], ["M"], nodes)


def build_model(inputs: list, output: list, nodes: list) -> ModelProto:
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs]
    made = [helper.make_node("Relu", ["x"], ["r"])]
    for operator, sources, result in nodes:
        attributes = {"axis": 0} if operator == "Concat" else {}
        made.append(helper.make_node(operator, sources.split(), [result], **attributes))
    graph = helper.make_graph(made, "g", values, [helper.make_tensor_value_info("y", TensorProto.FLOAT, output)])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


# --- names that only say "unknown" --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*UNKNOWN, "unk__0 ", "DynamicDimension.7", "undefined", "??", "nan", "Any"])
def test_each_axis_of_an_unknown_size_has_a_size_of_its_own(name: str):
    model = load(build_images(name, name))
    (declared,) = (declaration_of(value, model) for value in model.inputs)
    assert dimension_keys(declared)[2:] == [("x.2", None), ("x.3", None)]
    assert bind(model, {"x.2": 3, "x.3": 5}, {}).input_shapes() == {"x": (1, 2, 3, 5)}


@pytest.mark.parametrize(
    "name", ["N", "batch", "dynamic_batch", "unk_batch", "x_dynamic_axes_1", "height", "批次", "a?"]
)
def test_a_name_with_a_meaning_is_one_size(name: str):
    assert not says_unknown(name)
    assert bind(load(build_images(name, name)), {name: 4}, {}).input_shapes() == {"x": (1, 2, 4, 4)}


def test_digits_are_a_size():
    assert load(build_images("32", "48")).input_shapes() == {"x": (1, 2, 32, 48)}


@pytest.mark.parametrize("name", ["?", "unk__1"])
def test_a_bundle_runs_at_different_sizes_of_unknown_axes(tmp_path: Path, name: str):
    feeds = [{"x": draw(1, 2, height, width)} for height, width in ((4, 9), (3, 3), (1, 7))]
    model = load(build_images(name, name))
    placement, sizes = RandomPlacement((0, 1)), {"x.2": 5, "x.3": 6}
    bundle = compiled_with(build_images(name, name), placement, tmp_path, optimized=False, dimensions=sizes)
    assert_same(run_together(bundle, feeds), reference(model.whole_proto(), feeds))


# --- names with a meaning -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """Return a bundle of two inputs whose sizes have one name, on two devices."""
    folder = tmp_path_factory.mktemp("pair")
    return compiled_with(build_pair("N"), RandomPlacement((0, 1)), folder, optimized=False, dimensions={"N": 2})


def test_a_session_takes_different_sizes_of_one_name_as_onnx_runtime_does(pair: Bundle):
    feeds = {"x": draw(3), "z": draw(5)}
    with onnxplace.InferenceSession(pair) as session:
        (result,) = session.run(None, feeds)
    np.testing.assert_allclose(result, np.concatenate([np.maximum(draw(3), 0), np.exp(draw(5))]), rtol=1e-6)
    assert choose_step_inputs(pair, feeds, {}, 0).first["z"].shape == (5,)


@pytest.mark.parametrize(
    "change",
    [
        {"sharding": ShardingRecord(ways=2, exchanges={}, kinds=())},
        {"states": (StateRecord(output="y", input="x", device="cpu:0"),)},
        {},
    ],
    ids=["split operators", "states", "joined requests"],
)
def test_one_name_is_one_size_where_the_bundle_relies_on_it(pair: Bundle, change: dict):
    bundle = replace(pair, manifest=pair.manifest.model_copy(update=change))
    checks = RequestChecks(bundle, is_batched=not change)
    with pytest.raises(FeedError, match="dimension 'N' is 5 here and 3 in x"):
        checks.check_feeds({"x": draw(3), "z": draw(5)}, ["y"])
