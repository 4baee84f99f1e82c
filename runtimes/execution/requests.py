"""Requests: one set of feeds, processed by all devices of a bundle."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from onnxplace.bundle import Step
from onnxplace.devices import DeviceMemory
from onnxplace.feeds import Array
from onnxplace.ort import import_onnxruntime
from onnxplace.runtime import Event
from onnxplace.runtimes.execution.bells import Bell
from onnxplace.runtimes.execution.carried_state import CarriedStates
from onnxplace.runtimes.execution.futures import Outcome, ResultFuture
from onnxplace.runtimes.execution.routes import OpenRoute
from onnxplace.runtimes.execution.wait_list import WaitList


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
        future: ResultFuture | Outcome,
    ) -> None:
        self.number = number
        self.feeds = feeds
        self.output_names = output_names
        self.conversation = conversation
        """The states that it takes and leaves."""
        self.route = route
        self.unfinished = set(route.programs)
        """Devices that have not finished their part."""
        self.callers_device = ""
        """The device whose program the thread of the caller follows; empty if it follows none."""
        self.deliverer = ""
        """The device that finished last, whose thread completes the future."""
        self.resets_states = False
        """Whether states were reset since the previous request."""
        self.states: dict[str, Any] | None = None
        """States of the previous request, by state input; None until it is this request's turn."""
        self.next_states: dict[str, Any] = {}
        """States for the next request, by state input."""
        self.options = import_onnxruntime().RunOptions()
        """Run options of all its segments: `terminate` ends them at the next node."""
        self.future = future
        self.start_time = time.perf_counter()
        self.outputs: dict[str, Any] = {}
        self.events: list[Event] = []
        self.kept_alive: list[Any] = []
        self.checkpoints: list[tuple[DeviceMemory, str, Any]] = []
        """Memory, device and checkpoint at the end of each program whose work may not be done."""
        self.current_steps: dict[str, Step] = {}
        """The current or last step of each device of its route."""
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        # By the device whose program is followed, which is the same on all routes.
        self._arrived: dict[str, dict[str, Any]] = {home: {} for home in route.devices}
        self._wait_lists = {home: WaitList() for home in route.devices}

    def take_route(self, route: OpenRoute) -> None:
        """Take a route, before any device begins."""
        self.route = route
        self.unfinished = set(route.programs)

    def deliver(self, value_name: str, device: str, value: Any) -> None:
        """Hand a value to the device that follows the program of `device`."""
        with self._lock:
            self._arrived[device][value_name] = value
        self._wait_lists[device].wake()

    def receive(self, value_name: str, device: str, bell: Bell | None = None) -> Any:
        """Watch the bell if there is one, then sleep, until a value has arrived for a device's program.

        Raises CancelledError when the request has failed elsewhere.
        """
        arrived, wait_list = self._arrived[device], self._wait_lists[device]
        if bell is not None and value_name not in arrived:
            bell.watch(lambda: value_name in arrived or self.failure is not None)
        while True:
            with self._lock:
                if self.failure is not None:
                    raise CancelledError
                if value_name in arrived:
                    return arrived.pop(value_name)
                wakeup = wait_list.enter()
            wakeup.acquire()

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
