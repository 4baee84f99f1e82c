"""Micro-batches compute what the undivided training step computes."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from random import Random

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, helper, numpy_helper, parser

import onnxplace
from onnxplace.errors import FeedError, InfeasibleError
from onnxplace.facts import MicroBatches, Original, Profile
from onnxplace.model.model import Model
from onnxplace.passes.sharding.choose.layout_choice import ChoiceProblem, LayoutChoice
from tests.support.shardings import choose_randomly
from tests.support.step_checks import STATES, assert_bundle_takes_the_same_steps, assert_same_steps, compile_state
from tests.support.training_models import (
    OPTIMIZERS,
    Optimizer,
    StepBuilder,
    make_mlp,
    make_recurrent,
    make_transformer,
    make_two_tower,
)

STEPS = {"mlp": make_mlp, "transformer": make_transformer, "two_tower": make_two_tower, "recurrent": make_recurrent}
FRONT = "optimize,profile{estimate=true},microbatch"
# The gradient of an attention's key bias is zero but for rounding, which Adam divides by its size.
UNSURE = ("k.bias",)


def split(proto: ModelProto, count: int = 2, **more: object):
    return compile_state(proto, f"{FRONT}{{count={count}}}", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.sampled(4)
def test_micro_batches_take_the_same_steps_as_the_undivided_model(name: str, optimizer: Optimizer) -> None:
    proto = STEPS[name](optimizer)
    assert_same_steps(proto, split(proto, 2)[Model], unsure=UNSURE)


@pytest.mark.parametrize("name", STEPS)
def test_parts_of_unlike_sizes_are_weighted_by_them(name: str) -> None:
    proto = STEPS[name]("sgd", batch=5)
    assert_same_steps(proto, split(proto, 3)[Model])


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.sampled(4)
def test_any_choice_of_what_is_computed_in_parts_is_right(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = Random(seed)
    proto = STEPS[random.choice(sorted(STEPS))]("momentum")

    def choose(problem: ChoiceProblem, weight_limit_bytes: int | None = None) -> LayoutChoice:
        return choose_randomly(problem.space, random)

    monkeypatch.setattr(ChoiceProblem, "solve", choose)
    monkeypatch.setattr("onnxplace_training.apply_microbatches.MAX_WHOLE_SHARE", 2.0)
    assert_same_steps(proto, split(proto, random.choice((2, 3)))[Model])


def test_weights_and_updates_stay_whole_and_gradients_are_added_up() -> None:
    proto = make_mlp("adamw")
    state = split(proto, 4)
    model, parts = state[Model], state[MicroBatches]
    assert model.input_names == {value.name for value in proto.graph.input}
    assert [value.name for value in model.outputs] == [value.name for value in proto.graph.output]
    producers = {name: index for index, node in enumerate(model.nodes) for name in node.output}
    for value in proto.graph.output:
        if value.name.endswith(".new"):
            assert parts.part[producers[value.name]] == -1
    products = [i for i, node in enumerate(model.nodes) if node.op_type == "MatMul"]
    assert sorted(parts.part[products].tolist()) == sorted(list(range(4)) * 8)
    assert parts.count == 4


def test_metadata_of_nodes_survives() -> None:
    model = split(make_mlp("sgd"), 2)[Model]
    assert all({entry.key for entry in node.metadata_props} >= {"onnxplace.phase"} for node in model.nodes)


def test_parts_take_less_time_than_the_whole_and_the_whole_model_is_kept() -> None:
    proto = make_mlp("sgd", widths=(256, 512, 256), batch=512)
    whole, state = compile_state(proto, "optimize,profile{estimate=true}"), split(proto, 4)
    (before,), (after,) = whole[Profile].seconds.values(), state[Profile].seconds.values()
    assert before.sum() <= after.sum() < 1.5 * before.sum()
    kept = state[Original].model
    assert kept is not None
    assert len(kept.nodes) == len(whole[Model].nodes)
    assert kept.states == whole[Model].states


def test_a_contrastive_loss_is_split_again_behind_what_mixes_its_samples() -> None:
    parts = split(make_two_tower("sgd"), 3)[MicroBatches]
    assert np.bincount(parts.part + 1)[1:].min() > 25


def test_symbolic_batches_get_their_size() -> None:
    proto = make_mlp("sgd", batch=6)
    for value in proto.graph.input[:2]:
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    state = split(proto, 3, shape={"batch": 6})
    (note,) = (item for item in state.diagnostics if item.code == "L065")
    assert "x [6, 8], target [6, 4]" in note.message
    assert_same_steps(make_mlp("sgd", batch=6), state[Model])


@pytest.mark.parametrize("rows", [0, 1, 5, 7, 13])
def test_bundles_in_micro_batches_take_their_own_size_only(rows: int, symbolic_bundle: onnxplace.Bundle) -> None:
    feeds = {"x": np.zeros((rows, 8), np.float32), "target": np.zeros((rows, 4), np.float32)}
    with onnxplace.InferenceSession(symbolic_bundle) as session, pytest.raises(FeedError, match="axis 0 must be 6"):
        session.run(["loss"], feeds)


@pytest.fixture(scope="module")
def symbolic_bundle(tmp_path_factory: pytest.TempPathFactory) -> onnxplace.Bundle:
    proto = make_mlp("sgd", batch=6)
    for value in proto.graph.input[:2]:
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    bundle = onnxplace.compile(
        proto,
        tmp_path_factory.mktemp("step") / "bundle",
        devices="cpu:0,cpu:1",
        shape={"batch": 6},
        state=STATES,
        trial=False,
        pipeline=f"{FRONT}{{count=3}},coplace,m-etf,split,emit",
    )
    assert_bundle_takes_the_same_steps(make_mlp("sgd", batch=6), bundle)
    return bundle


def test_a_model_without_a_batch_is_refused() -> None:
    node = helper.make_node("Mul", ["w", "w"], ["w.new"])
    w = helper.make_tensor_value_info("w", TensorProto.FLOAT, (2,))
    new = helper.make_tensor_value_info("w.new", TensorProto.FLOAT, (2,))
    start = numpy_helper.from_array(np.ones(2, np.float32), "w")
    graph = helper.make_graph([node], "g", [w], [new], [start])
    with pytest.raises(InfeasibleError, match=r"L060.*no input holds a batch of samples"):
        split(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10))


def test_more_parts_than_samples_are_refused() -> None:
    with pytest.raises(InfeasibleError, match=r"L060.*expected at least 5 samples .* got 4 in input 'x'"):
        split(make_mlp("sgd"), 5)


def test_a_step_that_mixes_samples_in_most_of_its_work_is_refused_by_the_name_of_the_node() -> None:
    builder = StepBuilder("mixing")
    value, target = builder.input("x", 64, 256), builder.input("target", 64, 256)
    weight = builder.parameter("weight", np.ones(256))
    for _ in range(6):
        value = builder.node("Softmax", [builder.node("Mul", [value, weight], (64, 256))], (64, 256), axis=0)
        value = builder.node("CumSum", [value, builder.constant([0], np.int64)], (64, 256))
    value = builder.add(value, weight)
    with pytest.raises(InfeasibleError, match=r"L060.*(Softmax|CumSum) '.*' mixes the samples of a batch"):
        split(builder.finish(builder.squared_error(value, target)))


CACHE = """
<ir_version: 8, opset_import: ["": 17]>
cache (float[batch, 4, 8] x, float[batch, past, 8] cache) => (float[batch, total, 8] present)
{
    new = Relu(x)
    present = OPERATION
}
"""


FIXED = "shard{ways=2,exact=true,fixed=true}"


@pytest.mark.parametrize("step", [FIXED, "microbatch{count=2}"])
def test_sizes_are_not_fixed_where_a_state_grows(step: str) -> None:
    shape, front = {"batch": 2, "past": 4}, f"optimize,profile{{estimate=true}},{step}"
    growing = parser.parse_model(CACHE.replace("OPERATION", "Concat <axis = 1> (cache, new)"))
    with pytest.raises(InfeasibleError, match=r"'cache' from \[2, 4, 8\] to \[2, 8, 8\](?s:.)*leave out") as refused:
        compile_state(growing, front, states=("present=cache",), shape=shape)
    assert refused.value.code == "L060"


def test_sizes_are_fixed_where_states_keep_theirs() -> None:
    constant = parser.parse_model(CACHE.replace("OPERATION", "Add (cache, new)"))
    shape = {"batch": 2, "past": 4}
    state = compile_state(
        constant, f"optimize,profile{{estimate=true}},{FIXED}", states=("present=cache",), shape=shape
    )
    assert state[Model].input_shapes()["x"] == (2, 4, 8)


def test_a_model_without_nodes_has_no_micro_batches() -> None:
    empty = parser.parse_model('<ir_version: 8, opset_import: ["": 18]> g (float[4, 2] x) => (float[4, 2] x) {}')
    with pytest.raises(InfeasibleError, match=r"L060.*no operator can be computed in parts of the batch\n"):
        compile_state(empty, "optimize,profile{estimate=true},microbatch{count=2}", states=())
