"""A worker thread per device, and the requests that they are at.

What is under way is one dictionary in the order of submission: each worker does its part of the first request that
still needs it. A request is admitted, left and over by single steps that an interrupt of the main thread cannot tear
apart, and all that ends one may be done twice.
"""

from __future__ import annotations

import atexit
import copy
import ctypes
import itertools
import os
import queue
import threading
import time
import warnings
import weakref
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

from onnxplace.bundle import Bundle, Step
from onnxplace.errors import ExecutionError, OnnxplaceError, RunTimeoutError, one_line
from onnxplace.feeds import Array
from onnxplace.machine import (
    end_openings,
    interruptible,
    is_foreign_error,
    pin_thread,
    prepare_interrupts,
    require_interpreter,
)
from onnxplace.runtime import Event, EventKind, Result
from onnxplace.runtimes.execution.carried_state import CarriedStates
from onnxplace.runtimes.execution.ort_values import to_python
from onnxplace.runtimes.execution.requests import CancelledError, Request
from onnxplace.runtimes.execution.segments import OpenSegment, PlacedDevice
from onnxplace.runtimes.execution.sleepers import Sleepers
from onnxplace.utils import start_thread

MAX_IN_FLIGHT = 8
# Requests that were ended get so long to come to the end of a node. What takes longer is left behind.
END_GRACE_SECONDS = 2.0
# At the end of the interpreter, so long for what is under way; then it is ended.
EXIT_SECONDS = 10.0
# And so long if that is interrupted.
INTERRUPTED_EXIT_SECONDS = 0.3
# Idle workers look this often whether anybody could still have something for them.
OWNER_CHECK_SECONDS = 3.0
# How ONNX Runtime and C++ say that memory ran out.
_OUT_OF_MEMORY_TEXTS = ("Failed to allocate memory", "bad allocation", "bad_alloc", "BFCArena", "out of memory")


class Worker(threading.Thread):
    """The thread that follows one device's program."""

    def __init__(self, engine: Engine, device: PlacedDevice) -> None:
        super().__init__(target=engine.work, args=(device,), name=f"onnxplace {device.id}", daemon=True)
        self.engine = engine


class Engine:
    """An open bundle at work. Its threads keep it alive until it is closed or abandoned."""

    def __init__(
        self, bundle: Bundle, devices: Mapping[str, PlacedDevice], segments: Mapping[str, OpenSegment], trace: bool
    ) -> None:
        self.bundle = bundle
        self._segments = segments
        self._devices = devices
        self._trace = trace
        self._process = os.getpid()
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._changes = Sleepers()
        """Woken when a request is over or failed: a place, the next one's turn, the end of all."""
        self._under_way: dict[int, Request] = {}
        self._tokens: dict[str, queue.SimpleQueue[None]] = {device: queue.SimpleQueue() for device in devices}
        """A token makes a worker look what there is to do; one too many does no harm."""
        self._closed = False
        self.owner: weakref.ref[object] | None = None
        """Who closes or abandons the engine, if somebody does."""
        self._broken: ExecutionError | None = None
        self._learn_values(bundle)
        self._states = CarriedStates(bundle)
        self._stored_values = {value for states in self._states.on.values() for value in states.values()}
        self._reset = False
        first = bundle.manifest.segments[0].device if bundle.manifest.segments else ""
        self._first = devices.get(first)
        """The device that can begin at once, whose program `run` follows in the thread of its caller."""
        self._workers = [Worker(self, device) for device in devices.values()]

    def _learn_values(self, bundle: Bundle) -> None:
        """Look up once what each request needs to know of values."""
        manifest = bundle.manifest
        self._types = {item.name: item.dtype for item in manifest.inputs}
        self._inputs = set(self._types)
        self._read = {
            device: {v for s in manifest.segments if s.device == device for v in s.inputs} & self._inputs
            for device in self._devices
        }
        producers = {value: segment.device for segment in manifest.segments for value in segment.outputs}
        wanted = dict.fromkeys(item.value for item in manifest.outputs)
        self._plain = {name: item.plain for item in self._segments.values() for name in item.record.outputs}
        self._returned = {device: [v for v in wanted if producers.get(v) == device] for device in self._devices}
        self._returned_names = frozenset(item.name for item in bundle.returned)
        self._outputs = [(item.name, item.value) for item in manifest.outputs]

    def start(self) -> None:
        """Start the workers; an interrupt on the way ends those that run already."""
        prepare_interrupts()
        _ENGINES.add(self)
        try:
            require_interpreter()  # after which `_close_all_engines` finds this one
            for worker in self._workers:
                start_thread(worker)
        except BaseException:
            self.abandon()
            raise

    # -- requests ------------------------------------------------------------------------------------------------

    def request(self, feeds: Mapping[str, Array], also: Collection[str]) -> Request:
        """Return a request that no device is at yet; raises ExecutionError in a fork of the process of the engine."""
        if os.getpid() != self._process:  # before anything of ONNX Runtime is touched, whose locks may be held
            message = f"the session was opened in process {self._process}, and this is a fork of it without its threads"
            hint = "open a session in each process, or start processes by 'spawn'"
            raise ExecutionError("X006", message, where=str(self.bundle.path), hint=hint)
        wanted = self._returned_names.union(also) if also else self._returned_names
        return Request(next(self._numbers), feeds, self._devices, wanted)

    def submit(self, request: Request) -> None:
        """Hand a request to the workers; blocks while the most requests allowed are under way."""
        try:
            self._admit(request, None, None)
        except BaseException as failure:
            try:
                self._cancel(request, failure)
            except BaseException:  # an interrupt, before or while it was done: all of it may be done twice
                self._cancel(request, failure)
                raise
            raise

    def run(self, request: Request, timeout: float | None) -> Result:
        """Return the result of a request; with nothing else under way, do one device's part in this thread.

        That saves waking a worker and being woken by it, some 100 us. The thread stays on the cores where it is. With
        a timeout in seconds, workers do all of it, so that this thread can leave them to it.
        """
        if isinstance(threading.current_thread(), Worker):
            hint = "start it from another thread, or use run_async, whose callbacks may run the session"
            message = "run was called by a callback on the worker of a device, which would wait for itself"
            raise ExecutionError("X009", message, where=threading.current_thread().name, hint=hint)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            self._admit(request, self._first if timeout is None else None, deadline)
            if request.callers_device:
                device = self._devices[request.callers_device]
                with interruptible(request.stop):
                    self._serve(device, request)
                self._leave(request, device.id)
            return request.future.result(None if deadline is None else max(deadline - time.monotonic(), 0))
        except BaseException as failure:
            try:
                reason = self._give_up_run(request, failure, timeout)
            except BaseException:  # an interrupt, before or while it was done: all of it may be done twice
                self._cancel(request, failure)
                raise
            if reason is failure:
                raise
            raise reason from None

    def _admit(self, request: Request, callers: PlacedDevice | None, deadline: float | None) -> None:
        """Put a request in line, but for the device of its caller, who takes that on if nothing is under way.

        Raises ExecutionError if the session takes none, TimeoutError if there is no place for it in time.
        """
        while (asleep := self._enter(request, callers)) is not None:
            self._wake()  # workers that miss a token have it by now: nobody else would give them one
            if not asleep.acquire(timeout=-1 if deadline is None else max(deadline - time.monotonic(), 0)):
                raise TimeoutError
        self._wake(request.callers_device)
        if not self._devices:
            self._leave(request, "")

    def _enter(self, request: Request, callers: PlacedDevice | None) -> threading.Lock | None:
        """Put a request in line; return what to wait for if there is no place for it."""
        with self._lock:
            if self._broken is not None:
                raise self._broken
            if self._closed:
                raise ExecutionError("X002", "the session is closed", where=str(self.bundle.path))
            # A callback on a worker does not wait: its worker may be what makes a place.
            if len(self._under_way) >= MAX_IN_FLIGHT and not isinstance(threading.current_thread(), Worker):
                return self._changes.enter()
            if callers is not None and not self._under_way:
                request.callers_device = callers.id
            # No call between these, so that no interrupt of the main thread comes between them either.
            request.forgets = self._reset
            self._under_way[request.number] = request
            self._reset = False
            return None

    def _wake(self, but: str = "") -> None:
        """Make workers look what there is to do."""
        for device, tokens in self._tokens.items():
            if device != but:
                tokens.put(None)

    def _cancel(self, request: Request, failure: BaseException) -> None:
        """End a request that its caller gives up; workers leave it when they come to the end of a node."""
        if isinstance(failure, (KeyboardInterrupt, SystemExit)):
            failure = ExecutionError("X011", "the caller was interrupted", where=str(self.bundle.path))
        self._fail(request, failure)
        if request.callers_device:
            self._leave(request, request.callers_device)
        self._wake()

    def _give_up_run(self, request: Request, failure: BaseException, timeout: float | None) -> BaseException:
        """End the request of a `run` that does not return its result; return what to raise instead."""
        if request.future.is_finished:
            self._wake()  # which an interrupt may have kept `_leave` from
            return failure
        reason = self._late(request, timeout) if isinstance(failure, TimeoutError) else failure
        self._cancel(request, reason)
        return reason

    def _late(self, request: Request, timeout: float | None) -> RunTimeoutError:
        admitted = request.number in self._under_way
        where = request.whereabouts() if admitted else f"{len(self._under_way)} requests before it are under way"
        hint = "allow more time, or look what takes it: onnxplace bench, or run --trace"
        return RunTimeoutError("X007", f"no result within {timeout} s: {where}", where=str(self.bundle.path), hint=hint)

    def _fail(self, request: Request, failure: BaseException) -> None:
        request.fail(failure)
        with self._lock:  # so that nobody is between having looked and being in line
            self._changes.wake()

    def reset_state(self) -> None:
        """Forget states before the next request, and at once if nothing is under way."""
        with self._lock:
            self._reset = True
            if not self._under_way:
                self._states.clear()

    # -- the end -------------------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Take no more requests, wait for those under way, at most `timeout` seconds, then end them and the workers.

        A worker that does not come back from ONNX Runtime soon is left behind, with a RuntimeWarning.
        """
        self._closed = True
        if os.getpid() != self._process:
            return  # nothing of it works here
        with self._lock:
            self._changes.wake()
        self._wake()
        if isinstance(threading.current_thread(), Worker):
            return  # a callback: workers end by themselves once they are through
        try:
            self._wait_for_requests(timeout)
        except BaseException:  # an interrupt: no more waiting for them later on
            self.end_requests()
            raise
        ends = time.monotonic() + END_GRACE_SECONDS
        for worker in self._workers:
            with suppress(RuntimeError):  # one that was never started
                worker.join(max(ends - time.monotonic(), 0))
        if left := [worker for worker in self._workers if worker.is_alive()]:
            names = ", ".join(worker.name.removeprefix("onnxplace ") for worker in left)
            at = "; ".join(request.whereabouts() for request in list(self._under_way.values()))
            message = f"{self.bundle.path}: {names} did not come back from ONNX Runtime ({at or 'just ending'})"
            warnings.warn(f"{message}; its thread is left behind", RuntimeWarning, stacklevel=3)
            return
        self._segments = {}
        self._states.clear()

    def _wait_for_requests(self, timeout: float | None) -> None:
        """Wait for requests: those that were ended, or are ended here for lack of time, only for a while."""
        limit = None if timeout is None else time.monotonic() + timeout
        ended = False
        while True:
            with self._lock:
                if not self._under_way:
                    return
                alive = any(request.failure is None for request in self._under_way.values())
                asleep = self._changes.enter()
            late = limit is not None and time.monotonic() >= limit
            if ended and late:
                return
            if not ended and (late or not alive):
                ended, limit = True, time.monotonic() + END_GRACE_SECONDS
                self.end_requests()
                continue
            asleep.acquire(timeout=-1 if limit is None else max(limit - time.monotonic(), 0))

    def end_requests(self) -> None:
        """Let all that is under way fail, without waiting for it."""
        for request in list(self._under_way.values()):
            self._fail(request, ExecutionError("X002", "the session was closed", where=str(self.bundle.path)))
        self._wake()

    def abandon(self) -> None:
        """Let the workers end when they are through, and wait for nothing: for finalizers, which may hold any lock."""
        self._closed = True
        if os.getpid() == self._process:
            self._wake()

    # -- workers -------------------------------------------------------------------------------------------------

    def work(self, device: PlacedDevice) -> None:
        """Follow the device's program, request after request, until the engine is closed."""
        tokens = self._tokens[device.id]
        try:
            with pin_thread(device.cores):
                while not self._is_through(device.id):
                    self._sleep(tokens)
                    while (request := self._next(device.id)) is not None:
                        with suppress(BaseException):  # told to the request
                            self._serve(device, request)
                        self._leave(request, device.id)
        except BaseException as cause:  # noqa: BLE001 - what else can end a thread, as an exception set from outside
            self._break(device, cause)

    def _sleep(self, tokens: queue.SimpleQueue[None]) -> None:
        """Wait for a token; look now and then whether the engine was forgotten, in case that an interrupt hid it."""
        while True:
            with suppress(queue.Empty):
                return tokens.get(timeout=OWNER_CHECK_SECONDS)
            if self.owner is not None and self.owner() is None:
                self.abandon()

    def _next(self, device: str) -> Request | None:
        """Return the first request that needs a device; None if there is none, or if its caller does that part."""
        with self._lock:
            for request in self._under_way.values():
                if device in request.left:
                    return None if request.callers_device == device else request
        return None

    def _is_through(self, device: str) -> bool:
        with self._lock:
            return self._closed and not any(device in request.left for request in self._under_way.values())

    def _break(self, device: PlacedDevice, cause: BaseException) -> None:
        """Let everybody know that a worker died, so that nobody waits for it."""
        message = f"its worker died: {type(cause).__name__}: {cause}".rstrip(": ")
        self._broken = ExecutionError("X005", message, where=device.id, hint="open a new session")
        self._closed = True
        for request in list(self._under_way.values()):
            self._fail(request, self._broken)
            self._leave(request, device.id)
        self._wake()

    def _serve(self, device: PlacedDevice, request: Request) -> None:
        """Follow a device's program for one request; what goes wrong ends the request, interrupts are passed on."""
        try:
            self.follow(device, self.bundle.manifest.programs[device.id], request)
        except CancelledError:
            pass
        except OnnxplaceError as failure:
            self._fail(request, failure)
        except BaseException as failure:
            told = f"{type(failure).__name__}: {failure}"
            self._fail(request, ExecutionError("X001", f"the worker failed: {told}", where=device.id))
            if not isinstance(failure, Exception) or is_foreign_error(failure):
                raise

    def _leave(self, request: Request, device: str) -> None:
        """Note that a device is through with a request; the last one stores its states and hands out its result."""
        with self._lock:
            request.left.discard(device)
            last = not request.left and request.number in self._under_way
            if last:
                self._store_states(request)
                del self._under_way[request.number]
            more = bool(self._under_way) or self._closed
        if last:
            self._changes.wake()
            self._hand_out(request)
        if more and (self._closed or request.callers_device):
            self._wake()

    def follow(self, device: PlacedDevice, program: Sequence[Step], request: Request) -> None:
        """Do the steps of a device's program for one request."""
        stored, states = self._take_states(request), self._states.on.get(device.id, {})
        values = {
            name: device.feed(request.feeds[name], self._types[name])
            for name in self._read[device.id]
            if name in request.feeds
        }
        values.update({name: stored.pop(name) for name in states if name in stored})
        for step in program:
            if request.failure is not None:
                raise CancelledError
            request.at[device.id] = step
            if step.op == "run":
                self.run_segment(device, self._segments[step.segment], values, request)
            elif step.op == "send":
                request.put(step.value, step.peer, values[step.value])
            elif step.op == "receive":
                began = time.perf_counter()
                arrived = request.take(step.value, device.id)
                self._note(request, device, "wait", step.value, began)
                began = time.perf_counter()
                values[step.value] = device.receive(arrived)
                self._note(request, device, "copy", step.value, began)
            else:
                values.pop(step.value, None)
        request.outputs.update((name, values[name]) for name in self._returned[device.id])
        kept = {name: values[value] for name, value in states.items()}
        request.next_states.update({name: self._own(device, states[name], value) for name, value in kept.items()})

    def run_segment(self, device: PlacedDevice, segment: OpenSegment, values: dict[str, Any], request: Request) -> None:
        """Run one segment; raises ExecutionError naming segment and device."""
        began = time.perf_counter()
        try:
            segment.run(values, request.held, request.options)
        except OnnxplaceError:
            raise
        except Exception as problem:
            if is_foreign_error(problem):
                raise
            raise describe_segment_failure(problem, segment.record.id, device.id) from problem
        self._note(request, device, "run", segment.record.id, began)

    def _own(self, device: PlacedDevice, name: str, value: Any) -> Any:
        """Return a value that outlives its request: what a segment made of other than tensors may look at its feeds."""
        return value if self._plain[name] else device.receive(value)

    def _note(self, request: Request, device: PlacedDevice, kind: EventKind, name: str, began: float) -> None:
        if self._trace:
            now = time.perf_counter()
            request.events.append(
                Event(device.id, kind, name, began - request.began, now - request.began, request.number)
            )

    # -- states and results --------------------------------------------------------------------------------------

    def _take_states(self, request: Request) -> dict[str, Any]:
        """Wait for the request's turn, then return the states it takes over: a device takes its own out of there.

        Raises FeedError if a state has no value.
        """
        if not self._states.on:
            return {}
        while True:
            with self._lock:
                if request.failure is not None:
                    raise CancelledError
                if next(iter(self._under_way.values())) is request:
                    if request.states is None:  # whichever worker comes first takes them for all
                        if request.forgets:
                            self._states.clear()
                        request.states = self._states.take(request.feeds)
                    return request.states
                asleep = self._changes.enter()
            asleep.acquire()

    def _store_states(self, request: Request) -> None:
        """Keep what a request left for the next one, which begins when this one is no longer under way."""
        if not self._states.on:
            return
        if request.failure is None:
            self._states.store(request.next_states)
        elif request.states is not None:
            self._states.lose()
        if self._reset and len(self._under_way) == 1:
            self._states.clear()

    def _hand_out(self, request: Request) -> None:
        """Hand the result, or the failure, to whoever waits for it."""
        if request.failure is not None:
            request.future.finish(None, request.failure)
            return
        try:
            outputs = {name: self._output(value, request) for name, value in self._outputs if name in request.wanted}
        except Exception as problem:  # noqa: BLE001 - a future that is never set would hang its caller
            message = f"an output cannot be read: {one_line(problem) or type(problem).__name__}"
            request.future.finish(None, ExecutionError("X003", message, where="outputs"))
            return
        events = tuple(sorted(request.events, key=lambda event: event.start_seconds))
        request.future.finish(Result(outputs, events, time.perf_counter() - request.began), None)

    def _output(self, value: str, request: Request) -> Any:
        """Return what an output returns, as numpy: the caller may alter it without altering what we still read."""
        if value in self._inputs:
            return copy.deepcopy(request.feeds[value])
        array = to_python(request.outputs[value])
        return array.copy() if value in self._stored_values else array


def describe_segment_failure(problem: Exception, segment: str, device: str) -> ExecutionError:
    text = one_line(problem)
    if isinstance(problem, MemoryError) or any(words in text for words in _OUT_OF_MEMORY_TEXTS):
        hint = "close other programs, run fewer requests at a time, or compile for smaller inputs or more devices"
        message = f"segment {segment} ran out of memory" + (f": {text}" if text else "")
        return ExecutionError("X010", message, where=device, hint=hint)
    message = f"segment {segment} failed: {text or type(problem).__name__}"
    hint = "try the same feeds on the whole model: onnxplace verify"
    return ExecutionError("X001", message, where=device, hint=hint)


_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


@atexit.register
def _close_all_engines() -> None:
    """End all workers while they can still be ended: Python freezes, or even kills, threads that outlive it."""
    deadline = time.monotonic() + EXIT_SECONDS
    try:
        end_openings(EXIT_SECONDS)
        for engine in list(_ENGINES):
            engine.close(max(deadline - time.monotonic(), 0))
    except KeyboardInterrupt:
        for engine in list(_ENGINES):
            engine.end_requests()
        time.sleep(INTERRUPTED_EXIT_SECONDS)


def _keep_sessions_in_child() -> None:
    """Never free the sessions that a forked child inherits: their destructors wait for threads that are not there."""
    for engine in list(_ENGINES):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_keep_sessions_in_child)
