"""The models of a server: places for requests, their runs, sequences with states of their own, and counts of it all.

Everything here runs on the one thread of the event loop, so that nothing needs a lock. Only sessions have threads.
"""

from __future__ import annotations

import asyncio
import bisect
import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

from onnxplace import __version__
from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import InputError, OnnxplaceError, RunTimeoutError, format_one_line, format_value, suggest_nearest
from onnxplace.feeds.feeds import Array, Declared
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.runtime.interface import CopyStatus, Event, Result
from onnxplace_serving.tensors import name_datatype, read_optional

LOGGER = logging.getLogger("onnxplace.session")
# The statuses of HTTP of requests that fail: their names in metrics, and what gRPC calls them.
STATUSES = {
    400: ("invalid", "INVALID_ARGUMENT"),
    404: ("unknown", "NOT_FOUND"),
    408: ("slow", "DEADLINE_EXCEEDED"),
    413: ("too_large", "RESOURCE_EXHAUSTED"),
    429: ("queue_full", "RESOURCE_EXHAUSTED"),
    499: ("cancelled", "CANCELLED"),
    500: ("failed", "INTERNAL"),
    503: ("unavailable", "UNAVAILABLE"),
    504: ("timeout", "DEADLINE_EXCEEDED"),
}
VERSION = "1"
"""Of every model."""
PLATFORM = "onnxplace"
EXTENSIONS = ["binary_tensor_data", "sequence", "statistics", "model_configuration", "model_repository"]
# Upper bounds of the histogram of latencies, in seconds.
LATENCY_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
# A sequence without requests for this long, or for the time limit of a request, makes room for a new one.
SEQUENCE_IDLE_SECONDS = 60.0
WARMUP_REQUESTS = 3


class RequestError(Exception):
    """Why a request is not answered: a status of HTTP, and a message for its sender."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def describe_failure(problem: BaseException) -> RequestError:
    """Return the status and message of any failure; 500 for one that is none of the sender's."""
    if isinstance(problem, RequestError):
        return problem
    if isinstance(problem, asyncio.CancelledError):
        return RequestError(499, "the client no longer waits")
    status = 400 if isinstance(problem, InputError) else 504 if isinstance(problem, RunTimeoutError) else 500
    is_known, code = isinstance(problem, OnnxplaceError), getattr(problem, "code", "")
    if code in ("X002", "X005", "X016", "K014"):  # the session is closed or broken, a process has died, no copy is left
        status = 503
    if is_known and "INVALID_ARGUMENT" in str(problem):  # ONNX Runtime refuses values, such as an index out of range
        status = 400
    if status == 500 or code == "X016":
        LOGGER.error("a request failed: %s", problem, exc_info=None if is_known else problem)
    return RequestError(status, format_one_line(problem) if is_known else f"{type(problem).__name__}: {problem}")


@dataclass(frozen=True)
class Limits:
    """How much a server takes on."""

    max_in_flight: int = 8
    """Requests, or joined batches, that run at a time, for each model."""
    max_queue: int = 128
    """Requests that wait, for each model."""
    max_request_bytes: int = 64 << 20
    timeout_seconds: float = 60.0
    """From the arrival of a request to its answer; also what requests in flight get when the server ends."""
    max_sequences: int = 64
    """Sequences that each model keeps states for."""


class ServedSession(Protocol):
    """The part of `InferenceSession` that a server uses."""

    def submit(self, input_feed: Mapping[str, Any]) -> Future[Result]: ...
    def cancel(self, future: Future[Result]) -> None: ...
    def conversation(self) -> ServedSession: ...
    def list_copies(self) -> tuple[CopyStatus, ...]: ...
    def close(self, timeout: float | None = None) -> None: ...


@dataclass
class Statistics:
    """What a model has done since the server started."""

    counts: Counter[str] = field(default_factory=Counter)
    """How often requests ended with `success` or `fail`, had to `queue`, and did `compute_infer`."""
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """How long each of these took in all."""
    failures: Counter[str] = field(default_factory=Counter)
    """By reason."""
    executions: Counter[int] = field(default_factory=Counter)
    """Runs of the model by plan: joined requests are one."""
    last_inference: float = 0.0
    """Seconds since 1970."""
    latencies: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    """Number of successful requests by the first bound that they do not exceed."""
    busy_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Time that segments ran, by device."""
    last_events: tuple[Event, ...] = ()

    def add(self, what: str, seconds: float) -> None:
        """Count one more."""
        self.counts[what] += 1
        self.seconds[what] += seconds

    def end(self, seconds: float, failure: RequestError | None) -> None:
        """Count a request that has ended."""
        self.add("fail" if failure else "success", seconds)
        if failure:
            self.failures[STATUSES[failure.status][0]] += 1
        else:
            self.latencies[bisect.bisect_left(LATENCY_BOUNDS, seconds)] += 1

    def add_run(self, result: Result) -> None:
        """Count the run behind a result; requests that were joined share one tuple of events and end together."""
        self.last_inference = time.time()
        if not result.events or result.events is not self.last_events:
            self.executions[result.plan] += 1
            for event in result.events:
                if event.kind == "run":
                    self.busy_seconds[event.device] += event.finish_seconds - event.start_seconds
        self.last_events = result.events


class ServedModel:
    """A bundle that is open, under the name that clients call it by.

    Args:
        name: Its name.
        bundle: The bundle.
        session: Its session, opened with `trace`.
        limits: How much it takes on.
        max_batch: The largest batch that its requests are joined to; 1 if they are not.
    """

    def __init__(self, name: str, bundle: Bundle, session: ServedSession, limits: Limits, max_batch: int = 1) -> None:
        self.name, self.bundle, self.session, self.limits, self.max_batch = name, bundle, session, limits, max_batch
        self.inputs = {item.name: item for item in bundle.inputs}
        self.outputs = {item.name: item for item in bundle.returned_outputs}
        self.statistics, self.is_stopping = Statistics(), False
        self.open_requests = self.waiting_requests = 0
        # As many as the session takes without blocking its caller: of joined requests, a batch waits while others run.
        self.places = limits.max_in_flight if max_batch == 1 else (limits.max_in_flight + 1) * max_batch
        self._slots = asyncio.Semaphore(self.places)
        self._conversations: dict[int | str, tuple[ServedSession, float]] = {}
        """The states of each sequence, and when it was used last; the latter in this order."""

    @contextmanager
    def admit(self) -> Iterator[float]:
        """Hold a place for a request, from before its inputs are read until it is answered, and count it.

        Yields when the request has to end, on the clock of the event loop. Raises RequestError if there is no place,
        and for any failure inside.
        """
        started, failure = asyncio.get_running_loop().time(), None
        self.open_requests += 1
        try:
            if self.is_stopping:
                raise RequestError(503, "the server is stopping")
            if self.open_requests > self.places + self.limits.max_queue:
                message = f"{self.open_requests - 1} requests of {self.name!r} run or wait: try again later"
                raise RequestError(429, message)
            yield started + self.limits.timeout_seconds
        except (Exception, asyncio.CancelledError) as problem:
            failure = describe_failure(problem)
            if failure is problem or isinstance(problem, asyncio.CancelledError):
                raise
            raise failure from problem
        finally:
            self.open_requests -= 1
            self.statistics.end(asyncio.get_running_loop().time() - started, failure)

    async def infer(
        self, feeds: Mapping[str, Array], outputs: Sequence[str], parameters: Mapping[str, Any], deadline: float
    ) -> dict[str, Array]:
        """Return the outputs of a request by name, all for no names.

        `parameters` are `sequence_id`, `sequence_start`, `sequence_end`, and `timeout` in microseconds. Raises
        RequestError, or the OnnxplaceError of the run.
        """
        for name in outputs:
            if name not in self.outputs:
                raise RequestError(400, f"the model has no output {name!r}: {suggest_nearest(name, self.outputs)}")
        loop, microseconds = asyncio.get_running_loop(), parameters.get("timeout") or self.limits.timeout_seconds * 1e6
        if type(microseconds) not in (int, float) or not 0 < microseconds < 1e12:
            raise RequestError(400, f"expected a timeout in microseconds, got {format_value(microseconds)}")
        session, arrived, progress = self._choose_session(parameters), loop.time(), "it waits for others that run"
        self.waiting_requests += 1
        try:
            async with asyncio.timeout_at(min(deadline, arrived + microseconds / 1e6)):
                try:
                    await self._slots.acquire()
                finally:
                    self.waiting_requests -= 1
                progress, submitted = "it runs", loop.time()
                result = await self._run(session, feeds)
        except TimeoutError:
            raise RequestError(504, f"no result within the time limit: {progress}") from None
        self.statistics.add("queue", submitted - arrived)
        self.statistics.add("compute_infer", loop.time() - submitted)
        self.statistics.add_run(result)
        return {name: result.outputs[name] for name in outputs or self.outputs}

    async def _run(self, session: ServedSession, feeds: Mapping[str, Array]) -> Result:
        """Return the result of a request that has a slot; the slot is free when the devices have finished with it."""
        loop = asyncio.get_running_loop()
        try:
            future = session.submit(feeds)
        except BaseException:
            self._slots.release()
            raise

        def release(_: object) -> None:
            with suppress(RuntimeError):  # the loop is closed: a second signal has ended the server
                loop.call_soon_threadsafe(self._slots.release)

        future.add_done_callback(release)
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:  # its time is over, or its client has left
            session.cancel(future)
            raise

    def _choose_session(self, parameters: Mapping[str, Any]) -> ServedSession:
        """Return the states of the sequence that a request belongs to, or the session of a model without states."""
        if not self.bundle.manifest.states:
            return self.session
        key, now = parameters.get("sequence_id"), asyncio.get_running_loop().time()
        if not key or type(key) not in (int, str):
            message = f"model {self.name!r} carries states: expected a sequence_id, a number or text, not 0 or empty"
            raise RequestError(400, f"{message}, and sequence_start with the first request of a sequence")
        is_start, is_end = (read_optional(parameters, f"sequence_{point}", False) for point in ("start", "end"))
        if is_start:
            self._conversations.pop(key, None)
            oldest = now - max(SEQUENCE_IDLE_SECONDS, self.limits.timeout_seconds)
            self._conversations = {key: item for key, item in self._conversations.items() if item[1] >= oldest}
            if len(self._conversations) >= self.limits.max_sequences:
                message = f"{len(self._conversations)} sequences of {self.name!r} are open: end one with sequence_end"
                raise RequestError(429, message)
            self._conversations[key] = self.session.conversation(), now
        if key not in self._conversations:
            message = f"sequence {format_value(key)} has not started, or made room for others: send sequence_start"
            raise RequestError(400, message)
        session, _ = self._conversations.pop(key)
        if not is_end:
            self._conversations[key] = session, now
        return session

    def warm_up(self) -> None:
        """Run the model a few times on random inputs of each size that it was compiled for; raises OnnxplaceError."""
        manifest = self.bundle.manifest
        for sizes in [item.dimensions for item in manifest.sizes if item.weight > 0] or [manifest.dimensions]:
            feeds = random_feeds(self.bundle.inputs, sizes, 0)
            session = self.session.conversation() if manifest.states else self.session
            for future in [session.submit(feeds) for _ in range(WARMUP_REQUESTS)]:
                future.result(self.limits.timeout_seconds)

    @property
    def reason(self) -> str:
        """Return why it does not answer now; empty if it does."""
        copies = self.session.list_copies()
        if self.is_stopping or not copies or any(copy.is_open for copy in copies):
            return "the server is stopping" if self.is_stopping else ""
        return "; ".join(f"{copy.name} is opened again: {copy.last_failure}" for copy in copies)

    # What a model says of itself, as JSON of the protocol has it.

    def describe(self) -> dict[str, Any]:
        """Return its metadata."""
        tensors = {"inputs": self.inputs, "outputs": self.outputs}
        described = {key: [_describe_tensor(item) for item in items.values()] for key, items in tensors.items()}
        return {"name": self.name, "versions": [VERSION], "platform": PLATFORM, **described}

    def describe_config(self) -> dict[str, Any]:
        """Return its configuration in Triton's form, with what clients such as perf_analyzer read."""
        config: dict[str, Any] = {"name": self.name, "platform": PLATFORM, "backend": PLATFORM, "max_batch_size": 0}
        for key, items in (("input", self.inputs), ("output", self.outputs)):
            config[key] = [_describe_config_tensor(item) for item in items.values()]
        if self.bundle.manifest.states:
            config["sequence_batching"] = {"max_sequence_idle_microseconds": int(SEQUENCE_IDLE_SECONDS * 1e6)}
        return config

    def describe_statistics(self) -> dict[str, Any]:
        """Return its counts in Triton's form: times in nanoseconds, the time of the last request in milliseconds."""
        counts, kinds = self.statistics, ("success", "fail", "queue", "compute_infer")
        durations = {kind: {"count": counts.counts[kind], "ns": int(counts.seconds[kind] * 1e9)} for kind in kinds}
        times = {"last_inference": int(counts.last_inference * 1000), "inference_stats": durations}
        runs = {"inference_count": counts.counts["success"], "execution_count": counts.executions.total()}
        return {"name": self.name, "version": VERSION, **runs, **times}


def _describe_tensor(item: Declared) -> dict[str, Any]:
    sizes = [size if isinstance(size, int) else -1 for size in item.shape or ()]
    return {"name": item.name, "datatype": name_datatype(item.dtype), "shape": sizes}


def _describe_config_tensor(item: Declared) -> dict[str, Any]:
    described, optional = _describe_tensor(item), {"optional": True} if item.optional else {}
    data_type = f"TYPE_{described['datatype']}".replace("BYTES", "STRING")
    return {"name": item.name, "data_type": data_type, "dims": described["shape"], **optional}


class ServedModels:
    """All models of a server."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = {model.name: model for model in models}

    def find(self, name: str, version: str = "") -> ServedModel:
        """Return a model; raises RequestError if there is none of this name and version."""
        if name not in self.models:
            raise RequestError(404, f"there is no model {format_value(name)}: {suggest_nearest(name, self.models)}")
        if version not in ("", VERSION):
            raise RequestError(404, f"model {name!r} has version {VERSION} only, got {format_value(version)}")
        return self.models[name]

    def describe(self) -> dict[str, Any]:
        """Return the metadata of the server."""
        return {"name": "onnxplace", "version": __version__, "extensions": EXTENSIONS}

    def describe_statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        """Return the counts of a model, or of all for an empty name, in Triton's form; raises RequestError."""
        models = [self.find(name, version)] if name else self.models.values()
        return {"model_stats": [model.describe_statistics() for model in models]}

    def describe_index(self) -> list[dict[str, Any]]:
        """Return Triton's index of the models."""
        states = [(name, "UNAVAILABLE" if model.reason else "READY", model) for name, model in self.models.items()]
        return [{"name": n, "version": VERSION, "state": state, "reason": model.reason} for n, state, model in states]

    @property
    def is_ready(self) -> bool:
        """Return whether all models answer."""
        return not any(model.reason for model in self.models.values())

    def stop(self) -> None:
        """Take no further requests."""
        for model in self.models.values():
            model.is_stopping = True


def require_servable(bundle: Bundle) -> None:
    """Raise InputError unless all inputs and outputs are tensors, the only values that the protocol has."""
    for item in (*bundle.inputs, *bundle.returned_outputs):
        if not item.dtype.startswith("tensor("):
            message = f"{item.name!r} is {item.dtype}, and the protocol has tensors only"
            raise InputError("I015", message, where=str(bundle.path), hint="serve a model without it")
