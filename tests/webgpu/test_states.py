"""Carried states on a GPU: those of the CPU's tests whose devices are free, and where the values lie."""

import pytest

import onnxplace
from onnxplace.runtimes.execution.bound_memory import BoundMemory, BoundValue
from tests.runtimes import test_carried_state
from tests.runtimes.test_carried_state import session as session
from tests.support.state_checks import START, compile_sums, feeds

# Collected here too, with the bundles of this file.
globals().update({name: getattr(test_carried_state, name) for name in test_carried_state.FOR_ANY_DEVICE})


@pytest.fixture(
    scope="module", params=[("webgpu:0", "cpu:0"), ("cpu:0", "webgpu:0"), ("webgpu:0", "webgpu:0")], ids=",".join
)
def bundle(request, tmp_path_factory: pytest.TempPathFactory) -> onnxplace.Bundle:
    return compile_sums(tmp_path_factory.mktemp("sums"), request.param)


def test_states_stay_on_the_gpu(bundle, session, monkeypatch):
    on_gpu = {state.input for state in bundle.manifest.states if state.device == "webgpu:0"}
    session.run(None, feeds(0, **START))
    session.run(None, feeds(1))
    stored = session._session.engine.own_states._stored
    assert {name for name, value in stored.items() if isinstance(value, BoundValue)} == on_gpu
    moved, send = [], BoundMemory.send
    monkeypatch.setattr(BoundMemory, "send", lambda self, value, to: moved.append(value) or send(self, value, to))
    session.run(None, feeds(2))
    assert not {id(value) for value in moved} & {id(value) for value in stored.values()}
