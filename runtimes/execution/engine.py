"""An open bundle at work: its requests, and a worker thread per device.

A request passes through these steps:

1. *Admitted*: it takes one of `max_in_flight` slots and a route, and joins the dictionary of requests in flight.
2. *Ready*: no earlier request of its conversation is in flight. Without states, that is so at once.
3. *Followed*: each device of its route follows its program for it. Programs exchange values among each other, so the
   devices of one request wait for each other, while those that are done begin with the next request.
4. *Delivered*: the device that finishes last stores the states, frees the slot, and completes the future.

A failure, a timeout or a cancellation ends it at every device: ONNX Runtime stops at the end of a node, and what waits
for a value is woken. It still passes step 4, so that its devices are free again.

A request that is one segment on the host, and alone in flight, follows no program: the thread of its caller runs the
segment.

A request is admitted, left and finished by single steps that an interrupt of the main thread cannot tear apart. All
steps that end a request may be repeated.
"""

from __future__ import annotations

import atexit
import ctypes
import itertools
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import ExecutionError
from onnxplace.feeds.feeds import Array
from onnxplace.machine.interrupts import interruptible, prepare_interrupts
from onnxplace.machine.isolated_sessions import find_processes
from onnxplace.machine.ort_sessions import end_openings, is_foreign_error, require_interpreter
from onnxplace.runtime.interface import CopyStatus, Result, forked_session_error, run_timeout_error
from onnxplace.runtimes.execution.failures import describe_segment_failure, is_out_of_memory
from onnxplace.runtimes.execution.futures import ResultFuture
from onnxplace.runtimes.execution.host_memory import HostMemory, return_freed_memory
from onnxplace.runtimes.execution.requests import CarriedStates, Request
from onnxplace.runtimes.execution.segments import Fallback, OpenRoute, OpenSegment, PlacedDevice, choose_route
from onnxplace.runtimes.execution.wakeups import CALLERS
from onnxplace.runtimes.execution.workers import Worker, WorkerThread, WorkLoop
from onnxplace.utils.threads import start_thread

# The ends of all engines of a process: at the end of the interpreter, and in a forked child.

# Time at the end of the interpreter for requests in flight; then they are ended.
EXIT_SECONDS = 10.0
# Time to end them if that is interrupted.
INTERRUPTED_EXIT_SECONDS = 0.3


OPEN_ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()


def close_all_engines() -> None:
    """End all workers before the interpreter ends: Python freezes, or even kills, threads that outlive it."""
    deadline = time.monotonic() + EXIT_SECONDS
    try:
        end_openings(EXIT_SECONDS)
        for engine in list(OPEN_ENGINES):
            engine.close(max(deadline - time.monotonic(), 0))
    except KeyboardInterrupt:
        for engine in list(OPEN_ENGINES):
            engine.end_requests()
        time.sleep(INTERRUPTED_EXIT_SECONDS)


def keep_sessions_in_child() -> None:
    """Never free the sessions that a forked child inherits: their destructors wait for missing threads."""
    for engine in list(OPEN_ENGINES):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
        engine.idle_requests.clear()  # so that each request looks for its process


T = TypeVar("T")
Feeds = Mapping[str, Array]

# The end of the names of threads that read weights.
WEIGHTS_PART = " weights"
# Time for ended requests to reach the end of a node. Workers that take longer are left behind.
END_GRACE_SECONDS = 2.0


class Engine(WorkLoop):
    """An open bundle at work. Its threads keep it alive until it is closed or abandoned.

    With a `worker`, which does all of the work in their place, there is one device.
    """

    def __init__(
        self,
        bundle: Bundle,
        devices: Mapping[str, PlacedDevice],
        routes: Sequence[OpenRoute],
        trace: bool,
        max_in_flight: int,
        fallback: Fallback | None = None,
        worker: Worker | None = None,
    ) -> None:
        super().__init__(bundle, devices, routes, trace, worker)
        self._fallback = fallback
        self._max_in_flight = max_in_flight
        self._numbers = itertools.count()
        self._conversation_numbers = itertools.count(1)
        self._request_count = 0
        self._first_device = devices.get(bundle.manifest.segments[0].device if bundle.manifest.segments else "")
        """The device that can begin at once; `run` follows its program in the thread of its caller."""
        self._conversations = weakref.WeakSet((self.own_states,))
        """Sets of states that are freed with the session; an own set belongs to the handle of its conversation."""
        if worker is not None:
            worker.engine = self
            self._first_device = next(iter(devices.values()))
            self._take_values_as_of(self._first_device)
        work = self.work if worker is None else worker.work
        # One thread per device follows programs; devices that run ahead have one more, which waits for their results.
        self._workers = [WorkerThread(device, work) for device in devices.values()]
        self._workers += [WorkerThread(devices[device], self.complete, " deliveries") for device in self._enqueued]
        self._workers += [WorkerThread(item.device, item.read, WEIGHTS_PART) for item in self._weight_loaders.values()]
        self._run_entries = [entry for item in devices.values() for entry in item.memory.run_entries().items()]
        self._lone_outputs = self._find_lone_outputs()
        """Names of the outputs of the only segment, in its order; empty if requests need more than to run it."""
        self.idle_requests: dict[str, Request] = {}
        """The request of the last `_run_alone`, for the next one."""

    def _find_lone_outputs(self) -> list[str]:
        records, names = self.bundle.manifest.segments, {value: name for name, value in self._outputs}
        needs_more = self.worker or self._trace or self._turns or self._fallback or self._state_table.states
        if needs_more or self._weight_loaders or len(records) != 1 or len(self._routes[0].programs) != 1:
            return []
        record, (segment,) = records[0], self._routes[0].segments.values()
        is_whole = (self._inputs, {*names}, len(names)) == ({*record.inputs}, {*record.outputs}, len(self._outputs))
        is_plain = segment.is_native and type(segment.device.memory) is HostMemory
        return [names[value] for value in record.outputs] if is_whole and is_plain else []

    def _take_values_as_of(self, device: PlacedDevice) -> None:
        """Take all values for those of one device."""
        merged = {name: value for names in self._state_table.value_names.values() for name, value in names.items()}
        self._state_table.value_names = {device.id: merged} if merged else {}
        self._producers = dict.fromkeys(self._producers, device.id)

    def start(self) -> None:
        """Start the workers; an interrupt meanwhile ends those that have started."""
        prepare_interrupts()
        OPEN_ENGINES.add(self)
        try:
            require_interpreter()  # from here on `close_all_engines` finds this engine
            start_thread(*self._workers)
        except BaseException:
            self.abandon()
            raise

    def list_copies(self) -> tuple[CopyStatus, ...]:
        """Return the bundle as its one copy, if its own processes run it, which are opened again."""
        owner = next((device.memory.address.owner for device in self._devices.values()), "")
        if not (processes := find_processes(owner)):
            return ()
        name, is_open = ", ".join(item.device.id for item in processes), all(item.is_open for item in processes)
        last = min(processes, key=lambda process: (process.is_open, not process.last_failure))
        deaths = sum(process.death_count for process in processes)
        return (CopyStatus(name, is_open, len(self._in_flight), self._request_count, deaths, last.last_failure),)

    # -- requests ------------------------------------------------------------------------------------

    def request(
        self, feeds: Feeds, states: Collection[str], conversation: CarriedStates, future: ResultFuture | None = None
    ) -> Request:
        """Return a request, with a future if `submit` takes it, that also returns these carried states.

        Raises ExecutionError in a forked process.
        """
        request = None if future else self.idle_requests.pop("", None)
        if request is not None and request.failure is None:
            request.feeds, request.conversation, request.callers_device = feeds, conversation, ""
            request.current_steps = {}
            request.start_time = time.perf_counter()
            return request
        self._require_own_process()  # before any use of ONNX Runtime, whose locks may be held
        output_names = self._returned_names.union(states) if states else self._returned_names
        request_class = Request if self.worker is None else self.worker.request_class
        request = request_class(next(self._numbers), feeds, self._routes[0], output_names, conversation, future)
        for key, value in self._run_entries:
            request.options.add_run_config_entry(key, value)
        return request

    def _require_own_process(self) -> None:
        """Raise ExecutionError in a forked process."""
        if os.getpid() != self._process:
            raise forked_session_error(self._process, str(self.bundle.path))

    def submit(self, request: Request) -> None:
        """Hand a request to the workers; blocks while `max_in_flight` requests are in flight."""
        try:
            self._admit(request, None, None)
        except BaseException as failure:
            try:
                self._cancel(request, failure)
            except BaseException:  # an interrupt before or during `_cancel`, which may be repeated
                self._cancel(request, failure)
                raise
            raise

    def run(self, request: Request, timeout: float | None) -> Result:
        """Return the result of a request; with no other in flight, do one device's part in this thread.

        That saves waking a worker and being woken by it, about 100 us. The thread stays on its cores. With a timeout
        that is shorter than callers do parts, workers do all of them, so that this thread can stop waiting.
        """
        if isinstance(threading.current_thread(), WorkerThread):
            hint = "start it from another thread, or use run_async, whose callbacks may run the session"
            message = "run was called by a callback on a device's worker thread, which would wait for itself"
            raise ExecutionError("X006", message, where=threading.current_thread().name, hint=hint)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            does_part = timeout is None or (self.worker is not None and timeout > self.worker.callers_seconds)
            self._admit(request, self._first_device if does_part else None, deadline)
            if request.callers_device and self._lone_outputs:
                return self._run_alone(request)
            if request.callers_device:
                device = self._devices[request.callers_device]
                if self.worker is not None:
                    self.worker.run_part(request)
                else:
                    with interruptible(request.stop):
                        self._run_part(device, request)
                self.finish_part(request, device.id)
                if device.id in self._wakeup_flags:
                    self._wakeup_flags[device.id].watch(lambda: request.future.is_finished, self._wakeup_flags[CALLERS])
            return request.future.result(None if deadline is None else max(deadline - time.monotonic(), 0))
        except BaseException as failure:
            try:
                reason = self._abort_run(request, failure, timeout)
            except BaseException:  # an interrupt before or during `_cancel`, which may be repeated
                self._cancel(request, failure)
                raise
            if reason is failure:
                raise
            raise reason from None

    def _run_alone(self, request: Request) -> Result:
        """Run the only segment for a request in this thread, and end the request.

        Right after a run of ONNX Runtime, caches hold little of Python's code, which then takes ten times as long. So
        these steps are few: no program and no values on a device, and the next request takes the place of this one.
        """
        (segment,) = request.route.segments.values()
        request.current_steps[segment.device.id] = self._programs[request.route.programs[segment.device.id]][0]
        try:
            with interruptible(request.stop):
                arrays = segment.inner.run(segment.record.outputs, request.feeds, request.options)
        except Exception as problem:
            if is_foreign_error(problem) and not is_out_of_memory(problem):
                raise
            failure = describe_segment_failure(problem, segment.record, self.bundle.manifest, segment.device.id)
            raise request.failure or failure from problem
        finally:
            self._weight_files.check()
        with self.lock:
            self._in_flight.pop(request.number, None)
        self._request_changes.wake()
        if self._closed or self._in_flight:
            self._wake()
        result = Result(dict(zip(self._lone_outputs, arrays)), (), time.perf_counter() - request.start_time)
        request.feeds = {}  # the arrays belong to the caller
        if request.conversation is self.own_states:  # others may be closed, with all of their requests
            self.idle_requests[""] = request  # last, as no interrupt may end it there
        return result

    def _admit(self, request: Request, callers_device: PlacedDevice | None, deadline: float | None) -> None:
        """Put a request in flight; its caller does the part of `callers_device` if no other is in flight.

        Raises ExecutionError if the session accepts none, TimeoutError if no slot becomes free in time.
        """
        while (wakeup := self._try_admit(request, callers_device)) is not None:
            self._wake()  # workers that an interrupt kept from their token get it here
            if not wakeup.acquire(timeout=-1 if deadline is None else max(deadline - time.monotonic(), 0)):
                raise TimeoutError
        if self.worker is not None:
            self.worker.offer(request)
        elif len(self._tokens) > 1 or not request.callers_device:
            self._wake(request.callers_device)
        if not self._devices:
            self.finish_part(request, "")

    def _try_admit(self, request: Request, callers_device: PlacedDevice | None) -> threading.Lock | None:
        """Put a request in flight; returns a lock to wait for if no slot is free."""
        with self.lock:
            if self.failure is not None:
                raise self.failure
            if self._closed:
                raise ExecutionError("X002", "the session is closed", where=str(self.bundle.path))
            if (conversation := request.conversation).closed:
                hint = "open another one: session.conversation()"
                raise ExecutionError("X002", "the conversation is closed", where=str(self.bundle.path), hint=hint)
            # A callback on a worker does not wait: its own worker may have to free a slot.
            if len(self._in_flight) >= self._max_in_flight and not isinstance(threading.current_thread(), WorkerThread):
                return self._request_changes.enter()
            route = conversation.route or (self._routes[0] if len(self._routes) == 1 else self._choose_route())
            if route is not request.route:
                request.route, request.unfinished = route, set(route.programs)
            if self._state_table.value_names:
                conversation.route = route
            if callers_device is not None and not self._in_flight:
                request.callers_device = route.devices[callers_device.id]
            # No call between these, so that no interrupt of the main thread comes between them either.
            request.resets_states = conversation.reset_pending
            request.replacements = self._replacement_count
            self._in_flight[request.number] = request
            conversation.reset_pending = False
            self._request_count += 1
            return None

    def _choose_route(self) -> OpenRoute:
        """Return the route of a new request, or of a new conversation, whose states stay there."""
        # With states, conversations take routes, on which they stay; without, requests do while they are in flight.
        taken = [item.route.index for item in list(self._conversations) if item.route is not None]
        return choose_route(self._routes, taken or [request.route.index for request in self._in_flight.values()])

    def cancel(self, future: Future[Result]) -> None:
        """End the request of a future whose result is no longer wanted."""
        for request in list(self._in_flight.values()):
            if request.future is future:
                failure = ExecutionError("X011", "its caller no longer waits for it", where=str(self.bundle.path))
                self._cancel(request, failure)

    def _cancel(self, request: Request, failure: BaseException) -> None:
        """End a request that its caller abandons; workers stop at the end of a node."""
        if isinstance(failure, (KeyboardInterrupt, SystemExit)):
            failure = ExecutionError("X011", "the caller was interrupted", where=str(self.bundle.path))
        self.fail(request, failure)
        if request.callers_device:
            self.finish_part(request, request.callers_device)
        self._wake()

    def _abort_run(self, request: Request, failure: BaseException, timeout: float | None) -> BaseException:
        """End the request of a failing `run`; returns the error to raise."""
        if request.future.is_finished:
            self._wake()  # an interrupt may have kept `finish_part` from it
            return failure
        if isinstance(failure, TimeoutError):
            admitted = request.number in self._in_flight
            waiting = f"{len(self._in_flight)} requests before it are in flight"
            progress = request.describe_progress() if admitted else waiting
            failure = run_timeout_error(timeout, progress, str(self.bundle.path))
        self._cancel(request, failure)
        return failure

    # -- lost devices -------------------------------------------------------------------------------------

    def run_segment(self, device: PlacedDevice, segment: OpenSegment, values: dict[str, Any], request: Request) -> None:
        """Run one segment; if its device is lost, the fallback runs all segments of that device from then on.

        Where its values are in the host's memory, nothing else is lost, and the request goes on. Else it begins again.
        But states in the memory of the device are lost with it: it is not replaced, and its requests fail.
        """
        try:
            super().run_segment(device, segment, values, request)
        except ExecutionError as failure:
            fallback, values_remain = self._fallback, isinstance(device.memory, HostMemory)
            if fallback is None or request.failure is not None or not fallback.is_needed(device, failure):
                raise
            if self._state_table.value_names and not values_remain:
                message = f"{failure.message}; the carried states are lost with this device"
                raise ExecutionError("X016", message, where=device.id, hint="open a new session") from failure
            fallback.take_over(device, self._routes, failure)
            self._replacement_count += 1
            if not values_remain:
                self._replace_loaders(device)
                raise  # the request begins again
            super().run_segment(device, request.route.segments[segment.record.id], values, request)

    def _replace_loaders(self, device: PlacedDevice) -> None:
        """Let weights stream to the memory that a device has now."""
        for key, loader in list(self._weight_loaders.items()):
            if loader.device is device:
                loader.end()
                self._weight_loaders[key] = loader.reopen()
                self._workers.append(WorkerThread(device, self._weight_loaders[key].read, WEIGHTS_PART))
                start_thread(self._workers[-1])

    # -- conversations ------------------------------------------------------------------------------------

    def open_conversation(self) -> CarriedStates:
        """Return an own set of states; its requests do not wait for those of others."""
        self._require_own_process()
        conversation = CarriedStates(self._state_table, next(self._conversation_numbers))
        with self.lock:
            if self._closed:
                raise self.failure or ExecutionError("X002", "the session is closed", where=str(self.bundle.path))
            self._conversations.add(conversation)
        return conversation

    def reset_state(self, conversation: CarriedStates) -> None:
        """Discard states before the next request, or at once if none is in flight."""
        with self.lock:
            conversation.reset_pending = True
            if not self._is_busy(conversation):
                conversation.clear()

    def read_states(self, conversation: CarriedStates) -> dict[str, Array]:
        """Return copies of the states that requests have stored, by state input, after the requests in flight.

        Raises FeedError if the states are lost, ExecutionError after `close`.
        """
        stored, route = self.when_idle(conversation, lambda: (conversation.peek(), conversation.route))
        arrays = {}
        for home, names in self._state_table.value_names.items():
            for name in names:
                if name in stored and route is not None:
                    memory = self._devices[route.devices[home]].memory
                    arrays[name] = np.array(memory.read(memory.send(stored[name], None)))
        return arrays

    def when_idle(self, conversation: CarriedStates, act: Callable[[], T]) -> T:
        """Call a function when no request of a conversation is in flight; raises ExecutionError if it is closed."""
        self._require_own_process()
        while True:
            with self.lock:
                if self._closed or conversation.closed:
                    raise self.failure or ExecutionError("X002", "the session is closed", where=str(self.bundle.path))
                if not self._is_busy(conversation):
                    return act()
                wakeup = self._request_changes.enter()
            wakeup.acquire()

    def close_conversation(self, conversation: CarriedStates, timeout: float | None) -> None:
        """Refuse new requests of a conversation, wait at most `timeout` seconds for others, and free its states."""
        conversation.closed = True
        if os.getpid() != self._process:
            return
        with self.lock:
            if not self._is_busy(conversation):
                conversation.clear()
        if self._drain(timeout, conversation):
            with self.lock:
                conversation.clear()

    # -- the end ------------------------------------------------------------------------------------

    def close(self, timeout: float | None = None) -> None:
        """Refuse new requests, wait at most `timeout` seconds for those in flight, then end them and the workers.

        A worker that does not return from ONNX Runtime soon is left behind, with a RuntimeWarning.
        """
        self._closed = True
        if os.getpid() != self._process:
            return  # a forked process has no workers
        self._wake()
        if not self._drain(timeout):
            return
        deadline = time.monotonic() + END_GRACE_SECONDS
        for worker in self._workers:
            with suppress(RuntimeError):  # a worker that was never started
                worker.join(max(deadline - time.monotonic(), 0))
        if alive := [worker for worker in self._workers if worker.is_alive()]:
            names = ", ".join(worker.name.removeprefix("onnxplace ") for worker in alive)
            progress = "; ".join(request.describe_progress() for request in list(self._in_flight.values()))
            what = "a read" if all(worker.name.endswith(WEIGHTS_PART) for worker in alive) else "ONNX Runtime"
            message = f"{self.bundle.path}: {names} did not return from {what} ({progress or 'just ending'})"
            for request in list(self._in_flight.values()):  # their callers may wait without a timeout
                reason = ExecutionError("X002", f"the session was closed: {progress}", where=str(self.bundle.path))
                request.future.finish(None, request.failure or reason)
            warnings.warn(f"{message}; its thread is left behind", RuntimeWarning, stacklevel=3)
            return
        for route in self._routes:
            route.segments.clear()
        return_freed_memory(sum(record.weights_bytes for record in self.bundle.manifest.segments))
        self._weight_files.close()
        for conversation in list(self._conversations):
            conversation.clear()
        for device in self._devices.values():
            device.memory.close()

    def _drain(self, timeout: float | None, conversation: CarriedStates | None = None) -> bool:
        """Wait for requests in flight, of one conversation or of all; return whether this thread may wait for them."""
        with self.lock:
            self._request_changes.wake()  # callers that wait for a slot
        if isinstance(threading.current_thread(), WorkerThread):
            return False  # a callback: workers end by themselves after requests in flight, which store no states
        try:
            self._wait_for_requests(timeout, conversation)
            if self.worker is not None and conversation is None and self._in_flight:
                self.worker.give_up()
        except BaseException:  # an interrupt: do not wait for them any longer
            self.end_requests(conversation)
            raise
        return True

    def _wait_for_requests(self, timeout: float | None, conversation: CarriedStates | None = None) -> None:
        """Wait for requests in flight; ended ones get `END_GRACE_SECONDS`, and all are ended after the timeout."""
        limit = None if timeout is None else time.monotonic() + timeout
        ended = False
        while True:
            with self.lock:
                requests = self.list_in_flight(conversation)
                if not requests:
                    return
                alive = any(request.failure is None for request in requests)
                wakeup = self._request_changes.enter()
            late = limit is not None and time.monotonic() >= limit
            # Ended requests had their time: do not wait for a device that hangs.
            if ended and late:
                return
            if not ended and (late or not alive):
                ended, limit = True, time.monotonic() + END_GRACE_SECONDS
                self.end_requests(conversation)
                continue
            wakeup.acquire(timeout=-1 if limit is None else max(limit - time.monotonic(), 0))

    def end_requests(self, conversation: CarriedStates | None = None) -> None:
        """Let requests in flight fail, of one conversation or of all, without waiting for them."""
        what = "session" if conversation is None else "conversation"
        for request in self.list_in_flight(conversation):
            self.fail(request, ExecutionError("X002", f"the {what} was closed", where=str(self.bundle.path)))
        self._wake()


# Registered here, after all imports: hooks run in reverse order, so engines are closed before those of other modules.
atexit.register(close_all_engines)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=keep_sessions_in_child)
