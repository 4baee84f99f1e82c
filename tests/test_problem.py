"""What a step should take: one set of functions, which manifests, notes and plans use."""

import numpy as np
import pytest

from onnxplace.facts import Segments
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import list_transfer_bytes, predict_single_device_seconds, predict_step_seconds
from onnxplace.state import State
from onnxplace.target.target import Device, Target, request_overhead_seconds
from tests.conftest import branches


def make_state(placer: str, *memory_bytes: int) -> State:
    devices = tuple(Device(f"cpu:{index}", size, segment_seconds=1e-6) for index, size in enumerate(memory_bytes))
    steps = Pipeline.parse(f"optimize,profile{{estimate=true}},{placer},split")
    return steps.run(State(Target(devices)).with_facts(bind(load(branches()), {"batch": 4}, {})))[0]


@pytest.mark.parametrize("placer", ["single", "m-etf,adjust{device_map=...}"])
def test_a_step_has_the_overhead_of_the_devices_that_work_on_it(placer, tmp_path):
    (tmp_path / "map.json").write_text('{"left": "cpu:0", ".*": "cpu:1"}')
    state = make_state(placer.replace("...", str(tmp_path / "map.json")), 1 << 30, 1 << 30)
    count = 1 if placer == "single" else 2
    assert len({segment.device for segment in state[Segments].segments}) == count
    expected = state[Segments].simulation.makespan_seconds + request_overhead_seconds(count)
    assert predict_step_seconds(state) == expected
    assert bool(list_transfer_bytes(state)) == (count == 2)
    if count == 1:
        assert predict_single_device_seconds(state).min() == pytest.approx(predict_step_seconds(state))


def test_a_device_without_room_has_an_infinite_step_where_the_model_has_to_fit():
    state = make_state("single", 1 << 30, 1)
    assert np.isfinite(predict_single_device_seconds(state)).all()
    assert np.isfinite(predict_single_device_seconds(state, must_fit=True)).tolist() == [True, False]
