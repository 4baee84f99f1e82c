"""Isolated devices while a bundle runs: crashes, timeouts, interrupts, forks, and the device that takes over."""

import multiprocessing
import os
import signal
import threading
import warnings

import numpy as np
import onnx
import pytest

import onnxplace
from onnxplace.errors import FallbackWarning
from tests.support.endless import endless_bundle, expected, feeds
from tests.support.fault_checks import HUNG_SECONDS, assert_expected, run_at_once
from tests.support.isolated import crash_at_next_run, list_children
from tests.support.state_checks import APART, START, STATES, new_reference, pipeline, sums

DEVICES = "cpu:0,cpu:1{isolate=true}"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A loop on the isolated device, one node before and after it on the other one."""
    return endless_bundle(tmp_path_factory.mktemp("endless"), devices=DEVICES)


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A loop on an isolated device, in the thread of the caller."""
    folder = tmp_path_factory.mktemp("alone")
    return endless_bundle(folder, "cpu:0", "cpu:0", "cpu:0", devices="cpu:0{isolate=true}")


@pytest.fixture(scope="module")
def summing(tmp_path_factory):
    """States on both devices."""
    folder = tmp_path_factory.mktemp("sums")
    onnx.save(sums(), folder / "sums.onnx")
    return onnxplace.compile(
        folder / "sums.onnx", devices=DEVICES, shape={"n": 2, "m": 6}, state=STATES, pipeline=pipeline(folder, APART)
    )


def kill_soon(number):
    """Send a signal to the process of the device, in a moment."""
    (process,) = list_children()
    timer = threading.Timer(0.1, process.send_signal, (number,))
    timer.start()
    return timer


# -------------------------------------------------------------------------------------------------------------- crashes


@pytest.mark.sampled(3)
@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGABRT, signal.SIGKILL])
def test_a_crash_fails_requests_with_device_segment_and_signal(bundle, number):
    with onnxplace.InferenceSession(bundle) as session:
        assert_expected(session.run(None, feeds(3)), 3)
        futures = [session.submit(feeds(None)) for _ in range(2)]
        kill_soon(number)
        for future in futures:
            with pytest.raises(onnxplace.ExecutionError) as caught:
                future.result(HUNG_SECONDS)
            assert (caught.value.code, caught.value.where, caught.value.exit_code) == ("X016", "cpu:1", 4)
            message = f"segment cpu1-000 failed: the process of this device ended: {number.name}"
            assert (caught.value.message, "--fallback cpu:0" in caught.value.hint) == (message, True)
        with pytest.raises(onnxplace.ExecutionError, match="X016"):
            session.run(None, feeds(3))
    assert not list_children()


def test_a_crash_of_one_device_leaves_other_sessions_alone(bundle, alone):
    with onnxplace.InferenceSession(alone) as other, onnxplace.InferenceSession(bundle) as session:
        last = max(list_children(), key=lambda child: child.create_time())
        last.kill()
        with pytest.raises(onnxplace.ExecutionError, match=r"X016.*cpu:1"):
            session.run(None, feeds(3))
        assert_expected(other.run(None, feeds(3)), 3)
        with onnxplace.InferenceSession(bundle) as again:
            assert_expected(again.run(None, feeds(4)), 4)


# -------------------------------------------------------------------------------------------- timeouts and interrupts


def test_a_timeout_ends_the_run_and_not_the_process(bundle):
    with onnxplace.InferenceSession(bundle) as session:
        before = list_children()
        with pytest.raises(onnxplace.RunTimeoutError, match="X007"):
            session.run(None, feeds(None), timeout=0.2)
        assert_expected(session.run(None, feeds(3), timeout=HUNG_SECONDS), 3)
        assert list_children() == before


def test_a_process_that_hangs_is_killed_after_a_timeout(bundle, monkeypatch):
    monkeypatch.setattr("onnxplace.machine.isolated_sessions.STOP_SECONDS", 0.1)
    with onnxplace.InferenceSession(bundle) as session:
        (process,) = list_children()
        process.suspend()
        for seconds in (0.2, 2.0, 20.0):  # on a busy machine, the device may not have begun after the first
            with pytest.raises(onnxplace.RunTimeoutError, match="X007") as caught:
                session.run(None, feeds(3), timeout=seconds)
            if "cpu:1 runs segment" in caught.value.message:
                break
        with pytest.raises(onnxplace.ExecutionError, match=r"X016.*cpu:1.*killed, as a run did not end within 0.1 s"):
            session.run(None, feeds(3), timeout=HUNG_SECONDS)


def test_an_interrupt_ends_the_run_and_the_session_goes_on(alone):
    with onnxplace.InferenceSession(alone) as session:
        before = list_children()
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            session.run(None, feeds(None))
        assert_expected(session.run(None, feeds(3)), 3)
        assert list_children() == before


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_child_leaves_the_process_to_its_parent(alone):
    with onnxplace.InferenceSession(alone) as session:

        def child():
            with pytest.raises(onnxplace.ExecutionError, match="X006"):
                session.run(None, feeds(1))
            with onnxplace.InferenceSession(alone) as own:
                assert_expected(own.run(None, feeds(2)), 2)

        process = multiprocessing.get_context("fork").Process(target=child)
        process.start()
        process.join(HUNG_SECONDS)
        assert process.exitcode == 0
        assert_expected(session.run(None, feeds(3)), 3)


# ------------------------------------------------------------------------------------------------------------- fallback


def test_a_request_whose_device_crashes_is_repeated_on_the_fallback_which_is_said_once(bundle, monkeypatch):
    with onnxplace.InferenceSession(bundle, fallback="cpu:0") as session:
        assert_expected(session.run(None, feeds(3)), 3)
        crash_at_next_run(monkeypatch)
        with pytest.warns(FallbackWarning) as told:
            run_at_once(session, 3, 4, 5)
        text = "cpu:1: segment cpu1-000 failed: the process of this device ended: SIGKILL; cpu:0 runs its segments"
        assert [str(item.message).startswith(text) for item in told] == [True]
        assert_expected(session.run(None, feeds(6)), 6)


@pytest.mark.slow
def test_a_crash_during_a_long_run_is_survived(bundle):
    with onnxplace.InferenceSession(bundle, fallback="cpu:0") as session:
        killer = kill_soon(signal.SIGSEGV)
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            assert_expected(session.run(None, feeds(600_000)), 600_000)
        killer.join()
        assert not list_children()


def test_no_states_are_lost_with_the_process(summing, monkeypatch):
    with onnxplace.InferenceSession(summing, fallback="cpu:0") as session, session.conversation() as other:
        references = {session: new_reference(), other: new_reference()}
        for number in range(6):
            if number == 3:
                crash_at_next_run(monkeypatch)
            for runner, reference in references.items():
                x = np.array([number, 1], np.float32)
                given = {"x": x, "pick": np.zeros(1, np.int64), **(START if number == 0 else {})}
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore", FallbackWarning)
                    y, _ = runner.run(None, given)
                np.testing.assert_allclose(y, reference.step(x))


def test_without_a_fallback_a_crash_loses_the_states_and_says_so(summing, monkeypatch):
    given = {"x": np.ones(2, np.float32), "pick": np.zeros(1, np.int64)}
    with onnxplace.InferenceSession(summing) as session:
        session.run(None, {**given, **START})
        crash_at_next_run(monkeypatch)
        with pytest.raises(onnxplace.ExecutionError, match=r"X016.*cpu:1: segment"):
            session.run(None, given)
        with pytest.raises(onnxplace.FeedError, match="the previous request failed and lost it"):
            session.run(None, given)


def test_a_fallback_that_cannot_run_the_segments_is_named(bundle, monkeypatch):
    def refuse(*_):
        raise onnxplace.ModelError("M012", "ONNX Runtime has no kernel of Loop")

    with onnxplace.InferenceSession(bundle, fallback="cpu:0") as session:
        crash_at_next_run(monkeypatch)
        monkeypatch.setattr("onnxplace.runtimes.execution.segments.open_routes", refuse)
        with pytest.raises(
            onnxplace.ExecutionError, match=r"X016.*SIGKILL; cpu:0 cannot take over: ONNX Runtime has no"
        ):
            session.run(None, feeds(3))


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"fallback": "cuba:0"}, onnxplace.TargetError, ("T005", "fallback`: unknown device 'cuba:0'")),
        ({"fallback": "webgpu:7"}, onnxplace.TargetError, ("T011", "webgpu:7")),
        (
            {"fallback": "cpu:0", "runtime": "simulated"},
            onnxplace.UsageError,
            (
                "U045",
                "runtime 'simulated' has no option 'fallback'",
                "or use the runtime onnxruntime, which has fallback",
            ),
        ),
    ],
)
def test_a_fallback_that_does_not_exist_is_refused(bundle, options, error, words):
    with pytest.raises(error) as caught:
        onnxplace.InferenceSession(bundle, **options)
    assert all(word in str(caught.value) for word in words), str(caught.value)


def test_a_failure_of_a_segment_is_no_loss_of_its_device(bundle):
    wrong = {**feeds(1), "x": np.zeros((2, 4), np.float32)}
    with onnxplace.InferenceSession(bundle, fallback="cpu:0") as session:
        with pytest.raises(onnxplace.OnnxplaceError):
            session.run(None, wrong)
        assert len(list_children()) == 1
        np.testing.assert_array_equal(session.run(None, feeds(1))[0], expected(1)[0])
