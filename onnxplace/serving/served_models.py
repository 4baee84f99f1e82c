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
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

from onnxplace._version import __version__
from onnxplace.bundle import Bundle
from onnxplace.errors import (
    InputError,
    OnnxplaceError,
    RunTimeoutError,
    format_one_line,
    format_value,
    suggest_nearest,
)
from onnxplace.feeds import Array, Declared, random_feeds
from onnxplace.runtime import Event, Result
from onnxplace.serving.tensors import name_datatype

LOGGER = logging.getLogger("onnxplace.serving")
# The status of HTTP for each way in which a request fails, with its name in metrics.
REASONS = {
    400: "invalid",
    404: "unknown",
    408: "slow",
    413: "too_large",
    415: "encoding",
    429: "queue_full",
    499: "cancelled",
    500: "failed",
    501: "unsupported",
    503: "unavailable",
    504: "timeout",
}
VERSION = "1"
"""Of every model."""
PLATFORM = "onnxplace"
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
    if not isinstance(problem, OnnxplaceError):
        return RequestError(500, f"{type(problem).__name__}: {problem}")
    is_closed = problem.code in ("X002", "X005")  # the session, or one of its threads
    status = 400 if isinstance(problem, InputError) else 504 if isinstance(problem, RunTimeoutError) else 500
    return RequestError(503 if is_closed else status, format_one_line(problem))


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


@dataclass(frozen=True)
class InferenceRequest:
    """What a client asks for."""

    feeds: Mapping[str, Array]
    outputs: Sequence[str] = ()
    """Names; all if empty."""
    id: str = ""
    parameters: Mapping[str, Any] = field(default_factory=dict)
    """`sequence_id`, `sequence_start`, `sequence_end`, and `timeout` in microseconds."""


class ServedSession(Protocol):
    """The part of `InferenceSession` that a server uses."""

    def submit(self, input_feed: Mapping[str, Any]) -> Future[Result]: ...
    def cancel(self, future: Future[Result]) -> None: ...
    def conversation(self) -> ServedSession: ...
    def close(self, timeout: float | None = None) -> None: ...


@dataclass
class Duration:
    """How often something happened, and how long it took in all."""

    count: int = 0
    seconds: float = 0.0

    def add(self, seconds: float) -> None:
        """Count one more."""
        self.count, self.seconds = self.count + 1, self.seconds + max(seconds, 0.0)


@dataclass
class Statistics:
    """What a model has done since the server started."""

    success: Duration = field(default_factory=Duration)
    fail: Duration = field(default_factory=Duration)
    queue: Duration = field(default_factory=Duration)
    infer: Duration = field(default_factory=Duration)
    failures: Counter[str] = field(default_factory=Counter)
    """By reason."""
    executions: int = 0
    """Runs of the model: joined requests are one."""
    last_inference: float = 0.0
    """Seconds since 1970."""
    latencies: list[int] = field(default_factory=lambda: [0] * (len(LATENCY_BOUNDS) + 1))
    """Number of successful requests by the first bound that they do not exceed."""
    busy_seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    """Time that segments ran, by device."""
    last_events: tuple[Event, ...] = ()

    def end(self, seconds: float, failure: RequestError | None) -> None:
        """Count a request that has ended."""
        if failure is not None:
            self.fail.add(seconds)
            self.failures[REASONS.get(failure.status, "failed")] += 1
            return
        self.success.add(seconds)
        self.latencies[bisect.bisect_left(LATENCY_BOUNDS, seconds)] += 1

    def add_run(self, result: Result) -> None:
        """Count the run behind a result; requests that were joined share one tuple of events and end together."""
        self.last_inference = time.time()
        if not result.events or result.events is not self.last_events:
            self.executions += 1
            for event in result.events:
                if event.kind == "run":
                    self.busy_seconds[event.device] += event.finish_seconds - event.start_seconds
        self.last_events = result.events


@dataclass
class Ticket:
    """The place of a request."""

    deadline: float
    """On the clock of the event loop."""
    started: float = field(default_factory=time.perf_counter)


@dataclass
class _Conversation:
    """The states of a sequence."""

    session: ServedSession
    last_used: float


class ServedModel:
    """A bundle that is open, under the name that clients call it by.

    Args:
        name: Its name.
        bundle: The bundle.
        session: Its session, opened with `trace`.
        limits: How much it takes on.
        joined_rows: The largest batch that its requests are joined to; 1 if they are not.
    """

    def __init__(self, name: str, bundle: Bundle, session: ServedSession, limits: Limits, joined_rows: int = 1) -> None:
        self.name, self.bundle, self.session, self.limits, self.joined_rows = name, bundle, session, limits, joined_rows
        self.inputs = {item.name: item for item in bundle.inputs}
        self.outputs = {item.name: item for item in bundle.returned_outputs}
        self.statistics = Statistics()
        self.is_stopping = False
        self.open_requests = self.waiting_requests = 0
        # As many as the session takes without blocking its caller: a batch more waits while others run.
        places = limits.max_in_flight if joined_rows == 1 else (limits.max_in_flight + 1) * joined_rows
        self.places, self._slots = places, asyncio.Semaphore(places)
        self._conversations: dict[int | str, _Conversation] = {}
        """By sequence, the one that was used last at the end."""

    @contextmanager
    def admit(self) -> Iterator[Ticket]:
        """Hold a place for a request, from before its inputs are read until it is answered, and count it.

        Raises RequestError if there is none, and for any failure inside.
        """
        ticket = Ticket(asyncio.get_running_loop().time() + self.limits.timeout_seconds)
        failure: RequestError | None = None
        self.open_requests += 1
        try:
            if self.is_stopping:
                raise RequestError(503, "the server is stopping")
            if self.open_requests > self.places + self.limits.max_queue:
                message = f"{self.open_requests - 1} requests of {self.name!r} run or wait: try again later"
                raise RequestError(429, message)
            yield ticket
        except BaseException as problem:
            failure = describe_failure(problem)
            if failure.status == 500:
                LOGGER.error("%s: %s", self.name, failure, exc_info=not isinstance(problem, OnnxplaceError))
            if failure is problem or isinstance(problem, asyncio.CancelledError):
                raise
            raise failure from problem
        finally:
            self.open_requests -= 1
            self.statistics.end(time.perf_counter() - ticket.started, failure)

    async def infer(self, request: InferenceRequest, ticket: Ticket) -> dict[str, Array]:
        """Return the outputs of a request by name; raises RequestError, or an OnnxplaceError of the run."""
        for name in request.outputs:
            if name not in self.outputs:
                raise RequestError(400, f"the model has no output {name!r}: {suggest_nearest(name, self.outputs)}")
        session = self._choose_session(request.parameters)
        deadline = min(ticket.deadline, self._read_deadline(request.parameters))
        began = time.perf_counter()
        progress = f"it waits for {self.places} requests that run"
        try:
            async with asyncio.timeout_at(deadline):
                await self._wait_for_slot()
                progress, submitted = "it runs", time.perf_counter()
                result = await self._run(session, request.feeds)
        except TimeoutError:
            raise RequestError(504, f"no result within the time limit: {progress}") from None
        self.statistics.queue.add(submitted - began)
        self.statistics.infer.add(time.perf_counter() - submitted)
        self.statistics.add_run(result)
        return {name: result.outputs[name] for name in request.outputs or self.outputs}

    async def _wait_for_slot(self) -> None:
        self.waiting_requests += 1
        try:
            await self._slots.acquire()
        finally:
            self.waiting_requests -= 1

    async def _run(self, session: ServedSession, feeds: Mapping[str, Array]) -> Result:
        """Return the result of a request that has a slot; the slot is free when the devices have finished with it."""
        loop = asyncio.get_running_loop()
        try:
            future = session.submit(feeds)
        except BaseException:
            self._slots.release()
            raise
        future.add_done_callback(lambda _: loop.call_soon_threadsafe(self._slots.release))
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:  # its time is over, or its client has left
            self.session.cancel(future)
            raise

    def _read_deadline(self, parameters: Mapping[str, Any]) -> float:
        """Return when a request is to end at the latest by its own `timeout`."""
        microseconds = parameters.get("timeout", 0) or self.limits.timeout_seconds * 1e6
        if isinstance(microseconds, bool) or not isinstance(microseconds, int | float) or not 0 < microseconds < 1e12:
            raise RequestError(400, f"expected a timeout in microseconds, got {format_value(microseconds)}")
        return asyncio.get_running_loop().time() + microseconds / 1e6

    def _choose_session(self, parameters: Mapping[str, Any]) -> ServedSession:
        """Return the states of the sequence that a request belongs to, or the session of a model without states."""
        if not self.bundle.manifest.states:
            return self.session
        key, now = parameters.get("sequence_id"), asyncio.get_running_loop().time()
        if not key or isinstance(key, bool) or not isinstance(key, int | str):
            message = f"model {self.name!r} carries states: expected a sequence_id, a number or a text, not 0 or empty"
            raise RequestError(400, f"{message}, and sequence_start with the first request of a sequence")
        if parameters.get("sequence_start"):
            self._conversations.pop(key, None)
            self._make_room(now)
            self._conversations[key] = _Conversation(self.session.conversation(), now)
        if key not in self._conversations:
            message = f"sequence {format_value(key)} has not started, or made room for others: send sequence_start"
            raise RequestError(400, message)
        conversation = self._conversations.pop(key)
        if not parameters.get("sequence_end"):
            conversation.last_used = now
            self._conversations[key] = conversation
        return conversation.session

    def _make_room(self, now: float) -> None:
        """Forget sequences that have been idle for long; raises RequestError if there is no room for one more."""
        idle_since = now - max(SEQUENCE_IDLE_SECONDS, self.limits.timeout_seconds)
        idle = [key for key, item in self._conversations.items() if item.last_used < idle_since]
        for key in idle:
            del self._conversations[key]
        if len(self._conversations) >= self.limits.max_sequences:
            message = f"{len(self._conversations)} sequences of {self.name!r} are open: end one with sequence_end"
            raise RequestError(429, message)

    def warm_up(self) -> None:
        """Run the model a few times on random inputs of the sizes that it was compiled for; raises OnnxplaceError."""
        feeds = random_feeds(self.bundle.inputs, self.bundle.manifest.dimensions, 0)
        session = self.session.conversation() if self.bundle.manifest.states else self.session
        for future in [session.submit(feeds) for _ in range(WARMUP_REQUESTS)]:
            future.result(self.limits.timeout_seconds)

    # What models say of themselves, as JSON of the protocol has it.

    def describe(self) -> dict[str, Any]:
        """Return its metadata."""
        tensors = {"inputs": self.inputs, "outputs": self.outputs}
        described = {key: [_describe_tensor(item) for item in items.values()] for key, items in tensors.items()}
        return {"name": self.name, "versions": [VERSION], "platform": PLATFORM, **described}

    def describe_config(self) -> dict[str, Any]:
        """Return its configuration in Triton's form, with what clients such as perf_analyzer read."""
        inputs, outputs = (list(map(_describe_config_tensor, items.values())) for items in (self.inputs, self.outputs))
        for entry in inputs:
            if self.inputs[entry["name"]].optional:
                entry["optional"] = True
        config = {"name": self.name, "platform": PLATFORM, "backend": PLATFORM, "max_batch_size": 0}
        sequences = {"sequence_batching": {"max_sequence_idle_microseconds": int(SEQUENCE_IDLE_SECONDS * 1e6)}}
        return {**config, "input": inputs, "output": outputs, **(sequences if self.bundle.manifest.states else {})}

    def describe_statistics(self) -> dict[str, Any]:
        """Return its counts in Triton's form: times in nanoseconds, the time of the last request in milliseconds."""
        counts = self.statistics
        durations = {
            "success": counts.success,
            "fail": counts.fail,
            "queue": counts.queue,
            "compute_infer": counts.infer,
            **dict.fromkeys(("compute_input", "compute_output", "cache_hit", "cache_miss"), Duration()),
        }
        return {
            "name": self.name,
            "version": VERSION,
            "last_inference": int(counts.last_inference * 1000),
            "inference_count": counts.success.count,
            "execution_count": counts.executions,
            "inference_stats": {
                key: {"count": item.count, "ns": int(item.seconds * 1e9)} for key, item in durations.items()
            },
        }


def _describe_tensor(item: Declared) -> dict[str, Any]:
    sizes = [size if isinstance(size, int) else -1 for size in item.shape or ()]
    return {"name": item.name, "datatype": name_datatype(item.dtype), "shape": sizes}


def _describe_config_tensor(item: Declared) -> dict[str, Any]:
    described = _describe_tensor(item)
    datatype = described["datatype"].replace("BYTES", "STRING")
    return {"name": item.name, "data_type": f"TYPE_{datatype}", "dims": described["shape"]}


def refuse_extensions(parameters: Mapping[str, Any]) -> None:
    """Raise RequestError for parameters of extensions that this server does not have."""
    if "shared_memory_region" in parameters:
        raise RequestError(501, "this server has no shared memory: send tensors with the request")
    if parameters.get("classification"):
        raise RequestError(501, "this server does not classify: ask for the tensor")


class ServedModels:
    """All models of a server."""

    def __init__(self, models: Sequence[ServedModel]) -> None:
        self.models = {model.name: model for model in models}
        self.is_ready = True

    def find(self, name: str, version: str = "") -> ServedModel:
        """Return a model; raises RequestError if there is none of this name and version."""
        if name not in self.models:
            raise RequestError(404, f"there is no model {format_value(name)}: {suggest_nearest(name, self.models)}")
        if version not in ("", VERSION):
            raise RequestError(404, f"model {name!r} has version {VERSION} only, got {format_value(version)}")
        return self.models[name]

    def describe_statistics(self, name: str = "", version: str = "") -> dict[str, Any]:
        """Return the counts of a model, or of all for an empty name, in Triton's form; raises RequestError."""
        models = [self.find(name, version)] if name else self.models.values()
        return {"model_stats": [model.describe_statistics() for model in models]}

    def describe(self) -> dict[str, Any]:
        """Return the metadata of the server."""
        extensions = ["binary_tensor_data", "sequence", "statistics", "model_configuration", "model_repository"]
        return {"name": "onnxplace", "version": __version__, "extensions": extensions}

    def describe_index(self) -> list[dict[str, Any]]:
        """Return Triton's index of the models."""
        state = {"state": "READY", "reason": ""} if self.is_ready else {"state": "UNAVAILABLE", "reason": "stopping"}
        return [{"name": name, "version": VERSION, **state} for name in self.models]

    def stop(self) -> None:
        """Take no further requests."""
        self.is_ready = False
        for model in self.models.values():
            model.is_stopping = True

    def close(self) -> None:
        """Close all sessions, after the requests in flight."""
        for model in self.models.values():
            model.session.close(model.limits.timeout_seconds)


def require_servable(bundle: Bundle) -> None:
    """Raise UsageError unless all inputs and outputs are tensors, the only values that the protocol has."""
    for item in (*bundle.inputs, *bundle.returned_outputs):
        if not item.dtype.startswith("tensor("):
            message = f"{item.name!r} is {item.dtype}, and the protocol has tensors only"
            raise InputError("I015", message, where=str(bundle.path), hint="serve a model without it")
