"""The Python face: compile a model, load a bundle, run it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, NoReturn, Unpack, cast

import numpy as np

from onnxplace.bundle import Bundle, Check
from onnxplace.driver import Compiled, CompileOptions, compile_model
from onnxplace.errors import UsageError, nearest
from onnxplace.feeds import Declared, check_feeds
from onnxplace.machine import use_custom_operators
from onnxplace.pipeline import find_plugin
from onnxplace.runtime import Event, Result, Runtime, closing_timeout, unpicklable
from onnxplace.utils import Callbacks

if TYPE_CHECKING:
    from onnx import ModelProto

__all__ = ["Compiled", "InferenceSession", "compile", "compile_model", "load"]

# What `run_async` is told from None by, which is a value that ONNX Runtime passes on.
_NO_USER_DATA: Final = object()
# Locks cannot wait longer.
MAX_TIMEOUT_SECONDS = 1e6
FeedSignature = tuple[tuple[str, "np.dtype[Any]", tuple[int, ...]], ...]
"""Name, type and shape of each array that is fed."""


def compile(  # noqa: A001
    model: str | Path | ModelProto, output: str | Path | None = None, **options: Unpack[CompileOptions]
) -> Bundle:
    """Compile an ONNX model for several devices and return the bundle written to `output`.

    `output` defaults to the model's name with `.bundle`. Options, each optional, are those of `onnxplace compile`:

    - `devices`: "cuda:0,cuda:1" or a list, of this machine; or `target`: devices that may be elsewhere; `max_memory`:
      "16GiB", or "cuda:0=16GiB,cpu:0=64GiB".
    - `shape`: {"batch": 8}, sizes of symbolic dimensions; `inputs`: arrays by name, to measure with.
    - `placer`: may carry options, "auto{seconds=10}"; default: the one for the `objective` ("latency", "throughput",
      "fit"), which may search for `budget_seconds`; `pipeline`: all passes instead, as text; `seed`.
    - `device_map`: {"encoder.*": "cpu:0"} or a file, `colocate`: regular expressions, `strict`: fail instead of leaving
      a device unused.
    - `costs`: a cost file, `save_costs`: where to write one, `cache`: whether what was measured before may be used,
      `trial`: whether the bundle is run for a moment, to predict from what its segments really take (docs/costs.md).
    - `state`: outputs that are inputs of the next call, {"present.*": "past.*"} or texts "OUT=IN", each `*` standing
      for the same text on both sides.
    - `link_weights`: leave the weights in the model's own files, in or above whose folder `output` must be; `force`:
      replace what is at `output`.
    - `custom_op_libraries`: shared libraries with operators that ONNX Runtime has not.
    - `observer`: is told of each pass before it runs: its name, its number from 0, of how many.

    Raises OnnxplaceError; nothing is left behind then.

    >>> bundle = onnxplace.compile("model.onnx", devices="cpu:0,cpu:1")  # doctest: +SKIP
    """
    return compile_model(model, output, **options).bundle


def load(path: str | Path, check: Check = "small") -> Bundle:
    """Open a bundle; raises BundleError if it is damaged, unsafe or too new. `check="all"` hashes every file."""
    return Bundle.open(path, check)


class InferenceSession:
    """Run a bundle the way ONNX Runtime runs a model; a context manager.

    >>> with onnxplace.InferenceSession("model.bundle") as session:  # doctest: +SKIP
    ...     logits, = session.run(None, {"tokens": tokens})

    States (`onnxplace compile --state OUT=IN`) stay on their devices from run to run. The first run needs to be fed
    what they begin with; a state that is fed later replaces what was stored. Runs then follow one another in the
    order of their start, also those started by `run_async` and `submit` or from several threads. A run that fails
    loses the states; one that is refused for its inputs leaves them as they were.
    """

    def __init__(
        self,
        bundle: Bundle | str | Path,
        *,
        runtime: str = "onnxruntime",
        trace: bool = False,
        custom_op_libraries: Sequence[str | Path] = (),
    ) -> None:
        self._bundle = bundle if isinstance(bundle, Bundle) else load(bundle)
        kind = cast("type[Runtime]", find_plugin("runtimes", runtime))
        if self._bundle.manifest.states and not kind.keeps_state:
            hint = "use --runtime onnxruntime, or compile without --state"
            raise UsageError("S008", f"runtime {runtime!r} keeps no states", where=str(self._bundle.path), hint=hint)
        self._takes = _make_states_optional(self._bundle)
        self._known = [item.name for item in self._bundle.outputs]
        self._returned = [item.name for item in self._bundle.returned]
        self._kept = {item.output for item in self._bundle.manifest.states}
        with use_custom_operators(custom_op_libraries):
            self._session = kind().open(self._bundle, trace=trace)
        self._events: tuple[Event, ...] = ()
        self._accepted: FeedSignature | None = None
        self._callbacks = Callbacks()

    def get_inputs(self) -> list[Declared]:
        """Return the model's inputs: name, dtype, shape."""
        return self._bundle.inputs

    def get_outputs(self) -> list[Declared]:
        """Return the outputs that `run(None, ...)` gives: name, dtype, shape. States are not among them."""
        return self._bundle.returned

    def run(
        self, output_names: Iterable[str] | None, input_feed: Mapping[str, Any], *, timeout: float | None = None
    ) -> list[Any]:
        """Return the outputs asked for (None: all but states, which must be asked for by name) for these inputs.

        Raises FeedError for inputs that do not fit, UsageError for an unknown output, ExecutionError if a part fails,
        and RunTimeoutError, which is a TimeoutError, if that takes more than `timeout` seconds: the run is given up
        then, and its devices are free again when ONNX Runtime comes to the end of the node that it is at. A timeout
        costs some 100 us, since all work is done by other threads.
        """
        names = self._names(output_names)
        result = self._run(names, input_feed, timeout)
        return [result.outputs.get(name) for name in names]

    def run_timed(
        self,
        input_feed: Mapping[str, Any],
        output_names: Iterable[str] | None = None,
        *,
        timeout: float | None = None,
    ) -> Result:
        """Return the outputs by name and the seconds it took, as `submit` does; raises what `run` raises."""
        return self._run(self._names(output_names), input_feed, timeout)

    def _run(self, names: Sequence[str], input_feed: Mapping[str, Any], timeout: float | None) -> Result:
        feeds, also = self._checked(input_feed, names)
        result = self._session.run(feeds, also, check_timeout(timeout))
        self._events = result.events  # not the outputs, which are the caller's to free
        return result

    def run_async(
        self,
        output_names: Iterable[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[..., None],
        user_data: object = _NO_USER_DATA,
    ) -> None:
        """Start a run and return; `callback(outputs, error)` is called from another thread when it is over.

        Where `user_data` is given, be it None, the callback is ONNX Runtime's: `callback(outputs, user_data, text)`,
        the text empty if all went well, the outputs if it did not. The callback may take its time, run the session
        again, or close it; what it raises goes to `threading.excepthook`, which prints it.
        """
        names = self._names(output_names)

        def over(future: Future[Result]) -> None:
            error = future.exception()
            outputs = None if error else [future.result().outputs.get(name) for name in names]
            if user_data is _NO_USER_DATA:
                callback(outputs, error)
            else:
                callback(outputs or [], user_data, str(error) if error else "")

        callbacks = self._callbacks  # and not this session, which may be forgotten meanwhile
        self.submit(input_feed, names).add_done_callback(lambda future: callbacks.call(lambda: over(future)))

    def submit(self, input_feed: Mapping[str, Any], output_names: Iterable[str] | None = None) -> Future[Result]:
        """Start a run and return a future of its Result; runs that are under way together overlap across devices.

        The result has every output but states, and of these those that are asked for. The future's own callbacks are
        called by a worker, which does nothing else meanwhile: they cannot `run` the session.
        """
        feeds, also = self._checked(input_feed, self._names(output_names))
        return self._session.submit(feeds, also) if also else self._session.submit(feeds)

    def reset_state(self) -> None:
        """Forget all states: the next run has to be fed what they begin with. Runs under way are not touched."""
        self._session.reset_state()

    def trace(self) -> dict[str, Any]:
        """Return the timeline of the last `run` as Chrome trace JSON, which Perfetto opens; needs `trace=True`."""
        from onnxplace.report import chrome_trace

        return chrome_trace(self._events, self._bundle)

    def close(self, timeout: float | None = None) -> None:
        """End all threads; waits for runs that are under way. May be called twice.

        What still runs after `timeout` seconds is ended, and fails. A thread that does not come back from ONNX Runtime
        even then, which looks up at the end of each node, is left behind with a RuntimeWarning.
        """
        self._session.close(check_timeout(timeout, least=0))
        self._callbacks.close()

    def _checked(self, input_feed: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the feeds as arrays, and the states among the outputs asked for."""
        also = [name for name in names if name in self._kept] if self._kept else []
        shown = _make_signature(input_feed)
        if shown is not None and shown == self._accepted:
            return dict(input_feed), also
        feeds = check_feeds(input_feed, self._takes)
        if shown is not None and all(feeds[name] is value for name, value in input_feed.items()):
            self._accepted = shown
        return feeds, also

    def _names(self, output_names: Iterable[str] | None) -> list[str]:
        if isinstance(output_names, str):
            hint = f"write [{output_names!r}]"
            raise UsageError("U050", f"output names are a list, not {output_names!r}", hint=hint)
        names = list(output_names or ())
        for name in names:
            if name not in self._known:
                raise UsageError("U050", f"the model has no output {name!r}", hint=nearest(name, self._known))
        return names or list(self._returned)

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(closing_timeout(kind))

    def __reduce__(self) -> NoReturn:
        raise unpicklable("an InferenceSession")

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_callbacks") and not is_finalizing():  # when modules are empty, and all threads have ended
            self._session.abandon()
            self._callbacks.close()


def check_timeout(timeout: float | None, least: float = 1e-9) -> float | None:
    """Return a timeout in seconds; raises UsageError for what is none."""
    if timeout is None:
        return None
    if isinstance(timeout, bool) or not isinstance(timeout, Real) or not least <= timeout < MAX_TIMEOUT_SECONDS:
        expected = "more than 0" if least else "0 or more"
        hint = "leave it out to wait as long as it takes"
        raise UsageError("U056", f"expected a timeout in seconds, {expected}, got {timeout!r}", hint=hint)
    return float(timeout)


def _make_signature(feeds: Mapping[str, Any]) -> FeedSignature | None:
    """Return all that `check_feeds` looks at, if they are plain arrays: what passed once need not be seen again."""
    if not isinstance(feeds, Mapping) or not all(type(value) is np.ndarray for value in feeds.values()):
        return None
    return tuple([(name, value.dtype, value.shape) for name, value in feeds.items()])


def _make_states_optional(bundle: Bundle) -> list[Declared]:
    """Return the inputs as a run takes them: states may be left out."""
    states = {item.name for item in bundle.state_inputs}
    return [replace(item, optional=True) if item.name in states else item for item in bundle.inputs]
