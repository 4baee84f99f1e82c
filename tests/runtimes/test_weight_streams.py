"""Weights that stream: bundles compute what whole models do, with any pools, orders of requests, and faults."""

import random
import signal
import threading
import time

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

import onnxplace
from onnxplace.runtimes.execution import weight_loader
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from tests.support.fault_checks import HUNG_SECONDS, list_worker_threads, raise_in, wait_until
from tests.support.small_programs import Talker
from tests.support.streamed_chains import StreamedChain, draw_chain

PAGE = 4096
CPUS = ("cpu:0", "cpu:1")
CHAIN = StreamedChain(("cpu:0", "cpu:1", "cpu:0", "cpu:0", "cpu:0"), ("disk", "host", "disk", "disk", ""), 2 * PAGE)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return CHAIN.compile(tmp_path_factory.mktemp("chain"))


@pytest.fixture
def session(bundle):
    with onnxplace.InferenceSession(bundle) as session:
        yield session
        session.close(timeout=0)


def ask(talker, number, size=2, **options):
    feeds, expected = talker.prepare(number, size)
    outputs = talker.user.run_timed(feeds, talker.model.outputs, timeout=HUNG_SECONDS, **options).outputs
    assert_equal(outputs, expected)
    talker.keep(expected)


def ask_often(talker, count):
    for number in range(count):
        ask(talker, number)


def assert_equal(outputs, expected):
    assert outputs.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_array_equal(outputs[name], array)


def converse(session, chain, requests, draw):
    """Ask a session and conversations of it, several requests in flight, and check all answers."""
    talkers = [Talker(session, chain), *(Talker(session.conversation(), chain) for _ in range(2))]
    pending = []
    for number in range(requests):
        talker = draw.choice(talkers)
        # A conversation keeps its number of rows.
        feeds, expected = talker.prepare(number, 1 + talkers.index(talker))
        if draw.random() < 0.3:
            assert_equal(talker.user.run_timed(feeds, chain.outputs).outputs, expected)
        else:
            pending.append((talker.user.submit(feeds, chain.outputs), expected))
        talker.keep(expected)
    for future, expected in pending:
        assert_equal(future.result(HUNG_SECONDS).outputs, expected)


@settings(max_examples=6)
@given(st.integers(0, 1 << 30))
def test_random_chains_compute_what_the_whole_model_does(tmp_path_factory, seed):
    draw = random.Random(seed)
    chain = draw_chain(draw, CPUS)
    bundle = chain.compile(tmp_path_factory.mktemp("random"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_loader, "READ_PIECE_BYTES", draw.choice([100, PAGE, 1 << 20]))
        with onnxplace.InferenceSession(bundle, max_in_flight=draw.choice([1, 8])) as session:
            converse(session, chain, 12, draw)
    assert not list_worker_threads()


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float8e4m3fn", "int8", "double"])
def test_weights_keep_their_bits_in_all_types(tmp_path, dtype):
    chain = StreamedChain(("cpu:0",) * 3, ("disk", "host", "disk"), 2 * PAGE, dtype=dtype)
    with onnxplace.InferenceSession(chain.compile(tmp_path)) as session:
        for number in range(3):
            ask(Talker(session, chain), number)


def test_values_share_the_memory_of_the_pool(session):
    """Nothing is copied between a read and the kernel, also not for types that numpy lacks."""
    pool = weight_loader.HostPool(2 * PAGE)
    record = next(iter(CHAIN_RECORDS.values()))
    for dtype, elements in (("tensor(float)", 1024), ("tensor(bfloat16)", 2048), ("tensor(float8e4m3fn)", 4096)):
        changed = record.model_copy(update={"dtype": dtype, "shape": (elements,), "bytes": PAGE})
        value = pool._share(weight_loader.PooledWeight("w", changed, PAGE))
        address = value.ctypes.data if isinstance(value, np.ndarray) else value.data_ptr()
        assert address == pool._bytes.ctypes.data + PAGE
        assert address % PAGE == 0


CHAIN_RECORDS = {}


@pytest.fixture(autouse=True, scope="module")
def records(bundle):
    CHAIN_RECORDS.update(bundle.manifest.streamed)


def test_neighbours_in_a_file_are_read_at_once(tmp_path):
    chain = StreamedChain(("cpu:0",) * 4, ("disk",) * 4, 16 * PAGE, states=0)
    bundle = chain.compile(tmp_path, "m-etf,split,emit")
    (segment,) = bundle.manifest.segments
    (block,) = weight_loader.list_blocks(bundle, "cpu:0", 16 * PAGE)
    assert len(segment.streamed) == 4
    assert [(extent.size, len(extent.weights)) for extent in block.extents] == [(4 * PAGE, 4)]


def test_an_idle_session_has_its_pool_filled(bundle, session):
    streams = session._session.engine._weight_loaders
    wait_until(lambda: streams["cpu:0", "cpu:0"]._arrived == 2)
    ask(Talker(session, CHAIN), 0)
    wait_until(lambda: streams["cpu:0", "cpu:0"]._arrived == 5)


def test_reads_are_events_with_bytes_and_waits_are_events_of_segments(bundle):
    with OnnxRuntime().open(bundle, trace=True) as session:
        feeds = {**CHAIN.make_feeds(0), **CHAIN.make_start(0)}
        for _ in range(2):
            events = session.run(feeds, ["t0"]).events
    waits = [event.name for event in events if event.kind == "wait" and event.name.startswith("cpu")]
    assert sorted(waits) == ["cpu0-000", "cpu0-001", "cpu0-002", "cpu1-000"]
    loads = [event for event in events if event.kind == "load"]
    assert loads
    for event in loads:
        assert event.bytes == PAGE
        assert event.name in waits
        assert 0 <= event.start_seconds <= event.finish_seconds


def test_without_weights_that_stream_there_is_no_thread(tmp_path):
    chain = StreamedChain(("cpu:0",) * 2, ("", ""), PAGE)
    with onnxplace.InferenceSession(chain.compile(tmp_path)) as session:
        assert list_worker_threads() == ["onnxplace cpu:0"]
        assert not session._session.engine._weight_loaders


# ---------------------------------------------------------------------------------------------------- faults of reads


@pytest.fixture
def faulty_reads(monkeypatch):
    """A list of what the next reads do: None reads, an exception is raised, a number is the most bytes read."""
    faults, read_at = [], weight_loader.read_at

    def read(file, offset, view):
        fault = faults.pop(0) if faults else None
        if callable(fault):
            fault()
        elif isinstance(fault, BaseException):
            raise fault
        elif fault is not None:
            view = view[:fault]
        return read_at(file, offset, view) if len(view) else 0

    monkeypatch.setattr(weight_loader, "read_at", read)
    return faults


def test_short_reads_are_continued(bundle, faulty_reads):
    faulty_reads += [7, 1, 100, None, 4095] * 20
    with onnxplace.InferenceSession(bundle) as session:
        for number in range(3):
            ask(Talker(session, CHAIN), number)


@pytest.mark.parametrize(
    ("fault", "text"),
    [(OSError(5, "Input/output error"), "Input/output error"), (0, "the file ends there, and has")],
)
def test_a_failing_read_names_weight_file_and_offset_and_the_next_request_is_right(bundle, faulty_reads, fault, text):
    record = CHAIN_RECORDS["w0"]
    with onnxplace.InferenceSession(bundle) as session:
        talker = Talker(session, CHAIN)
        ask(talker, 0)
        wait_until(lambda: all(s._changes.empty() for s in session._session.engine._weight_loaders.values()))
        faulty_reads += [fault] * 50
        with pytest.raises(onnxplace.ExecutionError) as caught:
            ask_often(talker, 3)
        faulty_reads.clear()
        assert caught.value.code == "X017"
        assert caught.value.where.endswith(record.file)
        assert "weight 'w" in caught.value.message
        assert "cannot be read at byte" in caught.value.message
        assert text in caught.value.message
        talker.states = {}
        for number in range(3):
            ask(talker, number)


def test_a_failure_ahead_of_time_that_does_not_come_back_hits_no_request(bundle, faulty_reads):
    faulty_reads += [OSError(5, "Input/output error")] * 3
    with onnxplace.InferenceSession(bundle) as session:
        wait_until(lambda: len(faulty_reads) <= 1)
        faulty_reads.clear()
        ask(Talker(session, CHAIN), 0)


def test_requests_end_at_once_while_a_read_hangs(bundle, faulty_reads):
    released = threading.Event()
    faulty_reads += [lambda: released.wait(HUNG_SECONDS)] * 2
    session = onnxplace.InferenceSession(bundle)
    try:
        feeds = {**CHAIN.make_feeds(0), **CHAIN.make_start(0)}
        with pytest.raises(onnxplace.RunTimeoutError, match="cpu:0 runs segment cpu0-000"):
            session.run(None, feeds, timeout=0.1)
        future = session.submit(feeds)
        start = time.monotonic()
        with pytest.warns(RuntimeWarning, match="cpu:0 weights.* did not return from a read .*left behind"):
            session.close(timeout=0)
        assert time.monotonic() - start < HUNG_SECONDS / 2
        with pytest.raises(onnxplace.ExecutionError, match="X002"):
            future.result(HUNG_SECONDS)
    finally:
        released.set()
    wait_until(lambda: not list_worker_threads())


def test_an_interrupt_ends_the_wait_for_weights_and_the_session_goes_on(bundle, faulty_reads):
    released = threading.Event()
    faulty_reads += [lambda: released.wait(HUNG_SECONDS)] * 2
    with onnxplace.InferenceSession(bundle) as session:
        interrupt = threading.Timer(0.1, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            session.run(None, {**CHAIN.make_feeds(0), **CHAIN.make_start(0)})
        interrupt.join()
        released.set()
        ask_often(Talker(session, CHAIN), 2)
    assert not list_worker_threads()


def test_a_cancelled_request_ends_at_once_and_the_stream_begins_again(bundle, faulty_reads):
    released = threading.Event()
    with onnxplace.InferenceSession(bundle) as session:
        engine = session._session.engine
        streams = engine._weight_loaders
        stream = streams["cpu:0", "cpu:0"]
        wait_until(lambda: (stream._arrived, streams["cpu:1", "cpu:1"]._arrived) == (2, 1))
        faulty_reads += [lambda: released.wait(HUNG_SECONDS)] * 2
        future = session.submit({**CHAIN.make_feeds(0), **CHAIN.make_start(0)})
        wait_until(lambda: stream._waiting is not None)  # in the middle of its program
        engine.cancel(future)
        with pytest.raises(onnxplace.ExecutionError, match="X011"):
            future.result(HUNG_SECONDS)
        released.set()
        ask_often(Talker(session, CHAIN), 2)


def test_a_slow_read_only_slows(bundle, faulty_reads):
    faulty_reads += [lambda: time.sleep(0.02), None] * 6
    with onnxplace.InferenceSession(bundle) as session:
        for number in range(2):
            ask(Talker(session, CHAIN), number)


def test_a_dead_thread_of_weights_is_reported(bundle):
    with onnxplace.InferenceSession(bundle) as session:
        ask(Talker(session, CHAIN), 0)
        thread = next(thread for thread in threading.enumerate() if thread.name == "onnxplace cpu:1 weights")
        raise_in(thread.ident, SystemExit)
        with pytest.raises(onnxplace.ExecutionError, match=r"X005.*cpu:1: the thread that reads its weights died"):
            ask_often(Talker(session, CHAIN), 9)
    assert not list_worker_threads()


def test_a_dropped_session_leaves_no_thread(bundle):
    session = onnxplace.InferenceSession(bundle)
    ask(Talker(session, CHAIN), 0)
    del session
    wait_until(lambda: not list_worker_threads())
