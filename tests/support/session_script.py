"""A script for `InferenceSession`, that of ONNX Runtime or that of onnxplace: it uses what both have, and notes it all.

It knows nothing of either, so that what it notes can be compared.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnxruntime

METADATA = (
    "producer_name",
    "graph_name",
    "domain",
    "description",
    "graph_description",
    "version",
    "custom_metadata_map",
)
WAIT_SECONDS = 60


@dataclass
class Notes:
    """What a session answered."""

    facts: dict[str, Any] = field(default_factory=dict)
    """Texts and numbers, to be equal."""
    outputs: dict[str, list[Any]] = field(default_factory=dict)
    """Results of runs."""
    errors: dict[str, BaseException] = field(default_factory=dict)
    """Exceptions of calls that have to fail."""


def use_session(session: Any, feeds: Mapping[str, Any]) -> Notes:
    """Call the methods of a session with feeds that fit and with feeds that do not."""
    notes = Notes()
    for what in ("inputs", "outputs", "overridable_initializers"):
        nodes = getattr(session, f"get_{what}")()
        notes.facts[what] = [str(node) for node in nodes]
        notes.facts[f"attributes of {what}"] = [(node.name, node.type, node.shape) for node in nodes]
    metadata = session.get_modelmeta()
    notes.facts |= {name: getattr(metadata, name) for name in METADATA}
    notes.facts["providers"] = session.get_providers()
    notes.facts["provider options"] = session.get_provider_options()
    notes.facts["tuning"] = session.get_tuning_results()
    notes.facts["profile"] = (session.end_profiling(), session.get_profiling_start_time_ns())
    for what in ("input", "output"):
        memories = getattr(session, f"get_{what}_memory_infos")()
        notes.facts[f"{what} memory"] = [
            (item.name, item.device_id, item.mem_type, item.allocator_type) for item in memories
        ]
    notes.facts["devices"] = [item.ep_name for item in session.get_input_epdevices()]
    _run_every_way(session, feeds, notes)
    for label, call in _list_mistakes(session, feeds):
        try:
            notes.outputs[f"accepted: {label}"] = call() or []
        except Exception as error:  # noqa: BLE001 - its class is what the tests compare
            notes.errors[label] = error
    notes.outputs["run after mistakes"] = session.run(None, feeds)
    return notes


def _run_every_way(session: Any, feeds: Mapping[str, Any], notes: Notes) -> None:
    names = [node.name for node in session.get_outputs()]
    options = onnxruntime.RunOptions()
    options.logid = "first"
    notes.outputs["run"] = session.run(None, feeds)
    notes.outputs["run of no names"] = session.run([], feeds)
    notes.outputs["run of a tuple, twice"] = session.run((names[-1], names[0], names[0]), feeds)
    notes.outputs["run with options"] = session.run(names, input_feed=feeds, run_options=options)
    notes.outputs["run_async"] = run_async(session, feeds, options)[0]
    if not all(isinstance(value, np.ndarray) and value.dtype != object for value in feeds.values()):
        return
    if not any(value.dtype == np.float16 for value in feeds.values()):  # ONNX Runtime makes no such list
        notes.outputs["run of lists"] = session.run(None, {name: value.tolist() for name, value in feeds.items()})
    values = {name: onnxruntime.OrtValue.ortvalue_from_numpy(value) for name, value in feeds.items()}
    notes.outputs["run of OrtValues"] = session.run(None, values)
    if any("map(" in node.type for node in session.get_outputs()):
        return
    results = session.run_with_ort_values(names, values)
    notes.facts["types of OrtValues"] = [result.data_type() for result in results]
    tensors = [result for result in results if result.is_tensor()]
    notes.outputs["run_with_ort_values"] = [np.array(result.numpy()) for result in tensors]
    if len(tensors) == len(names):
        _run_bound(session, feeds, values, notes)


def _run_bound(session: Any, feeds: Mapping[str, Any], values: Mapping[str, Any], notes: Notes) -> None:
    """Bind feeds in three ways and outputs in three ways; all outputs are tensors."""
    expected = notes.outputs["run"]
    names = [node.name for node in session.get_outputs()]
    binding = session.io_binding()
    for name, value in feeds.items():
        binding.bind_cpu_input(name, value)
    for name in names:
        binding.bind_output(name)
    session.run_with_iobinding(binding)
    notes.outputs["bound arrays"] = binding.copy_outputs_to_cpu()
    notes.outputs["bound arrays as OrtValues"] = [np.array(value.numpy()) for value in binding.get_outputs()]
    binding.clear_binding_inputs()
    binding.clear_binding_outputs()
    buffers = [np.zeros_like(value) for value in expected]
    for name, value in feeds.items():
        binding.bind_input(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)
    for name, buffer in zip(names, buffers):
        binding.bind_output(name, "cpu", 0, buffer.dtype.type, buffer.shape, buffer.ctypes.data)
    binding.synchronize_inputs()
    session.run_with_iobinding(binding, onnxruntime.RunOptions())
    binding.synchronize_outputs()
    notes.outputs["bound memory"] = buffers
    notes.outputs["bound memory, copied"] = binding.copy_outputs_to_cpu()
    binding = session.io_binding()
    results = [onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros_like(value)) for value in expected]
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for name, value in zip(names, results):
        binding.bind_ortvalue_output(name, value)
    session.run_with_iobinding(binding)
    notes.outputs["bound OrtValues"] = [np.array(value.numpy()) for value in results]
    notes.facts["vector"] = len(binding.get_outputs_as_ortvaluevector())
    vectors = onnxruntime.capi.onnxruntime_pybind11_state.OrtValueVector
    fed, fetched = vectors(), vectors()
    for value in values.values():
        fed.push_back(value._get_c_value())
    devices = [onnxruntime.OrtDevice.make("cpu", 0)._get_c_device()] * len(names)
    session.run_with_ortvaluevector(onnxruntime.RunOptions(), list(values), fed, names, fetched, devices)
    notes.outputs["vector"] = [np.array(fetched[index].numpy()) for index in range(len(fetched))]


def run_async(session: Any, feeds: Mapping[str, Any], options: Any = None) -> tuple[list[Any], str]:
    """Return the outputs and the text of `run_async`; its user data has to come back."""
    results: list[Any] = []
    finished = threading.Event()

    def callback(outputs: list[Any], user_data: Any, text: str) -> None:
        results.append((outputs, user_data, text))
        finished.set()

    session.run_async(None, feeds, callback, "mine", options)
    assert finished.wait(WAIT_SECONDS)
    ((outputs, user_data, text),) = results
    assert user_data == "mine"
    return outputs, text


def _list_mistakes(session: Any, feeds: Mapping[str, Any]) -> list[tuple[str, Callable[[], Any]]]:
    """Return calls that are wrong for any model, and some for a first input that is a tensor of floats."""
    first, value = next(iter(feeds.items()))
    terminated = onnxruntime.RunOptions()
    terminated.terminate = True
    others = {name: item for name, item in feeds.items() if name != first}
    calls = [
        ("no output of this name", lambda: session.run(["missing"], feeds)),
        ("a text as names of outputs", lambda: session.run("y", feeds)),
        ("a mapping as names of outputs", lambda: session.run({session.get_outputs()[0].name: 1}, feeds)),
        ("a number as the name of an output", lambda: session.run([1], feeds)),
        (
            "a negative size is bound",
            lambda: session.io_binding().bind_input(first, "cpu", 0, np.float32, (-2, 3), 4096),
        ),
        ("a type that is none is bound", lambda: session.io_binding().bind_input(first, "cpu", 0, "none", (2,), 4096)),
        ("no input of this name", lambda: session.run(None, {**feeds, "missing": value})),
        ("a missing input", lambda: session.run(None, others)),
        ("a missing input, run_async", lambda: session.run_async(None, others, print, None)),
        ("terminated", lambda: session.run(None, feeds, terminated)),
        ("options of another kind", lambda: session.run(None, feeds, 5)),
        (
            "an input that is not there is bound",
            lambda: session.io_binding().bind_cpu_input("missing", np.zeros(1, "f4")),
        ),
        ("no output is bound", lambda: session.run_with_iobinding(session.io_binding())),
    ]
    if isinstance(value, np.ndarray) and value.dtype == np.float32:
        wrong = {"type": value.astype("f8"), "rank": value[None], "size": np.concatenate([value, value], axis=-1)}
        calls += [
            (f"a wrong {what}", lambda item=item: session.run(None, {**feeds, first: item}))
            for what, item in wrong.items()
        ]
        calls += [("a wrong type, bound", lambda: _run_bound_type(session, feeds, first, value.astype("f8")))]
    return calls


def _run_bound_type(session: Any, feeds: Mapping[str, Any], first: str, value: Any) -> None:
    binding = session.io_binding()
    for name, item in {**feeds, first: value}.items():
        binding.bind_cpu_input(name, item)
    binding.bind_output(session.get_outputs()[0].name)
    session.run_with_iobinding(binding)
