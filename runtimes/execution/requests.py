"""Requests, each one set of feeds for all devices of a bundle, and the states that they carry from one to the next."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import Step
from onnxplace.errors import FeedError
from onnxplace.feeds.feeds import Array, check_shape
from onnxplace.runtime.interface import Event
from onnxplace.runtimes.execution.futures import Outcome, ResultFuture, WaitList
from onnxplace.runtimes.execution.segments import OpenRoute
from onnxplace.runtimes.execution.turns import Turn
from onnxplace.runtimes.execution.wakeups import WakeupFlag
from onnxplace.target.device_memory import DeviceMemory
from onnxplace.utils.ort import import_onnxruntime

# Carried states: values that one request leaves on its device for the next.


class StateTable:
    """What a bundle says about its states; all conversations share it."""

    def __init__(self, bundle: Bundle) -> None:
        value_of = {item.name: item.value for item in bundle.manifest.outputs}
        self.inputs = {item.name: item for item in bundle.inputs}
        self._bundle = bundle
        self._initial = {item.input: item for item in bundle.manifest.states if item.initial}
        self.states = [item.name for item in bundle.state_inputs]
        self.required = [item.name for item in bundle.state_inputs if not item.optional]
        """State inputs without a default."""
        self.value_names: dict[str, dict[str, str]] = {}
        """Device -> state input -> name of the stored value."""
        for state in bundle.manifest.states:
            self.value_names.setdefault(state.device, {})[state.input] = value_of[state.output]

    def add_initial_values(
        self, names: Collection[str], values: dict[str, Any], feed: Callable[[Array, str], Any]
    ) -> None:
        """Add the initial values of states that are neither fed nor stored, as `feed` brings them to the device.

        They are mapped again each time, so that no memory is taken for them later.
        """
        for name in names:
            if name in self._initial and name not in values:
                array = self._bundle.read_initial_state(self._initial[name])
                values[name] = feed(array, self.inputs[name].dtype)


class CarriedStates:
    """The states of one conversation, stored between its requests, by state input.

    Its requests take and store them one after the other, under the lock of the engine.
    """

    def __init__(self, table: StateTable, number: int = 0) -> None:
        self._table = table
        self.number = number
        """Number of the conversation; 0 for requests outside of conversations."""
        self._stored: dict[str, Any] = {}
        self._previous: dict[str, Any] = {}
        self._lost = False
        self.keeps_previous = False
        """Whether the states that the last request has taken are kept, for a failure, or for `restore`."""
        self.change_count = 0
        """Number of requests that have stored states, without those that were undone."""
        self.reset_pending = False
        """Whether the next request starts without states."""
        self.closed = False
        """Whether no further request may begin, and the last one frees the states."""
        self.route: OpenRoute | None = None
        """The route of its first request: the states are on the devices of that route."""

    def take(self, feeds: Mapping[str, Array]) -> dict[str, Any]:
        """Remove and return the stored states that are not fed, so that they can be freed after their last use.

        Raises FeedError, and keeps the stored states, if a state has no value or does not fit the feeds.
        """
        # After a failure, a default would start again what the user believes to continue.
        needed = self._table.states if self._lost else self._table.required
        missing = [name for name in needed if name not in feeds and name not in self._stored]
        if missing:
            reason = ": the previous request failed and lost it" if self._lost else ", and none is stored"
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            hint = "feed initial values in the first call, such as bundle.zero_states(batch=1, past=0)"
            if len(self._table.required) < len(self._table.states) and self._lost:
                hint = "feed saved values, or start from the initial ones: session.reset_state()"
            raise FeedError("S007", f"no value for state input {missing[0]!r}{more}{reason}", hint=hint)
        taken = {name: value for name, value in self._stored.items() if name not in feeds}
        self._require_fit(taken, feeds)
        if self.keeps_previous:
            self._previous = self._stored
        self._stored = {}
        return taken

    def store(self, values: Mapping[str, Any]) -> None:
        """Store the states after a request."""
        self._stored, self._lost = dict(values), False
        self.change_count += 1

    def restore(self) -> None:
        """Bring back the states before the last request, which has stored its own."""
        self._stored, self._previous = self._previous, {}
        self.change_count -= 1

    def lose(self) -> None:
        """Note that a request failed that had taken the stored states; bring them back if they were kept."""
        self._stored, self._previous = self._previous, {}
        self._lost = not self.keeps_previous

    def clear(self) -> None:
        """Discard all states."""
        self._stored, self._previous, self._lost = {}, {}, False

    def peek(self) -> dict[str, Any]:
        """Return the stored states, which stay here.

        Raises FeedError if they are lost.
        """
        if self._lost:
            hint = "feed saved values, or start from the initial ones: session.reset_state()"
            raise FeedError("S007", "the states are lost: the previous request failed", hint=hint)
        return dict(self._stored)

    def _require_fit(self, taken: Mapping[str, Any], feeds: Mapping[str, Array]) -> None:
        """Raise FeedError if a stored state contradicts its input, or symbol sizes of the feeds."""
        symbols: dict[str, tuple[int, str]] = {}
        for name, array in feeds.items():
            if self._table.inputs[name].dtype.startswith("tensor("):
                check_shape(array.shape, self._table.inputs[name], symbols, f"input {name!r}")
        for name, value in taken.items():
            shape = value.shape() if callable(value.shape) else value.shape
            try:
                check_shape(tuple(shape), self._table.inputs[name], symbols, f"stored state {name!r}")
            except FeedError as problem:
                hint = "call session.reset_state(), then feed initial values"
                raise FeedError(problem.code, problem.message, where=problem.where, hint=hint) from None


# Requests: one set of feeds, processed by all devices of a bundle.


class CancelledError(Exception):
    """The request failed on another device."""


class Request:
    """One set of feeds, processed by all devices."""

    def __init__(
        self,
        number: int,
        feeds: Mapping[str, Array],
        route: OpenRoute,
        output_names: Collection[str],
        conversation: CarriedStates,
        future: ResultFuture | Outcome | None,
    ) -> None:
        self.number = number
        self.feeds = feeds
        self.output_names = output_names
        self.conversation = conversation
        """The states that it takes and leaves."""
        self.route = route
        self.options = import_onnxruntime().RunOptions()
        """Run options of all its segments: `terminate` ends them at the next node."""
        self.future: ResultFuture | Outcome = future or Outcome()
        self.start_time = time.perf_counter()
        self.replacements = 0
        """How many lost devices had been replaced when it started."""
        self._lock = threading.Lock()
        self.begin()

    def begin(self) -> None:
        """Begin, or begin again after a failure."""
        self.options.terminate = False
        self.unfinished = set(self.route.programs)
        """Devices that have not finished their part."""
        self.callers_device = ""
        """The device whose program the thread of the caller follows; empty if it follows none."""
        self.completed_by = ""
        """The device that finished last, whose thread then completes the future."""
        self.resets_states = False
        """Whether states were reset since the previous request."""
        self.states: dict[str, Any] | None = None
        """States of the previous request, by state input; None until this request is ready."""
        self.next_states: dict[str, Any] = {}
        """States for the next request, by state input."""
        self.outputs: dict[str, Any] = {}
        self.events: list[Event] = []
        self.kept_alive: list[Any] = []
        self.checkpoints: list[tuple[DeviceMemory, str, Any]] = []
        """Memory, device and checkpoint at the end of each program whose work may not be done."""
        self.current_steps: dict[str, Step] = {}
        """The current or last step of each device of its route."""
        self.failure: BaseException | None = None
        # By the device whose program is followed, which is the same on all routes.
        self._arrived: dict[str, dict[str, Any]] = {home: {} for home in self.route.devices}
        self._wait_lists = {home: WaitList() for home in self.route.devices}

    def deliver(self, value_name: str, device: str, value: Any) -> None:
        """Hand a value to the device that follows the program of `device`."""
        with self._lock:
            self._arrived[device][value_name] = value
        self._wait_lists[device].wake()

    def receive(self, value_name: str, device: str, flag: WakeupFlag | None = None) -> Any:
        """Watch the flag if there is one, then sleep, until a value has arrived for a device's program.

        Raises CancelledError when the request has failed elsewhere.
        """
        arrived, wait_list = self._arrived[device], self._wait_lists[device]
        if flag is not None and value_name not in arrived:
            flag.watch(lambda: value_name in arrived or self.failure is not None)
        while True:
            with self._lock:
                if self.failure is not None:
                    raise CancelledError
                if value_name in arrived:
                    return arrived.pop(value_name)
                wakeup = wait_list.enter()
            wakeup.acquire()

    def await_turn(self, turn: Turn, device: str) -> None:
        """Sleep until a turn of a device's program has begun; raises CancelledError when the request has failed."""
        while not turn.has_begun:
            wakeup = self._wait_lists[device].enter()  # before the checks, so that no change is missed
            if self.failure is not None:
                raise CancelledError
            if not turn.has_begun:
                wakeup.acquire()

    def wake(self, device: str) -> None:
        """Wake the thread that follows a device's program, if it waits."""
        self._wait_lists[device].wake()

    def fail(self, failure: BaseException) -> None:
        """End the request everywhere; the first failure is the one that is reported."""
        with self._lock:
            self.failure = self.failure or failure
            self.options.terminate = True
        for wait_list in self._wait_lists.values():
            wait_list.wake()

    def stop(self) -> None:
        """Let ONNX Runtime end the runs of this request at the next node."""
        self.options.terminate = True

    def describe_progress(self) -> str:
        """Return the current steps of unfinished devices, as in `cpu:0 runs segment cpu0-001`."""
        texts = []
        for device in sorted(self.unfinished):
            step = self.current_steps.get(device)
            if step is None:
                texts.append(f"{device} has not begun")
            elif step.op == "receive":
                texts.append(f"{device} waits for value {step.value!r} of {self.route.devices[step.peer]}")
            else:
                texts.append(f"{device} {step.op}s {f'segment {step.segment}' if step.segment else repr(step.value)}")
        if not texts and self.checkpoints:
            return (
                f"{', '.join(sorted(device for _, device, _ in self.checkpoints))} has not finished its enqueued work"
            )
        return ", ".join(texts) or "all devices have finished"
