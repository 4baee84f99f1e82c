"""A fault at every instruction: nothing hangs, other requests are right, and the session goes on or says it is over."""

import random
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import parser

import onnxplace
from onnxplace.errors import ExecutionError
from onnxplace.runtimes.execution.failures import describe_segment_failure
from onnxplace.runtimes.execution.futures import ResultFuture
from onnxplace.runtimes.execution.host_memory import HostMemory
from onnxplace.runtimes.execution.requests import Request
from tests.support.endless import feeds
from tests.support.fault_checks import HUNG_SECONDS, list_worker_threads, raise_in, read_resident_bytes
from tests.support.fault_injection import KINDS, Fault, inject, inject_at_each_place, list_faults
from tests.support.request_soak import soak_requests
from tests.support.small_programs import make_ping_pong, make_random_model

# An exception set in a thread from outside may come while Python frees an object, and is printed then.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture(scope="module")
def ping_pong(tmp_path_factory):
    """Models with states on two devices and on three, with values to and fro, and their bundles."""
    models = {devices: make_ping_pong(devices) for devices in (2, 3)}
    return {devices: (model.compile(tmp_path_factory.mktemp("small")), model) for devices, model in models.items()}


# All kinds on two devices and half of them on three; random faults are of all kinds.
@pytest.mark.parametrize(("devices", "kind"), [*((2, kind) for kind in KINDS), *((3, kind) for kind in KINDS[1::2])])
@pytest.mark.sampled(6)
def test_a_fault_at_any_instruction_is_survived(ping_pong, devices, kind):
    bundle, model = ping_pong[devices]
    assert inject_at_each_place(bundle, model, kind) >= (2 if kind == "kill_outside" else 5)


@settings(max_examples=15)
@given(st.integers(0, 1 << 30))
def test_random_faults_in_random_programs_are_survived(tmp_path_factory, seed):
    draw, model = random.Random(seed), make_random_model(seed)
    bundle = model.compile(tmp_path_factory.mktemp("random"))
    for fault in draw.sample(list_faults(bundle), 3):
        inject(bundle, model, fault)


@settings(max_examples=20)
@given(st.sampled_from([2, 3]), st.integers(0, 2), st.floats(0, 1e-3))
def test_a_worker_that_is_killed_at_any_moment_leaves_no_caller_waiting(ping_pong, devices, device, delay):
    bundle, model = ping_pong[devices]
    inject(bundle, model, Fault("kill_outside", f"cpu:{device % devices}", -1, False, "submit", delay))


# --------------------------------------------------------------------------------------------- what the faults found


def test_a_worker_that_dies_while_it_delivers_a_result_completes_the_future(session, monkeypatch):
    engine = session._session.engine

    def die(*_):
        raise SystemExit

    monkeypatch.setattr(engine, "_read_output", die)
    with pytest.raises(ExecutionError, match=r"X005.*its worker died: SystemExit"):
        session.submit(feeds(1)).result(HUNG_SECONDS)
    session.close()
    assert not list_worker_threads()


def test_a_request_that_is_admitted_while_a_worker_dies_is_failed(session):
    """The worker takes the list of requests only when no other thread is between its check and its entry."""
    engine = session._session.engine
    worker = next(worker for worker in engine._workers if worker.name == "onnxplace cpu:1")
    request = Request(1 << 40, feeds(1), engine._routes[0], frozenset({"y"}), engine.own_states, ResultFuture())
    with engine.lock:  # as in `_try_admit`, after its check
        raise_in(worker.ident, SystemExit)
        engine._tokens["cpu:1"].put(None)
        worker.join(0.2)
        engine._in_flight[request.number] = request
    with pytest.raises(ExecutionError, match="X005"):
        request.future.result(HUNG_SECONDS)


def test_finishing_a_future_may_be_repeated():
    future, calls, failure = ResultFuture(), [], ExecutionError("X001", "first")
    future.set_exception(failure)  # as far as an interrupted `finish` came
    future.add_done_callback(calls.append)
    future.finish(None, ExecutionError("X001", "second"))
    future.finish(None, ExecutionError("X001", "third"))
    assert future.exception(0) is failure
    assert calls == [future]


def test_memory_that_runs_out_in_a_copy_is_reported_as_such(session, monkeypatch):
    engine = session._session.engine
    device = engine._devices["cpu:0"]
    monkeypatch.setattr(device.memory, "receive", lambda value, source: np.empty(1 << 62, np.uint8))
    for call in (lambda: session.run(None, feeds(1)), lambda: session.submit(feeds(1)).result(HUNG_SECONDS)):
        with pytest.raises(ExecutionError, match=r"X010.*cpu:0: out of memory.*receive 'spun' from cpu:1.*EiB"):
            call()


def test_memory_that_runs_out_for_an_output_is_reported_as_such(session, monkeypatch):
    monkeypatch.setattr(HostMemory, "read", lambda memory, sent: np.empty(1 << 62, np.uint8))
    with pytest.raises(ExecutionError, match=r"X010.*outputs: out of memory for output '[yz]'.*EiB"):
        session.submit(feeds(1)).result(HUNG_SECONDS)


EXPAND = """
<ir_version: 8, opset_import: ["" : 17]>
expand (int64[2] shape, float[1] x) => (float[n, m] y) { grown = Expand(x, shape) y = Neg(grown) }
"""
SMALL = {"shape": np.array([2, 3], "i8"), "x": np.ones(1, "f4")}


@pytest.fixture
def expanding(tmp_path):
    model, pipeline = parser.parse_model(EXPAND), "profile{estimate=true},single,split,emit"
    return onnxplace.compile(model, tmp_path / "out", devices="cpu:0", pipeline=pipeline, inputs=SMALL)


def test_a_segment_that_runs_out_of_memory_says_how_much_it_asked_for_and_where(expanding):
    with onnxplace.InferenceSession(expanding) as session:
        big = {**SMALL, "shape": np.array([1 << 20, 1 << 22], "i8")}
        with pytest.raises(ExecutionError) as raised:
            session.run(None, big)
        problem = raised.value
        assert (problem.code, problem.where) == ("X010", "cpu:0")
        assert "segment cpu0-000 ran out of memory: it asked for 16777216.0 MiB (17592186044416 bytes) at once" in str(
            problem
        )
        assert problem.hint
        (y,) = session.run(None, SMALL)
        np.testing.assert_array_equal(y, -np.ones((2, 3)))


@pytest.mark.parametrize(
    "text",
    [
        "BFCArena::AllocateRawInternal(size_t, bool) Failed to allocate memory for requested buffer of size 12345",
        "BFCArena::Extend(size_t) Available memory of 99 is smaller than requested bytes of 12345",
    ],
)
def test_the_size_is_read_from_both_messages_of_onnx_runtime(expanding, text):
    record = expanding.manifest.segments[0]
    problem = describe_segment_failure(RuntimeError(text), record, expanding.manifest, "cpu:0")
    assert "it asked for 12345 bytes at once" in problem.message


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_after_memory_ran_out_small_requests_need_little_memory(expanding):
    """ONNX Runtime's arena would reserve all memory for the next request, and use 3 % of it for a table."""
    with onnxplace.InferenceSession(expanding) as session:
        session.run(None, SMALL)
        before = read_resident_bytes()
        with pytest.raises(ExecutionError, match="X010"):
            session.run(None, {**SMALL, "shape": np.array([1 << 20, 1 << 22], "i8")})
        for columns in range(1, 5):
            session.run(None, {**SMALL, "shape": np.array([1 << 10, columns << 10], "i8")})
        assert read_resident_bytes() - before < 256 << 20


def test_without_a_size_in_the_message_the_prediction_of_the_bundle_is_reported(expanding, monkeypatch):
    def run_out(*_):
        raise RuntimeError("std::bad_alloc")

    with onnxplace.InferenceSession(expanding) as session:
        for segment in session._session.engine._routes[0].segments.values():
            monkeypatch.setattr(segment, "inner", SimpleNamespace(run=run_out))
        predicted = r"the bundle predicts \d+ bytes of outputs and \d+ bytes of workspace"
        with pytest.raises(ExecutionError, match=f"X010.*segment cpu0-000 ran out of memory: {predicted}"):
            session.run(None, SMALL)


def test_all_callers_of_a_dead_worker_get_its_cause_also_those_without_a_slot(session, monkeypatch):
    problems, count, engine = [], 12, session._session.engine
    next_request = engine._next_request

    def die(device):
        if device == "cpu:0" and len(engine._in_flight) == engine._max_in_flight:
            raise SystemExit
        return None if device == "cpu:0" else next_request(device)

    def call():
        try:
            session.submit(feeds(None)).result(HUNG_SECONDS)
        except ExecutionError as problem:
            problems.append(problem)

    monkeypatch.setattr(engine, "_next_request", die)
    threads = [threading.Thread(target=call, daemon=True) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HUNG_SECONDS)
        assert not thread.is_alive()
    assert len(problems) == count
    assert all(problem.code == "X005" and "cpu:0: its worker died: SystemExit" in str(problem) for problem in problems)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_requests_of_random_sizes_from_several_threads_are_right_and_leave_nothing(tmp_path):
    report = soak_requests(tmp_path, 400)
    assert report.requests == 400
    assert report.growth_bytes < 64 << 20
    assert {name for name, _ in report.counts} == {"stateless", "states"}
