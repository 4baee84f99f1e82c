"""Where trained parameters go: into a module of torch, or into a model for inference."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxplace.bundle.bundle import WHOLE_MODEL_FILE, Bundle
from onnxplace.bundle.manifest import TrainingRecord
from onnxplace.errors import UsageError, format_names
from onnxplace.feeds.feeds import Array
from onnxplace.utils.files import write_file
from onnxplace_training.checkpoints import name_states

if TYPE_CHECKING:
    from onnx import GraphProto, ModelProto, NodeProto

# Copy states into modules of torch, which the caller has imported.


def copy_into_module(states: Mapping[str, Array], module: Any) -> None:
    """Copy arrays into the parameters and buffers of a module.

    Raises UsageError, and copies nothing, if any differs.
    """
    torch = sys.modules.get("torch")  # whoever has a module of torch has imported it
    if torch is None or not isinstance(module, torch.nn.Module):
        message = f"expected a torch.nn.Module, got {type(module).__name__}"
        raise UsageError("L041", message, where="load_into")
    targets = module.state_dict(keep_vars=True)
    where, hint = f"load_into {type(module).__name__}", "give the module from which the step was exported"
    if missing := [name for name in states if name not in targets]:
        raise UsageError("L041", f"the module has no {format_names(missing)}", where=where, hint=hint)
    for name, array in states.items():
        shape = tuple(targets[name].shape)
        if shape != array.shape:
            message = f"{name!r} has the shape {list(shape)} in the module, expected {list(array.shape)}"
            raise UsageError("L041", message, where=where, hint=hint)
    with torch.no_grad():
        for name, array in states.items():
            # Arrays of a checkpoint are read-only, of which torch warns.
            targets[name].copy_(torch.from_numpy(array if array.flags.writeable else array.copy()))


# The model for inference in a training step: its forward part, with the parameters as weights.

# protobuf refuses messages of 2 GiB.
MAX_MODEL_BYTES = (1 << 31) - (1 << 20)
_MODULE_HINT = "copy the parameters into the module, trainer.load_into(module.eval()), and export that"


def write_inference_model(path: Path, bundle: Bundle, training: TrainingRecord, states: Mapping[str, Array]) -> None:
    """Write the forward part of a training step; `states` are by the names of users.

    Raises UsageError L040 if the step does not say what its module returns, or if inference would compute otherwise.
    """
    import onnx

    where = bundle.manifest.model
    outputs = training.inference.outputs
    if not outputs:
        message = "the step does not say which values its module returns"
        raise UsageError("L040", message, where=where, hint=_MODULE_HINT)
    model = onnx.load(bundle.file(WHOLE_MODEL_FILE), load_external_data=False)
    values = {name: states[key] for name, key in name_states(training).items() if key in states}
    nodes, read = _select_nodes(model.graph, outputs, values)
    _require_inference(training, nodes, read, values, where)
    _load_weights(model, bundle, read - values.keys())
    result = _build_model(model, nodes, read, values, outputs)
    if (size := result.ByteSize()) > MAX_MODEL_BYTES:
        message = f"the model would have {size} bytes in one file, expected at most {MAX_MODEL_BYTES}"
        raise UsageError("L040", message, where=where, hint=_MODULE_HINT)
    text = result.SerializeToString()
    write_file(path, lambda stream: stream.write(text))


def _select_nodes(
    graph: GraphProto, outputs: tuple[str, ...], states: Mapping[str, Array]
) -> tuple[list[NodeProto], set[str]]:
    """Return the nodes that some values need, and all values that these nodes read; states need no nodes."""
    from onnxplace.model.nested_graphs import iterate_reads

    needed, nodes = set(outputs), []
    for node in reversed(graph.node):
        if needed.isdisjoint(node.output) or not states.keys().isdisjoint(node.output):
            continue
        nodes.append(node)
        needed.update(iterate_reads(node))
    computed = {name for node in nodes for name in node.output}
    return nodes[::-1], needed - computed


def _require_inference(
    training: TrainingRecord, nodes: list[NodeProto], read: set[str], states: Mapping[str, Array], where: str
) -> None:
    """Raise UsageError unless these nodes compute what the module computes in inference."""
    computed = {name for node in nodes for name in node.output}
    if missing := [name for name in training.inference.outputs if name not in computed]:
        message = f"the model of the bundle no longer has {format_names(missing)}, which the module returns"
        raise UsageError("L040", message, where=where, hint=_MODULE_HINT)
    for name in (training.seed, training.step, training.learning_rate):
        if name and name in read:
            message = f"the forward part reads {name!r}, so it is not that of inference: it has a dropout, for example"
            raise UsageError("L040", message, where=where, hint=_MODULE_HINT)
    for buffer in training.buffers:
        array = states.get(buffer.input)
        if array is not None and array.dtype.kind == "f" and buffer.input not in read:
            message = f"the forward part does not read {buffer.name!r}: it normalises by statistics of its batch"
            raise UsageError("L040", message, where=where, hint=_MODULE_HINT)


def _load_weights(model: ModelProto, bundle: Bundle, names: set[str]) -> None:
    """Load the bytes of weights that the new model needs."""
    from onnx import external_data_helper

    folder = bundle.link_root if bundle.manifest.linked else bundle.file(WHOLE_MODEL_FILE).parent
    for tensor in model.graph.initializer:
        if tensor.name in names and external_data_helper.uses_external_data(tensor):
            external_data_helper.load_external_data_for_tensor(tensor, str(folder))


def _build_model(
    model: ModelProto,
    nodes: list[NodeProto],
    read: set[str],
    states: Mapping[str, Array],
    outputs: tuple[str, ...],
) -> ModelProto:
    """Return a model of some nodes, whose states are weights."""
    import onnx
    from onnx import numpy_helper

    from onnxplace.model.shape_inference import infer_shapes

    graph, result = model.graph, onnx.ModelProto()
    result.ir_version, result.producer_name = model.ir_version, "onnxplace"
    result.opset_import.extend(model.opset_import)
    result.graph.name = graph.name or "inference"
    result.graph.node.extend(nodes)
    result.graph.initializer.extend(t for t in graph.initializer if t.name in read and t.name not in states)
    result.graph.initializer.extend(
        numpy_helper.from_array(np.ascontiguousarray(array).reshape(array.shape), name)
        for name, array in states.items()
        if name in read
    )
    result.graph.input.extend(item for item in graph.input if item.name in read and item.name not in states)
    # Types are those of the model's own outputs, or from shape inference; they are not required.
    inferred = infer_shapes(model).graph
    known = {item.name: item for item in (*inferred.value_info, *inferred.output)}
    result.graph.output.extend(known.get(name) or onnx.ValueInfoProto(name=name) for name in outputs)
    return result
