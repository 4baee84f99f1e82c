"""Carried states on devices with streams: those of the CPU's tests whose devices are free, and where the values lie."""

import numpy as np
import pytest

from onnxplace.runtimes.execution.stream_values import StreamValue
from tests.runtimes import test_carried_state
from tests.runtimes.test_carried_state import session as session
from tests.support.fake_streams import FakeMemory
from tests.support.state_checks import START, compile_sums, feeds, new_reference

# Collected here too, with the bundles of this file.
REUSED = (
    "test_a_failed_run_loses_the_states_until_they_are_fed_again",
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
DEVICES = [("fake:0", "cpu:0"), ("cpu:0", "fake:0"), ("fake:0", "fake:1"), ("fake:0/0", "fake:0/1")]


@pytest.fixture(scope="module", params=DEVICES, ids=",".join)
def bundle(request, tmp_path_factory):
    return compile_sums(tmp_path_factory.mktemp("sums"), request.param)


def test_states_are_carried_from_run_to_run(session):
    reference = new_reference()
    for number in range(5):
        y, picked = session.run(None, feeds(number, **(START if number == 0 else {})))
        np.testing.assert_allclose(y, reference.step(feeds(number)["x"]), rtol=1e-6)
        assert picked == [number]


def test_states_stay_on_their_device(bundle, session):
    session.run(None, feeds(0, **START))
    session.run(None, feeds(1))
    stored = session._session.engine._states._stored
    for state in bundle.manifest.states:
        if state.device.startswith("fake"):
            assert isinstance(stored[state.input], StreamValue)
            assert (stored[state.input].tensor is None) != (stored[state.input].host is None)


def test_states_are_copied_to_the_host_only_on_request(bundle, session, driver, monkeypatch):
    sent, send = [], FakeMemory.send

    def note(memory, value, destination):
        if destination is None:
            sent.append(value)
        return send(memory, value, destination)

    session.run(None, feeds(0, **START))
    monkeypatch.setattr(FakeMemory, "send", note)
    session.run(None, feeds(1))
    producers = {value: segment.device for segment in bundle.manifest.segments for value in segment.outputs}
    names = {item.name for item in bundle.returned_outputs}
    returned = [item.value for item in bundle.manifest.outputs if item.name in names]
    assert len(sent) == sum(producers[value].startswith("fake") for value in returned)
