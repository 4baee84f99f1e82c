"""One set of feeds on its way through the devices of a bundle."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from typing import Any

from onnxplace.bundle import Step
from onnxplace.feeds import Array
from onnxplace.machine import import_onnxruntime
from onnxplace.runtime import Event
from onnxplace.runtimes.execution.futures import ResultFuture
from onnxplace.runtimes.execution.sleepers import Sleepers


class CancelledError(Exception):
    """The request failed on another device."""


class Request:
    """One set of feeds on its way through all devices."""

    def __init__(
        self, number: int, feeds: Mapping[str, Array], devices: Collection[str], wanted: Collection[str]
    ) -> None:
        self.number = number
        self.feeds = feeds
        self.wanted = wanted
        self.left = set(devices)
        """Devices that are not through with it."""
        self.callers_device = ""
        """The device whose program the thread of the caller follows; empty if it follows none."""
        self.forgets = False
        """Whether states were reset since the request before."""
        self.states: dict[str, Any] | None = None
        """What it takes over from the request before, by state input; None until it has its turn."""
        self.next_states: dict[str, Any] = {}
        """What it leaves to the next one, by state input."""
        self.options = import_onnxruntime().RunOptions()
        """Of all its runs: `terminate` ends them at the next node."""
        self.future = ResultFuture()
        self.began = time.perf_counter()
        self.outputs: dict[str, Any] = {}
        self.events: list[Event] = []
        self.held: list[Any] = []
        self.at: dict[str, Step] = {}
        """The step that each device is at, or was at last."""
        self.failure: BaseException | None = None
        self._lock = threading.Lock()
        self._arrived: dict[str, dict[str, Any]] = {device: {} for device in devices}
        self._sleepers = {device: Sleepers() for device in devices}

    def put(self, value_name: str, device: str, value: Any) -> None:
        """Hand a value over to another device."""
        with self._lock:
            self._arrived[device][value_name] = value
        self._sleepers[device].wake()

    def take(self, value_name: str, device: str) -> Any:
        """Sleep until a value has arrived; raises CancelledError when the request has failed elsewhere."""
        arrived, sleepers = self._arrived[device], self._sleepers[device]
        while True:
            with self._lock:
                if self.failure is not None:
                    raise CancelledError
                if value_name in arrived:
                    return arrived.pop(value_name)
                asleep = sleepers.enter()
            asleep.acquire()

    def fail(self, failure: BaseException) -> None:
        """End the request everywhere; the first failure is the one that is reported."""
        with self._lock:
            self.failure = self.failure or failure
            self.options.terminate = True
        for sleepers in self._sleepers.values():
            sleepers.wake()

    def stop(self) -> None:
        """Let what ONNX Runtime computes for this request fail at the next node."""
        self.options.terminate = True

    def whereabouts(self) -> str:
        """Return what the devices that are not through are at, as in `cpu:0 runs segment cpu0-001`."""
        told = []
        for device in sorted(self.left):
            step = self.at.get(device)
            if step is None:
                told.append(f"{device} has not begun")
            elif step.op == "receive":
                told.append(f"{device} waits for value {step.value!r} of {step.peer}")
            else:
                told.append(f"{device} {step.op}s {f'segment {step.segment}' if step.segment else repr(step.value)}")
        return ", ".join(told) or "no device is at it"
