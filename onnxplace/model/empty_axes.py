"""Refuse an empty axis before the kernels of ONNX Runtime that end the process for it.

    GRU(x, w, r)   becomes   shape = Shape(x)
                             one = Gather([1], ReduceMin(shape) == 0)   # its name says why it refuses index 1
                             GRU(Reshape(x, shape * one), w, r)

That takes some microseconds, and copies nothing. `python -m benchmarks.conformance --empty` looks for such kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, TypeProto, ValueInfoProto, helper, numpy_helper

from onnxplace.model.nested_graphs import iterate_subgraphs, refill, rename_reads
from onnxplace.model.tensors import read_shape_entries

ENDS_PROCESS = "ONNX Runtime ends the process"
"""Begins the names of guards, and with them ONNX Runtime's words."""
FATAL_OPERATORS = {
    "Conv", "ConvTranspose", "DynamicQuantizeLSTM", "GRU", "GroupQueryAttention", "InstanceNormalization", "LSTM",
    "MultiHeadAttention", "QAttention", "STFT", "Scan", "SkipLayerNormalization", "SkipSimplifiedLayerNormalization",
    "Unique",
}  # fmt: skip
# Before this version of the standard operators, integers cannot be compared.
MIN_GUARDED_OPSET = 7


def guard_empty_axes(graph: GraphProto, types: Mapping[str, TypeProto]) -> None:
    """Insert guards into a graph and its subgraphs, in place.

    A value has none if none of its axes can be empty. `types` are those of values, as far as they are known.
    """
    known = {name: tuple(read_shape_entries(kind) or ()) for name, kind in types.items()}
    known |= {item.name: tuple(item.dims) for item in graph.initializer if item.name not in known}
    nodes = list[NodeProto]()
    for node in [NodeProto.FromString(item.SerializeToString()) for item in graph.node]:
        for subgraph in iterate_subgraphs(node):
            guard_empty_axes(subgraph, {})
        for position, axes in _list_fatal_axes(node, types):
            name = node.input[position] if position < len(node.input) else ""
            sizes = [size for axis, size in enumerate(known.get(name, ())) if axes is None or axis in axes]
            if name and axes != () and not (sizes and all(isinstance(size, int) and size for size in sizes)):
                is_skip = node.op_type.startswith("Skip")  # it ends the process only where the first input has rows
                nodes += _make_guards(node, name, axes, node.input[0] if is_skip else "")
                node.input[position] = nodes[-1].output[0]
                if name in types:  # what ONNX Runtime would not infer
                    graph.value_info.append(ValueInfoProto(name=node.input[position], type=types[name]))
        _guard_scan_outputs(node)
        nodes.append(node)
    refill(graph.node, nodes)


def list_own_nodes(graph: GraphProto) -> list[NodeProto]:
    """Return the nodes of a graph without guards, whose results no node reads any more."""
    guards = [node for node in graph.node if node.name.startswith(ENDS_PROCESS)]
    guarded = {node.output[0]: node.input[0] for node in guards if node.op_type == "Reshape"}
    nodes = [node for node in graph.node if not node.name.startswith(ENDS_PROCESS)]
    for node in nodes:
        rename_reads(node, guarded)
    return nodes


def _list_fatal_axes(node: NodeProto, types: Mapping[str, TypeProto]) -> Iterator[tuple[int, tuple[int, ...] | None]]:
    """Yield positions of inputs, with the axes that must not be empty: None for all."""
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    inputs = [types.get(name, TypeProto()) for name in node.input]
    shapes = [tuple(read_shape_entries(item) or ()) for item in inputs]
    axes = tuple(range(len(shapes[0]))) if shapes else ()
    match node.op_type:
        case "GRU":
            yield 0, None
        case "LSTM" | "DynamicQuantizeLSTM":
            yield 0, (1, 2)  # with inputs of no elements, it goes on, with memory that nothing has written
        case "GroupQueryAttention" | "QAttention":
            yield 0, (0,)
        case "MultiHeadAttention":
            yield 2, (2,)
        case "STFT":
            yield 2, (0,)
        case "SkipLayerNormalization" | "SkipSimplifiedLayerNormalization":
            yield 1, (0,)
        case "Conv":
            yield 1, tuple(range(2, len(shapes[1])))
        case "ConvTranspose" if len(axes) > 4:
            yield 0, axes[2:]
        case "InstanceNormalization" if inputs[0].tensor_type.elem_type == TensorProto.FLOAT16:
            yield 0, axes[2:]
        case "Unique" if "axis" in attributes:
            yield 0, tuple(axis for axis in axes if axis != attributes["axis"] % len(axes))
        case "Scan":  # it transposes these
            scanned = attributes.get("scan_input_axes", ())
            yield from ((len(node.input) - len(scanned) + i, None) for i, axis in enumerate(scanned) if axis)


def _guard_scan_outputs(node: NodeProto) -> None:
    """Guard what the subgraph of a Scan returns, if it is transposed."""
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    if axes := attributes.get("scan_output_axes", ()):
        body = attributes["body"]
        for value in [value for value, axis in zip(body.output[-len(axes) :], axes) if axis]:
            guards = _make_guards(node, value.name, None)
            body.node.extend(guards)
            value.name = guards[-1].output[0]


def _make_guards(node: NodeProto, value: str, axes: Sequence[int] | None, other: str = "") -> list[NodeProto]:
    """Return the nodes that guard a value of a node, the last of which returns it.

    Where `other` has no rows either, nothing is refused.
    """
    text = f"{ENDS_PROCESS} in node {node.name!r} ({node.op_type}) where an axis of {value!r} is empty"
    guards, result = list[NodeProto](), next(filter(None, node.output))

    def add(operator: str, *inputs: str, **attributes: Any) -> str:
        output = f"{result}/{value}/{len(guards)}"
        guards.append(helper.make_node(operator, inputs, [output], f"{text} ({len(guards)})", **attributes))
        return output

    def add_constant(*numbers: int) -> str:
        return add("Constant", value=numpy_helper.from_array(np.array(numbers, dtype=np.int64)))

    shape, one = add("Shape", value), add_constant(1)
    sizes = add("Concat", shape, one, axis=0) if axes is None else add("Gather", shape, add_constant(*axes))
    if other:
        has_none = add("Equal", add("Gather", add("Shape", other), add_constant(0)), add_constant(0))
        sizes = add("Add", sizes, add("Cast", has_none, to=TensorProto.INT64))
    is_empty = add("Cast", add("Equal", add("ReduceMin", sizes), add_constant(0)), to=TensorProto.INT64)
    add("Reshape", value, add("Mul", shape, add("Gather", one, is_empty)))
    return guards
