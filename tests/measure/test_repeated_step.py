"""Steps that are repeated for timing carry the states that keep their shapes."""

from functools import partial

import numpy as np
import pytest
from onnx import TensorProto, helper

import onnxplace
from onnxplace.measure.step_inputs import RepeatedStep, keeps_state_shapes
from tests.support.state_checks import START, compile_sums, feeds
from tests.support.training_models import draw_batch, make_mlp


class FakeSession:
    """Counts resets of its states."""

    resets = 0

    @property
    def states(self):
        return self

    def reset(self):
        self.resets += 1


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mlp")
    return onnxplace.compile(make_mlp("momentum"), folder / "mlp.bundle", devices="cpu:0,cpu:1", trial=False)


def test_parameters_are_fed_to_the_first_step_only(mlp):
    batch, states = draw_batch(make_mlp()), mlp.initial_states()
    step, session = RepeatedStep(mlp, {**batch, **states}), FakeSession()
    assert step.prepare(session).keys() == {*batch, *states}
    assert step.prepare(session).keys() == step.prepare(session).keys() == batch.keys()
    assert session.resets == 1


def test_scalar_states_are_carried_like_others(tmp_path):
    value = partial(helper.make_tensor_value_info, elem_type=TensorProto.FLOAT)
    nodes = [helper.make_node("Add", ["count", "x"], ["next"]), helper.make_node("Neg", ["next"], ["y"])]
    graph = helper.make_graph(
        nodes,
        "count",
        [value("x", shape=[]), value("count", shape=[])],
        [value("next", shape=[]), value("y", shape=[])],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)
    bundle = onnxplace.compile(model, tmp_path / "b", devices="cpu:0,cpu:1", state=["next=count"], trial=False)
    assert keeps_state_shapes(bundle)
    step, session = RepeatedStep(bundle, {"x": np.float32(1), "count": np.float32(0)}), FakeSession()
    assert [list(step.prepare(session)) for _ in range(2)] == [["x", "count"], ["x"]]


def test_states_that_may_grow_are_fed_to_each_step(tmp_path):
    bundle = compile_sums(tmp_path)
    assert not keeps_state_shapes(bundle)
    inputs = {**feeds(np.zeros(2)), **START}
    step, session = RepeatedStep(bundle, inputs), FakeSession()
    assert [step.prepare(session) for _ in range(3)] == [inputs] * 3
    assert session.resets == 3


def test_a_bundle_without_states_is_fed_the_same_in_each_step(tmp_path, mlp):
    step, session = RepeatedStep(mlp, {"x": np.zeros(1)}), FakeSession()
    assert keeps_state_shapes(mlp)
    assert [list(step.prepare(session)) for _ in range(2)] == [["x"], ["x"]]
