"""The methods of sessions of bundles beyond running: states, timelines, and what ONNX Runtime's sessions have."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.bundle import WHOLE_MODEL_FILE, Bundle, SplitStates
from onnxplace.drop_in.exceptions import also_raise_as, argument_error
from onnxplace.drop_in.io_binding import IOBinding
from onnxplace.drop_in.run_arguments import to_owned_ort_value
from onnxplace.drop_in.session_arguments import SessionArguments, list_providers, warn_ignored
from onnxplace.errors import OnnxplaceError, UsageError
from onnxplace.feeds import Declared
from onnxplace.machine import make_session_options, open_session, to_python
from onnxplace.model_metadata import ModelMetadata
from onnxplace.ort import import_onnxruntime
from onnxplace.runtime import CopyStatus, RuntimeSession
from onnxplace.serving import check_in_flight
from onnxplace.traces import (
    MAX_TRACED_REQUESTS,
    RequestTimeline,
    TraceRecorder,
    chrome_trace,
    predict_timelines,
    read_segment_nodes,
)
from onnxplace.utils import write_file

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


class SessionMethods(ABC):
    """Methods of a session of a bundle beyond running: its own, and those of ONNX Runtime's sessions."""

    _bundle: Bundle
    _session: RuntimeSession
    _arguments: SessionArguments
    _split_states: SplitStates
    _recorder: TraceRecorder | None

    @abstractmethod
    def run(self, output_names: Iterable[str] | None, input_feed: Mapping[str, Any], run_options: Any = None) -> Any:
        """Run the model and return the named outputs."""

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
        predicted = predict_timelines(self._bundle.manifest, timelines)
        return chrome_trace(timelines, predicted, self._bundle.manifest, read_segment_nodes(self._bundle))

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

    def disable_fallback(self) -> None:  # noqa: B027 - that is how a bundle runs
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

    def release_captured_graph(self, graph_annotation_id: int = 0) -> None:  # noqa: B027 - there is none
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
