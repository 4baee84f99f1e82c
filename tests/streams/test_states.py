"""Carried states on devices with streams: those of the CPU's tests whose devices are free, and where the values lie."""

import pytest

from onnxplace.runtimes.execution.device_streams import StreamValue
from tests.runtimes import test_carried_state
from tests.runtimes.test_carried_state import session as session
from tests.support.fake_streams import FakeMemory
from tests.support.state_checks import START, compile_sums, feeds

# Collected here too, with the bundles of this file.
REUSED = (*test_carried_state.FOR_ANY_DEVICE, "test_a_failed_run_loses_the_states_until_they_are_fed_again")
globals().update({name: getattr(test_carried_state, name) for name in REUSED})
DEVICES = [("fake:0", "cpu:0"), ("cpu:0", "fake:0"), ("fake:0", "fake:1"), ("fake:0/0", "fake:0/1")]


@pytest.fixture(scope="module", params=DEVICES, ids=",".join)
def bundle(request, tmp_path_factory):
    return compile_sums(tmp_path_factory.mktemp("sums"), request.param)


def test_states_stay_on_their_device(bundle, session):
    session.run(None, feeds(0, **START))
    session.run(None, feeds(1))
    stored = session._session.engine.own_states._stored
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
