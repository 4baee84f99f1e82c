"""The interface of runtimes, which open bundles and run them with feeds."""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NoReturn, cast

from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import ExecutionError, RunTimeoutError, UsageError
from onnxplace.feeds.feeds import Array

# Requests in flight that a session accepts before it lets callers wait.
DEFAULT_MAX_IN_FLIGHT = 8

EventKind = Literal["run", "copy", "wait", "load"]


@dataclass(frozen=True)
class Event:
    """An activity of a device, for the timeline."""

    device: str
    kind: EventKind
    name: str
    """The segment that ran or whose weights were loaded or waited for, or the value that was copied or waited for."""
    start_seconds: float
    """Time since the request was submitted."""
    finish_seconds: float
    request: int = 0
    """Number of the request in its session."""
    submitted_seconds: float | None = None
    """When the request was submitted, on the clock of the runtime; None if it does not say.

    With it, the events of several requests are on one time axis.
    """
    route: int = 0
    """Index of the route that the request takes."""
    conversation: int = 0
    """Number of the request's conversation in its session; 0 outside of conversations."""
    bytes: int | None = None
    """Size of the value that was copied, or the weights that were loaded; None if the runtime does not say."""
    copy: int = 0
    """Index of the copy of the bundle that did it, in a session of several."""


@dataclass(frozen=True)
class CopyStatus:
    """A copy of a bundle in a session of several."""

    name: str
    """Its hosts, as in `node1,node2`."""
    is_open: bool
    """Whether it takes requests; one that does not is being opened again."""
    requests_in_flight: int
    requests: int
    """Number of requests that it was given, with those in flight."""
    failures: int
    """How often it was left out: it died, or could not be opened."""
    last_failure: str = ""
    """Why it was left out last, also after it is open again."""


@dataclass(frozen=True)
class Result:
    """The result of one request."""

    outputs: Mapping[str, Any]
    """Outputs by name: numpy arrays, or ONNX Runtime's lists and maps for outputs that are not tensors.

    Outputs of carried states are left out unless the request names them.
    """
    events: tuple[Event, ...]
    """Activities of all devices; empty unless the session was opened with `trace`."""
    seconds: float
    """Time from submission to the last output."""
    plan: int = 0
    """Index of the plan that ran it, of those of the bundle."""


class SessionStates:
    """The carried states of a session, or of one of its conversations, which sessions hand on as one object.

    This one is for runtimes that keep states and tell nothing of them: all methods but `reset` raise UsageError.

    Args:
        owner: Name of the session's class, for messages.
    """

    def __init__(self, owner: str = "") -> None:
        self._owner = owner

    def reset(self) -> None:
        """Forget the states before the next request; requests that already run still carry theirs."""

    def read(self) -> Mapping[str, Array]:
        """Return copies of the states that requests have stored, by state input, after those in flight.

        Raises FeedError if they are lost.
        """
        raise self._make_error("cannot read its states without a run")

    def protect(self) -> None:
        """Keep the states before each run: they are back if it fails, and after `restore`.

        That takes memory for a second set of states.
        """
        raise self._make_error("cannot bring states back after a failure")

    def restore(self) -> None:
        """Bring back the protected states before the last run that succeeded."""
        raise self._make_error("cannot bring states back")

    def count_changes(self) -> int:
        """Return how many runs have changed the states, after those in flight; a restored one does not count.

        After an interrupt it tells whether the run that was interrupted had an effect.
        """
        raise self._make_error("does not count changes of its states")

    def _make_error(self, reason: str) -> UsageError:
        return UsageError("U045", f"{self._owner} {reason}", hint="use --runtime onnxruntime")


class RuntimeSession(ABC):
    """An open bundle; closing it ends all its threads.

    Leaving a `with` block closes it, too.
    """

    @abstractmethod
    def submit(self, feeds: Mapping[str, Array], states: Collection[str] = ()) -> Future[Result]:
        """Start a request with checked feeds; several requests may run at the same time.

        Its result has every output except carried states. Of these it has those that `states` names. Requests that
        carry states run one after the other, in the order of submission, except that those of different conversations
        may overlap. The future raises ExecutionError, naming segment and device, if a segment fails, and FeedError if a
        state is neither fed nor stored.
        """

    def run(self, feeds: Mapping[str, Array], states: Collection[str] = (), timeout: float | None = None) -> Result:
        """Return the result of a request; a runtime may work in the caller's thread.

        Raises RunTimeoutError, and abandons the request, if there is no result within `timeout` seconds.
        """
        future = self.submit(feeds, states)
        try:
            return future.result(timeout)
        except TimeoutError:
            if future.done():
                raise
        raise run_timeout_error(timeout)

    def cancel(self, future: Future[Result]) -> None:  # noqa: B027 - a runtime may let such requests complete
        """End a request whose result is no longer wanted, as soon as the runtime can; never waits."""

    @property
    def states(self) -> SessionStates:
        """Return the carried states of the requests of this session."""
        return SessionStates(type(self).__name__)

    def open_conversation(self) -> RuntimeSession:
        """Return a session with its own states, over the same weights.

        Closing it waits for its own requests, frees its states, and leaves this session open. Closing this session
        closes it too. Raises UsageError if the runtime has one set of states only.
        """
        message = f"{type(self).__name__} has one set of states, and no conversations"
        hint = "use --runtime onnxruntime, or open a session for each conversation"
        raise UsageError("U045", message, hint=hint)

    @abstractmethod
    def close(self, timeout: float | None = None) -> None:
        """Wait for running requests, at most `timeout` seconds, then end them. May be called twice."""

    def abandon(self) -> None:  # noqa: B027 - a runtime without threads has nothing to do
        """Stop without waiting: the session was garbage-collected, and a finalizer may run in any thread."""

    @property
    def failure(self) -> BaseException | None:
        """Return the error after which this session runs nothing any more; None while it works."""
        return None

    def read_remote_delays(self) -> Mapping[str, int]:
        """Return, by thread of other processes that work for it, the nanoseconds for which it waited for a core."""
        return {}

    def list_copies(self) -> tuple[CopyStatus, ...]:
        """Return the copies of the bundle, if there are several."""
        return ()

    def __reduce__(self) -> NoReturn:
        raise unpicklable_error("a session")

    def __enter__(self) -> RuntimeSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(choose_closing_timeout(kind))


def choose_closing_timeout(kind: type[BaseException] | None) -> float | None:
    """Return the timeout of a `with` block left by this exception: no waiting after an interrupt.

    >>> choose_closing_timeout(None), choose_closing_timeout(KeyboardInterrupt)
    (None, 0.0)
    """
    return None if kind is None or issubclass(kind, Exception) else 0.0


def run_timeout_error(timeout: float | None, progress: str = "", where: str = "") -> RunTimeoutError:
    """Return the error of a request without a result after `timeout` seconds; `progress` says what it waits for.

    >>> run_timeout_error(0.5, "it runs in a batch of 3").message
    'no result within 0.5 s: it runs in a batch of 3'
    """
    hint = "allow more time, or find out what takes it: onnxplace bench, or run --trace"
    message = f"no result within {timeout} s" + (f": {progress}" if progress else "")
    return RunTimeoutError("X007", message, where=where, hint=hint)


def forked_session_error(process: int, where: str) -> ExecutionError:
    """Return the error for a session in a fork of the process that opened it.

    >>> forked_session_error(123, "model.bundle").message
    'the session was opened in process 123, and this is a fork of it without its threads'
    """
    message = f"the session was opened in process {process}, and this is a fork of it without its threads"
    hint = "open a session in each process, or start processes by 'spawn'"
    return ExecutionError("X006", message, where=where, hint=hint)


def unpicklable_error(what: str) -> UsageError:
    """Return the error for an object with threads and devices, which cannot be copied.

    >>> unpicklable_error("a session").message
    'a session cannot be copied or pickled'
    """
    hint = "pickle the bundle, and open a session in each process"
    return UsageError("X006", f"{what} cannot be copied or pickled", hint=hint)


class Runtime(ABC):
    """A way to run bundles; subclasses are stateless, and the registry creates them by name."""

    name: ClassVar[str]
    summary: ClassVar[str] = ""
    """One line for lists of runtimes."""
    keeps_state: ClassVar[bool] = False
    """Whether it carries states between requests; others refuse bundles with states."""

    @abstractmethod
    def open(self, bundle: Bundle, *, trace: bool = False) -> RuntimeSession:
        """Open a bundle.

        A runtime whose `submit` waits while many requests are in flight also takes `max_in_flight`, their number, by
        default `DEFAULT_MAX_IN_FLIGHT`.

        Raises:
            TargetError: for a device that this machine does not have.
            ModelError: for a segment that ONNX Runtime refuses.
        """


def open_session(runtime: Runtime, bundle: Bundle, *, trace: bool, max_in_flight: int) -> RuntimeSession:
    """Open a bundle with a bound on the requests in flight, which plugins need not have.

    Raises UsageError if the runtime has no such bound and it is not the default.
    """
    if max_in_flight == DEFAULT_MAX_IN_FLIGHT:
        return runtime.open(bundle, trace=trace)
    parameters = inspect.signature(runtime.open).parameters
    if "max_in_flight" not in parameters and all(item.kind is not item.VAR_KEYWORD for item in parameters.values()):
        message = f"runtime {runtime.name!r} has no bound on requests in flight: its `open` takes no max_in_flight"
        raise UsageError("U045", message, where=str(bundle.path), hint="leave max_in_flight out")
    session: RuntimeSession = cast("Any", runtime).open(bundle, trace=trace, max_in_flight=max_in_flight)
    return session


def make_no_outputs_error(runtime: str, where: str) -> UsageError:
    """Return the error for a runtime that computes no outputs."""
    hint = "use --runtime onnxruntime"
    return UsageError("U045", f"runtime {runtime!r} computes no outputs", where=where, hint=hint)
