"""Recognise what occurs again: nodes that do the same to values of the same shapes, and layers made of such nodes."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
from onnx import AttributeProto, GraphProto, NodeProto, TensorProto, numpy_helper

from onnxplace.facts import Repeat
from onnxplace.graph import Bools, Floats, Ints, Longs, OpGraph
from onnxplace.model import Model, tensor_size
from onnxplace.passes.profiling.repeat_kernels import runs

Shapes = Mapping[str, Sequence[int]]

# What small integers say decides the work of a node only where they are axes, or say what shape comes out.
AXES_OF = ("Reduce", "CumSum", "DFT")
TOLD_APART_BYTES = 256
# Fewer nodes than this, in all but the first of equal layers, are no structure worth speaking of.
MIN_NODES = 8


def node_kinds(model: Model, shapes: Shapes) -> Ints:
    """Return a dense id per node: equal for nodes of equal operator, attributes, and inputs and outputs by type.

    A subgraph counts by its structure, whatever its values are called; weights count by type and shape, and small
    integers by what they hold if that is axes, or a shape that is not known otherwise. Linear.
    """
    return _numbered(model, shapes)[0]


def fingerprints(model: Model, shapes: Shapes) -> tuple[str, ...]:
    """Return what tells a node's kind (`node_kinds`) in any model: 16 hexadecimal digits per node.

    Versions of operators count too. Names of nodes and values do not.
    """
    kinds, keys = _numbered(model, shapes)
    versions = {opset.domain or "ai.onnx": opset.version for opset in model.opsets}
    hashes = [
        hashlib.blake2b(repr((versions.get(key[0] or "ai.onnx"), key)).encode(), digest_size=8).hexdigest()
        for key in keys
    ]
    return tuple(hashes[kind] for kind in kinds.tolist())


def _numbered(model: Model, shapes: Shapes) -> tuple[Ints, list[tuple[Any, ...]]]:
    """Return the kind of each node, and what each kind has in common."""
    signatures = _signatures(model, shapes)
    held = {name: held_integers(tensor) for name, tensor in model.initializers.items()}
    numbers: dict[tuple[Any, ...], int] = {}
    kinds = []
    for node, reads in zip(model.nodes, model.reads):
        captured = reads[len(set(filter(None, node.input))) :]
        telling = node.op_type.startswith(AXES_OF) or any(name and name not in shapes for name in node.output)
        key = (
            node.domain,
            node.op_type,
            _attributes(node, {}),
            tuple([signatures.get(name) for name in (*node.input, *captured)]),
            tuple([signatures.get(name) for name in node.output]),
            tuple([held.get(name) for name in node.input]) if telling else (),
        )
        kinds.append(numbers.setdefault(key, len(numbers)))
    return np.array(kinds, dtype=np.int32), list(numbers)


def _signatures(model: Model, shapes: Shapes) -> dict[str, Hashable]:
    """Return type and shape of each value and weight, as far as they are known; an absent input has none."""
    found: dict[str, Hashable] = {}
    for name, kind in model.types.items():
        which = kind.WhichOneof("value")
        element = kind.tensor_type.elem_type if which == "tensor_type" else which
        found[name] = ("value", element, tuple(shapes[name]) if name in shapes else None)
    for name, tensor in model.initializers.items():
        if not model.overridable(name):
            found[name] = _tensor(tensor)
    return found


def _tensor(tensor: TensorProto) -> Hashable:
    return ("weight", tensor.data_type, tuple(tensor.dims))


def held_integers(tensor: TensorProto) -> bytes:
    """Return what a small integer tensor holds, nothing for others."""
    small = tensor.data_location != TensorProto.EXTERNAL and tensor_size(tensor) <= TOLD_APART_BYTES
    if small and tensor.data_type in (TensorProto.INT64, TensorProto.INT32):
        return numpy_helper.to_array(tensor).tobytes()
    return b""


def _attributes(node: NodeProto, known: dict[str, int]) -> Hashable:
    """Return a node's attributes in order of their names; `known` numbers the values of the graph it is in."""
    if not node.attribute:
        return ()
    return tuple(sorted((attribute.name, _attribute(attribute, known)) for attribute in node.attribute))


def _attribute(attribute: AttributeProto, known: dict[str, int]) -> tuple[Any, ...]:
    if attribute.type == AttributeProto.GRAPH:
        return ("graph", repr(_body(attribute.g, dict(known))))
    if attribute.type == AttributeProto.GRAPHS:
        return ("graphs", repr([_body(graph, dict(known)) for graph in attribute.graphs]))
    return ("plain", attribute.SerializeToString(deterministic=True))


def _body(graph: GraphProto, known: dict[str, int]) -> Hashable:
    """Return the structure of a subgraph, in which every name is the number of its first appearance."""

    def number(name: str) -> int:
        return known.setdefault(name, len(known)) if name else -1

    inputs = tuple((number(v.name), v.type.SerializeToString(deterministic=True)) for v in graph.input)
    weights = tuple((number(t.name), _tensor(t), held_integers(t)) for t in graph.initializer)
    nodes = []
    for node in graph.node:
        reads = tuple(number(name) for name in node.input)
        attributes = _attributes(node, known)
        nodes.append((node.domain, node.op_type, reads, attributes, tuple(number(name) for name in node.output)))
    return inputs, weights, tuple(nodes), tuple(number(v.name) for v in graph.output)


def find_repeats(kinds: Ints, graph: OpGraph) -> tuple[Repeat, ...]:
    """Return stretches of nodes, in the model's order, that are equal layers one after the other; none overlap.

    Layers are equal if their nodes are of equal kinds and read each other in the same way. Of several ways to see a
    stretch as layers, the one that saves most nodes is taken; where a layer begins is free, and is chosen such that
    the fewest values cross from layer to layer. O(N log N).
    """
    if len(kinds) < 2:
        return ()
    starts, ends, periods = runs(_block_names(kinds))
    crossing = _crossing(graph)
    taken = np.zeros(len(kinds), dtype=bool)
    found = []
    saved = (ends - starts) // periods * periods - periods
    for index in np.lexsort((starts, periods, -saved)).tolist():
        start, end, period = int(starts[index]), int(ends[index]), int(periods[index])
        if saved[index] < MIN_NODES or taken[start:end].any():
            continue
        for repeat in _wired(graph, start, end, period, crossing):
            found.append(repeat)
            taken[repeat.start : repeat.stop] = True
    return tuple(sorted(found, key=lambda repeat: repeat.start))


def _block_names(kinds: Ints) -> Longs:
    """Return the numbers of all blocks of 1, 2, 4, ... items, as `runs` wants them."""
    names = [kinds.astype(np.int64)]
    block = 1
    while 2 * block <= len(kinds):
        level, count = np.full(len(kinds), -1, dtype=np.int64), len(kinds) - 2 * block + 1
        pairs = names[-1][:count] * (len(kinds) + 1) + names[-1][block : block + count]
        level[:count] = np.unique(pairs, return_inverse=True)[1]
        names.append(level)
        block *= 2
    return np.stack(names)


def _crossing(graph: OpGraph) -> Longs:
    """Return, per position in the model's order, how many values are made before it and read from it on."""
    last = np.full(len(graph.value_names), -1, dtype=np.int64)
    np.maximum.at(last, graph.inputs.items, graph.inputs.rows)
    made = np.flatnonzero((graph.producer >= 0) & (last >= 0))
    change = np.zeros(len(graph) + 2, dtype=np.int64)
    np.add.at(change, graph.producer[made] + 1, 1)
    np.add.at(change, last[made] + 1, -1)
    return np.cumsum(change)


def _wired(graph: OpGraph, start: int, end: int, period: int, crossing: Longs) -> list[Repeat]:
    """Return the parts of a stretch of equal kinds whose layers are also equal in what reads what."""
    count = (end - start) // period
    shifts = (end - start) % period + 1
    borders = start + np.arange(shifts)[:, None] + period * np.arange(count + 1)[None, :]
    start += int(crossing[borders].sum(axis=1).argmin())
    firsts = start + period * np.arange(count)
    layers = [wiring(graph, int(first), period) for first in firsts]
    found, begin = [], 0
    for layer in range(1, count + 1):
        if layer == count or layers[layer] != layers[begin]:
            if (layer - begin - 1) * period >= MIN_NODES:
                found.append(Repeat(start + begin * period, period, layer - begin))
            begin = layer
    return found


def wiring(graph: OpGraph, first: int, period: int) -> bytes:
    """Return which node of a layer, if any, makes each value that its nodes read."""
    items = graph.inputs.items[graph.inputs.starts[first] : graph.inputs.starts[first + period]]
    return np.maximum(graph.producer[items] - first, -1).tobytes()


def pool_by_kind(seconds: Floats, unit: Ints, ran: Bools, kinds: Ints) -> Floats:
    """Return the seconds with each kernel at the median of all kernels that do the same, scaled to the same sum.

    `unit` tells which nodes are one kernel, `ran` which were run at all; kernels of nodes of equal kinds, in order, do
    the same. Measured in docs/measurements.md.
    """
    kinds = 2 * kinds + ran
    count = int(unit.max(initial=-1)) + 1
    members = np.argsort(unit, kind="stable")
    bounds = np.searchsorted(unit[members], np.arange(count + 1))
    alike: dict[bytes, list[int]] = {}
    for index in range(count):
        alike.setdefault(kinds[members[bounds[index] : bounds[index + 1]]].tobytes(), []).append(index)
    spent = np.bincount(unit, seconds, count)
    common = np.empty(count)
    for indices in alike.values():
        common[indices] = np.median(spent[indices])
    shares = (common / np.maximum(np.bincount(unit, minlength=count), 1))[unit]
    total = shares.sum()
    return shares * (seconds.sum() / total) if total > 0 else seconds
