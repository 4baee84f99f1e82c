"""Weights that stream to devices whose work is enqueued: no run and no copy comes too early, and nothing is left."""

import gc
import random
import threading

import pytest
from hypothesis import given, settings, strategies as st

import onnxplace
from onnxplace.runtimes.execution import device_streams, weight_loader
from onnxplace.runtimes.execution.device_streams import DriverError
from tests.runtimes.test_weight_streams import PAGE, ask, ask_often, assert_equal, converse
from tests.support.fake_streams import FakeDriver, use_fake_driver
from tests.support.fault_checks import HUNG_SECONDS, list_worker_threads, wait_until
from tests.support.small_programs import Talker
from tests.support.streamed_chains import StreamedChain, draw_chain

GPUS = ("fake:0", "fake:1", "cpu:0")
CHAIN = StreamedChain(
    ("fake:0", "fake:1", "fake:0", "fake:0", "fake:0"), ("disk", "host", "host", "disk", ""), 2 * PAGE
)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return CHAIN.compile(tmp_path_factory.mktemp("chain"))


def assert_nothing_left(driver):
    assert not list_worker_threads()
    gc.collect()
    driver.drain()
    assert not any(driver.used_bytes.values())
    assert driver.counts.get("free_host", 0) == driver.counts.get("allocate_host", 0)


@settings(max_examples=6)
@given(st.integers(0, 1 << 30))
def test_random_chains_compute_what_the_whole_model_does(tmp_path_factory, seed):
    draw = random.Random(seed)
    chain, eagerness = draw_chain(draw, GPUS), draw.choice([0.0, 0.3, 0.9])
    with use_fake_driver(FakeDriver(seed, has_peer_access=draw.random() < 0.5, eagerness=eagerness)) as driver:
        bundle = chain.compile(tmp_path_factory.mktemp("random"))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weight_loader, "READ_PIECE_BYTES", draw.choice([256, PAGE, 1 << 20]))
            with onnxplace.InferenceSession(bundle, max_in_flight=draw.choice([1, 8])) as session:
                converse(session, chain, 12, draw)
        del session
        assert_nothing_left(driver)


def test_no_thread_waits_for_copies_of_weights_that_the_host_keeps(tmp_path, driver):
    chain = StreamedChain(("fake:0",) * 6, ("host",) * 6, 2 * PAGE, states=0)
    bundle, driver.eagerness, driver.has_places = chain.compile(tmp_path), 0.0, False
    with onnxplace.InferenceSession(bundle) as session:
        ask_often(Talker(session, chain), 2)  # all weights are read
        stream = session._session.engine._weight_loaders["fake:0", "fake:0"]
        wait_until(lambda: stream._arrived % 6 == 2)
        copies, driver.longest_queue = driver.counts["copy_to_device"], 0
        driver.counts["synchronize"] = 0
        ask(Talker(session, chain), 3)
        assert driver.longest_queue > 6
        assert driver.counts["synchronize"] <= 3  # the end of the request, and its output
        wait_until(lambda: stream._arrived % 6 == 2)
        assert driver.counts["copy_to_device"] - copies == 6 + 1  # all blocks, and the input


def test_page_locked_memory_holds_what_the_host_keeps_and_few_buffers(bundle, driver):
    with onnxplace.InferenceSession(bundle, max_in_flight=2) as session:
        ask_often(Talker(session, CHAIN), 2)
        allocated = driver.counts["allocate_host"]
        ask_often(Talker(session, CHAIN), 10)
        assert driver.counts["allocate_host"] <= allocated + 4
    del session
    assert_nothing_left(driver)


@pytest.mark.parametrize("call", ["copy_to_device", "allocate_host", "record", "wait"])
def test_an_error_of_the_driver_is_one_of_the_request_and_the_next_one_is_right(bundle, driver, monkeypatch, call):
    original = getattr(driver, call)
    monkeypatch.setattr(device_streams, "MAX_KEPT_BYTES", 0)  # so that buffers have to be allocated
    with onnxplace.InferenceSession(bundle) as session:
        talker = Talker(session, CHAIN)
        ask(talker, 0)

        def fail(*arguments):
            if threading.current_thread().name == "onnxplace fake:0 weights":
                raise DriverError(f"{call}: refused")
            return original(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(driver, call, fail)
            problems = [find_problem(session, number) for number in range(2)]
        assert any(problems)
        for problem in filter(None, problems):
            assert problem.code == "X001"
            assert f"{call}: refused" in problem.message
        talker.states = {}
        ask_often(talker, 3)
    del session
    assert not list_worker_threads()


def test_a_device_without_memory_for_the_pool_says_so_when_the_session_is_opened(bundle, driver):
    driver.memory_limit = PAGE
    with pytest.raises(onnxplace.ExecutionError, match=r"X010.*asked for 8192 bytes"):
        onnxplace.InferenceSession(bundle)
    assert not list_worker_threads()


def test_a_copy_that_fails_on_the_device_gives_no_wrong_number(bundle, driver):
    with onnxplace.InferenceSession(bundle) as session:
        talker = Talker(session, CHAIN)
        ask(talker, 0)
        stream = session._session.engine._weight_loaders["fake:0", "fake:0"]._pool._queue.stream

        def fail(is_shadow):
            if not is_shadow:
                raise DriverError("an illegal memory access was encountered")

        driver.push(stream, fail)
        problems = [find_problem(session, number) for number in range(1, 8)]
    assert "X001" in {problem.code for problem in filter(None, problems)}
    assert not list_worker_threads()


def find_problem(session, number):
    """Return the error of a request; None if its answer is right."""
    feeds = {**CHAIN.make_feeds(number), **CHAIN.make_start(number)}
    future = session.submit(feeds, CHAIN.outputs)
    problem = future.exception(HUNG_SECONDS)
    assert problem is None or isinstance(problem, onnxplace.ExecutionError)
    if problem is None:
        assert_equal(future.result().outputs, CHAIN.step(feeds))
    return problem
