"""Training steps are recognised: by metadata, by the flow of data, and only they."""

from collections.abc import Callable

import numpy as np
import pytest
from onnx import ModelProto, parser

from onnxplace.graph.op_graph import OpGraph
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind, build_op_graph, infer_static_shapes, value_bytes
from onnxplace.model.model import Model
from onnxplace.model.state_binding import bind_states
from onnxplace.model_metadata import Phase, TrainingRoles
from onnxplace.pipeline.pipeline import make_pass, run_pass
from onnxplace.state import State
from onnxplace.target.target import Device, Target
from onnxplace_training.recognise_step import recognise_training_step
from tests.support.training_models import (
    MOMENTS,
    OPTIMIZERS,
    RECURRENT,
    make_mlp,
    make_recurrent,
    make_transformer,
    make_two_tower,
    remove_metadata,
)

MAKERS = {"mlp": make_mlp, "transformer": make_transformer, "two_tower": make_two_tower, "recurrent": make_recurrent}
every_model = pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
every_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)


def prepare(model: ModelProto, *states: str) -> tuple[Model, OpGraph]:
    """Return a model with states, as passes see it, and its graph."""
    loaded = load(model)
    sizes = {"past": 3} if any("past" in str(value) for value in loaded.inputs) else {}
    bound = bind_states(bind(loaded, sizes, {}), states)
    target = Target((Device("cpu:0", 1 << 30),))
    optimized = run_pass(make_pass("optimize"), State(target).with_facts(bound))[Model]
    return optimized, build_op_graph(optimized, value_bytes(optimized, infer_static_shapes(optimized)))


def recognise(model: ModelProto, *states: str) -> TrainingRoles | None:
    return recognise_training_step(*prepare(model, *states))


def require(roles: TrainingRoles | None) -> TrainingRoles:
    assert roles is not None
    return roles


@every_model
@every_optimizer
@pytest.mark.sampled(3)
def test_the_flow_of_data_tells_what_metadata_says(maker: Callable[..., ModelProto], optimizer):
    told = require(recognise(maker(optimizer)))
    model, graph = prepare(remove_metadata(maker(optimizer)), "*.new=*")
    derived = require(recognise_training_step(model, graph))
    different = np.flatnonzero(told.phase != derived.phase)
    assert [graph.names[node] for node in different] == []
    np.testing.assert_array_equal(told.parameter, derived.parameter)
    np.testing.assert_array_equal(told.owner, derived.owner)
    step = derived.step
    assert step.loss == "loss"
    assert step.learning_rate == "learning_rate"
    assert step.step == told.step.step
    assert [item.input for item in step.parameters] == [item.input for item in told.step.parameters]
    for own, other in zip(step.parameters, told.step.parameters):
        assert [(m.input, m.output) for m in own.moments] == [(m.input, m.output) for m in other.moments]
        assert len(own.moments) == len(MOMENTS[optimizer])
    # The builder names the gradient by an Identity behind it, through which everything leads as well.
    assert [item.gradient for item in step.parameters] == [item.gradient for item in told.step.parameters]


@every_model
@every_optimizer
def test_every_backward_node_has_a_forward_node_and_no_other_node_has(maker, optimizer):
    roles = require(recognise(maker(optimizer)))
    backward = roles.phase == Phase.BACKWARD
    assert backward.any()
    assert (roles.owner[backward] >= 0).all()
    assert (roles.owner[~backward] == -1).all()
    assert (roles.phase[roles.owner[backward]] == Phase.FORWARD).all()


def test_what_all_parameters_share_works_for_none():
    model, graph = prepare(remove_metadata(make_mlp("adam")), "*.new=*")
    roles = require(recognise_training_step(model, graph))
    shared = [node for node, op in enumerate(graph.ops) if op in ("Pow", "Cast")]
    assert len(shared) == 3
    assert (roles.parameter[shared] == -1).all()
    assert (roles.phase[shared] == Phase.UPDATE).all()


# Two parameters, whose gradients are scaled by the norm of both; the learning rate is a constant.
CLIPPED = """<ir_version: 10, opset_import: ["" : 20]>
step (float[4,3] x, float[4,2] target, float[3,5] v, float[5,2] w) => (float loss, float[3,5] v_new, float[5,2] w_new) {
    hidden = MatMul(x, v)
    active = Tanh(hidden)
    y = MatMul(active, w)
    error = Sub(y, target)
    square = Mul(error, error)
    loss = ReduceMean<keepdims=0>(square)
    scale = Constant<value_float=0.25>()
    dy = Mul(error, scale)
    turned = Transpose(active)
    dw = MatMul(turned, dy)
    w_turned = Transpose(w)
    dactive = MatMul(dy, w_turned)
    active_square = Mul(active, active)
    one = Constant<value_float=1.0>()
    slope = Sub(one, active_square)
    dhidden = Mul(dactive, slope)
    x_turned = Transpose(x)
    dv = MatMul(x_turned, dhidden)
    dv_square = ReduceSumSquare<keepdims=0>(dv)
    dw_square = ReduceSumSquare<keepdims=0>(dw)
    total = Add(dv_square, dw_square)
    norm = Sqrt(total)
    bounded = Max(norm, one)
    rate = Constant<value_float=0.1>()
    factor = Div(rate, bounded)
    v_change = Mul(dv, factor)
    w_change = Mul(dw, factor)
    v_new = Sub(v, v_change)
    w_new = Sub(w, w_change)
}"""


def test_a_norm_of_all_gradients_connects_no_parameters():
    model, graph = prepare(parser.parse_model(CLIPPED), "*_new=*")
    roles = require(recognise_training_step(model, graph))
    assert [item.name for item in roles.step.parameters] == ["v", "w"]
    assert [item.gradient for item in roles.step.parameters] == ["dv", "dw"]
    assert (roles.step.loss, roles.step.learning_rate, roles.step.step) == ("loss", "", "")
    owner = {name: int(number) for name, number in zip(_produced(graph), roles.parameter)}
    assert {name for name, number in owner.items() if number == 0} == {
        *(
            "dhidden",
            "dv",
            "dv_square",
            "v_change",
            "v_new",
            "active_square",
            "slope",
            "x_turned",
            "w_turned",
            "dactive",
        )
    }
    assert {name for name, number in owner.items() if number == 1} == {"turned", "dw", "dw_square", "w_change", "w_new"}
    phase = {name: Phase(kind) for name, kind in zip(_produced(graph), roles.phase.tolist())}
    assert {name for name, kind in phase.items() if kind is Phase.UPDATE} == {
        *("dv_square", "dw_square", "total", "norm", "bounded", "factor", "v_change", "w_change", "v_new", "w_new")
    }


def _produced(graph: OpGraph) -> list[str]:
    return [graph.value_names[int(graph.outputs[node][0])] for node in range(len(graph))]


# ------------------------------------------------------------------------------------------ models that are none

DECODER = """<ir_version: 10, opset_import: ["" : 20]>
decoder (float[1,1,8] x, float[1,past,8] keys, float[1,past,8] values, float[8,8] w)
=> (float[1,1,8] y, float[1,next,8] keys_new, float[1,next,8] values_new, float best) {
    query = MatMul(x, w)
    keys_new = Concat<axis=1>(keys, x)
    values_new = Concat<axis=1>(values, query)
    turned = Transpose<perm=[0,2,1]>(keys_new)
    scores = MatMul(query, turned)
    weights = Softmax(scores)
    y = MatMul(weights, values_new)
    best = ReduceMax<keepdims=0>(y)
}"""
FIXED_CACHE = """<ir_version: 10, opset_import: ["" : 20]>
decoder (float[1,8] x, int64[1,1] position, float[16,8] keys, bool[16,1] is_now) => (float loss, float[16,8] keys_new) {
    keys_new = Where(is_now, x, keys)
    turned = Transpose(keys_new)
    scores = MatMul(x, turned)
    loss = ReduceMean<keepdims=0>(scores)
}"""
COUNTER = """<ir_version: 10, opset_import: ["" : 20]>
count (float[4] x, float total) => (float mean, float total_new) {
    mean = ReduceMean<keepdims=0>(x)
    total_new = Add(total, mean)
}"""


@pytest.mark.parametrize(
    ("text", "states"),
    [
        (DECODER, ["keys_new=keys", "values_new=values"]),
        (FIXED_CACHE, ["keys_new=keys"]),
        (RECURRENT, ["hidden_new=hidden", "cell_new=cell"]),
        (COUNTER, ["total_new=total"]),
    ],
    ids=["decoder", "fixed cache", "recurrent", "counter"],
)
def test_models_with_states_that_do_not_learn_are_no_training_steps(text, states):
    assert recognise(parser.parse_model(text), *states) is None


def test_a_model_without_states_is_no_training_step():
    assert recognise(remove_metadata(make_mlp("sgd"))) is None


def test_running_statistics_are_buffers_and_their_nodes_forward():
    text = CLIPPED.replace("float[5,2] w)", "float[5,2] w, float[5] mean)").replace(
        "float[5,2] w_new)", "float[5,2] w_new, float[5] mean_new)"
    )
    text = text.replace(
        "active = Tanh(hidden)",
        "active = Tanh(hidden)\n batch_mean = ReduceMean<keepdims=0>(hidden, axes)\n kept = Mul(mean, keep)\n"
        "    added = Mul(batch_mean, keep)\n    mean_new = Add(kept, added)",
    )
    text = text.replace(
        "hidden = MatMul(x, v)",
        "axes = Constant<value_ints=[0]>()\n keep = Constant<value_float=0.5>()\n hidden = MatMul(x, v)",
    )
    model, graph = prepare(parser.parse_model(text), "*_new=*")
    roles = require(recognise_training_step(model, graph))
    assert [item.name for item in roles.step.buffers] == ["mean"]
    phase = dict(zip(_produced(graph), roles.phase.tolist()))
    assert {phase[name] for name in ("batch_mean", "kept", "added", "mean_new")} == {Phase.FORWARD}


def test_the_loss_is_found_among_several_numbers():
    text = CLIPPED.replace("=> (float loss,", "=> (float error_norm, float loss,").replace(
        "square = Mul(error, error)", "square = Mul(error, error)\n error_norm = ReduceL2<keepdims=0>(error)"
    )
    assert require(recognise(parser.parse_model(text), "*_new=*")).step.loss == "loss"
    renamed = text.replace("loss", "first").replace("error_norm", "second")
    assert require(recognise(parser.parse_model(renamed), "*_new=*")).step.loss == "second"


def test_roles_of_a_rewritten_graph_are_those_of_the_sources():
    roles = require(recognise(make_mlp("sgd")))
    source = np.array([0, 0, len(roles.phase) - 1, -1])
    copied = roles.spread(source)
    assert copied.phase.tolist() == [roles.phase[0], roles.phase[0], roles.phase[-1], Phase.FORWARD]
    assert copied.parameter.tolist() == [roles.parameter[0], roles.parameter[0], roles.parameter[-1], -1]
    assert (copied.owner[:2] == -1).all()


def test_what_is_computed_again_is_backward_and_belongs_to_its_source():
    roles = require(recognise(make_mlp("sgd")))
    count = len(roles.phase)
    source = np.append(np.arange(count), [0, -1])
    again = np.append(np.zeros(count, dtype=bool), [True, True])
    copied = roles.spread(source, again)
    np.testing.assert_array_equal(copied.owner[:count], roles.owner)
    assert copied.phase[count:].tolist() == [Phase.BACKWARD] * 2
    assert copied.owner[count:].tolist() == [0, -1]
    assert copied.parameter[count:].tolist() == [-1, -1]
