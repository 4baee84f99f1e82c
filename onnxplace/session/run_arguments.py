"""The arguments of a run: feeds, names of outputs, and RunOptions."""

from __future__ import annotations

import ctypes
import sys
import threading
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.split_states import SplitStates
from onnxplace.errors import ExecutionError, FeedError, UsageError, format_names, format_value, suggest_nearest
from onnxplace.feeds.feeds import Array, check_feeds
from onnxplace.machine.ort_values import is_native_array, to_ort_value, to_python
from onnxplace.runtime.interface import Result, RuntimeSession, run_timeout_error
from onnxplace.session.exceptions import also_raise_as, argument_error
from onnxplace.utils.ort import import_onnxruntime
from onnxplace.utils.threads import start_thread

# OrtValues as feeds and as results.
#
# An OrtValue that is made of an array borrows its memory, and an array that is made of an OrtValue borrows from there.
# Here each keeps alive what it borrows from, or owns a copy.


class _Borrowed:
    """The memory of an array, for numpy, together with the OrtValue that owns it."""

    def __init__(self, array: Any, owner: Any) -> None:
        self.__array_interface__ = array.__array_interface__
        self.owner = owner


def unwrap_ort_values(feeds: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return feeds with arrays, or lists of arrays, in place of OrtValues; tensors on the CPU are not copied.

    Raises FeedError for sparse tensors.
    """
    ort_value = getattr(sys.modules.get("onnxruntime"), "OrtValue", None)  # before its import, there is no OrtValue
    if ort_value is None or not isinstance(feeds, Mapping):
        return feeds
    return {name: _to_array(name, value) if isinstance(value, ort_value) else value for name, value in feeds.items()}


def _to_array(name: str, value: Any) -> Any:
    if value.is_sparse_tensor():
        message, hint = "expected a dense tensor, got a sparse one", "give it as an array"
        raise FeedError("F003", message, where=f"input {name!r}", hint=hint)
    array = to_python(value)
    return np.asarray(_Borrowed(array, value)) if is_native_array(array) else array


def to_owned_ort_value(value: Any, declared: str) -> Any:
    """Return an output as an OrtValue that owns its memory; None for an absent optional.

    `declared` is its type in the model, which an empty list needs.
    """
    result = to_ort_value(value, declared)
    if result is None or not result.is_tensor() or result.data_type() == "tensor(string)":
        return result
    owned = import_onnxruntime().OrtValue.ortvalue_from_shape_and_type(result.shape(), result.element_type())
    ctypes.memmove(owned.data_ptr(), result.data_ptr(), result.tensor_size_in_bytes())
    return owned


# What a session checks before a request: the names of outputs, and the feeds.

FeedSignature = tuple[tuple[str, "np.dtype[Any]", tuple[int, ...]], ...]
"""Name, type and shape of each input array."""


class RequestChecks:
    """The inputs and outputs of a bundle, and what was found right in an earlier request."""

    def __init__(self, bundle: Bundle, *, is_batched: bool = False) -> None:
        self.split_states = SplitStates(bundle.manifest)
        states = {item.name for item in bundle.state_inputs}
        self._run_inputs = [replace(item, optional=True) if item.name in states else item for item in bundle.inputs]
        self._output_names = [item.name for item in bundle.outputs]
        self._returned_names = [item.name for item in bundle.returned_outputs]
        self._state_outputs = {item.output for item in bundle.manifest.states}
        self._is_strict = is_batched or bundle.manifest.has_equal_sizes
        self._is_split = bool(self.split_states)
        self._accepted_signature: FeedSignature | None = None
        self._labels = bundle.manifest.training.labels if bundle.manifest.training else ()
        # Of texts and labels, the content is checked too, so that nothing is known of those of the next request.
        self._can_repeat = not self._labels and not any("string" in item.dtype for item in bundle.inputs)

    def check_feeds(self, input_feed: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the feeds as arrays, and the states among the output names; raises FeedError."""
        states = [name for name in names if name in self._state_outputs] if self._state_outputs else []
        if self._is_split and isinstance(input_feed, Mapping):
            input_feed = self.split_states.cut_feeds(unwrap_ort_values(input_feed))
        signature = _make_signature(input_feed)
        if signature is not None and signature == self._accepted_signature:
            return dict(input_feed), states
        given = input_feed if signature else unwrap_ort_values(input_feed)
        feeds = check_feeds(given, self._run_inputs, strict=self._is_strict)
        for labels in self._labels:
            labels.check(feeds)
        is_unchanged = signature is not None and all(feeds[name] is value for name, value in input_feed.items())
        if self._can_repeat and is_unchanged:
            self._accepted_signature = signature
        return feeds, states

    def resolve_parts(self, output_names: Iterable[str] | None) -> list[str]:
        """Return the names of outputs, with those of parts in place of states that are split over devices."""
        return self.split_states.expand_names(self.resolve_names(output_names))

    def resolve_names(self, output_names: Iterable[str] | None) -> list[str]:
        """Return the names of outputs, by default of all except states; raises UsageError for an unknown one."""
        if output_names is None:
            return self._returned_names
        if isinstance(output_names, str | Mapping) or not isinstance(output_names, Iterable):
            hint = f"write [{output_names!r}]" if isinstance(output_names, str) else "None stands for all outputs"
            raise _make_kind_error(f"expected a list of output names, got {format_value(output_names)}", hint)
        names = list(output_names)
        if bad := [name for name in names if not isinstance(name, str)]:
            message = f"expected texts as names of outputs, got {format_value(bad[0])}"
            raise _make_kind_error(message, f"known: {format_names(self._output_names, quoted=False)}")
        for name in names:
            if name not in self._output_names and not self.split_states.expand_names([name])[1:]:
                raise UsageError(
                    "F001", f"the model has no output {name!r}", hint=suggest_nearest(name, self._output_names)
                )
        return names or self._returned_names


def _make_kind_error(message: str, hint: str) -> UsageError:
    """Return the error for names of outputs of a wrong kind, for which ONNX Runtime raises TypeError."""
    return also_raise_as(UsageError("F001", message, hint=hint), TypeError)


_ARRAYS = frozenset({np.ndarray})


def _make_signature(feeds: Mapping[str, Any]) -> FeedSignature | None:
    """Return all that `check_feeds` checks, if all feeds are plain arrays.

    A signature that passed once need not be checked again.
    """
    if not isinstance(feeds, (dict, Mapping)) or not _ARRAYS.issuperset(map(type, feeds.values())):
        return None
    return tuple([(name, value.dtype, value.shape) for name, value in feeds.items()])


# Runs with ONNX Runtime's RunOptions: `terminate`, set before or during a run, ends it.

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
