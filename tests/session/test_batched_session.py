"""Requests joined into batches: answers of their own, failures of their own, and nothing that waits for ever."""

import gc
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import pytest

import onnxplace
from onnxplace import Batching
from onnxplace.bundle.manifest import BatchingRecord
from onnxplace.errors import ExecutionError, RunTimeoutError
from onnxplace.session.batched_session import BatchedSession
from onnxplace.session.batcher import WaitingRequest
from tests.conftest import FAST_PIPELINE, branches
from tests.session.fake_sessions import WAIT_SECONDS, FakeSession
from tests.support.random_models import reference

RECORD = BatchingRecord(dimension="N", inputs={"x": 0}, outputs={"y": 0})
# Requests wait for company as long as a test needs.
PATIENT = Batching(max_batch=4, max_delay_ms=60_000)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("batched")
    return onnxplace.compile(
        branches(), folder / "b", devices="cpu:0,cpu:1", shape={"batch": 2}, pipeline=FAST_PIPELINE
    )


@pytest.fixture
def fake():
    return FakeSession(is_open=False)


@pytest.fixture
def session(bundle, fake):
    session = BatchedSession(fake, bundle, RECORD, PATIENT, max_in_flight=1)
    yield session
    fake.is_open = True
    fake.release()
    session.close(timeout=0)
    assert not session.batcher.thread.is_alive()


def feed(number: int, size: int = 1) -> dict:
    return {"x": np.full((size, 3), number, "f4")}


def answer(future: Future) -> np.ndarray:
    return future.result(WAIT_SECONDS).outputs["y"]


def check_answers(futures: list[Future], numbers: range, sizes: list[int] | None = None) -> None:
    for index, (future, number) in enumerate(zip(futures, numbers, strict=True)):
        np.testing.assert_array_equal(answer(future), np.full((sizes[index] if sizes else 1, 3), 2 * number))


def test_requests_that_wait_are_joined_and_get_their_own_results(session, fake):
    first = session.submit(feed(9))
    fake.wait_for_starts(1)
    sizes = [1, 2, 1, 3]
    futures = [session.submit(feed(number, size)) for number, size in enumerate(sizes)]
    fake.is_open = True
    fake.release()
    check_answers([first, *futures], [9, 0, 1, 2, 3], [1, *sizes])
    assert fake.sizes == [1, 4, 3]


def test_a_request_larger_than_the_largest_batch_is_not_joined(session, fake):
    futures = [session.submit(feed(0))]
    fake.wait_for_starts(1)
    sizes = [1, 1, 9, 1]
    futures += [session.submit(feed(number, size)) for number, size in enumerate(sizes, 1)]
    fake.is_open = True
    fake.release()
    check_answers(futures, range(5), [1, *sizes])
    assert fake.sizes == [1, 2, 9, 1]


def test_requests_of_other_widths_and_of_no_rows_are_not_joined(session, fake):
    session.submit(feed(0))
    fake.wait_for_starts(1)
    inputs = [np.ones((1, 3), "f4"), np.ones((1, 4), "f4"), np.ones((0, 3), "f4"), np.ones((2, 3), "f4")]
    futures = [session.submit({"x": x}) for x in inputs]
    fake.is_open = True
    fake.release()
    for future, x in zip(futures, inputs, strict=True):
        np.testing.assert_array_equal(answer(future), 2 * x)
    assert sorted(x.shape for x in fake.started) == [(0, 3), (1, 3), (1, 4), (3, 3)]


def test_a_full_batch_starts_while_another_runs(bundle, fake):
    with BatchedSession(fake, bundle, RECORD, PATIENT, max_in_flight=2) as session:
        futures = [session.submit(feed(0))]
        fake.wait_for_starts(1)
        futures += [session.submit(feed(number)) for number in range(1, 5)]
        fake.wait_for_starts(2)
        assert fake.sizes == [1, 4]
        fake.release()
        check_answers(futures, range(5))


def test_only_the_requests_fail_that_have_to(session, fake):
    fake.fail = lambda x: ValueError("a bad row") if 2 in x else None
    futures = [session.submit(feed(0))]
    fake.wait_for_starts(1)
    futures += [session.submit(feed(number)) for number in range(1, 5)]
    fake.is_open = True
    fake.release()
    with pytest.raises(ValueError, match="a bad row"):
        answer(futures.pop(2))
    check_answers(futures, [0, 1, 3, 4])
    assert fake.sizes == [1, 4, 1, 1, 1, 1]


def test_a_result_without_the_batch_is_computed_again_one_by_one(session, fake):
    fake.change = lambda y: y if len(y) == 1 else y[:1]
    futures = [session.submit(feed(0))]
    fake.wait_for_starts(1)
    futures += [session.submit(feed(number)) for number in range(1, 4)]
    fake.is_open = True
    fake.release()
    check_answers(futures, range(4))
    assert fake.sizes == [1, 3, 1, 1, 1]


def test_a_run_alone_is_not_delayed(bundle):
    fake = FakeSession()
    with BatchedSession(fake, bundle, RECORD, PATIENT, max_in_flight=1) as session:
        for number in range(3):
            np.testing.assert_array_equal(session.run(feed(number)).outputs["y"], 2 * feed(number)["x"])
            check_answers([session.submit(feed(number))], [number])


def test_runs_of_several_threads_are_joined(session, fake):
    with ThreadPoolExecutor(4) as pool:
        first = session.submit(feed(0))
        fake.wait_for_starts(1)
        runs = [pool.submit(session.run, feed(number)) for number in range(1, 5)]
        fake.release()
        fake.wait_for_starts(2)  # a full batch
        fake.release()
        check_answers([first, *runs], range(5))
    assert fake.sizes == [1, 4]


def test_a_timeout_says_what_the_request_waits_for(session, fake):
    session.submit(feed(0))
    fake.wait_for_starts(1)
    with pytest.raises(RunTimeoutError, match=r"no result within 0.05 s: it waits for 1 requests in flight") as caught:
        session.run(feed(1), timeout=0.05)
    assert caught.value.code == "X007"
    fake.is_open = True
    fake.release()
    check_answers([session.submit(feed(2))], [2])
    assert 1 not in [x[0, 0] for x in fake.started]


def test_a_timeout_of_a_batch_leaves_the_others_their_results(session, fake):
    session.submit(feed(0))
    fake.wait_for_starts(1)
    kept = session.submit(feed(1))
    dropped = session.submit(feed(2))
    fake.release()
    session.cancel(dropped)
    with pytest.raises(ExecutionError, match="its caller no longer waits for it"):
        dropped.result(WAIT_SECONDS)
    fake.wait_for_starts(2)
    assert not fake.cancelled
    fake.release()
    check_answers([kept], [1])


def test_a_batch_without_a_waiting_caller_is_ended(session, fake):
    futures = [session.submit(feed(0))]
    fake.wait_for_starts(1)
    session.cancel(futures[0])
    with pytest.raises(ExecutionError, match="X011"):
        futures[0].result(WAIT_SECONDS)
    fake.release()
    check = session.submit(feed(1))
    fake.wait_for_starts(2)
    fake.release()
    check_answers([check], [1])
    assert len(fake.cancelled) == 1


def test_callers_wait_while_too_many_requests_are_in_flight(session, fake):
    futures = [session.submit(feed(number)) for number in range(8)]  # one runs, and others for two batches wait
    accepted = threading.Event()

    def submit_one_more() -> None:
        futures.append(session.submit(feed(8)))
        accepted.set()

    thread = threading.Thread(target=submit_one_more)
    thread.start()
    assert not accepted.wait(0.1)
    fake.is_open = True
    fake.release()
    assert accepted.wait(WAIT_SECONDS)
    thread.join()
    check_answers(futures, range(9))


def test_close_waits_for_the_requests_that_wait(bundle):
    fake = FakeSession(is_open=False)
    session = BatchedSession(fake, bundle, RECORD, PATIENT, max_in_flight=1)
    futures = [session.submit(feed(0))]
    fake.wait_for_starts(1)
    futures += [session.submit(feed(number)) for number in (1, 2)]
    fake.is_open = True
    fake.release()
    session.close()
    check_answers(futures, range(3))
    assert fake.is_closed
    for use in (session.submit, session.run):
        with pytest.raises(ExecutionError, match=r"X002.*the session is closed"):
            use(feed(0))


def test_close_with_a_timeout_fails_what_has_not_started(bundle):
    fake = FakeSession(is_open=False)
    session = BatchedSession(fake, bundle, RECORD, PATIENT, max_in_flight=1)
    running = session.submit(feed(0))
    fake.wait_for_starts(1)
    waiting = session.submit(feed(1))
    session.close(timeout=0.05)
    with pytest.raises(ExecutionError, match=r"X002.*the session was closed"):
        waiting.result(WAIT_SECONDS)
    check_answers([running], [0])
    assert fake.sizes == [1]


def test_a_callback_that_runs_the_session_is_refused_instead_of_waiting_for_itself(session, fake):
    failures: list[BaseException | None] = []

    def run_again(_: Future) -> None:
        try:
            session.run(feed(1))
        except ExecutionError as problem:
            failures.append(problem)

    future = session.submit(feed(0))
    fake.wait_for_starts(1)
    future.add_done_callback(run_again)
    fake.release()
    check_answers([future], [0])
    check = session.submit(feed(2))  # handled after the callbacks
    fake.wait_for_starts(2)
    fake.release()
    check_answers([check], [2])
    assert [failure.code for failure in failures] == ["X006"]


def test_no_caller_waits_for_a_thread_that_died(session, fake, monkeypatch):
    future = session.submit(feed(0))
    fake.wait_for_starts(1)
    monkeypatch.setattr(session.batcher, "_end_batch", lambda ended: (_ for _ in ()).throw(SystemExit("killed")))
    fake.release()
    with pytest.raises(ExecutionError, match=r"X005.*its thread died: SystemExit: killed"):
        future.result(WAIT_SECONDS)
    with pytest.raises(ExecutionError, match="X005"):
        session.submit(feed(1))
    assert fake.is_abandoned


def test_a_request_that_is_accepted_while_the_thread_dies_is_failed(bundle):
    session = BatchedSession(FakeSession(), bundle, RECORD, PATIENT, max_in_flight=1)
    batcher, request = session.batcher, WaitingRequest(feed(0), 1, None, 0.0)

    def die():
        raise SystemExit("killed")

    with batcher._lock:  # as in `_try_accept`, after its check
        batcher._inbox.put(die)
        batcher.thread.join(0.2)
        batcher._open[request] = None
    with pytest.raises(ExecutionError, match=r"X005.*its thread died: SystemExit: killed"):
        request.future.result(WAIT_SECONDS)


def test_a_forgotten_session_ends_its_thread(bundle):
    fake = FakeSession()
    session = BatchedSession(fake, bundle, RECORD, PATIENT, max_in_flight=1)
    check_answers([session.submit(feed(0))], [0])
    thread, forgotten = session.batcher.thread, weakref.ref(session)
    del session
    gc.collect()
    assert forgotten() is None
    thread.join(WAIT_SECONDS)
    assert not thread.is_alive()
    assert fake.is_abandoned


@pytest.mark.parametrize("batching", [Batching(1), Batching(4, 0), Batching(16, 5)])
def test_many_threads_get_the_answers_of_single_runs(bundle, batching):
    random = np.random.default_rng(0)
    items = [{"x": random.standard_normal((size, 64)).astype("f4")} for size in random.integers(0, 6, 120)]
    with onnxplace.InferenceSession(bundle, batching=batching) as session, ThreadPoolExecutor(6) as pool:
        outputs = list(pool.map(lambda item: session.run(None, item)[0], items))
    for y, (expected,) in zip(outputs, reference(branches(), items), strict=True):
        assert y.shape == expected.shape
        np.testing.assert_allclose(y, expected, rtol=0, atol=1e-4)


def test_run_async_hands_over_the_results_of_its_request(bundle):
    results: dict[int, object] = {}
    ended = threading.Semaphore(0)

    def keep(outputs: list, number: int, text: str) -> None:
        results[number] = (outputs[0].shape, text)
        ended.release()

    with onnxplace.InferenceSession(bundle, batching=Batching(8, 20)) as session:
        for number in range(6):
            session.run_async(None, {"x": np.ones((number, 64), "f4")}, keep, number)
        assert all(ended.acquire(timeout=WAIT_SECONDS) for _ in range(6))
    assert results == {number: ((number, 64), "") for number in range(6)}
