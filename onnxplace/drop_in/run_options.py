"""Runs with ONNX Runtime's RunOptions: `terminate`, set before or during a run, ends it."""

from __future__ import annotations

import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from typing import Any

from onnxplace.drop_in.exceptions import argument_error
from onnxplace.errors import ExecutionError, format_value
from onnxplace.feeds import Array
from onnxplace.ort import import_onnxruntime
from onnxplace.runtime import Result, RuntimeSession, run_timeout_error
from onnxplace.utils import start_thread

# `terminate` is looked at this often: ONNX Runtime does not report that it was set.
POLL_SECONDS = 0.005


def require_run_options(options: Any) -> None:
    """Check RunOptions before a run.

    Raises UsageError, also a TypeError, for another object, and ExecutionError (X014) if `terminate` is set.
    """
    if not isinstance(options, import_onnxruntime().RunOptions):
        message = f"expected onnxruntime.RunOptions, got {format_value(options)}"
        raise argument_error(TypeError, message, where="run_options", hint="a timeout is given as timeout=5.0")
    if options.terminate:
        raise _make_termination(options)


def run_with_options(
    session: RuntimeSession,
    feeds: Mapping[str, Array],
    states: Collection[str],
    timeout: float | None,
    options: Any,
) -> Result:
    """Return the result of a request that ends when `options.terminate` is set.

    Raises:
        UsageError: the options are no RunOptions.
        ExecutionError: the run was terminated (X014), or failed.
        RunTimeoutError: there is no result within `timeout` seconds.
    """
    require_run_options(options)
    deadline = None if timeout is None else time.monotonic() + timeout
    future = session.submit(feeds, states) if states else session.submit(feeds)
    try:
        while not future.done():
            if options.terminate:
                raise _make_termination(options)
            if deadline is not None and time.monotonic() >= deadline:
                raise run_timeout_error(timeout)
            _wait(future)
        return future.result()
    except BaseException:
        session.cancel(future)
        raise


def end_with_options(session: RuntimeSession, future: Future[Result], options: Any) -> None:
    """Let a thread end a request when `options.terminate` is set."""

    def watch() -> None:
        while not future.done():
            if options.terminate:
                session.cancel(future)
                return
            _wait(future)

    start_thread(threading.Thread(target=watch, name="onnxplace run options", daemon=True))


def replace_termination(error: BaseException | None, options: Any) -> BaseException | None:
    """Return the error of a request, which is that of its termination if its options ended it."""
    is_cancelled = isinstance(error, ExecutionError) and error.code == "X011"
    return _make_termination(options) if is_cancelled and options is not None and options.terminate else error


def _wait(future: Future[Result]) -> None:
    """Wait for a result, but not long; a failure stays in the future."""
    try:
        future.exception(POLL_SECONDS)
    except TimeoutError:
        return


def _make_termination(options: Any) -> ExecutionError:
    tag = f"run {options.logid!r}: " if options.logid else ""
    hint = "set run_options.terminate = False, or use new RunOptions, for the next run"
    return ExecutionError("X014", f"{tag}it was ended by run_options.terminate", hint=hint)
