"""Open and run ONNX Runtime sessions.

Sessions are quiet, pinned to cores, and on the given device or not opened.
"""

from __future__ import annotations

import atexit
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

from onnxplace.errors import ExecutionError, ModelError, OnnxplaceError, format_one_line, format_value
from onnxplace.machine.interrupts import interruptible
from onnxplace.machine.session_errors import explain_session_error, find_written_folder
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.kind_table import find_kind
from onnxplace.target.provider_lock import ProviderLock
from onnxplace.utils.control_groups import find_core_limit
from onnxplace.utils.ort import import_onnxruntime
from onnxplace.utils.threads import run_in_threads

# ------------------------------------------------------------------ sessions of providers that are not safe for threads


T = TypeVar("T")


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of a session, without a reference to it."""

    name: str
    type: str
    shape: list[Any]


SessionDescription = tuple[list[TensorInfo], list[TensorInfo], list[TensorInfo], list[str]]


def describe_session(session: Any) -> SessionDescription:
    """Return the description that `SessionHandle` takes, which does not refer to the session."""
    items = (session.get_inputs(), session.get_outputs(), session.get_overridable_initializers())
    inputs, outputs, more = ([TensorInfo(item.name, item.type, list(item.shape)) for item in part] for part in items)
    return inputs, outputs, more, list(session.get_providers())


class SessionHandle:
    """What a session says of itself, without a reference to it."""

    def __init__(self, description: SessionDescription) -> None:
        self._inputs, self._outputs, self._overridable, self._providers = description

    def get_inputs(self) -> list[TensorInfo]:
        """Return the required inputs."""
        return self._inputs

    def get_outputs(self) -> list[TensorInfo]:
        """Return the outputs."""
        return self._outputs

    def get_overridable_initializers(self) -> list[TensorInfo]:
        """Return the optional inputs."""
        return self._overridable

    def get_providers(self) -> list[str]:
        """Return the names of its execution providers, the preferred one first."""
        return self._providers


class GuardedSession(SessionHandle):
    """A session whose calls hold the lock of its provider, and which is freed while it is held.

    It has those of ONNX Runtime's methods that onnxplace uses. Only the lock refers to the session itself, so that no
    frame, exception or cycle of a caller can keep it and free it at another time.
    """

    def __init__(self, session: Any, lock: ProviderLock) -> None:
        super().__init__(describe_session(session))
        self.lock = lock
        self._owned = lock.own(self, session)

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any], options: Any = None) -> list[Any]:
        """Return outputs as numpy arrays."""
        return self.call(lambda session: list(session.run(names, feeds, options)))

    def run_with_ort_values(self, names: Sequence[str], feeds: Mapping[str, Any], options: Any = None) -> list[Any]:
        """Return outputs as OrtValues in the host's memory."""
        return self.call(lambda session: list(session.run_with_ort_values(names, feeds, options)))

    def end_profiling(self) -> str:
        """Return the path of the profile."""
        return self.call(lambda session: str(session.end_profiling()))

    def call(self, function: Callable[[Any], T]) -> T:
        """Call a function with the session, which it must not return, while this thread holds the lock."""
        return self.lock.call(lambda: function(self._owned[0]))

    def own(self, handle: object, value: object) -> list[Any]:
        """Let the lock own a value on the device for a handle; it is freed before this session.

        Returns a list that ends with the value, as `ProviderLock.own` does.
        """
        return self.lock.own(handle, self._owned[0], value)


# -------------------------------------------------------------------------------------------------------- open sessions


CPU = DeviceAddress("cpu", 0)
Level = Literal["none", "basic", "extended", "all"]
# Idle threads of the pool spin for this time before they sleep. The default burns tens of milliseconds after each run.
SPIN_MICROSECONDS = 100


_custom_libraries: ContextVar[tuple[str, ...]] = ContextVar("custom operator libraries", default=())


@contextmanager
def use_custom_operators(libraries: Sequence[str | Path]) -> Iterator[None]:
    """Load these libraries of kernels into sessions.

    They are loaded into each session whose options this thread creates inside.

    Raises ModelError for a library that does not exist, or that ONNX Runtime cannot load, and for a single path.
    """
    if isinstance(libraries, str | Path):
        message = f"expected a list of paths of libraries, got {format_value(str(libraries))}"
        raise ModelError("M010", message, where="custom_op_libraries", hint=f"write [{str(libraries)!r}]")
    paths = tuple(str(Path(library).resolve()) for library in libraries)
    for path in paths:
        if not os.path.isfile(path):
            hint = "give the path of a shared library with --custom-op-library"
            raise ModelError("M010", "this library of operators does not exist", where=path, hint=hint)
        _register_library(import_onnxruntime().SessionOptions(), path)
    token = _custom_libraries.set(tuple(dict.fromkeys((*_custom_libraries.get(), *paths))))
    try:
        yield
    finally:
        _custom_libraries.reset(token)


_default_level: ContextVar[Level] = ContextVar("optimisation of sessions", default="all")


@contextmanager
def without_optimisations() -> Iterator[None]:
    """Open sessions without ONNX Runtime's optimisations.

    This holds for each session whose options this thread creates inside.
    """
    token = _default_level.set("none")
    try:
        yield
    finally:
        _default_level.reset(token)


def uses_optimisations() -> bool:
    """Return whether sessions are optimised that this thread opens, as set by `without_optimisations`."""
    return _default_level.get() != "none"


def list_operator_libraries() -> tuple[str, ...]:
    """Return the libraries of custom operators in use, as set by `use_custom_operators`."""
    return _custom_libraries.get()


def _register_library(options: Any, path: str) -> None:
    try:
        options.register_custom_ops_library(path)
    except Exception as problem:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        message = f"ONNX Runtime cannot load operators from it: {format_one_line(problem)}"
        hint = "it must be a shared library that exports RegisterCustomOps"
        raise ModelError("M010", message, where=path, hint=hint) from None


def make_session_options(
    cores: Sequence[int],
    level: Level | None = None,
    entries: Mapping[str, str] | None = None,
    *,
    keeps_order: bool = False,
) -> Any:
    """Return options for a session that computes on `cores` only.

    The calling thread has to pin itself (`pin_thread`).

    Args:
        cores: Numbers of cores, the first of which belongs to the calling thread.
        level: Optimisation; by default all, except within `without_optimisations`.
        entries: Entries for the session's configuration.
        keeps_order: Compute the nodes in the order of the file, without optimisations, which move nodes and merge equal
            ones. Otherwise ONNX Runtime goes back from the last output depth first, and gradients pile up.
    """
    runtime = import_onnxruntime()
    properties: dict[str, Any] = {}
    if keeps_order:
        # Of the nodes whose inputs are there, the first in the file.
        properties["execution_order"] = runtime.ExecutionOrder.PRIORITY_BASED
        # Reuse gives large buffers to small values that live long: a step held a half more than its values.
        properties["enable_mem_reuse"] = False
        level = "none"
    properties["log_severity_level"] = 4  # failures arrive as exceptions, and need not be repeated on stderr
    level = level or _default_level.get()
    name = "ORT_DISABLE_ALL" if level == "none" else f"ORT_ENABLE_{level.upper()}"
    properties["graph_optimization_level"] = getattr(runtime.GraphOptimizationLevel, name)
    properties["intra_op_num_threads"] = max(len(cores), 1)
    properties["inter_op_num_threads"] = 1
    all_entries: dict[str, str] = {}
    if len(cores) > 1 and hasattr(os, "sched_setaffinity"):
        # The entry counts cores from 1, and leaves out the calling thread.
        affinities = ";".join(str(core + 1) for core in cores[1:])
        all_entries.update({"session.intra_op_thread_affinities": affinities} if may_pin() else {})
        all_entries["session.intra_op.spin_duration_us"] = str(SPIN_MICROSECONDS)
    return create_session_options(properties, {**all_entries, **(entries or {})}, list_operator_libraries(), cores)


@cache
def _options_class() -> Any:
    """Return a subclass of ONNX Runtime's session options, whose objects may have further attributes."""
    return type("SessionOptions", (import_onnxruntime().SessionOptions,), {})


def create_session_options(
    properties: Mapping[str, Any], entries: Mapping[str, str], libraries: Sequence[str], cores: Sequence[int]
) -> Any:
    """Return options with these properties, entries of the configuration, libraries of custom operators, and cores."""
    options = _options_class()()
    # ONNX Runtime does not tell these.
    options.entries, options.libraries, options.cores = dict(entries), tuple(libraries), tuple(cores)
    for name, value in properties.items():
        setattr(options, name, value)
    for key, value in entries.items():
        options.add_session_config_entry(key, value)
    for path in libraries:
        _register_library(options, path)
    return options


def describe_session_options(options: Any) -> tuple[Mapping[str, Any], Mapping[str, str], Sequence[str], Sequence[int]]:
    """Return the arguments of `create_session_options` for such options, also if properties were set later."""
    names = [name for name, item in vars(import_onnxruntime().SessionOptions).items() if isinstance(item, property)]
    return {name: getattr(options, name) for name in names}, options.entries, options.libraries, options.cores


_openings_under_way = 0
# If set, ONNX Runtime drops the options of a session for those that a model may have. Unset while sessions are opened.
_MODEL_OPTIONS_VARIABLE = "ORT_LOAD_CONFIG_FROM_MODEL"
_hidden: dict[str, str] = {}
# Whether the interpreter is ending, so that no session may be opened.
_is_ending = False
_lock = threading.Lock()


def require_interpreter() -> None:
    """Raise ExecutionError once the interpreter ends."""
    if _is_ending:
        hint = "open and use sessions before the program ends"
        raise ExecutionError("X006", "the interpreter is ending, so no session can be opened", hint=hint)


@contextmanager
def _count_opening() -> Iterator[None]:
    """Count a session while it is opened.

    Raises ExecutionError once the interpreter ends.
    """
    global _openings_under_way
    with _lock:
        require_interpreter()
        _openings_under_way += 1
        if _MODEL_OPTIONS_VARIABLE in os.environ:
            _hidden[_MODEL_OPTIONS_VARIABLE] = os.environ.pop(_MODEL_OPTIONS_VARIABLE)
    try:
        yield
    finally:
        with _lock:
            _openings_under_way -= 1
            if not _openings_under_way:
                os.environ.update(_hidden)
                _hidden.clear()


@atexit.register
def end_openings(seconds: float = 10.0) -> None:
    """Forbid new sessions, and wait for those that are being opened.

    After this, Python kills threads that return from C++.
    """
    global _is_ending
    _is_ending, deadline = True, time.monotonic() + seconds
    while _openings_under_way and time.monotonic() < deadline:
        time.sleep(0.005)


def _cancel_loading(options: Any) -> None:
    if hasattr(options, "set_load_cancellation_flag"):
        options.set_load_cancellation_flag(True)


class _Loads:
    """Sessions that several threads open, and give up together."""

    def __init__(self) -> None:
        self._options: list[Any] = []
        self._are_cancelled = False

    def add(self, options: Any) -> None:
        """Count a session with these options as one of them."""
        self._options.append(options)
        if self._are_cancelled:
            _cancel_loading(options)

    def cancel(self) -> None:
        """Make those under way fail soon, and later ones at once."""
        self._are_cancelled = True  # before the list is read, so that none is missed
        for options in list(self._options):
            _cancel_loading(options)


_loads: ContextVar[_Loads | None] = ContextVar("sessions that are opened together", default=None)


def open_in_threads(jobs: Sequence[Callable[[], T]]) -> list[T]:
    """Run jobs that open sessions at the same time, each in its own thread; return their results.

    Raises the OnnxplaceError of the first job in order that has one. After other errors and Ctrl-C, the other jobs give
    up their sessions.
    """
    if len(jobs) == 1:
        return [jobs[0]()]
    loads = _Loads()

    def attempt(job: Callable[[], T]) -> T | OnnxplaceError:
        _loads.set(loads)
        try:
            return job()
        except OnnxplaceError as problem:
            return problem

    attempts = run_in_threads([partial(copy_context().run, attempt, job) for job in jobs], loads.cancel)
    for item in attempts:
        if isinstance(item, OnnxplaceError):
            raise item
    return cast("list[T]", attempts)


def is_foreign_error(problem: Exception) -> bool:
    """Return whether an exception cannot be ONNX Runtime's.

    A user's signal handler may raise at any time.
    """
    module = type(problem).__module__.partition(".")[0]
    return isinstance(problem, OSError) or module not in ("builtins", "onnxruntime", "onnxplace")


def open_session(
    model: str | Path | bytes,
    options: Any,
    device: DeviceAddress = CPU,
    where: str = "",
    provider_options: Mapping[str, str] | None = None,
) -> Any:
    """Open a session in this process; arguments and errors are those of `open_session` in isolated_sessions.py."""
    kind, lock = find_kind(device.kind), find_kind(device.kind).lock
    for key, value in kind.session_entries(device).items():
        options.add_session_config_entry(key, value)

    def create() -> Any:
        source = model if isinstance(model, bytes) else str(model)
        return kind.create_session(source, options, device, provider_options or {})

    if (loads := _loads.get()) is not None:
        loads.add(options)
    try:
        with _count_opening(), interruptible(lambda: _cancel_loading(options)):
            session = create() if lock is None else lock.call(lambda: GuardedSession(create(), lock))
    except OnnxplaceError:
        raise
    except Exception as problem:
        if is_foreign_error(problem):
            raise
        place = where or ("model" if isinstance(model, bytes) else str(model))
        path_or_bytes = model if isinstance(model, bytes) else Path(model)
        raise explain_session_error(problem, path_or_bytes, find_written_folder(options), device.id, place) from None
    if session.get_providers()[0] != kind.provider(device.options):
        hint = "`onnxplace devices` says why a GPU cannot be used"
        raise ExecutionError("R001", f"ONNX Runtime fell back to the CPU, expected {device.id}", where=where, hint=hint)
    return session


def list_taken_nodes(session: Any, device: DeviceAddress) -> frozenset[str]:
    """Return the names of the nodes that a device's provider took; the CPU computes the others of the session.

    The session must have been opened with the entry `session.record_ep_graph_assignment_info` = 1.
    """
    if isinstance(session, GuardedSession):
        return session.call(lambda inner: list_taken_nodes(inner, device))
    provider = find_kind(device.kind).provider(device.options)
    groups = session.get_provider_graph_assignment_info()
    names = (node.name for group in groups if group.ep_name == provider for node in group.get_nodes())
    # A convolution whose layout was changed for the provider has a new name.
    return frozenset(item for name in names for item in (name, re.sub(r"_token_\d+$", "", name)))


def may_pin() -> bool:
    """Return whether threads can be kept on cores; all containers with a quota would take the same ones."""
    return hasattr(os, "sched_setaffinity") and math.isinf(find_core_limit())


@contextmanager
def pin_thread(cores: Sequence[int]) -> Iterator[None]:
    """Keep the calling thread on the first of `cores` while inside."""
    if not cores or not may_pin():
        yield
        return
    previous = os.sched_getaffinity(0)
    with suppress(OSError):  # a core that is no longer available: slower, but not wrong
        os.sched_setaffinity(0, {cores[0]})
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, previous)
