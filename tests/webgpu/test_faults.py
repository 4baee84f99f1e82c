"""Failures while a bundle runs on a GPU and a CPU: the tests of CPUs whose devices are free."""

import pytest

import onnxplace
from tests.runtimes import test_faults
from tests.runtimes.conftest import hook_errors as hook_errors, session as session
from tests.support.endless import endless_bundle, feeds
from tests.support.fault_checks import HUNG_SECONDS, assert_expected

# Collected here too, with the bundles of this file.
REUSED = (
    "test_a_callback_on_a_worker_may_submit_and_close_but_not_run",
    "test_a_callback_that_raises_an_exit_does_not_end_the_worker",
    "test_a_close_with_timeout_ends_runs_in_flight",
    "test_a_deleted_session_waits_for_nothing",
    "test_a_forked_child_gets_an_error_and_ends",
    "test_a_refused_run_async_leaves_no_thread_behind",
    "test_a_session_whose_finalizer_was_interrupted_ends_its_threads_all_the_same",
    "test_an_error_in_a_callback_of_run_async_is_reported_and_the_next_one_is_called",
    "test_an_interrupt_at_any_moment_of_a_run_leaves_a_session_that_works",
    "test_leaving_a_block_by_an_error_waits_for_runs_in_flight",
    "test_leaving_a_block_by_an_interrupt_does_not_wait_for_runs_in_flight",
    "test_the_timeout_includes_the_wait_for_a_slot",
)
globals().update({name: getattr(test_faults, name) for name in REUSED})
PLACES = {
    "loop on the GPU": {"spin": "webgpu:0", "last": "cpu:0", "other": "cpu:0"},
    "loop on the CPU": {"spin": "cpu:0", "last": "webgpu:0", "other": "webgpu:0"},
    "all on the GPU": {"spin": "webgpu:0", "last": "webgpu:0", "other": "webgpu:0"},
}


@pytest.fixture(scope="module", params=PLACES)
def bundle(request, tmp_path_factory):
    return endless_bundle(
        tmp_path_factory.mktemp("endless"),
        **(places := PLACES[request.param]),
        devices=",".join(sorted(set(places.values()))),
    )


def test_a_timeout_ends_a_run_and_the_next_one_works(session):
    with pytest.raises(onnxplace.RunTimeoutError, match="X007"):
        session.run(None, feeds(None), timeout=0.2)
    assert_expected(session.run(None, feeds(3), timeout=HUNG_SECONDS), 3)


@pytest.mark.parametrize("bundle", list(PLACES)[:2], indirect=True)
def test_an_interrupted_opening_leaves_no_thread(bundle, monkeypatch):
    """There is more than one thread to start."""
    test_faults.test_an_interrupted_opening_leaves_no_thread(bundle, monkeypatch)
