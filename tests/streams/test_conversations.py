"""Conversations on devices with streams: the tests of CPUs whose devices are free."""

import pytest

from tests.runtimes import test_conversations
from tests.runtimes.test_conversations import session as session
from tests.support.ping_pong import compile_ping_pong

# Collected here too, with the bundles of this file.
REUSED = (
    "test_a_callback_may_close_the_conversation_that_calls_it",
    "test_a_conversation_dropped_with_a_run_in_flight_completes_it",
    "test_a_conversation_is_a_session",
    "test_a_conversation_keeps_its_session_alive",
    "test_a_reset_and_a_failure_lose_the_states_of_one_conversation_only",
    "test_any_interleaving_of_conversations_equals_each_of_them_alone",
    "test_closing_a_conversation_waits_for_its_runs_and_frees_its_states",
    "test_closing_the_session_closes_its_conversations",
    "test_each_conversation_has_its_own_states_and_the_session_has_others",
    "test_threads_with_a_conversation_each_share_one_session",
)
globals().update({name: getattr(test_conversations, name) for name in REUSED})
NAMES = [("fake:0", "fake:1", "cpu:0"), ("fake:0/0", "fake:0/1", "fake:1")]


@pytest.fixture(scope="module", params=NAMES, ids=",".join)
def names(request):
    return request.param


@pytest.fixture(scope="module")
def bundle(names, tmp_path_factory):
    return compile_ping_pong(tmp_path_factory.mktemp("ping_pong"), names=names)


@pytest.fixture(scope="module")
def bundles(names, bundle, tmp_path_factory):
    return {2: bundle, 3: compile_ping_pong(tmp_path_factory.mktemp("three"), 3, names=names)}
