"""Conversations on a GPU: those of the CPU's tests whose devices are free."""

import numpy as np
import pytest

import onnxplace
from onnxplace.runtimes.execution.bound_memory import BoundValue
from tests.runtimes import test_conversations
from tests.runtimes.test_conversations import session as session
from tests.support.ping_pong import compile_ping_pong, make_feeds, make_start

# Collected here too, with the bundles of this file.
REUSED = (
    "test_a_callback_may_close_the_conversation_that_calls_it",
    "test_a_conversation_dropped_with_a_run_in_flight_completes_it",
    "test_a_conversation_is_a_session",
    "test_a_dropped_conversation_frees_its_states_and_leaves_the_session_open",
    "test_a_reset_and_a_failure_lose_the_states_of_one_conversation_only",
    "test_any_interleaving_of_conversations_equals_each_of_them_alone",
    "test_closing_a_conversation_waits_for_its_runs_and_frees_its_states",
    "test_closing_the_session_closes_its_conversations",
    "test_each_conversation_has_its_own_states_and_the_session_has_others",
    "test_threads_with_a_conversation_each_share_one_session",
)
globals().update({name: getattr(test_conversations, name) for name in REUSED})
PARTS = [("webgpu:0", "cpu:0"), ("cpu:0", "webgpu:0"), ("webgpu:0", "webgpu:0")]


@pytest.fixture(scope="module", params=PARTS, ids=",".join)
def bundle(request, tmp_path_factory):
    return compile_ping_pong(tmp_path_factory.mktemp("ping_pong"), names=request.param)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory, bundle):
    """The GPU has the first part and the last one of the second bundle, and values cross the CPU in between."""
    three = compile_ping_pong(tmp_path_factory.mktemp("three"), 3, names=("webgpu:0", "cpu:0", "webgpu:0"))
    return {2: bundle, 3: three}


def test_states_of_all_conversations_stay_on_the_gpu(bundle, session):
    users = [session, session.conversation(), session.conversation()]
    for user in users:
        user.run(None, make_feeds(0, **make_start()))
    engine = session._session.engine
    on_gpu = {state.input for state in bundle.manifest.states if state.device == "webgpu:0"}
    assert on_gpu
    for states in engine._conversations:
        assert {name for name, value in states._stored.items() if isinstance(value, BoundValue)} == on_gpu


def test_a_session_without_states_has_conversations_too(tmp_path):
    bundle = compile_ping_pong(tmp_path, stateless=True, names=("webgpu:0", "webgpu:0"))
    with onnxplace.InferenceSession(bundle) as session, session.conversation() as conversation:
        first, second = (user.run(["y"], make_feeds(3, **make_start(2)))[0] for user in (session, conversation))
    np.testing.assert_array_equal(first, second)
