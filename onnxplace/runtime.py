"""What a runtime is: something that opens a bundle and runs feeds through it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from onnxplace.bundle import Bundle
from onnxplace.feeds import Array

EventKind = Literal["run", "copy", "wait"]


@dataclass(frozen=True)
class Event:
    """Something that took time on a device, for the timeline."""

    device: str
    kind: EventKind
    name: str
    """The segment that ran, or the value that was copied or waited for."""
    start_seconds: float
    """Since the request was submitted."""
    finish_seconds: float
    request: int = 0


@dataclass(frozen=True)
class Result:
    """What one request gave."""

    outputs: Mapping[str, Any]
    """By the model's output names: numpy arrays, or ONNX Runtime's lists and maps for what is no tensor.

    Without states, unless they were asked for.
    """
    events: tuple[Event, ...]
    """What each device did, if the session was opened to trace; else empty."""
    seconds: float
    """From submission to the last output."""


class RuntimeSession(ABC):
    """An open bundle. Closing it, also by leaving a `with` block, ends all threads it started."""

    @abstractmethod
    def submit(self, feeds: Mapping[str, Array], also: Collection[str] = ()) -> Future[Result]:
        """Start a request with feeds that were checked; several may be under way, each with its own values.

        Its result has every output but states, and of these those named in `also`. Requests that pass states on run
        one after the other, in the order of submission. The future raises ExecutionError naming segment and device
        if a part fails, FeedError if a state is neither fed nor stored.
        """

    def run(self, feeds: Mapping[str, Array], also: Collection[str] = ()) -> Result:
        """Return what `submit` promises; a runtime may do a part of the work in the thread of its caller."""
        return self.submit(feeds, also).result()

    def reset_state(self) -> None:  # noqa: B027 - most bundles have no states
        """Forget states before the next request that is submitted; those under way still pass theirs on."""

    @abstractmethod
    def close(self) -> None:
        """Stop; waits for what is under way. May be called twice."""

    def __enter__(self) -> RuntimeSession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Runtime(ABC):
    """A way to run bundles. Subclasses are stateless; the registry makes one by name."""

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    keeps_state: ClassVar[bool] = False
    """Whether it stores states between requests; bundles with states are refused otherwise."""

    @abstractmethod
    def open(self, bundle: Bundle, *, trace: bool = False) -> RuntimeSession:
        """Open a bundle; raises TargetError for a device that is not here, ModelError for a segment that is refused."""
