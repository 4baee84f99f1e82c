"""Carried states on a GPU: those of the CPU's tests whose devices are free, and where the values lie."""

import numpy as np
import pytest

import onnxplace
from onnxplace.runtimes.execution.bound_memory import BoundMemory, BoundValue
from tests.runtimes import test_carried_state
from tests.runtimes.test_carried_state import session as session
from tests.support.state_checks import START, compile_sums, feeds, new_reference

# Collected here too, with the bundles of this file.
REUSED = (
    "test_a_fed_state_replaces_the_stored_one_and_the_others_stay",
    "test_a_reset_applies_to_the_next_run_and_not_to_those_in_flight",
    "test_a_run_returns_states_only_on_request",
    "test_after_a_reset_the_next_run_must_be_fed_all_states",
    "test_closing_waits_for_runs_that_wait_for_their_turn",
    "test_feeds_and_outputs_may_be_altered_after_a_run",
    "test_run_async_carries_states_too",
    "test_runs_in_flight_take_turns",
    "test_states_equal_those_of_one_session_after_any_runs_and_resets",
    "test_threads_that_share_a_session_share_its_states",
)
globals().update({name: getattr(test_carried_state, name) for name in REUSED})


@pytest.fixture(
    scope="module", params=[("webgpu:0", "cpu:0"), ("cpu:0", "webgpu:0"), ("webgpu:0", "webgpu:0")], ids=",".join
)
def bundle(request, tmp_path_factory: pytest.TempPathFactory) -> onnxplace.Bundle:
    return compile_sums(tmp_path_factory.mktemp("sums"), request.param)


def test_states_are_carried_from_run_to_run(session):
    reference = new_reference()
    for number in range(5):
        y, picked = session.run(None, feeds(number, **(START if number == 0 else {})))
        np.testing.assert_allclose(y, reference.step(feeds(number)["x"]), rtol=1e-6)
        assert picked == [number]


def test_states_stay_on_the_gpu(bundle, session, monkeypatch):
    on_gpu = {state.input for state in bundle.manifest.states if state.device == "webgpu:0"}
    session.run(None, feeds(0, **START))
    session.run(None, feeds(1))
    stored = session._session.engine._states._stored
    assert {name for name, value in stored.items() if isinstance(value, BoundValue)} == on_gpu
    moved, send = [], BoundMemory.send
    monkeypatch.setattr(BoundMemory, "send", lambda self, value, to: moved.append(value) or send(self, value, to))
    session.run(None, feeds(2))
    assert not {id(value) for value in moved} & {id(value) for value in stored.values()}
