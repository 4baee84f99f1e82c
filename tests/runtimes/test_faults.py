"""Failures while a bundle runs: timeouts, failing callbacks, dead workers, forks, deleted sessions."""

import copy
import gc
import multiprocessing
import os
import pickle
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import onnxplace
from onnxplace.runtime.interface import DEFAULT_MAX_IN_FLIGHT
from onnxplace.runtimes.execution import engine as engine_module, workers as workers_module
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from tests.support.endless import expected, feeds
from tests.support.fault_checks import (
    HUNG_SECONDS,
    assert_death_fails_all_requests,
    assert_expected,
    interrupt_runs,
    list_worker_threads,
    wait_until,
)

# ------------------------------------------------------------------------------------------------------------- timeouts


def test_a_timeout_ends_a_run_and_reports_its_progress(session):
    for seconds in (0.2, 2.0, 20.0):  # on a busy machine, devices may not have begun after the first
        with pytest.raises(onnxplace.RunTimeoutError) as raised:
            session.run(None, feeds(None), timeout=seconds)
        problem = raised.value
        if "runs segment" in problem.message and "waits for" in problem.message:
            break
    assert (problem.code, problem.exit_code) == ("X007", 4)
    assert "cpu:1 runs segment cpu1-000" in problem.message
    assert "cpu:0 waits for value 'spun' of cpu:1" in problem.message
    assert isinstance(problem, TimeoutError), "as Python's own"
    assert_expected(session.run(None, feeds(3), timeout=HUNG_SECONDS), 3)
    assert_expected(session.run(None, feeds(4)), 4)


def test_the_timeout_includes_the_wait_for_a_slot(session):
    for _ in range(DEFAULT_MAX_IN_FLIGHT):
        session.submit(feeds(None))
    with pytest.raises(onnxplace.RunTimeoutError, match="8 requests before it are in flight"):
        session.run(None, feeds(1), timeout=0.1)


@pytest.mark.parametrize("callback", [None, "print", 3])
def test_a_callback_that_cannot_be_called_is_refused_at_once(session, callback):
    with pytest.raises(onnxplace.UsageError, match=r"U054.*expected a callback that can be called, got"):
        session.run_async(None, feeds(1), callback)


@pytest.mark.parametrize("timeout", [1e6, 0, -1, float("nan"), float("inf"), "1", True])
def test_invalid_timeouts_are_refused(session, timeout):
    with pytest.raises(onnxplace.UsageError, match="expected a timeout in seconds, more than 0 and less than 1000000"):
        session.run(None, feeds(1), timeout=timeout)


def test_a_close_with_timeout_ends_runs_in_flight(bundle):
    session = onnxplace.InferenceSession(bundle)
    futures = [session.submit(feeds(None)) for _ in range(3)]
    session.close(timeout=0.1)
    for future in futures:
        with pytest.raises(onnxplace.ExecutionError, match="the session was closed"):
            future.result(HUNG_SECONDS)
    assert not list_worker_threads()
    with pytest.raises(onnxplace.ExecutionError, match="X002"):
        session.run(None, feeds(1))


def leave_block(bundle, kind, inputs):
    """Return the future of a run in flight when an exception left the block of its session."""
    try:
        with onnxplace.InferenceSession(bundle) as session:
            future = session.submit(inputs)
            raise kind
    except kind:
        return future


def test_leaving_a_block_by_an_interrupt_does_not_wait_for_runs_in_flight(bundle):
    future = leave_block(bundle, KeyboardInterrupt, feeds(None))
    assert isinstance(future.exception(HUNG_SECONDS), onnxplace.ExecutionError)
    assert not list_worker_threads()


def test_leaving_a_block_by_an_error_waits_for_runs_in_flight(bundle):
    assert_expected([leave_block(bundle, ZeroDivisionError, feeds(3)).result(0).outputs[name] for name in "yz"], 3)


def test_a_worker_that_does_not_return_is_left_behind_with_a_warning(bundle, monkeypatch):
    monkeypatch.setattr(engine_module, "END_GRACE_SECONDS", 0.1)
    released, started = threading.Event(), []
    session = onnxplace.InferenceSession(bundle)
    engine = session._session.engine
    monkeypatch.setattr(
        engine, "run_segment", lambda *arguments: (started.append(arguments), released.wait(HUNG_SECONDS))
    )
    session.submit(feeds(1))
    wait_until(lambda: len(started) == 2)
    with pytest.warns(RuntimeWarning, match=r"cpu:0, cpu:1 did not return .*its thread is left behind"):
        session.close(timeout=0)
    released.set()
    wait_until(lambda: not list_worker_threads())


# ------------------------------------------------------------------------------------------------------------ callbacks


@pytest.mark.parametrize("failure", [SystemExit(3), KeyboardInterrupt(), GeneratorExit()])
def test_a_callback_that_raises_an_exit_does_not_end_the_worker(session, hook_errors, failure):
    def fail(future):
        raise failure

    future, results = session.submit(feeds(20_000)), []
    future.add_done_callback(fail)
    future.add_done_callback(lambda future: results.append(future.result()))
    assert_expected([future.result(HUNG_SECONDS).outputs[name] for name in "yz"], 20_000)
    for rounds in range(1, 9):
        assert_expected(session.run(None, feeds(rounds), timeout=HUNG_SECONDS), rounds)
    assert hook_errors == [failure]
    assert len(results) == 1, "the other callback is called nevertheless"


def test_an_error_in_a_callback_of_run_async_is_reported_and_the_next_one_is_called(session, hook_errors):
    finished, failure = threading.Event(), ValueError("mine")

    def fail(outputs, error):
        raise failure

    session.run_async(None, feeds(1), fail)
    session.run_async(None, feeds(1), lambda outputs, error: finished.set())
    assert finished.wait(HUNG_SECONDS)
    assert hook_errors == [failure]


def test_a_refused_run_async_leaves_no_thread_behind(bundle):
    with onnxplace.InferenceSession(bundle) as session, pytest.raises(onnxplace.FeedError):
        session.run_async(None, {}, lambda outputs, error: None)
    wait_until(lambda: not list_worker_threads())


def test_a_callback_on_a_worker_may_submit_and_close_but_not_run(bundle):
    session, raised, futures, finished = onnxplace.InferenceSession(bundle), [], [], threading.Event()

    def call(future):
        try:
            session.run(None, feeds(1))
        except onnxplace.ExecutionError as problem:
            raised.append(problem)
        futures.append(session.submit(feeds(2)))
        session.close()
        finished.set()

    session.submit(feeds(20_000)).add_done_callback(call)
    assert finished.wait(HUNG_SECONDS)
    assert raised[0].code == "X006"
    assert_expected([futures[0].result(HUNG_SECONDS).outputs[name] for name in "yz"], 2)
    session.close()
    assert not list_worker_threads()


def test_a_callback_on_a_worker_may_submit_without_a_free_slot(session):
    callback_futures, finished = [], threading.Event()

    def call(future):
        callback_futures.append(session.submit(feeds(1)))
        finished.set()

    futures = [session.submit(feeds(20_000)) for _ in range(DEFAULT_MAX_IN_FLIGHT)]
    futures[0].add_done_callback(call)
    later_futures = [session.submit(feeds(10)) for _ in range(20)]
    assert finished.wait(HUNG_SECONDS)
    for future in [*futures, *later_futures, *callback_futures]:
        assert future.result(HUNG_SECONDS).outputs


# --------------------------------------------------------------------------------------------------------- dead workers


def test_a_dead_worker_is_reported_and_fails_all_requests(session):
    assert_death_fails_all_requests(session, "onnxplace cpu:1", "cpu:1")


def test_a_segment_out_of_memory_has_its_own_error(session, monkeypatch):
    def run_out(*arguments):
        raise MemoryError

    for segment in session._session.engine._routes[0].segments.values():
        monkeypatch.setattr(segment, "run", run_out)
    with pytest.raises(onnxplace.ExecutionError) as raised:
        session.run(None, feeds(1))
    assert raised.value.code == "X010"
    assert "ran out of memory" in raised.value.message
    assert raised.value.hint
    assert isinstance(raised.value.__cause__, MemoryError)


def test_a_failure_without_message_is_reported_by_its_type(session, monkeypatch):
    def fail(*arguments):
        raise RuntimeError

    for segment in session._session.engine._routes[0].segments.values():
        monkeypatch.setattr(segment, "run", fail)
    with pytest.raises(onnxplace.ExecutionError, match=r"segment cpu[01]-000 failed: RuntimeError"):
        session.run(None, feeds(1))


# --------------------------------------------------------------------------------------------- copies, forks, forgotten


@pytest.mark.parametrize("duplicate", [pickle.dumps, copy.copy, copy.deepcopy])
def test_a_session_cannot_be_copied_and_the_error_names_an_alternative(session, duplicate):
    for original in (session, session._session):
        with pytest.raises(onnxplace.UsageError, match=r"X006.*cannot be copied or pickled(.|\n)*pickle the bundle"):
            duplicate(original)


def test_a_bundle_can_be_pickled(bundle):
    unpickled = pickle.loads(pickle.dumps(bundle))
    assert unpickled == bundle
    with onnxplace.InferenceSession(unpickled) as session:
        assert_expected(session.run(None, feeds(1)), 1)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_gets_an_error_and_ends(session):
    assert_expected(session.run(None, feeds(1)), 1)
    future = session.submit(feeds(None))

    def child():
        for call in (lambda: session.run(None, feeds(1)), lambda: session.submit(feeds(1))):
            with pytest.raises(onnxplace.ExecutionError, match="X006"):
                call()
        session.close()

    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join(HUNG_SECONDS)
    code = process.exitcode
    process.kill()
    assert code == 0
    assert not future.done()
    session.close(timeout=0)


def test_names_of_outputs_may_come_from_a_generator(session):
    (output,) = session.run((name for name in ["z"]), feeds(1))
    np.testing.assert_array_equal(output, expected(1)[1])


def test_a_deleted_session_waits_for_nothing(bundle):
    session = onnxplace.InferenceSession(bundle)
    future = session.submit(feeds(None))
    engine = session._session.engine
    del session
    gc.collect()
    assert not future.done()
    engine.end_requests()
    assert isinstance(future.exception(HUNG_SECONDS), onnxplace.ExecutionError)
    wait_until(lambda: not list_worker_threads())


def test_a_session_whose_finalizer_was_interrupted_ends_its_threads_all_the_same(bundle, monkeypatch):
    monkeypatch.setattr(workers_module, "OWNER_CHECK_SECONDS", 0.05)
    session = OnnxRuntime().open(bundle)
    session.finalizer.detach()  # as after an interrupt at its first instruction, which Python swallows
    del session
    gc.collect()
    wait_until(lambda: not list_worker_threads())


def test_an_interrupted_opening_leaves_no_thread(bundle, monkeypatch):
    started, start = [], threading.Thread.start

    def interrupted(thread):
        if started and thread.name.startswith("onnxplace"):
            raise KeyboardInterrupt
        started.append(thread.name)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", interrupted)
    with pytest.raises(KeyboardInterrupt):
        onnxplace.InferenceSession(bundle)
    assert started
    wait_until(lambda: not list_worker_threads())


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
# An interrupt while Python frees an object is printed, not raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_of_a_run_leaves_a_session_that_works(bundle):
    assert threading.current_thread() is threading.main_thread()
    with onnxplace.InferenceSession(bundle) as session:
        interrupts = 0
        for interrupted in interrupt_runs(session, 50):
            interrupts += interrupted
            assert_expected(session.run(None, feeds(2), timeout=HUNG_SECONDS), 2)
        with ThreadPoolExecutor(4) as pool:
            for outputs in pool.map(lambda rounds: session.run(None, feeds(rounds)), [5] * 20):
                assert_expected(outputs, 5)
    assert interrupts > 300
    assert not list_worker_threads()
