"""The pass `predict`: what it provides is what the manifest states, whether a pipeline has the pass or not."""

import numpy as np
import pytest

from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import UsageError
from onnxplace.facts import Emitted, Placement, Prediction
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.state import State
from onnxplace.target.target import Device, Target
from tests.conftest import branches

PLACED = "optimize,profile{estimate=true},coplace{join=never},single,split"


def make_state(devices=2):
    target = Target(tuple(Device(f"cpu:{index}", 1 << 30) for index in range(devices)))
    return State(target).with_facts(bind(load(branches()), {"batch": 2}, {}))


@pytest.mark.parametrize("further", ["", ",replicate{routes=cpu:1}"])
def test_a_manifest_states_what_the_pass_predicts(tmp_path, further):
    state, _ = Pipeline.parse(f"{PLACED}{further},predict").run(make_state())
    prediction = state[Prediction]
    for name, text in (("with", "predict,emit"), ("without", "emit")):
        pipeline = Pipeline.parse(f"{PLACED}{further},{text}{{path={tmp_path / name}}}")
        manifest = Bundle.open(pipeline.run(make_state())[0][Emitted].path).manifest
        assert manifest.predicted == prediction.request
        assert manifest.devices == prediction.devices
        assert [segment.seconds for segment in manifest.segments] == prediction.segment_seconds.tolist()
        assert [segment.weights_bytes for segment in manifest.segments] == prediction.weights_bytes.tolist()
        assert manifest.transfer_bytes == sum(prediction.transfer_bytes)


def test_copies_hold_their_weights_on_each_device():
    state, _ = Pipeline.parse(f"{PLACED},replicate{{routes=cpu:1}},predict").run(make_state())
    first, second = state[Prediction].devices
    assert first.weights_bytes == second.weights_bytes > 0
    assert first.nodes == second.nodes == len(state[Placement].device)
    assert np.isclose(first.compute_seconds, second.compute_seconds)


def test_a_prediction_needs_segments():
    with pytest.raises(UsageError, match="needs Segments"):
        Pipeline.parse("optimize,profile{estimate=true},coplace{join=never},single,predict").run(make_state())
