"""Threads and interrupts at bad moments, on devices with streams: no deadlock, no early reuse, nothing held idly."""

import gc
import threading
import weakref
from contextlib import contextmanager

import numpy as np
import pytest

import onnxplace
from onnxplace.runtimes.execution import engine as engine_module
from onnxplace.runtimes.execution.bound_memory import BoundMemory
from onnxplace.runtimes.execution.device_streams import DriverError, WorkQueue
from onnxplace.runtimes.execution.futures import ResultFuture
from onnxplace.runtimes.execution.requests import Request
from tests.streams.test_held import feed, make_array, open_memory
from tests.streams.test_order import compile_chain, compute_chain, make_rows
from tests.support.fake_streams import FakeDriver, use_fake_driver
from tests.support.fault_checks import HUNG_SECONDS, list_worker_threads, wait_until


@pytest.fixture(params=[True, False], ids=["peer", "host"])
def late_driver(request):
    """A driver that executes work only where something waits for it."""
    with use_fake_driver(FakeDriver(4, request.param, eagerness=0.0, has_places=False)) as driver:
        yield driver


@contextmanager
def hang_devices(driver, monkeypatch):
    """Let threads that wait for work of devices hang inside of the block."""
    released, waiting, synchronize = threading.Event(), threading.Event(), driver.synchronize

    def hang(event):
        waiting.set()
        released.wait(HUNG_SECONDS)
        synchronize(event)

    monkeypatch.setattr(driver, "synchronize", hang)
    try:
        yield waiting
    finally:
        released.set()


def run_thread(thread):
    thread.start()
    thread.join(HUNG_SECONDS)
    assert not thread.is_alive()


# ------------------------------------------------------------------------------------------------------------ locks


def test_an_error_is_described_without_the_lock_of_its_queue(driver, monkeypatch):
    """Else two devices that wait for each other and fail would each wait for the other's lock."""
    first, second = (WorkQueue(driver, device, f"fake:{device}") for device in range(2))
    first.wait(other := second.mark("its cause"))
    mark, described, results = first.mark("a run"), threading.Event(), []

    def is_complete(event):
        if event is mark.event and not described.is_set():
            raise DriverError("it failed")
        return False

    def is_over(checked):
        described.set()
        thread.join(HUNG_SECONDS / 10)  # the other thread has the lock of the first queue by now
        return False

    def take_lock():
        described.wait(HUNG_SECONDS)
        if first.lock.acquire(timeout=HUNG_SECONDS / 20):
            results.append("free")
            first.lock.release()

    mark.event, other.event = object(), object()
    monkeypatch.setattr(driver, "is_complete", is_complete)
    monkeypatch.setattr(other, "is_over", lambda: is_over(other))
    thread = threading.Thread(target=take_lock, daemon=True)
    thread.start()
    with pytest.raises(onnxplace.ExecutionError, match="fake:1: its cause failed: it failed"):
        first.release()
    assert results == ["free"]


def test_a_failed_queue_does_not_keep_what_others_hold(late_driver):
    memory, add = open_memory("fake:0")
    late_driver.fail_at_run = 0
    add(feed(memory, 1), feed(memory, 2))
    with pytest.raises(onnxplace.ExecutionError, match="segment sum failed"):
        memory.settle(memory.checkpoint())
    memory.incoming.last_mark().synchronize()
    with pytest.raises(onnxplace.ExecutionError, match="segment sum failed"):
        memory.settle(None)
    assert memory.incoming.last_mark() is None
    memory.close()
    gc.collect()
    assert not any(late_driver.used_bytes.values())


# ------------------------------------------------------------------------------------------------------- interrupts


def interrupt_mark(monkeypatch, queue, call, *arguments):
    """Call a function, and let Ctrl-C come after it has enqueued work and before the mark of that."""

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(queue, "mark", interrupt)
        with pytest.raises(KeyboardInterrupt):
            call(*arguments)
    gc.collect()


def test_memory_of_an_interrupted_upload_is_not_reused_during_its_copy(late_driver, monkeypatch):
    memory, add = open_memory("fake:0")
    interrupt_mark(monkeypatch, memory.incoming, add, feed(memory, 1), feed(memory, 2))
    result = add(feed(memory, 10), feed(memory, 20))
    np.testing.assert_array_equal(memory.read(memory.send(result, None)), make_array(30))


def test_memory_of_an_interrupted_copy_between_devices_is_not_reused_during_it(late_driver, monkeypatch):
    (first, add), (second, add_second) = open_memory("fake:0"), open_memory("fake:1")
    sent = first.send(add(feed(first, 1), feed(first, 2)), second)
    interrupt_mark(monkeypatch, second.incoming, second.receive, sent, first)
    del sent
    result = add_second(feed(second, 10), feed(second, 20))
    second.computing.last_mark().synchronize()
    np.testing.assert_array_equal(second.read(second.send(result, None)), make_array(30))


def test_the_buffer_of_an_interrupted_download_is_not_reused_during_its_copy(late_driver, monkeypatch):
    memory, add = open_memory("fake:0")
    value = add(feed(memory, 1), feed(memory, 2))
    interrupt_mark(monkeypatch, memory.outgoing, memory.send, value, None)
    used = {address for addresses in memory.pool._free.values() for address in addresses}
    memory.close()  # waits for the copy, then frees its buffer
    assert not used
    late_driver.drain()
    gc.collect()
    assert late_driver.counts["free_host"] == late_driver.counts["allocate_host"]


# ------------------------------------------------------------------------------------------------------------ naming


def test_a_call_that_fails_does_not_blame_work_that_has_not_failed(late_driver, monkeypatch):
    memory, add = open_memory("fake:0")
    value = add(feed(memory, 1), feed(memory, 2))

    def refuse(size):
        raise DriverError("allocate_host: too many locked pages")

    with monkeypatch.context() as patch:
        patch.setattr(late_driver, "allocate_host", refuse)
        memory.pool.close()
        with pytest.raises(DriverError, match=r"^allocate_host: too many locked pages"):
            memory.send(value, None)


# ----------------------------------------------------------------------------------------------------- idle devices


@pytest.mark.parametrize("names", [("fake:0", "fake:1"), ("fake:0",)], ids=",".join)
def test_idle_devices_hold_no_work_and_no_values(tmp_path, late_driver, names):
    with onnxplace.InferenceSession(compile_chain(tmp_path, names)) as session:
        for number in range(3):
            rows = make_rows(number)
            (result,) = session.run(None, {"h0": rows})
            np.testing.assert_array_equal(result, compute_chain(rows))
        reference = weakref.ref(rows)
        del rows, result
        wait_until(lambda: gc.collect() is not None and reference() is None)  # after its thread's next step
        for device in session._session.engine._devices.values():
            assert [queue.last_mark() for queue in device.memory._queues] == [None] * 3
        assert not any(late_driver.used_bytes.values())


def test_a_session_that_is_dropped_frees_its_locked_memory(tmp_path, late_driver):
    session = onnxplace.InferenceSession(compile_chain(tmp_path, ("fake:0", "fake:1")))
    session.run(None, {"h0": make_rows(1)})
    del session
    counts = late_driver.counts
    wait_until(lambda: gc.collect() is not None and not list_worker_threads())
    wait_until(lambda: gc.collect() is not None and counts["free_host"] == counts["allocate_host"])


# -------------------------------------------------------------------------------------------------- engines at work


def test_a_request_is_enqueued_while_the_part_of_a_caller_is_executed(tmp_path, late_driver, monkeypatch):
    """The worker finds nothing to do while a caller enqueues, and has to look again right after it."""
    rows = make_rows(1)
    with onnxplace.InferenceSession(compile_chain(tmp_path, ("fake:0",))) as session:
        engine, submitted = session._session.engine, []
        follow, looked = engine.follow_program, threading.Event()
        next_request = engine._next_request

        def find(device):
            request = next_request(device)
            if submitted and request is None:
                looked.set()
            return request

        def follow_and_submit(device, program, request):
            if not submitted:
                submitted.append(session.submit({"h0": rows}))
                assert looked.wait(HUNG_SECONDS)  # the worker was woken in vain
            follow(device, program, request)

        monkeypatch.setattr(engine, "follow_program", follow_and_submit)
        monkeypatch.setattr(engine, "_next_request", find)
        with hang_devices(late_driver, monkeypatch):
            caller = threading.Thread(target=session.run, args=(None, {"h0": rows}), daemon=True)
            caller.start()
            wait_until(lambda: len(engine._in_flight) == 2)
            wait_until(lambda: all(request.checkpoints for request in list(engine._in_flight.values())))
        caller.join(HUNG_SECONDS)
        np.testing.assert_array_equal(submitted[0].result(HUNG_SECONDS).outputs["h6"], compute_chain(rows))


def test_the_end_of_a_part_may_be_noted_again_while_its_completion_thread_takes_the_request(tmp_path, late_driver):
    class TakenRequest(Request):
        """A request whose checkpoints are gone when they are read again."""

        @property
        def checkpoints(self):
            taken, self.remaining = self.remaining, []
            return taken

        @checkpoints.setter
        def checkpoints(self, value):
            self.remaining = value

    with onnxplace.InferenceSession(compile_chain(tmp_path, ("fake:0",))) as session:
        engine = session._session.engine
        request = TakenRequest(1 << 40, {}, engine._routes[0], frozenset(), engine.own_states, ResultFuture())
        request.remaining = [(engine._devices["fake:0"].memory, "fake:0", None)]
        engine._in_flight[request.number] = request
        engine.finish_part(request, "fake:0")
        assert request.future.result(HUNG_SECONDS).outputs == {}


def test_close_returns_although_a_device_hangs_with_work_of_a_failed_request(tmp_path, late_driver, monkeypatch):
    monkeypatch.setattr(engine_module, "END_GRACE_SECONDS", 0.1)
    bundle = compile_chain(tmp_path, ("fake:0", "cpu:0"))
    session = onnxplace.InferenceSession(bundle)
    engine = session._session.engine

    def fail(device, segment, values, request, run=engine.run_segment):
        run(device, segment, values, request)
        raise ValueError("it failed after its work was enqueued")

    monkeypatch.setattr(engine, "run_segment", fail)
    with pytest.raises(onnxplace.ExecutionError, match="it failed"):
        session.run(None, {"h0": make_rows(1)}, timeout=HUNG_SECONDS)
    with hang_devices(late_driver, monkeypatch):
        closing = threading.Thread(target=session.close, daemon=True)
        with pytest.warns(RuntimeWarning, match="fake:0 deliveries did not return"):
            run_thread(closing)
        assert engine._routes[0].segments  # sessions whose work is in flight are not freed
    wait_until(lambda: not list_worker_threads())


def test_callers_of_a_device_that_hangs_are_told_when_the_session_is_closed(tmp_path, late_driver, monkeypatch):
    monkeypatch.setattr(engine_module, "END_GRACE_SECONDS", 0.1)
    session = onnxplace.InferenceSession(compile_chain(tmp_path, ("fake:0",)))
    with hang_devices(late_driver, monkeypatch) as waiting:
        futures = [session.submit({"h0": make_rows(number)}) for number in range(2)]
        assert waiting.wait(HUNG_SECONDS)
        with pytest.warns(RuntimeWarning, match="fake:0 deliveries did not return"):
            session.close(timeout=0)
        for future in futures:
            assert future.exception(HUNG_SECONDS / 10).code == "X002"
    wait_until(lambda: not list_worker_threads())


def test_a_value_of_a_device_with_streams_reaches_one_that_only_sessions_reach(late_driver):
    memory, add = open_memory("fake:0")
    receiver = BoundMemory.__new__(BoundMemory)  # without a device: receiving needs none
    for value in (add(feed(memory, 1), feed(memory, 2)), feed(memory, 3)):
        received = receiver.receive(memory.send(value, receiver), memory)
        np.testing.assert_array_equal(received.numpy(), make_array(3))
