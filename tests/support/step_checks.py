"""Checks that two models of a training step compute the same over several steps."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnxruntime
from onnx import ModelProto

import onnxplace
from onnxplace.facts import Profile
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.model.state_binding import StateRequest, bind_states
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from tests.support.training_models import ReferenceTrainer, draw_batch

STATES = ("*.new=*",)


def compile_state(
    proto: ModelProto,
    pipeline: str,
    devices: str = "cpu:0,cpu:1",
    states: StateRequest = STATES,
    shape: dict[str, int] | None = None,
) -> State:
    """Return the state after some passes, with estimated costs."""
    model = bind_states(bind(load(proto), shape or {}, {}), states)
    state, _ = Pipeline.parse(pipeline).run(State(local_target(devices)).with_facts(model))
    assert Profile in state
    return state


def assert_same_steps(
    proto: ModelProto, model: Model, steps: int = 3, unsure: Sequence[str] = (), tolerance: float = 2e-5
) -> None:
    """Raise AssertionError unless a model takes the same steps as the original, loss by loss and state by state.

    Args:
        proto: The original.
        model: The other one, with its inputs and outputs.
        steps: Number of steps.
        unsure: Parts of names of states that are not compared: where a gradient is zero but for rounding, Adam follows
            the rounding.
        tolerance: Of losses and states.
    """
    expected, actual = ReferenceTrainer(proto), ReferenceTrainer(proto)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    data = model.whole_proto().SerializeToString()
    actual._session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    for step in range(steps):
        feeds = draw_batch(proto, step)
        np.testing.assert_allclose(actual.step(feeds), expected.step(feeds), rtol=tolerance, atol=tolerance)
        for name, value in expected.states.items():
            if not any(text in name for text in unsure):
                np.testing.assert_allclose(actual.states[name], value, rtol=1e-3, atol=tolerance, err_msg=name)


def assert_bundle_takes_the_same_steps(proto: ModelProto, bundle: onnxplace.Bundle, steps: int = 3) -> None:
    """Raise AssertionError unless a bundle has the losses of its model over several steps."""
    reference = ReferenceTrainer(proto)
    names = {value.name for value in proto.graph.input}
    with onnxplace.InferenceSession(bundle) as session:
        for number in range(steps):
            feeds = draw_batch(proto, number)
            counted = {"step": np.array(number + 1)} if "step" in names else {}
            (loss,) = session.run(["loss"], {**feeds, **counted})
            np.testing.assert_allclose(loss, reference.step(feeds), rtol=2e-5, atol=2e-6)
