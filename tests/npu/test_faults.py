"""Failures while a bundle runs on a CPU and an NPU: the tests of CPUs whose devices are free."""

import pytest

import onnxplace
from tests.runtimes import test_faults
from tests.runtimes.conftest import hook_errors as hook_errors, session as session
from tests.support.endless import endless_bundle, feeds
from tests.support.fault_checks import HUNG_SECONDS, assert_expected
from tests.support.npu_models import NPU

# Collected here too, with the bundle of this file.
REUSED = (
    "test_a_callback_on_a_worker_may_submit_and_close_but_not_run",
    "test_a_callback_that_raises_an_exit_does_not_end_the_worker",
    "test_a_close_with_timeout_ends_runs_in_flight",
    "test_a_deleted_session_waits_for_nothing",
    "test_a_forked_child_gets_an_error_and_ends",
    "test_an_interrupt_at_any_moment_of_a_run_leaves_a_session_that_works",
    "test_leaving_a_block_by_an_error_waits_for_runs_in_flight",
    "test_leaving_a_block_by_an_interrupt_does_not_wait_for_runs_in_flight",
    "test_the_timeout_includes_the_wait_for_a_slot",
)
globals().update({name: getattr(test_faults, name) for name in REUSED})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """NPUs take no loops: that one is on the CPU."""
    folder = tmp_path_factory.mktemp("endless")
    return endless_bundle(folder, spin="cpu:0", last=NPU, other=NPU, devices=f"cpu:0,{NPU}")


def test_a_timeout_ends_a_run_and_the_next_one_works(session):
    with pytest.raises(onnxplace.RunTimeoutError, match="X007"):
        session.run(None, feeds(None), timeout=0.2)
    assert_expected(session.run(None, feeds(3), timeout=HUNG_SECONDS), 3)
