"""Fold constants and drop unused nodes before the graph is cut."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

from annotated_types import Ge
from onnx import NodeProto, TensorProto, ValueInfoProto, numpy_helper

from onnxplace.errors import Diagnostic, OnnxplaceError
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.model.cut_constraints import DEQUANTIZE, is_quantization_node
from onnxplace.model.lineage import RANDOM_OPERATORS
from onnxplace.model.lowering import with_shape
from onnxplace.model.model import Model
from onnxplace.model.nested_graphs import captured_names, has_subgraphs, iterate_subgraphs
from onnxplace.model.tensors import tensor_size
from onnxplace.passes.sharding.space.known_shapes import fix_sizes, infer_shapes_and_values
from onnxplace.state import Pass, State

# Folding these would undo a quantisation that ONNX Runtime can still fuse.
_QUANTISERS = {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}


@dataclass(frozen=True)
class Optimize(Pass):
    """Fold constant nodes, and drop unused nodes and weights.

    A DequantizeLinear with several readers is duplicated for each of them, as in ONNX Runtime. Then each can be placed
    with its operator, and the quantised value crosses between devices.

    Weights keep their bytes and their place on disk. Fusions are left to ONNX Runtime, and `profile` keeps the fused
    nodes together (docs/decisions/0003-fusion.md).
    """

    name: ClassVar[str] = "optimize"
    requires: ClassVar[tuple[type, ...]] = (Model,)
    provides: ClassVar[tuple[type, ...]] = (Model,)

    fold_up_to: Annotated[int, Ge(0)] = 65536
    """Limit in bytes of a weight, and of a result, for folding; larger ones would bloat the bundle."""
    fixed_sizes: bool = False
    """Fix the sizes of inputs to those of `--shape`, so that what follows from them becomes constant."""

    def run(self, state: State) -> State:
        before = state[Model]
        model = _duplicate_dequantisers(_drop_unused(_fix_sizes(before) if self.fixed_sizes else before))
        foldable = _find_foldable(model, self.fold_up_to)
        notes: tuple[Diagnostic, ...] = ()
        try:
            if foldable:
                model = _drop_unused(_fold(model, foldable, self.fold_up_to))
        except OnnxplaceError as error:
            notes = (Diagnostic("O001", f"constants were not folded: {error.message}", where=model.name),)
        remaining = {node.name for node in model.nodes}
        removed = (node.name for node in before.nodes if node.name not in remaining)
        return state.with_facts(replace(model, removed=(*before.removed, *removed))).with_notes(*notes)


def _fix_sizes(model: Model) -> Model:
    """Return the model with the sizes that it is bound to, and the small values that follow from them as constants.

    Some providers take a Reshape or Expand only if its target is a constant.
    """
    shapes, values = infer_shapes_and_values(model)
    returned = {model.sources.get(output.name, output.name) for output in model.outputs}
    computed = {name for node in model.nodes for name in node.output if name in values} - returned
    nodes = [node for node in model.nodes if not all(name in computed for name in node.output if name)]
    kept = {name for node in nodes for name in node.output}
    constants = {name: values[name] for name in computed - kept}
    return replace(
        fix_sizes(model).replacing(nodes, {**model.initializers, **constants}),
        outputs=tuple(with_shape(value, shapes.get(value.name)) for value in model.outputs),
    )


def _drop_unused(model: Model) -> Model:
    """Return the model without nodes and weights that no output depends on."""
    needed = {model.sources.get(output.name, output.name) for output in model.outputs}
    needed_nodes = []
    for node, reads in zip(reversed(model.nodes), reversed(model.reads)):
        if any(name in needed for name in node.output if name):
            needed_nodes.append(node)
            needed.update(reads)
    weights = {name: t for name, t in model.initializers.items() if name in needed or model.overridable(name)}
    return model.replacing(needed_nodes[::-1], weights)


def _duplicate_dequantisers(model: Model) -> Model:
    """Give each node that reads a DequantizeLinear its own copy of that.

    Subgraphs read the first one.
    """
    maker = {node.output[0]: node for node in model.nodes if node.output and is_quantization_node(node, DEQUANTIZE)}
    if not maker:
        return model
    inner = {name for node in model.nodes for graph in iterate_subgraphs(node) for name in captured_names(graph)}
    taken = {name for node in model.nodes for name in (node.name, *node.output)} | set(model.initializers)
    taken |= model.input_names
    shared = inner | {model.sources.get(output.name, output.name) for output in model.outputs}
    nodes: list[NodeProto] = []
    for node in model.nodes:
        own: dict[str, str] = {}
        for name in dict.fromkeys(name for name in node.input if name in maker):
            if name not in shared:
                shared.add(name)  # the first reader keeps the existing node
                continue
            nodes.append(_copy_with_new_names(maker[name], taken))
            own[name] = nodes[-1].output[0]
        if own:  # its subgraphs stay as they are
            node = deepcopy(node)
            node.input[:] = [own.get(name, name) for name in node.input]
        nodes.append(node)
    return model.replacing(nodes, model.initializers)


def _copy_with_new_names(node: NodeProto, taken: set[str]) -> NodeProto:
    """Copy a one-output node, and add the new names to `taken`."""
    copy = deepcopy(node)
    number = 1
    while f"{node.name}/{number}" in taken or f"{node.output[0]}/{number}" in taken:
        number += 1
    copy.name, copy.output[0] = f"{node.name}/{number}", f"{node.output[0]}/{number}"
    taken.update((copy.name, copy.output[0]))
    return copy


def _find_foldable(model: Model, limit_bytes: int) -> list[int]:
    """Return the positions of nodes that depend on small constants only."""
    constant = {
        name for name, t in model.initializers.items() if not model.overridable(name) and tensor_size(t) <= limit_bytes
    }
    if not model.weights_files:  # what is outside the model may be absent
        constant -= {name for name, t in model.initializers.items() if t.data_location == TensorProto.EXTERNAL}
    returned = {model.sources.get(output.name, output.name) for output in model.outputs}
    positions = []
    for index, (node, reads) in enumerate(zip(model.nodes, model.reads)):
        if _is_pure(node) and all(name in constant for name in reads) and not returned & set(node.output):
            positions.append(index)
            constant.update(filter(None, node.output))
    return positions


def _is_pure(node: NodeProto) -> bool:
    """Return whether a node gives the same results in each inference, and may be folded."""
    is_fixed = node.op_type not in RANDOM_OPERATORS | _QUANTISERS
    return is_fixed and node.domain in ("", "ai.onnx") and not has_subgraphs(node)


def _fold(model: Model, positions: Sequence[int], limit_bytes: int) -> Model:
    """Replace nodes by their results, except for large ones."""
    values = _evaluate(model, positions, _read_outside(model, positions))
    large = {name for name, tensor in values.items() if tensor_size(tensor) > limit_bytes}
    folded = set()
    for index in reversed(positions):
        if large & set(model.nodes[index].output):
            large.update(model.reads[index])  # the inputs of a large constant stay too
        else:
            folded.add(index)
    needed = set(_read_outside(model, sorted(folded)))
    remaining = [node for index, node in enumerate(model.nodes) if index not in folded]
    return model.replacing(remaining, {**model.initializers, **{n: t for n, t in values.items() if n in needed}})


def _read_outside(model: Model, positions: Sequence[int]) -> list[str]:
    """Return the outputs of these nodes that other nodes read."""
    chosen = set(positions)
    read = {name for index, reads in enumerate(model.reads) if index not in chosen for name in reads}
    return [name for index in positions for name in model.nodes[index].output if name in read]


def _evaluate(model: Model, positions: Sequence[int], names: Sequence[str]) -> dict[str, TensorProto]:
    """Run constant nodes once and return their outputs, as tensors by name."""
    if not names:
        return {}
    nodes = [model.nodes[index] for index in positions]
    reads = dict.fromkeys(name for node in nodes for name in node.input if name in model.initializers)
    weights = [model.initializers[name] for name in reads]
    proto = model.proto(nodes, weights, [], [ValueInfoProto(name=name) for name in names])
    session = open_session(
        proto.SerializeToString(), make_session_options([0], "none", model.session_entries), where=model.name
    )
    try:
        arrays = session.run(list(names), {})
        return {name: numpy_helper.from_array(array, name) for name, array in zip(names, arrays)}
    except Exception as error:  # noqa: BLE001 - a type without numpy form, or a kernel that fails
        raise OnnxplaceError("O001", str(error).splitlines()[0]) from None
