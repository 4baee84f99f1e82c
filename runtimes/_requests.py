"""One set of feeds on its way through the devices of a bundle."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any

from onnxplace.feeds import Array
from onnxplace.runtime import Event, Result
from onnxplace.runtimes._states import States


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
        self.turn: threading.Event | None = None
        """Set when the request before is over; None where requests may overlap."""
        self.over: threading.Event | None = None
        """Set when this request is over, for the next one."""
        self.here = False
        """Whether the caller's own thread follows one device's program."""
        self.forgets = False
        """Whether states were reset since the request before."""
        self.left: dict[str, Any] = {}
        """What is to be stored, by state input."""
        self.future: Future[Result] = Future()
        self.future.set_running_or_notify_cancel()  # what is under way cannot be cancelled
        self.began = time.perf_counter()
        self.outputs: dict[str, Any] = {}
        self.events: list[Event] = []
        self.held: list[Any] = []
        self._left = len(devices)
        self._states: dict[str, Any] | None = None
        self._lock = threading.Lock()
        self._arrived: dict[str, dict[str, Any]] = {device: {} for device in devices}
        self._changed = {device: threading.Condition(self._lock) for device in devices}
        self.failure: BaseException | None = None

    def begin(self, states: States) -> dict[str, Any]:
        """Wait for its turn, then return the states it takes over: a device takes its own out of there.

        Raises FeedError if a state has no value.
        """
        if self.turn is None:
            return {}
        self.turn.wait()
        with self._lock:  # whichever worker comes first takes them for all
            if self.failure is not None:
                raise CancelledError
            if self._states is None:
                if self.forgets:
                    states.clear()
                self._states = states.take(self.feeds)
            return self._states

    @property
    def took_states(self) -> bool:
        return self._states is not None

    def put(self, value_name: str, device: str, value: Any) -> None:
        """Hand a value over to another device."""
        with self._lock:
            self._arrived[device][value_name] = value
            self._changed[device].notify()

    def take(self, value_name: str, device: str) -> Any:
        """Sleep until a value has arrived; raises CancelledError when the request has failed elsewhere."""
        arrived, changed = self._arrived[device], self._changed[device]
        with changed:
            while self.failure is None and value_name not in arrived:
                changed.wait()
            if self.failure is not None:
                raise CancelledError
            return arrived.pop(value_name)

    def fail(self, failure: BaseException) -> None:
        """End the request everywhere; the first failure is the one that is reported."""
        with self._lock:
            self.failure = self.failure or failure
            for changed in self._changed.values():
                changed.notify()

    def done(self) -> bool:
        """Count a device as through; True for the last one."""
        with self._lock:
            self._left -= 1
            return self._left <= 0
