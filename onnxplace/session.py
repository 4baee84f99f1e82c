"""Load a bundle and run it, without the parts of onnxplace that compile: they take four times as long to import."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, Final, NoReturn

from onnxplace.bundle import Bundle, Check
from onnxplace.drop_in import (
    FURTHER,
    RequestChecks,
    SessionMethods,
    accept_arguments,
    end_with_options,
    match_onnxruntime,
    open_bundle,
    replace_termination,
    require_run_options,
    run_with_options,
)
from onnxplace.errors import FeedError, InputError, OnnxplaceError, UsageError
from onnxplace.machine import use_custom_operators
from onnxplace.pipeline import create_runtime, is_runtime_option, list_runtime_options
from onnxplace.runtime import (
    DEFAULT_MAX_IN_FLIGHT,
    Result,
    RuntimeSession,
    choose_closing_timeout,
    unpicklable_error,
)
from onnxplace.serving import (
    Batching,
    check_in_flight,
    check_timeout,
    open_serving_session,
    stream_results,
)
from onnxplace.traces import TraceRecorder
from onnxplace.utils import Callbacks

# The default of `user_data`: None is a value that ONNX Runtime passes on.
_NO_USER_DATA: Final = object()


def load(path: str | Path, check: Check = "small") -> Bundle:
    """Open a bundle; `check="all"` hashes every file.

    Raises BundleError if it is damaged, unsafe or too new.

    >>> load("model.bundle").manifest.placer  # doctest: +SKIP
    'auto'
    """
    return Bundle.open(path, check)


class InferenceSession(SessionMethods):
    """Run a bundle the way ONNX Runtime runs a model: its constructor and methods are those of ONNX Runtime, too.

    docs/drop-in.md lists them, and what they mean for a bundle. It is a context manager.

    >>> with onnxplace.InferenceSession("model.bundle") as session:  # doctest: +SKIP
    ...     logits, = session.run(None, {"tokens": tokens})

    Carried states (`onnxplace compile --state OUT=IN`) stay on their devices between runs. The first run takes their
    initial values as inputs; a state that is an input later replaces the stored one. Runs with states follow one
    another in the order of their start, whether by `run`, `run_async` or `submit`, and from several threads. A run that
    fails loses the states. A run with refused inputs leaves them unchanged. States that are split over devices are fed
    and returned whole, under the names of the original model; `submit` and `run_timed` return their parts.
    `conversation()` returns a further set of states over the same weights.

    Args:
        path_or_bytes: A bundle, or its path.
        sess_options: ONNX Runtime's SessionOptions. `enable_profiling` and `profile_file_prefix` count. A warning lists
            others that differ from the defaults; they have no effect on a bundle.
        providers: As for ONNX Runtime; a warning says if the bundle was compiled for others.
        provider_options: As for ONNX Runtime; a warning says that they have no effect.
        runtime: Name of the runtime.
        trace: Whether requests are recorded for `trace`.
        custom_op_libraries: Shared libraries with operators that ONNX Runtime does not have.
        max_in_flight: Number of requests in flight, 1 to 1024; further ones wait until one ends.
        batching: Joins requests of several callers into one, `Batching(max_batch=8)`; see docs/serving.md.
        fallback: A device of this machine, "cpu:0", that takes over the segments of a device that is lost while the
            session is open; a FallbackWarning says so. See docs/faults.md.
        isolate: Whether each device has its own process. If a run ends that, the request fails, and all others go
            on when it is open again; `list_copies` counts the deaths. See docs/faults.md.
        further: Options of the runtime, such as `hosts`, `timeout` and `replicas` of `mpi` (`onnxplace runtimes mpi`,
            docs/hosts.md); and other keywords of ONNX Runtime, such as `enable_fallback`.
    """

    def __init__(
        self,
        path_or_bytes: Bundle | str | os.PathLike[str] | bytes,
        sess_options: Any = None,
        providers: Sequence[str | tuple[str, dict[Any, Any]]] | None = None,
        provider_options: Sequence[dict[Any, Any]] | None = None,
        *,
        runtime: str = "onnxruntime",
        trace: bool = False,
        custom_op_libraries: Sequence[str | Path] = (),
        max_in_flight: int = DEFAULT_MAX_IN_FLIGHT,
        batching: Batching | None = None,
        fallback: str | None = None,
        isolate: bool | None = None,
        **further: Any,
    ) -> None:
        max_in_flight = check_in_flight(max_in_flight, "max_in_flight")
        opened = open_bundle(path_or_bytes)
        others = [name for name in further if name not in FURTHER]
        options = {name: further.pop(name) for name in others if is_runtime_option(runtime, name)}
        known = [name for options in list_runtime_options().values() for name in options] if others else []
        self._arguments = accept_arguments(
            opened, sess_options, providers, provider_options, further, type(self), known
        )
        trace = trace or self._arguments.profile_prefix is not None
        created = create_runtime(runtime, fallback=fallback, isolate=isolate or None, **options)
        if opened.manifest.states and not created.keeps_state:
            hint = "use --runtime onnxruntime, or compile without --state"
            raise UsageError("U045", f"runtime {runtime!r} keeps no states", where=str(opened.path), hint=hint)
        with use_custom_operators(custom_op_libraries):
            session = open_serving_session(opened, created, trace, max_in_flight, batching)
            self._attach(opened, session, TraceRecorder() if trace else None, is_batched=batching is not None)

    def _attach(
        self, bundle: Bundle, session: RuntimeSession, recorder: TraceRecorder | None, *, is_batched: bool = False
    ) -> None:
        """Use an open session of a runtime."""
        self._bundle = bundle
        self._session = session
        self._checks = RequestChecks(bundle, is_batched=is_batched)
        self._split_states = self._checks.split_states
        self._recorder = recorder
        self._callbacks = Callbacks()
        self._is_closed = False

    def run(
        self,
        output_names: Iterable[str] | None,
        input_feed: Mapping[str, Any],
        run_options: Any = None,
        *,
        timeout: float | None = None,
    ) -> list[Any]:
        """Run the model and return the named outputs; None: all except states.

        Feeds are arrays, lists, or OrtValues. A run with a `timeout`, or with ONNX Runtime's RunOptions, takes some
        100 us longer, since other threads do all its work. `run_options.terminate`, set before or during the run, ends
        it; `run_options.logid` names it in the trace.

        The errors are also those of ONNX Runtime, for code that catches them: docs/drop-in.md.

        Raises:
            FeedError: the inputs do not fit.
            UsageError: an output is unknown.
            ExecutionError: a segment fails, or `run_options` ended the run.
            RunTimeoutError: the run takes more than `timeout` seconds. It is abandoned; its devices are free again at
                the end of the nodes that they execute. It is also a TimeoutError.
        """
        try:
            names = self._checks.resolve_names(output_names)
            result = self._run(self._split_states.expand_names(names), input_feed, timeout, run_options)
            return [self._split_states.find_output(result.outputs, name) for name in names]
        except OnnxplaceError as error:
            match_onnxruntime(error)
            raise

    def run_timed(
        self,
        input_feed: Mapping[str, Any],
        output_names: Iterable[str] | None = None,
        *,
        timeout: float | None = None,
    ) -> Result:
        """Run the model; return outputs by name and the time, like `submit`.

        Raises the errors of `run`.
        """
        return self._run(self._checks.resolve_parts(output_names), input_feed, timeout)

    def _run(
        self, names: Sequence[str], input_feed: Mapping[str, Any], timeout: float | None, run_options: Any = None
    ) -> Result:
        feeds, states = self._check_feeds(input_feed, names)
        timeout, called = check_timeout(timeout), time.perf_counter()
        if run_options is None:
            result = self._session.run(feeds, states, timeout)
        else:
            result = run_with_options(self._session, feeds, states, timeout, run_options)
        if self._recorder is not None:
            self._recorder.add(called, result, "" if run_options is None else run_options.logid)
        return result

    def _check_feeds(self, input_feed: Mapping[str, Any], names: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Return the feeds as arrays, and the states among the names; a closed session says so, whatever they are."""
        return ({}, []) if self._is_closed else self._checks.check_feeds(input_feed, names)

    def run_async(
        self,
        output_names: Iterable[str] | None,
        input_feed: Mapping[str, Any],
        callback: Callable[..., None],
        user_data: object = _NO_USER_DATA,
        run_options: Any = None,
    ) -> None:
        """Start a run; another thread calls `callback(outputs, error)` at its end.

        With `user_data`, even None, the callback is that of ONNX Runtime: `callback(outputs, user_data, text)`. The
        text is empty after success, the outputs are empty after a failure; feeds that do not fit are such a failure.
        The callback may block, run the session again, or close it; its exceptions go to `threading.excepthook`, which
        prints them. `run_options` are as for `run`.

        Raises the errors of `run` for unknown outputs and missing inputs, and for feeds without `user_data`.
        """
        if not callable(callback):
            raise UsageError("U054", f"expected a callback that can be called, got {callback!r}")
        has_user_data = user_data is not _NO_USER_DATA

        def report(outputs: list[Any] | None, error: BaseException | None) -> None:
            if has_user_data:
                callback(outputs or [], user_data, str(error) if error else "")
            else:
                callback(outputs, error)

        def finish(future: Future[Result], names: Sequence[str]) -> None:
            if (error := replace_termination(future.exception(), run_options)) is not None:
                report(None, error)
            else:
                report([split_states.find_output(future.result().outputs, name) for name in names], None)

        callbacks, split_states = self._callbacks, self._split_states  # a reference to this session would keep it alive
        try:
            names = self._checks.resolve_names(output_names)
            future = self._submit(input_feed, split_states.expand_names(names), run_options)
        except OnnxplaceError as error:
            match_onnxruntime(error)
            is_reported = error.code == "X014" or isinstance(error, InputError)
            if not has_user_data or not is_reported or isinstance(error, ValueError | TypeError):
                raise
            refusal = error
            callbacks.call(lambda: report(None, refusal))
            return
        if run_options is not None:
            end_with_options(self._session, future, run_options)
        future.add_done_callback(lambda future: callbacks.call(lambda: finish(future, names)))

    def submit(self, input_feed: Mapping[str, Any], output_names: Iterable[str] | None = None) -> Future[Result]:
        """Start a run and return a future.

        Runs in flight overlap across devices. The result has every output except states, and the states that are named.
        A worker calls the future's own callbacks and does nothing else meanwhile: they cannot `run` the session.
        """
        return self._submit(input_feed, self._checks.resolve_parts(output_names))

    def _submit(self, input_feed: Mapping[str, Any], names: Sequence[str], run_options: Any = None) -> Future[Result]:
        feeds, states = self._check_feeds(input_feed, names)
        if run_options is not None:
            require_run_options(run_options)
        called = time.perf_counter() if self._recorder else 0.0
        future = self._session.submit(feeds, states) if states else self._session.submit(feeds)
        if self._recorder is not None:
            tag = "" if run_options is None else run_options.logid
            future.add_done_callback(partial(self._recorder.add_future, called, tag=tag))
        return future

    def cancel(self, future: Future[Result]) -> None:
        """End a run of `submit` whose result is no longer wanted; its devices are free at the end of their nodes."""
        self._session.cancel(future)

    def stream(
        self,
        feeds: Iterable[Mapping[str, Any]],
        *,
        in_flight: int = 4,
        output_names: Iterable[str] | None = None,
    ) -> Generator[list[Any], None, None]:
        """Yield the outputs of each of many feeds, as `run` returns them, in their order.

        Up to `in_flight` requests, 1 to 1024, run at the same time. The next feeds are taken when a result is asked for
        and one of these places is free, so that `feeds` may be endless. An error is raised when its turn comes, after
        all results before it; errors of `feeds` itself too. The requests in flight are ended then, and when the
        generator is closed or forgotten.

        >>> for (logits,) in session.stream({"tokens": tokens} for tokens in batches):  # doctest: +SKIP
        ...     print(logits.shape)
        """
        if isinstance(feeds, Mapping) or not isinstance(feeds, Iterable):
            message = f"expected an iterable of feeds, one after the other, got {type(feeds).__name__}"
            raise FeedError("U054", message, hint="write [feeds], or use run")
        names, split_states = self._checks.resolve_names(output_names), self._split_states
        return stream_results(
            feeds,
            check_in_flight(in_flight, "in_flight"),
            submit=lambda item: self.submit(item, names),
            cancel=self._session.cancel,
            read=lambda result: [split_states.find_output(result.outputs, name) for name in names],
        )

    def conversation(self) -> Conversation:
        """Return a conversation: the same model and weights, with its own states.

        Runs of one conversation follow one another; runs of different conversations overlap across devices. All share
        the slots of this session for runs in flight. The session's own runs are a conversation, too.

        Raises UsageError if the runtime has one set of states only, and ExecutionError after `close`.
        """
        return Conversation(self)

    def close(self, timeout: float | None = None) -> None:
        """End all threads after the runs in flight. May be called twice.

        Runs that last longer than `timeout` seconds are stopped, and fail. ONNX Runtime stops at the end of a node; a
        thread that does not return even then is abandoned with a RuntimeWarning.
        """
        timeout = check_timeout(timeout, minimum=0)
        self._is_closed = True
        self._session.close(timeout)
        self._callbacks.close()

    def __repr__(self) -> str:
        return f"{'closed ' * self._is_closed}{type(self).__name__} of {self._bundle!r}"

    def _repr_html_(self) -> str | None:
        return self._bundle._repr_html_()

    def __enter__(self) -> InferenceSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(choose_closing_timeout(kind))

    def __reduce__(self) -> NoReturn:
        raise unpicklable_error("an InferenceSession")

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if hasattr(self, "_callbacks") and not is_finalizing():  # then modules are empty, and all threads have ended
            self._session.abandon()
            self._callbacks.close()


class Conversation(InferenceSession):
    """Carried states of their own, over the weights of an open session: see `InferenceSession.conversation`.

    It runs as a session does. The first run takes initial states as inputs, and a run that fails loses the states of
    this conversation only. `close` waits for its own runs, then frees its states; so does the end of a `with` block. A
    conversation that is dropped frees them after its runs in flight. Closing the session closes its conversations.

    >>> with session.conversation() as first, session.conversation() as second:  # doctest: +SKIP
    ...     for conversation, prompt in ((first, hello), (second, goodbye)):
    ...         conversation.submit({"tokens": prompt, **bundle.zero_states(batch=1, past=0)})
    """

    def __init__(self, session: InferenceSession) -> None:
        self._parent = session  # which would end its threads if it were collected
        self._arguments = session._arguments
        self._attach(session._bundle, session._session.open_conversation(), session._recorder)

    def __reduce__(self) -> NoReturn:
        raise unpicklable_error("a Conversation")
