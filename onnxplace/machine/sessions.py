"""Open ONNX Runtime sessions the one way everything here does: quiet, pinned, and on the device that was asked for."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal

from onnxplace.errors import ExecutionError, ModelError, OnnxplaceError, one_line
from onnxplace.machine.hardware import import_onnxruntime
from onnxplace.machine.interrupts import interruptible, run_interruptibly
from onnxplace.machine.refusals import explain_refusal, written_folder

Level = Literal["none", "basic", "extended", "all"]
_LEVELS = {
    "none": "ORT_DISABLE_ALL",
    "basic": "ORT_ENABLE_BASIC",
    "extended": "ORT_ENABLE_EXTENDED",
    "all": "ORT_ENABLE_ALL",
}
# Idle pool threads spin this long for the next piece of work; the default burns tens of milliseconds after each run.
SPIN_MICROSECONDS = 100


_libraries: ContextVar[tuple[str, ...]] = ContextVar("custom operator libraries", default=())


@contextmanager
def use_custom_operators(libraries: Sequence[str | Path]) -> Iterator[None]:
    """Load the kernels of these shared libraries into every session whose options this thread makes inside.

    Raises ModelError for a library that is not there or that ONNX Runtime cannot load.
    """
    paths = tuple(str(Path(library).resolve()) for library in libraries)
    for path in paths:
        if not os.path.isfile(path):
            raise ModelError("M023", "there is no such library of operators", where=path)
        _register(import_onnxruntime().SessionOptions(), path)
    token = _libraries.set(tuple(dict.fromkeys((*_libraries.get(), *paths))))
    try:
        yield
    finally:
        _libraries.reset(token)


_level: ContextVar[Level] = ContextVar("optimisation of sessions", default="all")


@contextmanager
def without_optimisations() -> Iterator[None]:
    """Open sessions with ONNX Runtime's optimisations off, where this thread makes their options inside."""
    token = _level.set("none")
    try:
        yield
    finally:
        _level.reset(token)


def operator_libraries() -> tuple[str, ...]:
    """Return the libraries of custom operators that are in use here and now."""
    return _libraries.get()


def _register(options: Any, path: str) -> None:
    try:
        options.register_custom_ops_library(path)
    except Exception as problem:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        message = f"ONNX Runtime cannot load operators from it: {one_line(problem)}"
        hint = "it must be a shared library that exports RegisterCustomOps"
        raise ModelError("M023", message, where=path, hint=hint) from None


def session_options(cores: Sequence[int], level: Level | None = None, entries: Mapping[str, str] | None = None) -> Any:
    """Return options for a session that computes on `cores` only; the calling thread pins itself (`pin_thread`).

    Without a `level` everything is optimised, but within `without_optimisations`.
    """
    runtime = import_onnxruntime()
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # its failures reach us as exceptions; no second telling on stderr
    options.graph_optimization_level = getattr(runtime.GraphOptimizationLevel, _LEVELS[level or _level.get()])
    options.intra_op_num_threads = max(len(cores), 1)
    options.inter_op_num_threads = 1
    if len(cores) > 1 and hasattr(os, "sched_setaffinity"):
        # Core numbers start at 1 there, and the first core belongs to the calling thread.
        options.add_session_config_entry(
            "session.intra_op_thread_affinities", ";".join(str(core + 1) for core in cores[1:])
        )
        options.add_session_config_entry("session.intra_op.spin_duration_us", str(SPIN_MICROSECONDS))
    for key, value in (entries or {}).items():
        options.add_session_config_entry(key, value)
    for path in operator_libraries():
        _register(options, path)
    return options


_opening = 0
_ending = False
_lock = threading.Lock()


def require_interpreter() -> None:
    """Raise ExecutionError once the interpreter ends."""
    if _ending:
        raise ExecutionError("X013", "the interpreter is ending, no session is opened any more")


@contextmanager
def _opened() -> Iterator[None]:
    """Count a session that is being opened; raises ExecutionError once the interpreter ends."""
    global _opening
    with _lock:
        require_interpreter()
        _opening += 1
    try:
        yield
    finally:
        with _lock:
            _opening -= 1


@atexit.register
def end_openings(seconds: float = 10.0) -> None:
    """Open no more sessions, and wait for those on their way: Python kills threads that come back from C++ after it."""
    global _ending
    _ending, ends = True, time.monotonic() + seconds
    while _opening and time.monotonic() < ends:
        time.sleep(0.005)


def _cancel_loading(options: Any) -> None:
    if hasattr(options, "set_load_cancellation_flag"):
        options.set_load_cancellation_flag(True)


def is_foreign_error(problem: Exception) -> bool:
    """Return whether an exception cannot be ONNX Runtime's: a user's signal handler may raise in the middle of it."""
    module = type(problem).__module__.partition(".")[0]
    return isinstance(problem, OSError) or module not in ("builtins", "onnxruntime", "onnxplace")


def open_session(model: str | Path | bytes, options: Any, device_id: str = "cpu:0", where: str = "") -> Any:
    """Open a model on a device.

    Raises ModelError for what ONNX Runtime refuses, ExecutionError if it falls back or has no space to write.
    """
    kind, _, index = device_id.partition(":")
    providers: list[Any] = ["CPUExecutionProvider"]
    if kind == "cuda":
        providers.insert(0, ("CUDAExecutionProvider", {"device_id": index}))
    source = model if isinstance(model, bytes) else str(model)
    try:
        with _opened(), interruptible(lambda: _cancel_loading(options)):
            session = import_onnxruntime().InferenceSession(source, options, providers=providers)
    except OnnxplaceError:
        raise
    except Exception as problem:
        if is_foreign_error(problem):
            raise
        place = where or ("model" if isinstance(model, bytes) else str(model))
        given = model if isinstance(model, bytes) else Path(model)
        raise explain_refusal(problem, given, written_folder(options), device_id, place) from None
    if kind == "cuda" and session.get_providers()[0] != "CUDAExecutionProvider":
        raise ExecutionError("R003", f"ONNX Runtime silently fell back to the CPU instead of {device_id}", where=where)
    return session


def run_whole_model(session: Any, names: Sequence[str] | None, feeds: Mapping[str, Any], where: str) -> list[Any]:
    """Run an uncut model; raises ModelError with ONNX Runtime's own words if it cannot run with these inputs."""
    try:
        return list(run_interruptibly(session, names, dict(feeds)))
    except Exception as problem:
        if is_foreign_error(problem):
            raise
        text = one_line(problem)
        hint = "random inputs may not fit this model: give real ones with --inputs F.npz, other sizes with --shape"
        raise ModelError("M017", f"the model cannot be run with these inputs: {text}", where=where, hint=hint) from None


@contextmanager
def pin_thread(cores: Sequence[int]) -> Iterator[None]:
    """Keep the calling thread on the first of `cores` while inside."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    with suppress(OSError):  # a core that was taken away since: slower, not wrong
        os.sched_setaffinity(0, {cores[0]})
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setaffinity(0, before)
