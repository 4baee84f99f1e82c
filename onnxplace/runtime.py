"""What a runtime is: something that opens a bundle and runs feeds through it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn

from onnxplace.bundle import Bundle
from onnxplace.errors import RunTimeoutError, UsageError
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

    def run(self, feeds: Mapping[str, Array], also: Collection[str] = (), timeout: float | None = None) -> Result:
        """Return what `submit` promises; a runtime may do a part of the work in the thread of its caller.

        Raises RunTimeoutError, and gives the request up, if there is no result within `timeout` seconds.
        """
        future = self.submit(feeds, also)
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                raise
        raise RunTimeoutError("X007", f"no result within {timeout} s", hint="allow more time")

    def reset_state(self) -> None:  # noqa: B027 - most bundles have no states
        """Forget states before the next request that is submitted; those under way still pass theirs on."""

    @abstractmethod
    def close(self, timeout: float | None = None) -> None:
        """Stop; waits for what is under way, at most `timeout` seconds, and then ends it. May be called twice."""

    def abandon(self) -> None:  # noqa: B027 - a runtime without threads has nothing to do
        """Stop without waiting for anything: the session was forgotten, and a finalizer may run anywhere."""

    def __reduce__(self) -> NoReturn:
        raise unpicklable("a session")

    def __enter__(self) -> RuntimeSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(closing_timeout(kind))


def closing_timeout(kind: type[BaseException] | None) -> float | None:
    """Return how long a `with` block that is left by this exception waits for what is under way: not if interrupted."""
    return None if kind is None or issubclass(kind, Exception) else 0.0


def unpicklable(what: str) -> UsageError:
    """Return the error for something that holds threads and devices, which no copy could have."""
    hint = "pickle the bundle, and open a session in each process"
    return UsageError("U055", f"{what} cannot be copied or pickled", hint=hint)


class Runtime(ABC):
    """A way to run bundles. Subclasses are stateless; the registry makes one by name."""

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    keeps_state: ClassVar[bool] = False
    """Whether it stores states between requests; bundles with states are refused otherwise."""

    @abstractmethod
    def open(self, bundle: Bundle, *, trace: bool = False) -> RuntimeSession:
        """Open a bundle; raises TargetError for a device that is not here, ModelError for a segment that is refused."""
