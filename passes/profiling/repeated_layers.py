"""Recognise equal nodes, and repeated layers made of equal nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, numpy_helper

from onnxplace.facts import Repeat
from onnxplace.graph.lifetimes import sum_alive
from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs, OpGraph
from onnxplace.model.model import Model
from onnxplace.model.tensors import tensor_size
from onnxplace.passes.profiling.repeat_kernels import find_runs

Shapes = Mapping[str, Sequence[int]]

# Operators (by prefix) whose small integers are axes, which decide their work.
AXES_OPERATORS = ("Reduce", "CumSum", "DFT")
# Integer tensors up to this size are compared by content.
MAX_INTEGER_BYTES = 256
# Repeats with fewer nodes than this, the first layer not counted, are not worth reporting.
MIN_SAVED_NODES = 8


def node_kinds(model: Model, shapes: Shapes) -> Ints:
    """Return a dense id per node, the same for equal nodes.

    Equal nodes have equal operators, attributes, and types of inputs and outputs. A subgraph counts by its structure,
    whatever its values are called. Weights count by type and shape. Small integers count by content if they are axes,
    or a shape that is not known otherwise. Linear.
    """
    return _number_kinds(model, shapes)[0]


def fingerprints(model: Model, shapes: Shapes) -> tuple[str, ...]:
    """Return 16 hexadecimal digits per node that identify its kind.

    They identify it in any model (`node_kinds`). Versions of operators count too. Names of nodes and values do not.
    """
    kinds, keys = _number_kinds(model, shapes)
    versions = {opset.domain or "ai.onnx": opset.version for opset in model.opsets}
    hashes = [
        hashlib.blake2b(repr((versions.get(key[0] or "ai.onnx"), key)).encode(), digest_size=8).hexdigest()
        for key in keys
    ]
    return tuple(hashes[kind] for kind in kinds.tolist())


def _number_kinds(model: Model, shapes: Shapes) -> tuple[Ints, list[tuple[Any, ...]]]:
    """Return the kind of each node, and the key of each kind."""
    signatures = _describe_values(model, shapes)
    small_integers = {name: small_integer_bytes(tensor) for name, tensor in model.initializers.items()}
    numbers: dict[tuple[Any, ...], int] = {}
    kinds = []
    for node, reads in zip(model.nodes, model.reads):
        captured = reads[len(set(filter(None, node.input))) :]
        shows_integers = node.op_type.startswith(AXES_OPERATORS) or any(
            name and name not in shapes for name in node.output
        )
        key = (
            node.domain,
            node.op_type,
            _describe_attributes(node, {}),
            tuple([signatures.get(name) for name in (*node.input, *captured)]),
            tuple([signatures.get(name) for name in node.output]),
            tuple([small_integers.get(name) for name in node.input]) if shows_integers else (),
        )
        kinds.append(numbers.setdefault(key, len(numbers)))
    return np.array(kinds, dtype=np.int32), list(numbers)


def _describe_values(model: Model, shapes: Shapes) -> dict[str, Hashable]:
    """Return the known types and shapes of values and weights."""
    signatures: dict[str, Hashable] = {}
    for name, value_type in model.types.items():
        type_case = value_type.WhichOneof("value")
        element = value_type.tensor_type.elem_type if type_case == "tensor_type" else type_case
        signatures[name] = ("value", element, tuple(shapes[name]) if name in shapes else None)
    return signatures | {name: _describe_weight(tensor) for name, tensor in model.constants.items()}


def _describe_weight(tensor: TensorProto) -> Hashable:
    return ("weight", tensor.data_type, tuple(tensor.dims))


def small_integer_bytes(tensor: TensorProto) -> bytes:
    """Return the content of a small integer tensor, no bytes for others."""
    small = tensor.data_location != TensorProto.EXTERNAL and tensor_size(tensor) <= MAX_INTEGER_BYTES
    if small and tensor.data_type in (TensorProto.INT64, TensorProto.INT32):
        return numpy_helper.to_array(tensor).tobytes()
    return b""


def _describe_attributes(node: NodeProto, numbers: dict[str, int]) -> Hashable:
    """Return a node's attributes by name.

    `numbers` has the numbers of values around its subgraphs.
    """
    return tuple(sorted((attribute.name, _describe_attribute(attribute, numbers)) for attribute in node.attribute))


def _describe_attribute(attribute: AttributeProto, numbers: dict[str, int]) -> tuple[Any, ...]:
    if attribute.type == AttributeProto.GRAPH:
        return ("graph", repr(_describe_subgraph(attribute.g, dict(numbers))))
    if attribute.type == AttributeProto.GRAPHS:
        return ("graphs", repr([_describe_subgraph(graph, dict(numbers)) for graph in attribute.graphs]))
    return ("plain", attribute.SerializeToString(deterministic=True))


def _describe_subgraph(graph: GraphProto, numbers: dict[str, int]) -> Hashable:
    """Return the structure of a subgraph, with numbers for names.

    A name's number is that of its first appearance.
    """

    def number(name: str) -> int:
        return numbers.setdefault(name, len(numbers)) if name else -1

    inputs = tuple((number(v.name), v.type.SerializeToString(deterministic=True)) for v in graph.input)
    weights = tuple((number(t.name), _describe_weight(t), small_integer_bytes(t)) for t in graph.initializer)
    nodes = []
    for node in graph.node:
        reads = tuple(number(name) for name in node.input)
        attributes = _describe_attributes(node, numbers)
        nodes.append((node.domain, node.op_type, reads, attributes, tuple(number(name) for name in node.output)))
    return inputs, weights, tuple(nodes), tuple(number(v.name) for v in graph.output)


def find_repeats(kinds: Ints, graph: OpGraph) -> tuple[Repeat, ...]:
    """Return ranges of nodes that are sequences of equal layers.

    They are in the model's order and do not overlap. Layers are equal if their nodes are of equal kinds and read each
    other in the same way. Of several ways to cut a range into layers, the one that saves most nodes is taken. Layers
    begin where the fewest values cross from layer to layer. O(N log N).
    """
    if len(kinds) < 2:
        return ()
    starts, ends, periods = find_runs(substring_names(kinds))
    crossing = _count_crossing_values(graph)
    taken = np.zeros(len(kinds), dtype=bool)
    repeats = []
    saved_nodes = (ends - starts) // periods * periods - periods
    for index in np.lexsort((starts, periods, -saved_nodes)).tolist():
        start, end, period = int(starts[index]), int(ends[index]), int(periods[index])
        if saved_nodes[index] < MIN_SAVED_NODES or taken[start:end].any():
            continue
        for repeat in _split_by_wiring(graph, start, end, period, crossing):
            repeats.append(repeat)
            taken[repeat.start : repeat.stop] = True
    return tuple(sorted(repeats, key=lambda repeat: repeat.start))


def substring_names(kinds: Ints) -> Longs:
    """Return the numbers of all substrings, as `find_runs` needs them.

    Substrings have 1, 2, 4, ... items.
    """
    names = [kinds.astype(np.int64)]
    block = 1
    while 2 * block <= len(kinds):
        level, count = np.full(len(kinds), -1, dtype=np.int64), len(kinds) - 2 * block + 1
        pairs = names[-1][:count] * (len(kinds) + 1) + names[-1][block : block + count]
        level[:count] = np.unique(pairs, return_inverse=True)[1]
        names.append(level)
        block *= 2
    return np.stack(names)


def _count_crossing_values(graph: OpGraph) -> Longs:
    """Return, per position, how many values cross it.

    Those are made before it and read from it on.
    """
    last = np.full(len(graph.value_names), -1, dtype=np.int64)
    np.maximum.at(last, graph.inputs.items, graph.inputs.rows)
    crossing_values = np.flatnonzero((graph.producer >= 0) & (last >= 0))
    begin, end = graph.producer[crossing_values] + 1, last[crossing_values] + 1
    return sum_alive(begin, end, np.ones(len(begin)), len(graph) + 1).astype(np.int64)


def _split_by_wiring(graph: OpGraph, start: int, end: int, period: int, crossing: Longs) -> list[Repeat]:
    """Return the parts of a range whose layers are wired equally."""
    count = (end - start) // period
    shifts = (end - start) % period + 1
    borders = start + np.arange(shifts)[:, None] + period * np.arange(count + 1)[None, :]
    start += int(crossing[borders].sum(axis=1).argmin())
    firsts = start + period * np.arange(count)
    layers = [wiring(graph, int(first), period) for first in firsts]
    repeats, begin = [], 0
    for layer in range(1, count + 1):
        if layer == count or layers[layer] != layers[begin]:
            if (layer - begin - 1) * period >= MIN_SAVED_NODES:
                repeats.append(Repeat(start + begin * period, period, layer - begin))
            begin = layer
    return repeats


def wiring(graph: OpGraph, first: int, period: int) -> bytes:
    """Return which node of a layer makes each value it reads.

    -1 stands for values from outside.
    """
    items = graph.inputs.items[graph.inputs.starts[first] : graph.inputs.starts[first + period]]
    return np.maximum(graph.producer[items] - first, -1).tobytes()


def pool_by_kind(seconds: Floats, unit: Ints, ran: Bools, kinds: Ints) -> Floats:
    """Set each kernel to the median of all equal kernels.

    The sum of seconds stays the same. Nodes of one `unit` are one kernel; `ran` is False for nodes that were not run.
    Kernels are equal if their nodes, in order, are of equal kinds. docs/measurements.md has the effect.
    """
    kinds = 2 * kinds + ran
    count = int(unit.max(initial=-1)) + 1
    members = np.argsort(unit, kind="stable")
    bounds = np.searchsorted(unit[members], np.arange(count + 1))
    equal_kernels: dict[bytes, list[int]] = {}
    for index in range(count):
        equal_kernels.setdefault(kinds[members[bounds[index] : bounds[index + 1]]].tobytes(), []).append(index)
    kernel_seconds = np.bincount(unit, seconds, count)
    pooled_seconds = np.empty(count)
    for indices in equal_kernels.values():
        pooled_seconds[indices] = np.median(kernel_seconds[indices])
    shares = (pooled_seconds / np.maximum(np.bincount(unit, minlength=count), 1))[unit]
    total = shares.sum()
    return shares * (seconds.sum() / total) if total > 0 else seconds
