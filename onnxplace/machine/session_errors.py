"""Explain why ONNX Runtime cannot open a session: an unknown operator, a missing kernel, or a full disk."""

from __future__ import annotations

import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onnxplace.errors import ModelError, OnnxplaceError, UsageError, format_one_line
from onnxplace.utils.files import disk_error

if TYPE_CHECKING:
    from onnx import GraphProto

LIBRARY_HINT = "give the library that has it: --custom-op-library FILE (custom_op_libraries=[...] in Python)"
_UNKNOWN_OPERATOR = re.compile(r"(?P<domain>[\w.]+):(?P<name>\w+)\(-?\d+\) is not a registered function/op")
_NO_KERNEL = re.compile(
    r"Could not find an implementation for (?P<operator>[\w.]+)\((?P<opset>\d+)\) node with name '(?P<node>.*)'"
)
# Parts of ONNX Runtime's messages for models that no version of it can run.
_INVALID_MODEL_TEXTS = (
    "This is an invalid model",
    "Duplicate definition",
    "Type Error",
    "ShapeInferenceError",
    "INVALID_GRAPH",
)
# With less free space than this, a failure counts as one for lack of space.
MIN_FREE_BYTES = 1 << 20
# Larger models are not searched for types: the search takes several times their size in memory.
MAX_SEARCHED_BYTES = 1 << 28


def explain_session_error(
    problem: Exception, model: Path | bytes, folder: str, device_id: str, where: str
) -> OnnxplaceError:
    """Return the error that explains ONNX Runtime's exception.

    Args:
        problem: The exception.
        model: Path or bytes of the model.
        folder: The folder that the session writes to; "" if it writes nothing.
        device_id: The device of the session.
        where: Place for the error message.
    """
    if folder and (full := find_disk_full(folder, len(model) if isinstance(model, bytes) else 0)):
        return full
    text = format_one_line(problem).rpartition("[ONNXRuntimeError] : ")[2]
    if "use_per_session_threads must be false" in text:
        message = "onnxruntime.set_global_thread_pool_sizes was called, so that no session may have threads of its own"
        return UsageError("U088", message, where=where, hint="leave the call out, or use bundles in another process")
    if unknown := _UNKNOWN_OPERATOR.search(text):
        message = f"ONNX Runtime has no operator {unknown['name']} in domain {unknown['domain']!r}"
        return ModelError("M010", message, where=where, hint=LIBRARY_HINT)
    if missing := _NO_KERNEL.search(text):
        types = _describe_input_types(model, missing["node"], missing["operator"])
        kind = "CPU" if device_id.startswith("cpu:") else "GPU"
        operator = f"{missing['operator']} (opset {missing['opset']})"
        message = f"ONNX Runtime has no kernel of {operator} for {types or 'its input types'} on a {kind}"
        hint = "convert this node to float32 or float16, with a Cast before and after it, or put it on another device"
        place = f"{where}, node {missing['node']!r}" if missing["node"] else where
        return ModelError("M012", message, where=place, hint=hint)
    if "INVALID_PROTOBUF" in text:
        return ModelError("M002", "not an ONNX file, or a damaged one", where=where, hint="export or copy it again")
    hint = "the installed ONNX Runtime cannot run this model; try another version of it, or export with an older opset"
    if any(words in text for words in _INVALID_MODEL_TEXTS):
        hint = "the model is inconsistent; onnx.checker.check_model(path, full_check=True) may say more"
    return ModelError("M012", f"ONNX Runtime refuses the model: {text}", where=where, hint=hint)


def find_disk_full(folder: str, needed_bytes: int = 0) -> OnnxplaceError | None:
    """Return the error for a full disk, found by writing to it.

    Returns None if there is space.
    """
    try:
        if shutil.disk_usage(folder).free < needed_bytes:
            return disk_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), folder)
        with tempfile.TemporaryFile(dir=folder) as stream:
            stream.write(bytes(MIN_FREE_BYTES))
            stream.flush()
    except OSError as problem:
        return disk_error(problem, folder)
    return None


def _describe_input_types(model: Path | bytes, node_name: str, operator: str) -> str:
    """Return the input types of a node, such as `bfloat16`.

    Returns "" for unknown types.
    """
    try:
        if (len(model) if isinstance(model, bytes) else model.stat().st_size) > MAX_SEARCHED_BYTES:
            return ""
        from onnx import load_model_from_string, shape_inference

        proto = load_model_from_string(model if isinstance(model, bytes) else model.read_bytes())
        for value in proto.graph.input:  # types alone: with sizes, inference could end the process (`infer_shapes`)
            value.type.tensor_type.ClearField("shape")
        graphs = list(_walk_graphs(shape_inference.infer_shapes(proto).graph))
        nodes = [node for graph in graphs for node in graph.node if node.op_type == operator]
        matching = [node for node in nodes if node.name == node_name] or nodes
        known = {kind: text for graph in graphs for kind, text in _iterate_tensor_types(graph)}
        names = matching[0].input if len(matching) == 1 else ()
        return ", ".join(dict.fromkeys(known[name] for name in names if name in known))
    except Exception:  # noqa: BLE001 - the types are optional in a message about a model that is wrong anyway
        return ""


def _walk_graphs(graph: GraphProto) -> Iterator[GraphProto]:
    """Yield a graph and all subgraphs in it."""
    yield graph
    for node in graph.node:
        for attribute in node.attribute:
            for inner in (*attribute.graphs, *([attribute.g] if attribute.HasField("g") else ())):
                yield from _walk_graphs(inner)


def _iterate_tensor_types(graph: GraphProto) -> Iterator[tuple[str, str]]:
    """Yield the tensors of a graph: name and element type."""
    from onnx import TensorProto

    for value in (*graph.input, *graph.output, *graph.value_info):
        if value.type.HasField("tensor_type"):
            yield value.name, TensorProto.DataType.Name(value.type.tensor_type.elem_type).lower()
    for tensor in graph.initializer:
        yield tensor.name, TensorProto.DataType.Name(tensor.data_type).lower()


def find_written_folder(options: Any) -> str:
    """Return the folder that a session with these options writes to.

    Returns "" if it writes nothing.
    """
    path = options.optimized_model_filepath or (options.profile_file_prefix if options.enable_profiling else "")
    return str(Path(path).parent) if path else ""
