"""The threads of an engine: workers follow programs, and completion threads wait for work that is only enqueued.

The requests in flight are one dictionary in the order of submission. A request is ready once no earlier one of its
conversation is in flight, at once if the bundle has no states. Each worker does its part of the first ready request
that still needs it. All workers follow one order, in which requests became ready, so no two wait for each other.

A device that runs ahead has a completion thread besides its worker: that waits for the enqueued work of requests, one
after the other, so that the worker can enqueue the next one meanwhile.
"""

from __future__ import annotations

import copy
import os
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, ClassVar

from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import ExecutionError, OnnxplaceError
from onnxplace.machine.ort_sessions import is_foreign_error, pin_thread
from onnxplace.runtime.interface import Result
from onnxplace.runtimes.execution.failures import describe_output_failure, describe_step_failure, is_out_of_memory
from onnxplace.runtimes.execution.futures import WaitList
from onnxplace.runtimes.execution.programs import ProgramLoop
from onnxplace.runtimes.execution.requests import CancelledError, CarriedStates, Request
from onnxplace.runtimes.execution.segments import OpenRoute, PlacedDevice
from onnxplace.runtimes.execution.wakeups import CALLERS, choose_wakeups

# Idle workers check this often whether their engine still has an owner.
OWNER_CHECK_SECONDS = 3.0


class WorkerThread(threading.Thread):
    """A thread of an engine for one device: it follows the program, or does another part of the work."""

    def __init__(self, device: PlacedDevice, work: Callable[[PlacedDevice], None], part: str = "") -> None:
        super().__init__(target=work, args=(device,), name=f"onnxplace {device.id}{part}", daemon=True)


class Worker(ABC):
    """Does all of an engine's work in place of a thread for each device, such as by messages to other processes.

    To its engine it is one device, which makes all values and has all carried states. One thread of the engine is in
    `work`; the other methods are called by any thread, also in several at once. The worker takes requests from
    `engine.next_request`, and their states by `engine.take_states`. It leaves `outputs`, `next_states` and `events` in
    a request, and ends it by `engine.finish_part`, after `engine.fail` if it has failed. It may be interrupted at any
    step in a caller's thread, and then be called again.
    """

    request_class: ClassVar[type[Request]] = Request
    callers_seconds: ClassVar[float] = float("inf")
    """How long callers do their part at most; the rest is left to `work`."""
    engine: WorkLoop
    """The engine, which sets it."""

    @abstractmethod
    def work(self, device: PlacedDevice) -> None:
        """Do the work of requests until `engine.is_finished`."""

    @abstractmethod
    def offer(self, request: Request) -> None:
        """Begin with a request that is in flight, unless its caller does so: then `run_part` follows."""

    @abstractmethod
    def run_part(self, request: Request) -> None:
        """Do what helps a request, in the thread of its caller."""

    @abstractmethod
    def wake(self) -> None:
        """Let `work` look for requests that have failed, and for the end of the engine; also called in finalizers."""

    @abstractmethod
    def finished(self, request: Request) -> bool:
        """Return whether all work of a request has ended, and keep nothing of it then."""

    @abstractmethod
    def give_up(self) -> None:
        """End all requests at once: the engine closes, and they did not end in time."""


class WorkLoop(ProgramLoop):
    """The part of an engine that its threads run."""

    def __init__(
        self,
        bundle: Bundle,
        devices: Mapping[str, PlacedDevice],
        routes: Sequence[OpenRoute],
        trace: bool,
        worker: Worker | None = None,
    ) -> None:
        super().__init__(bundle, devices, routes, trace)
        self.worker = worker
        self._process = os.getpid()
        self.lock = threading.Lock()
        """Held by whoever changes which requests are in flight, or what they wait for."""
        self._request_changes = WaitList()
        """Woken when a request ends or fails: a free slot, or the end of all."""
        self._in_flight: dict[int, Request] = {}
        self._tokens: dict[str, queue.SimpleQueue[None]] = {device: queue.SimpleQueue() for device in devices}
        """A token makes a worker look for work; a superfluous one does no harm."""
        self._enqueued: dict[str, queue.SimpleQueue[Request | None]] = {
            device.id: queue.SimpleQueue() for device in devices.values() if device.memory.runs_ahead
        }
        """Requests whose work is enqueued, by device; None makes a completion thread look whether it is needed."""
        self._wakeup_flags = choose_wakeups(devices, bundle.manifest)
        self._closed = False
        self.owner: weakref.ref[object] | None = None
        """The session that closes or abandons the engine, if there is one."""
        self.failure: ExecutionError | None = None
        """The error after which it accepts no requests; None while it works."""
        self._stored_values = {value for states in self._state_table.value_names.values() for value in states.values()}
        self.own_states = CarriedStates(self._state_table)
        """The states of requests outside of conversations."""
        self._replacement_count = 0
        """How many lost devices the fallback has replaced."""
        self._ready: list[Request] = []
        """Ready requests of bundles with states, in the order in which they became ready."""

    def work(self, device: PlacedDevice) -> None:
        """Follow the device's program, request after request, until the engine is closed."""
        tokens, request = self._tokens[device.id], None
        try:
            with pin_thread(device.cores):
                while not self.is_finished(device.id):
                    if device.id in self._wakeup_flags:
                        self._wakeup_flags[device.id].watch(lambda: not tokens.empty())
                    self._await_token(tokens)
                    while (request := self._next_request(device.id)) is not None:
                        with suppress(BaseException):  # the request has it
                            self._run_part(device, request)
                        self.finish_part(request, device.id)
        except BaseException as cause:  # noqa: BLE001 - whatever ends a thread, such as an exception set from outside
            self._mark_broken(device, cause, request)
        finally:
            for loader in self._weight_loaders.values():
                if loader.device is device:
                    loader.end()

    def _await_token(self, tokens: queue.SimpleQueue[None]) -> None:
        """Wait for a token.

        The finalizer of a session abandons its engine, but an interrupt may prevent it. So the worker checks now and
        then whether its owner still exists.
        """
        while True:
            with suppress(queue.Empty):
                return tokens.get(timeout=OWNER_CHECK_SECONDS)
            if self.owner is not None and self.owner() is None:
                self.abandon()

    def _next_request(self, device: str) -> Request | None:
        """Return the first ready request that needs a device; None if there is none, or its caller does that part."""
        request = self.next_request(lambda item: device in item.unfinished)
        return None if request is None or request.callers_device == device else request

    def next_request(self, is_wanted: Callable[[Request], bool]) -> Request | None:
        """Return the first ready request that is wanted; None if there is none."""
        with self.lock:
            ready = self._list_ready() if self._state_table.value_names else self._in_flight.values()
            return next(filter(is_wanted, ready), None)

    def _list_ready(self) -> list[Request]:
        """Return the ready requests, in the order in which they became ready; only workers call it."""
        # Of each conversation, only the oldest request in flight is ready: it takes the states that the one before has
        # stored. Ready requests stay in the list until they end, so that all workers see the same order.
        talking = {id(request.conversation) for request in self._ready}
        for request in self._in_flight.values():
            if id(request.conversation) not in talking:
                talking.add(id(request.conversation))
                self._ready.append(request)
        return self._ready

    def list_in_flight(self, conversation: CarriedStates | None = None) -> list[Request]:
        """Return the requests in flight, of one conversation or of all."""
        return [item for item in list(self._in_flight.values()) if conversation in (None, item.conversation)]

    def is_finished(self, device: str) -> bool:
        """Return whether the engine is closed and no request needs a device any more."""
        with self.lock:
            return self._closed and not any(device in request.unfinished for request in self._in_flight.values())

    def refuse(self, failure: ExecutionError) -> None:
        """Accept no requests from now on, with this error, unless there is one already."""
        self.failure = self.failure or failure
        self._closed = True

    def _mark_broken(self, device: PlacedDevice, cause: BaseException, current: Request | None) -> None:
        """Fail all requests after a worker died, also the one that it was completing: no thread may wait for it."""
        message = f"its worker died: {type(cause).__name__}: {cause}".rstrip(": ")
        self.failure = ExecutionError("X005", message, where=device.id, hint="open a new session")
        self._closed = True
        with self.lock:  # a request that is admitted meanwhile is in this list, or its caller sees the failure
            requests = list(self._in_flight.values())
        for request in requests:
            self.fail(request, self.failure)
            self.finish_part(request, device.id)
        if current is not None and current.completed_by == device.id:
            current.fail(self.failure)
            self._complete_future(current)
        self._wake()

    def _run_part(self, device: PlacedDevice, request: Request) -> None:
        """Follow a device's program for one request; an error ends the request, an interrupt is raised again."""
        try:
            self.follow_program(device, self._programs[request.route.programs[device.id]], request)
        except CancelledError:
            pass
        except OnnxplaceError as failure:
            self.fail(request, failure)
        except BaseException as failure:
            step = request.current_steps.get(device.id)
            error = describe_step_failure(failure, step, device.id)
            error.__cause__ = failure
            self.fail(request, error)
            if not isinstance(failure, Exception) or (is_foreign_error(failure) and not is_out_of_memory(failure)):
                raise

    def finish_part(self, request: Request, device: str) -> None:
        """Note that a device finished its part; the last device stores the states and completes the future."""
        if self.worker is not None and not self.worker.finished(request):
            return
        if self._turns is not None:  # an interrupt may have kept the end of a segment from it
            self._turns.leave((self, request.number, device))
        with self.lock:
            request.unfinished.discard(device)
            last = not request.unfinished and request.number in self._in_flight
            checkpoints = request.checkpoints  # which its completion thread may empty at any moment
            is_enqueued = last and bool(checkpoints) and self.failure is None
            if is_enqueued:
                self._enqueued[checkpoints[-1][1]].put(request)  # whose completion thread calls this again
            elif last and self._may_repeat(request):
                last = False
                request.begin()
                self._wake()
            elif last:
                request.completed_by = device
                self._store_states(request)
                if self._ready:
                    self._ready = [other for other in self._ready if other is not request]
                del self._in_flight[request.number]
            more = bool(self._in_flight) or self._closed
        if is_enqueued:
            if request.callers_device:  # its worker can enqueue the next request
                self._wake()
            return
        if last:
            self._request_changes.wake()
            self._complete_future(request)
            if device in self._wakeup_flags:
                self._wakeup_flags[device].plan_notification(self._wakeup_flags[CALLERS])
        if more and (self._closed or request.callers_device or (last and self._state_table.value_names)):
            self._wake()

    def _may_repeat(self, request: Request) -> bool:
        """Return whether a request without states failed while a lost device was replaced, for the first time."""
        previous, request.replacements = request.replacements, self._replacement_count
        failed = isinstance(request.failure, ExecutionError) and request.failure.code in ("X001", "X016")
        return failed and previous < self._replacement_count and not self._state_table.value_names

    def _wake(self, excluded: str = "") -> None:
        """Make all workers look for work, except that of the device `excluded`."""
        if self.worker is not None:
            if not excluded:
                self.worker.wake()
            return
        for device, tokens in self._tokens.items():
            if device != excluded:
                tokens.put(None)
                if excluded in self._wakeup_flags:
                    self._wakeup_flags[excluded].plan_notification(self._wakeup_flags[device])
        if self._closed:  # completion threads get requests as such, and only look whether they are needed any more
            for requests in self._enqueued.values():
                requests.put(None)

    def fail(self, request: Request, failure: BaseException) -> None:
        """End a request with a failure."""
        request.fail(failure)
        with self.lock:  # so that no thread is between its check and its entry in the list
            self._request_changes.wake()

    def abandon(self) -> None:
        """Let the workers end after requests in flight, without waiting: for finalizers, which may hold any lock."""
        self._closed = True
        if os.getpid() == self._process:
            self._wake()

    # -- states and results ------------------------------------------------------------------------------------

    def take_states(self, request: Request) -> dict[str, Any]:
        """Return the stored states of a ready request; each device removes its own.

        Raises FeedError if a state has no value.
        """
        if not self._state_table.value_names:
            return {}
        with self.lock:
            if request.failure is not None:
                raise CancelledError
            if request.states is None:  # the first worker takes them for all
                if request.resets_states:
                    request.conversation.clear()
                request.states = request.conversation.take(request.feeds)
            return request.states

    def _store_states(self, request: Request) -> None:
        """Store the states of a request for the next one, which begins when this one is no longer in flight."""
        conversation = request.conversation
        if not self._state_table.value_names:
            return
        if request.failure is None:
            conversation.store(request.next_states)
        elif request.states is not None:
            conversation.lose()
        if (conversation.reset_pending or conversation.closed) and not self._is_busy(conversation, request):
            conversation.clear()

    def _is_busy(self, conversation: CarriedStates, ending: Request | None = None) -> bool:
        """Return whether requests of a conversation are in flight, other than one that ends."""
        return any(item.conversation is conversation and item is not ending for item in self._in_flight.values())

    def _complete_future(self, request: Request) -> None:
        """Complete the future of a request, by its result or its failure."""
        if request.failure is not None:
            request.future.finish(None, request.failure)
            return
        outputs, name = {}, ""
        try:
            for name, value in self._outputs:
                if name in request.output_names:
                    outputs[name] = self._read_output(value, request)
        except Exception as problem:  # noqa: BLE001 - a future that is never set would hang its caller
            request.future.finish(None, describe_output_failure(problem, name))
            return
        events = tuple(sorted(request.events, key=lambda event: event.start_seconds))
        request.future.finish(Result(outputs, events, time.perf_counter() - request.start_time), None)

    def _read_output(self, value: str, request: Request) -> Any:
        """Return an output as numpy; the caller may alter it without altering feeds or stored states."""
        if value in self._inputs:
            return copy.deepcopy(request.feeds[value])
        producer = self._devices[request.route.devices[self._producers[value]]]
        array = producer.memory.read(request.outputs[value])
        return array.copy() if value in self._stored_values else array

    # -- completion threads of devices that run ahead ---------------------------------------------------------------

    def complete(self, device: PlacedDevice) -> None:
        """Wait for the enqueued work of one request after another, and finish each, until the engine is closed."""
        request = None
        try:
            while not self.is_ended():
                if (request := self._enqueued[device.id].get()) is not None:
                    self._settle(request)
                    self.finish_part(request, device.id)
                    request = None  # while this thread waits for the next one, nothing may keep its values
        except BaseException as cause:  # noqa: BLE001 - whatever ends a thread, such as an exception set from outside
            self._mark_broken(device, cause, request)
        # Requests that failed did not wait for their enqueued work, which may use what `close` frees. `close` waits for
        # this thread with a limit, so that it returns even if a device hangs.
        with suppress(Exception):
            device.memory.finish()

    def _settle(self, request: Request) -> None:
        """Wait for the enqueued work and the outputs of a request, unless it has failed; an error ends it."""
        for memory, device, checkpoint in request.checkpoints:
            if request.failure is not None:
                break
            try:
                memory.settle(checkpoint)
                home = request.route.programs[device]
                for name in [name for name in request.outputs if self._producers[name] == home]:
                    request.outputs[name] = memory.fetch(request.outputs[name])
            except OnnxplaceError as failure:
                self.fail(request, failure)
            except Exception as failure:  # noqa: BLE001 - the caller of the request gets it
                self.fail(request, describe_step_failure(failure, None, device))
        for memory, _, _ in request.checkpoints:
            with suppress(OnnxplaceError):  # of another request, which gets it itself
                memory.settle(None)  # an idle device holds nothing for copies that ended meanwhile
        request.checkpoints = []

    def is_ended(self) -> bool:
        """Return whether the engine is closed and no request is in flight."""
        with self.lock:
            return self._closed and not self._in_flight
