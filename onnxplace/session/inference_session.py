"""Load a bundle and run it, without the parts of onnxplace that compile: they take four times as long to import."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import Any, Final, NoReturn

import numpy as np

from onnxplace.bundle.bundle import WHOLE_MODEL_FILE, Bundle, Check
from onnxplace.errors import FeedError, InputError, OnnxplaceError, UsageError
from onnxplace.feeds.feeds import Declared
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options, use_custom_operators
from onnxplace.machine.ort_values import to_python
from onnxplace.model_metadata import ModelMetadata
from onnxplace.pipeline.registry import create_runtime, is_runtime_option, list_options
from onnxplace.runtime.chrome_format import chrome_trace, read_segment_nodes
from onnxplace.runtime.interface import (
    DEFAULT_MAX_IN_FLIGHT,
    CopyStatus,
    Result,
    RuntimeSession,
    choose_closing_timeout,
    unpicklable_error,
)
from onnxplace.runtime.timelines import MAX_TRACED_REQUESTS, RequestTimeline, TraceRecorder, predict_timelines
from onnxplace.session.batched_session import Batching, check_in_flight, check_timeout, open_serving_session
from onnxplace.session.exceptions import also_raise_as, argument_error, match_onnxruntime
from onnxplace.session.io_binding import IOBinding
from onnxplace.session.run_arguments import (
    RequestChecks,
    end_with_options,
    replace_termination,
    require_run_options,
    run_with_options,
    to_owned_ort_value,
)
from onnxplace.session.session_arguments import FURTHER, accept_arguments, list_providers, open_bundle, warn_ignored
from onnxplace.session.streams import stream_results
from onnxplace.utils.files import write_file
from onnxplace.utils.ort import import_onnxruntime
from onnxplace.utils.threads import Callbacks

# The default of `user_data`: None is a value that ONNX Runtime passes on.
_NO_USER_DATA: Final = object()


def load(path: str | Path, check: Check = "small") -> Bundle:
    """Open a bundle; `check="all"` hashes every file.

    Raises BundleError if it is damaged, unsafe or too new.

    >>> load("model.bundle").manifest.placer  # doctest: +SKIP
    'auto'
    """
    return Bundle.open(path, check)


# Inputs and outputs of a bundle, described as ONNX Runtime describes those of a model.


@dataclass(frozen=True, eq=False)
class NodeArg:
    """An input or output, with the attributes and the text of `onnxruntime.NodeArg`.

    >>> print(NodeArg("x", "tensor(float)", ["batch", 64]))
    NodeArg(name='x', type='tensor(float)', shape=['batch', 64])
    """

    name: str
    type: str
    """ONNX Runtime's name of the type: `tensor(float)`, `seq(tensor(int64))`."""
    shape: list[int | str | None]
    """Sizes, names of symbolic dimensions, and None for an unknown size.

    It is empty for a scalar, for an unknown rank, and for values that are no tensors.
    """


def _describe(item: Declared) -> NodeArg:
    return NodeArg(item.name, item.dtype, list(item.shape or ()))


class InferenceSession:
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
            session is open; a FallbackWarning reports it. See docs/faults.md.
        isolate: Whether each device has its own process. If a run ends that, the request fails, and all others go
            on when it is open again; `list_copies` counts the deaths. See docs/faults.md.
        warmup: Whether all plans of a bundle for several sizes are opened at once, instead of at their first use.
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
        warmup: bool = False,
        **further: Any,
    ) -> None:
        max_in_flight = check_in_flight(max_in_flight, "max_in_flight")
        with ExitStack() as failure:
            with open_bundle(path_or_bytes) as opened:
                others = [name for name in further if name not in FURTHER]
                options = {name: further.pop(name) for name in others if is_runtime_option(runtime, name)}
                known = chain.from_iterable(list_options("runtime_options").values() if others else ())
                self._arguments = accept_arguments(
                    opened, sess_options, providers, provider_options, further, type(self), known
                )
                trace = trace or self._arguments.profile_prefix is not None
                created = create_runtime(runtime, fallback=fallback, isolate=isolate or None, **options)
                if opened.manifest.states and not created.keeps_state:
                    hint = "use --runtime onnxruntime, or compile without --state"
                    raise UsageError("U045", f"runtime {runtime!r} keeps no states", where=str(opened.path), hint=hint)
                with use_custom_operators(custom_op_libraries):
                    session = open_serving_session(opened, created, trace, max_in_flight, batching, warmup)
                failure.callback(session.abandon)  # if the hash of a file turns out to be wrong
            failure.pop_all()
        self._attach(opened, session, TraceRecorder() if trace else None, is_batched=batching is not None)

    def _attach(
        self, bundle: Bundle, session: RuntimeSession, recorder: TraceRecorder | None, *, is_batched: bool = False
    ) -> None:
        """Use an open session of a runtime."""
        self._bundle = bundle
        self._session = session
        self._checks = RequestChecks(bundle, is_batched=is_batched)
        self._check_feeds = self._checks.check_feeds
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
            return self._split_states.find_outputs(result.outputs, names)
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
        timeout, called = None if timeout is None else check_timeout(timeout), time.perf_counter()
        if run_options is None:
            result = self._session.run(feeds, states, timeout)
        else:
            result = run_with_options(self._session, feeds, states, timeout, run_options)
        if self._recorder is not None:
            self._recorder.add(called, result, "" if run_options is None else run_options.logid)
        return result

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
                report(split_states.find_outputs(future.result().outputs, names), None)

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
            read=lambda result: split_states.find_outputs(result.outputs, names),
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
        self._is_closed, self._check_feeds = True, lambda input_feed, names: ({}, [])  # its runs report that first
        self._session.close(timeout)
        self._callbacks.close()

    # -- states, timelines and copies of the bundle ----------------------------------------------------

    def reset_state(self) -> None:
        """Forget all states; the next run takes initial values as inputs.

        Runs in flight are not affected.
        """
        self._session.states.reset()

    def read_states(self) -> dict[str, Any]:
        """Return copies of the current states by state input, after the runs in flight; no run is needed.

        States that are split over devices are whole. States that no run has computed have their initial values, or are
        missing if they have none.

        Raises FeedError after a run that lost the states, and UsageError if the runtime cannot read them.
        """
        states = {**self._bundle.initial_states(), **self._session.states.read()}
        return self._split_states.join_feeds({name: np.array(array) for name, array in states.items()})

    def protect_states(self) -> None:
        """Keep the states before each run: they are back if it fails, and after `restore_states`.

        That takes memory for a second set of states.
        """
        self._session.states.protect()

    def restore_states(self) -> None:
        """Bring back the states before the last run that succeeded, once; they have to be protected."""
        self._session.states.restore()

    def count_state_changes(self) -> int:
        """Return how many runs have changed the states, after the runs in flight; a restored one does not count.

        After an interrupt it tells whether the run that was interrupted had an effect.
        """
        return self._session.states.count_changes()

    def trace(self, last: int = MAX_TRACED_REQUESTS) -> dict[str, Any]:
        """Return the timelines of the last requests, 1 to 1000, as Chrome trace JSON; needs `trace=True`.

        It has the requests that have succeeded, also those of conversations. Next to them it has the prediction for
        requests that are submitted at the same times. Perfetto opens it, too (docs/traces.md).

        >>> Path("trace.json").write_text(json.dumps(session.trace()))  # doctest: +SKIP
        """
        count = check_in_flight(last, "last", MAX_TRACED_REQUESTS)
        if self._recorder is None:
            hint = "InferenceSession(bundle, trace=True)"
            raise UsageError("U042", "this session records no trace: it was opened without trace=True", hint=hint)
        timelines = self.list_timelines()[-count:]
        plans = [(plan.manifest, read_segment_nodes(plan)) for plan in self._bundle.plans]
        by_plan = [[item for item in timelines if item.plan == number] for number in range(len(plans))]
        predicted = [item for (manifest, _), own in zip(plans, by_plan) for item in predict_timelines(manifest, own)]
        return chrome_trace(timelines, predicted, *plans[0], dict(zip(self._bundle.manifest.plans, plans[1:])))

    def list_timelines(self) -> tuple[RequestTimeline, ...]:
        """Return what the last requests did, at most 1000 that have succeeded, in the order of their submission.

        Needs `trace=True`; it is empty otherwise.
        """
        return self._recorder.list_timelines() if self._recorder else ()

    def list_copies(self) -> tuple[CopyStatus, ...]:
        """Return the copies of the bundle, `replicas` of them: which are open, and why one was left out.

        A session of one copy has none.

        >>> [copy.is_open for copy in session.list_copies()]  # doctest: +SKIP
        [True, False]
        """
        return self._session.list_copies()

    # -- what the model is ------------------------------------------------------------------------------

    def get_inputs(self) -> list[NodeArg]:
        """Return the model's inputs without default values: name, type, shape. States are among them."""
        return [_describe(item) for item in self._bundle.inputs if not item.optional]

    def get_outputs(self) -> list[NodeArg]:
        """Return the outputs of `run(None, ...)`, without states: name, type, shape."""
        return [_describe(item) for item in self._bundle.returned_outputs]

    def get_overridable_initializers(self) -> list[NodeArg]:
        """Return the model's inputs with default values: name, type, shape."""
        return [_describe(item) for item in self._bundle.inputs if item.optional]

    def get_modelmeta(self) -> ModelMetadata:
        """Return what the ONNX file said of the model, with the attributes of `onnxruntime.ModelMetadata`."""
        return self._bundle.manifest.metadata

    def get_session_options(self) -> Any:
        """Return the `sess_options` of this session, or defaults; most have no effect on a bundle."""
        options = self._arguments.session_options
        return import_onnxruntime().SessionOptions() if options is None else options

    @property
    def ignored_options(self) -> tuple[str, ...]:
        """Return the arguments of this session that have no effect on a bundle, such as `sess_options.logid`."""
        return self._arguments.ignored

    # -- where it runs ----------------------------------------------------------------------------------

    def get_providers(self) -> list[str]:
        """Return the execution providers of the bundle's devices, the CPU's last."""
        return list(list_providers(self._bundle))

    def get_provider_options(self) -> dict[str, dict[str, str]]:
        """Return the options of each execution provider; `device_id` lists the devices, as in `0,1`."""
        return list_providers(self._bundle)

    def set_providers(self, providers: Any = None, provider_options: Any = None) -> None:
        """Raise UsageError: a bundle is compiled for its devices."""
        providers_text = ", ".join(self.get_providers())
        hint = "compile the model for other devices: onnxplace compile MODEL --devices cuda:0,cuda:1"
        raise self._refuse(f"this bundle was compiled for {providers_text}; its devices cannot be set", hint)

    def disable_fallback(self) -> None:
        """Do nothing: onnxplace never falls back to another provider."""

    def enable_fallback(self) -> None:
        """Warn that it has no effect: onnxplace never falls back to another provider."""
        warn_ignored("enable_fallback: onnxplace never falls back to another provider; it raises the error")

    def get_input_memory_infos(self) -> list[Any]:
        """Return the memory of the host for each input, where a bundle takes them."""
        return [_describe_host_memory() for _ in self.get_inputs()]

    def get_output_memory_infos(self) -> list[Any]:
        """Return the memory of the host for each output, where a bundle leaves them."""
        return [_describe_host_memory() for _ in self.get_outputs()]

    def get_input_epdevices(self) -> list[Any]:
        """Return ONNX Runtime's CPU device for each input, since a bundle takes them in the memory of the host."""
        runtime = import_onnxruntime()
        cpu = next((item for item in runtime.get_ep_devices() if item.ep_name == "CPUExecutionProvider"), None)
        return [cpu for _ in self.get_inputs()]

    def get_provider_graph_assignment_info(self) -> Sequence[Any]:
        """Raise UsageError: the manifest says which segment runs where."""
        raise self._refuse("the manifest has the assignment of nodes", "read session.bundle.manifest.segments")

    @property
    def bundle(self) -> Bundle:
        """Return the bundle that this session runs."""
        return self._bundle

    # -- running with OrtValues -------------------------------------------------------------------------

    def run_with_ort_values(
        self, output_names: Iterable[str] | None, input_dict_ort_values: Mapping[str, Any], run_options: Any = None
    ) -> list[Any]:
        """Run the model with OrtValues as feeds, and return OrtValues; None for an absent optional.

        Raises the errors of `run`, and UsageError for outputs that are maps.
        """
        types = {item.name: item.type for item in self.get_outputs()}
        names = list(output_names or types)
        values = self.run(names, input_dict_ort_values, run_options)
        for name, value in zip(names, values):
            if "map(" in types.get(name, "") or isinstance(value, dict):
                raise self._refuse(f"output {name!r} is a map, which no OrtValue can hold", "use run")
        return [to_owned_ort_value(value, types.get(name, "")) for name, value in zip(names, values)]

    def io_binding(self) -> IOBinding:
        """Return an object that binds inputs and outputs to buffers, for `run_with_iobinding`."""
        inputs = [item.name for item in self._bundle.inputs]
        return IOBinding(self, inputs, {item.name: item.type for item in self.get_outputs()})

    def run_with_iobinding(self, iobinding: IOBinding, run_options: Any = None) -> None:
        """Run the model with bound inputs, and write or keep the bound outputs.

        Raises the errors of `run`, which are RuntimeErrors here, as in ONNX Runtime.
        """
        if not isinstance(iobinding, IOBinding):
            hint = "use session.io_binding(); with optimum: use_io_binding=False"
            raise self._refuse(f"expected a binding of this session, got {type(iobinding).__name__}", hint)
        if iobinding.session is not self:
            raise argument_error(ValueError, "this binding is of another session", hint="use session.io_binding()")
        try:
            iobinding.run(lambda names, feeds: self.run(names, feeds, run_options))
        except OnnxplaceError as error:
            also_raise_as(error, RuntimeError)
            raise

    def run_with_ortvaluevector(
        self,
        run_options: Any,
        feed_names: Sequence[str],
        feeds: Iterable[Any],
        fetch_names: Sequence[str],
        fetches: Any,
        fetch_devices: Sequence[Any],
    ) -> None:
        """Run the model with the values of an OrtValueVector, and append its outputs to `fetches`.

        They lie in the memory of the host, whatever `fetch_devices` says. Raises the errors of `run`.
        """
        arrays = {name: to_python(value) for name, value in zip(feed_names, feeds)}
        for value in self.run_with_ort_values(fetch_names, arrays, run_options):
            fetches.push_back(value._get_c_value())

    def create_ortvalue_from_shape_and_type(
        self, shape: Sequence[int], element_type: Any, device_type: str, device_id: int = 0, vendor_id: int = -1
    ) -> Any:
        """Return an OrtValue, which does not belong to this session; see `onnxruntime.OrtValue`."""
        create = import_onnxruntime().OrtValue.ortvalue_from_shape_and_type
        return create(shape, element_type, device_type, device_id, vendor_id)

    # -- profiles and tuning ----------------------------------------------------------------------------

    def end_profiling(self) -> str:
        """Write the trace of the last requests to a file and return its name; empty if the session records none.

        `trace=True` or `sess_options.enable_profiling` records it; Chrome and Perfetto open it (docs/traces.md).
        """
        if self._recorder is None:
            return ""
        prefix = self._arguments.profile_prefix or "onnxplace_profile_"
        path = Path(f"{prefix}_{time.strftime('%Y-%m-%d_%H-%M-%S')}.json")
        text = json.dumps(self.trace()).encode()
        write_file(path, lambda stream: stream.write(text))
        return str(path)

    def get_profiling_start_time_ns(self) -> int:
        """Return when time 0 of the trace was, by `time.perf_counter_ns`; 0 if nothing is recorded."""
        timelines = self.list_timelines()
        return int(timelines[0].submitted_seconds * 1e9) if timelines else 0

    def get_tuning_results(self) -> list[Any]:
        """Return an empty list: no provider of a bundle tunes its kernels while it runs."""
        return []

    def set_tuning_results(self, results: Sequence[Any], *, error_on_invalid: bool = False) -> None:
        """Accept an empty list; warns that others have no effect, or raises UsageError with `error_on_invalid`."""
        if results and error_on_invalid:
            raise self._refuse("a bundle takes no results of tuning", "leave them out")
        if results:
            warn_ignored("set_tuning_results: a bundle takes no results of tuning")

    def set_ep_dynamic_options(self, options: Mapping[str, str]) -> None:
        """Raise UsageError: the options of a bundle's devices are those that it was compiled for."""
        hint = "give options of a device when compiling: --devices cuda:0{provider=tensorrt}, or a target file"
        raise self._refuse("the options of its devices cannot be set while it is open", hint)

    def release_captured_graph(self, graph_annotation_id: int = 0) -> None:
        """Do nothing: a bundle captures no graphs."""

    # -- what libraries read ----------------------------------------------------------------------------

    @property
    def _model_path(self) -> str:
        """The path of the whole optimised model: optimum looks for weights and configurations next to it."""
        return str(self._bundle.file(WHOLE_MODEL_FILE))

    @cached_property
    def _sess(self) -> Any:
        """A session of ONNX Runtime with the model's inputs, with which `onnxruntime.IOBinding` can be created.

        optimum creates one for each session, whether it uses it or not.
        """
        return _open_interface(self._bundle)

    def _refuse(self, message: str, hint: str) -> UsageError:
        return UsageError("U088", message, where=str(self._bundle.path), hint=hint)

    # -- the object ------------------------------------------------------------------------------------

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
    """Separate carried states, over the weights of an open session: see `InferenceSession.conversation`.

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


def _describe_host_memory() -> Any:
    runtime = import_onnxruntime()
    return runtime.OrtMemoryInfo("Cpu", runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT)


def _open_interface(bundle: Bundle) -> Any:
    """Return ONNX Runtime's own session of a model that has a bundle's inputs and computes nothing."""
    import onnx
    from onnx import TensorProto, helper

    whole = onnx.load(bundle.file(WHOLE_MODEL_FILE), load_external_data=False)
    default = helper.make_tensor("none", TensorProto.FLOAT, [0], [])
    output = helper.make_tensor_value_info("none", TensorProto.FLOAT, [0])
    stored = {tensor.name for tensor in whole.graph.initializer}
    inputs = [item for item in whole.graph.input if item.name not in stored]
    graph = helper.make_graph([helper.make_node("Constant", [], ["none"], value=default)], "inputs", inputs, [output])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=whole.ir_version)
    return open_session(model.SerializeToString(), make_session_options([0], "none"))._sess
