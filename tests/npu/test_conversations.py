"""Carried states and conversations whose values cross between a CPU and an NPU: those of the CPU's tests."""

import pytest

from tests.runtimes import test_conversations
from tests.runtimes.test_conversations import session as session
from tests.support.npu_models import NPU
from tests.support.ping_pong import compile_ping_pong

# Collected here too, with the bundles of this file.
REUSED = (
    "test_a_callback_may_close_the_conversation_that_calls_it",
    "test_a_conversation_dropped_with_a_run_in_flight_completes_it",
    "test_a_conversation_is_a_session",
    "test_a_dropped_conversation_frees_its_states_and_leaves_the_session_open",
    "test_a_reset_and_a_failure_lose_the_states_of_one_conversation_only",
    "test_closing_a_conversation_waits_for_its_runs_and_frees_its_states",
    "test_closing_the_session_closes_its_conversations",
    "test_each_conversation_has_its_own_states_and_the_session_has_others",
    "test_threads_with_a_conversation_each_share_one_session",
)
globals().update({name: getattr(test_conversations, name) for name in REUSED})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The part whose input `pick` has any number of elements is on the CPU."""
    return compile_ping_pong(tmp_path_factory.mktemp("ping_pong"), names=("cpu:0", NPU))
