"""Requests that are one segment on the host, which their callers run alone: as all others, only in fewer steps."""

import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import parser

import onnxplace
from onnxplace.errors import ExecutionError, FeedError
from tests.support.endless import X, endless_bundle, expected, feeds
from tests.support.fault_checks import HUNG_SECONDS, assert_expected, interrupt_runs, wait_until

# Outputs in another order than the segment computes them, and an input that may be left out.
MANY = """
<ir_version: 8, opset_import: ["" : 17]>
many (float[n, 3] a, float[3] b) => (float[n, 3] last, float[3, n] turned, float[n, 3] first)
<float[3] b = {1, 2, 3}>
{
    first = Add(a, b)
    middle = Neg(first)
    turned = Transpose(middle)
    last = Mul(middle, a)
}
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """A bundle of one segment, which runs for a given number of rounds."""
    return endless_bundle(tmp_path_factory.mktemp("lone"), "cpu:0", "cpu:0", "cpu:0", devices="cpu:0")


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    bundle = onnxplace.compile(parser.parse_model(MANY), folder / "many", devices="cpu:0", shape={"n": 2})
    assert len(bundle.manifest.segments) == 1
    return bundle


@pytest.fixture
def lone_runs(monkeypatch):
    """The names of the threads that have run requests alone, one for each request."""
    from onnxplace.runtimes.execution.engine import Engine

    names, run_alone = [], Engine._run_alone

    def noting(engine, request):
        names.append(threading.current_thread().name)
        return run_alone(engine, request)

    monkeypatch.setattr(Engine, "_run_alone", noting)
    return names


def find_segment(session):
    (segment,) = session._session.engine._routes[0].segments.values()
    return segment


def begin_endless_run(session, pool):
    """Start an endless run in another thread; return its future once it is in flight."""
    future = pool.submit(session.run, None, feeds(None))
    wait_until(lambda: session._session.engine._in_flight)
    return future


# ------------------------------------------------------------------------------------------------------------- results


@given(
    data=st.data(),
    names=st.none() | st.lists(st.sampled_from(["first", "turned", "last"]), min_size=1, max_size=4),
    way=st.sampled_from(["plain", "fortran", "strided", "list", "read-only"]),
    has_default=st.booleans(),
)
@settings(deadline=None, max_examples=60)
def test_callers_and_workers_return_the_same(many, opened_many, data, names, way, has_default):
    n, m = data.draw(st.integers(0, 4)), 3
    array = np.random.default_rng(n).standard_normal((n, m)).astype(np.float32)
    ways = {
        "plain": array,
        "fortran": np.asfortranarray(array),
        "strided": np.repeat(array, 2, axis=1)[:, ::2],
        "list": array.tolist() if n else array,
        "read-only": np.frombuffer(array.tobytes(), np.float32).reshape(n, m),
    }
    fed = {"a": ways[way]} | ({} if has_default else {"b": np.array([3, 1, 2], np.float32)})
    alone, worked = opened_many.run(names, fed), opened_many.run(names, fed, timeout=HUNG_SECONDS)
    submitted = opened_many.submit(fed, names).result(HUNG_SECONDS).outputs
    for name, one, other in zip(names or ["last", "turned", "first"], alone, worked):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        np.testing.assert_array_equal(one, other)
        np.testing.assert_array_equal(one, submitted[name])


@pytest.fixture(scope="module")
def opened_many(many):
    with onnxplace.InferenceSession(many) as session:
        yield session


def test_the_caller_runs_it_alone(session, lone_runs):
    for rounds in range(3):
        assert_expected(session.run(None, feeds(rounds)), rounds)
    assert lone_runs == [threading.current_thread().name] * 3
    session.run(None, feeds(1), timeout=HUNG_SECONDS)
    session.submit(feeds(1)).result(HUNG_SECONDS)
    assert len(lone_runs) == 3, "a timeout and a future leave it to the worker"


@pytest.mark.parametrize("spin", ["cpu:0", "cpu:1"])
def test_bundles_of_several_segments_are_not_run_alone(tmp_path, lone_runs, spin):
    several = endless_bundle(tmp_path, spin, "cpu:0", "cpu:1")
    with onnxplace.InferenceSession(several) as session:
        assert_expected(session.run(None, feeds(3)), 3)
    assert not lone_runs


def test_a_traced_request_has_its_events(bundle, lone_runs):
    with onnxplace.InferenceSession(bundle, trace=True) as session:
        assert_expected(session.run(None, feeds(3)), 3)
        (timeline,) = session.list_timelines()
    assert [event.kind for event in timeline.events] == ["run"]
    assert not lone_runs


def test_results_belong_to_the_caller(session):
    first = session.run(None, feeds(3))
    kept = [array.copy() for array in first]
    for array in first:
        array[...] = 7
    second = session.run(None, feeds(3))
    for array, other in zip(second, kept):
        np.testing.assert_array_equal(array, other)
        assert array.flags.writeable
        assert not np.shares_memory(array, X)


def test_the_seconds_of_a_result_are_those_of_its_own_run(session):
    seconds = [session.run_timed(feeds(rounds)).seconds for rounds in (20_000, 1)]
    assert 0 < seconds[1] < seconds[0]


def test_a_finished_request_holds_no_arrays_and_none_of_a_conversation_is_used_again(session):
    idle = session._session.engine.idle_requests
    with session.conversation() as conversation:
        conversation.run(None, feeds(2))
        assert not idle  # closing a conversation ends its requests
    session.run(None, feeds(2))
    assert [dict(request.feeds) for request in idle.values()] == [{}]


def test_conversations_run_alone_too(session, lone_runs):
    with session.conversation() as conversation:
        assert_expected(conversation.run(None, feeds(2)), 2)
    with pytest.raises(ExecutionError, match="closed"):
        conversation.run(None, feeds(2))
    assert_expected(session.run(None, feeds(3)), 3)
    assert len(lone_runs) == 2


# -------------------------------------------------------------------------------------------------------------- errors


def test_an_error_names_segment_and_device_and_the_next_run_succeeds(many, opened_many):
    bad = {"a": np.ones((2, 3), np.float32), "b": np.ones(3, np.float32)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(find_segment(opened_many), "inner", SimpleNamespace(run=lambda *arguments: 1 / 0))
        errors = []
        for run in (opened_many.run, lambda names, fed: opened_many.submit(fed).result(HUNG_SECONDS)):
            with pytest.raises(ExecutionError) as raised:
                run(None, bad)
            errors.append((raised.value.code, raised.value.message, raised.value.where, raised.value.hint))
    assert errors[0] == errors[1]
    assert (errors[0][0], errors[0][2]) == ("X001", "cpu:0")
    assert many.manifest.segments[0].id in errors[0][1]
    assert len(opened_many.run(None, bad)) == 3


@pytest.mark.parametrize(
    "failure",
    [ValueError("injected"), RuntimeError("std::bad_alloc"), MemoryError(), OSError("injected"), SystemExit(3)],
    ids=lambda failure: type(failure).__name__,
)
def test_a_failure_is_reported_as_by_a_request_that_follows_its_program(many, failure, monkeypatch):
    def fail(*arguments):
        raise failure

    fed, errors = {"a": np.ones((2, 3), np.float32)}, []
    for is_lone in (True, False):
        with onnxplace.InferenceSession(many) as session:
            if not is_lone:
                monkeypatch.setattr(session._session.engine, "_lone_outputs", [])
            with monkeypatch.context() as patch:
                patch.setattr(find_segment(session), "inner", SimpleNamespace(run=fail))
                with pytest.raises(BaseException) as raised:
                    session.run(None, fed)
            errors.append((type(raised.value).__name__, str(raised.value)))
            assert len(session.run(None, fed)) == 3
    assert errors[0] == errors[1]


def test_inputs_are_checked_before_each_run(opened_many):
    good = {"a": np.ones((2, 3), np.float32)}
    opened_many.run(None, good)
    for fed, code in (({}, "F002"), ({**good, "c": good["a"]}, "F001"), ({"a": np.ones(3, np.float32)}, "F003")):
        with pytest.raises(FeedError) as raised:
            opened_many.run(None, fed)
        assert raised.value.code == code
    opened_many.run(None, good)


def test_an_exception_of_a_signal_handler_is_raised_as_it_is(session, monkeypatch):
    class AlarmError(Exception):
        """A user's own."""

    def alarmed(*arguments):
        raise AlarmError

    with monkeypatch.context() as patch:
        patch.setattr(find_segment(session), "inner", SimpleNamespace(run=alarmed))
        with pytest.raises(AlarmError):
            session.run(None, feeds(1))
    assert_expected(session.run(None, feeds(1)), 1)


# ------------------------------------------------------------------------------------------- threads, interrupts, ends


@pytest.mark.parametrize("max_in_flight", [1, 2, 8])
def test_many_callers_get_their_own_results(bundle, max_in_flight):
    with onnxplace.InferenceSession(bundle, max_in_flight=max_in_flight) as session, ThreadPoolExecutor(6) as pool:

        def call(rounds):
            fed = {**feeds(rounds), "x": X + rounds}
            if rounds % 3 == 0:
                return session.submit(fed).result(HUNG_SECONDS).outputs["y"]
            return session.run(["y"], fed, timeout=HUNG_SECONDS if rounds % 3 == 1 else None)[0]

        for rounds, y in enumerate(pool.map(call, range(300))):
            np.testing.assert_array_equal(y, expected(rounds)[0] + (rounds if rounds % 2 else -rounds))
        assert not session._session.engine._in_flight


def test_a_submitted_request_waits_for_a_caller_and_then_runs(session):
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(session.run, None, feeds(100_000))
        second = session.submit(feeds(2))
        assert_expected([second.result(HUNG_SECONDS).outputs[name] for name in ("y", "z")], 2)
        assert_expected(first.result(HUNG_SECONDS), 100_000)


def test_a_timeout_ends_the_wait_for_a_caller(session):
    with ThreadPoolExecutor(1) as pool:
        first = begin_endless_run(session, pool)
        with pytest.raises(onnxplace.RunTimeoutError):
            session.run(None, feeds(2), timeout=0.05)
        session.close(timeout=0)
        with pytest.raises(ExecutionError, match="closed"):
            first.result(HUNG_SECONDS)


def test_closing_ends_a_caller_that_runs_and_says_so(bundle):
    session = onnxplace.InferenceSession(bundle)
    with ThreadPoolExecutor(1) as pool:
        future = begin_endless_run(session, pool)
        session.close(timeout=0.05)
        with pytest.raises(ExecutionError) as raised:
            future.result(HUNG_SECONDS)
    assert raised.value.code == "X002"
    with pytest.raises(ExecutionError, match="closed"):
        session.run(None, feeds(1))
    wait_until(lambda: not any(worker.is_alive() for worker in session._session.engine._workers))


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
def test_an_interrupt_ends_an_endless_run_and_leaves_nothing_behind(session, lone_runs):
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for _ in range(5):
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with pytest.raises(KeyboardInterrupt):
                session.run(None, feeds(None))
            assert_expected(session.run(None, feeds(3)), 3)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert len(lone_runs) == 10


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="no timers here")
# An interrupt while Python frees an object is printed, not raised.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_moment_leaves_a_session_that_works(bundle):
    with onnxplace.InferenceSession(bundle) as session:
        interrupts = 0
        for interrupted in interrupt_runs(session, 200):
            interrupts += interrupted
            assert_expected(session.run(None, feeds(2)), 2)
            assert not session._session.engine._in_flight
        assert_expected(session.run(None, feeds(2), timeout=HUNG_SECONDS), 2)
    assert interrupts > 300


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
# Python warns of threads in the parent, of which the child needs none.
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_forked_child_gets_an_error(session):
    session.run(None, feeds(1))
    if (child := os.fork()) == 0:
        try:
            session.run(None, feeds(1))
        except ExecutionError as error:
            os._exit(0 if error.code == "X006" else 2)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert_expected(session.run(None, feeds(1)), 1)


def test_a_callback_on_a_worker_cannot_run_it(session):
    errors = []

    def call(future):
        try:
            session.run(None, feeds(1))
        except ExecutionError as error:
            errors.append(error.code)

    future = session.submit(feeds(50_000))
    future.add_done_callback(call)
    future.result(HUNG_SECONDS)
    wait_until(lambda: errors)
    assert errors == ["X006"]
