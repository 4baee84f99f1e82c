"""Failures on devices with streams: the tests of CPUs whose devices are free, and errors of enqueued work."""

import numpy as np
import pytest
from onnx import parser

import onnxplace
from onnxplace.target.target import Device, Target
from tests.runtimes import test_faults
from tests.runtimes.conftest import hook_errors as hook_errors, session as session
from tests.support.endless import endless_bundle, feeds
from tests.support.fake_streams import FakeMemory
from tests.support.fault_checks import (
    HUNG_SECONDS,
    assert_death_fails_all_requests,
    assert_expected,
    list_worker_threads,
)
from tests.support.ping_pong import PingPong, compile_ping_pong, make_feeds, make_start
from tests.support.state_checks import pipeline

# Collected here too, with the bundles of this file.
REUSED = (
    "test_a_callback_on_a_worker_may_submit_and_close_but_not_run",
    "test_a_callback_that_raises_an_exit_does_not_end_the_worker",
    "test_a_close_with_timeout_ends_runs_in_flight",
    "test_a_deleted_session_waits_for_nothing",
    "test_a_refused_run_async_leaves_no_thread_behind",
    "test_an_interrupted_opening_leaves_no_thread",
    "test_leaving_a_block_by_an_error_waits_for_runs_in_flight",
    "test_leaving_a_block_by_an_interrupt_does_not_wait_for_runs_in_flight",
    "test_the_timeout_includes_the_wait_for_a_slot",
)
globals().update({name: getattr(test_faults, name) for name in REUSED})
PLACES = {
    "loop on the GPU": {"spin": "fake:0", "last": "cpu:0", "other": "cpu:0"},
    "loop on the CPU": {"spin": "cpu:0", "last": "fake:0", "other": "fake:0"},
}


@pytest.fixture(scope="module", params=PLACES)
def bundle(request, tmp_path_factory):
    return endless_bundle(tmp_path_factory.mktemp("endless"), **PLACES[request.param], devices="fake:0,cpu:0")


def test_a_timeout_ends_a_run_and_the_next_one_works(session):
    with pytest.raises(onnxplace.RunTimeoutError, match="X007"):
        session.run(None, feeds(None), timeout=0.2)
    assert_expected(session.run(None, feeds(3), timeout=HUNG_SECONDS), 3)


@pytest.mark.parametrize("name", ["fake:0", "fake:0 deliveries"])
def test_a_dead_thread_is_reported_and_fails_all_requests(session, name):
    assert_death_fails_all_requests(session, f"onnxplace {name}", "fake:0")


@pytest.mark.parametrize("number", range(5))
def test_an_error_of_an_enqueued_run_names_its_segment_and_device(tmp_path, driver, number):
    """The runs are enqueued in the order of the program of the one device; the error comes when nothing runs it."""
    bundle = compile_ping_pong(tmp_path, stateless=True, names=("fake:0", "fake:1"))
    with onnxplace.InferenceSession(bundle) as session:
        session.run(None, {**make_feeds(1), **make_start()})
        enqueued = note_runs(session)
        driver.fail_at_run = number
        with pytest.raises(onnxplace.ExecutionError, match="illegal memory access") as caught:
            session.run(None, {**make_feeds(1), **make_start()}, timeout=HUNG_SECONDS)
        segment = enqueued[number]
        assert caught.value.code == "X001"
        assert f"segment {segment.id} failed" in str(caught.value)
        assert caught.value.where == segment.device
    assert not list_worker_threads()


def note_runs(session):
    """Return a list that receives the records of segments as their runs are enqueued."""
    records, segments = [], session._session.engine._routes[0].segments
    for segment in segments.values():
        memory, run = segment.device.memory, segment.run

        def noted(*arguments, memory=memory, run=run, record=segment.record):
            with memory.driver.lock:  # no other run may come between
                records.append(record)
                run(*arguments)

        segment.run = noted
    return records


def test_memory_that_runs_out_is_an_error_of_one_request(tmp_path, driver):
    bundle = compile_ping_pong(tmp_path, stateless=True, names=("fake:0", "fake:1"))
    inputs = {**make_feeds(1), **make_start()}
    with onnxplace.InferenceSession(bundle) as session:
        driver.memory_limit = 8
        with pytest.raises(onnxplace.ExecutionError, match=r"X010.*asked for 16 bytes"):
            session.run(None, inputs, timeout=HUNG_SECONDS)
        driver.memory_limit = None
        y = session.run(None, inputs, timeout=HUNG_SECONDS)[0]
    np.testing.assert_array_equal(y, PingPong().step(inputs)["y"])


def test_requests_that_were_enqueued_before_an_error_succeed_or_fail_and_none_hangs(tmp_path, driver):
    bundle = compile_ping_pong(tmp_path, stateless=True, names=("fake:0", "fake:1"))
    with onnxplace.InferenceSession(bundle, max_in_flight=8) as session:
        driver.fail_at_run = 13
        all_feeds = [{**make_feeds(number), **make_start(number)} for number in range(12)]
        futures = [session.submit(feeds) for feeds in all_feeds]
        failures = [future.exception(HUNG_SECONDS) for future in futures]
        assert any(failures)
        for future, failure, inputs in zip(futures, failures, all_feeds):
            if failure is None:
                np.testing.assert_array_equal(future.result().outputs["y"], PingPong().step(inputs)["y"])
            else:
                assert isinstance(failure, onnxplace.ExecutionError)


STATE_APART = """
<ir_version: 8, opset_import: ["" : 17]>
apart (float[4] x, float[4] total) => (float[4] y, float[4] total_next) {
    [out] y = Neg(x)
    [add] total_next = Add(total, x)
}
"""


def test_an_error_of_a_run_whose_result_only_the_next_request_needs_fails_its_own_request(tmp_path, driver):
    bundle = onnxplace.compile(
        parser.parse_model(STATE_APART),
        tmp_path / "apart.bundle",
        target=Target((Device("fake:0", 1 << 30), Device("fake:1", 1 << 30))),
        state=("total_next=total",),
        pipeline=pipeline(tmp_path, {"out": "fake:0", "add": "fake:1"}),
    )
    x, driver.has_places = np.ones(4, "f4"), False
    with onnxplace.InferenceSession(bundle) as session:
        enqueue = FakeMemory.enqueue

        def fail_on_second(memory, *arguments):
            driver.fail_at_run = 0 if memory.address.id == "fake:1" else None
            with driver.lock:
                return enqueue(memory, *arguments)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(FakeMemory, "enqueue", fail_on_second)
            patch.setattr(driver, "eagerness", 0.0)
            with pytest.raises(onnxplace.ExecutionError, match=r"X001.*fake:1: segment .* failed"):
                session.run(None, {"x": x, "total": x})
