"""Measure a model that is too large for a device in pieces that fit, equal pieces once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import ValueInfoProto, helper

from onnxplace.errors import OnnxplaceError
from onnxplace.facts import Repeat
from onnxplace.graph import Csr, Ints, OpGraph
from onnxplace.model import Model
from onnxplace.passes.profiling.repeated_layers import wiring
from onnxplace.passes.profiling.timer import Measurement, MeasurementOptions

Values = dict[str, Any]

# Several layers are one piece until they hold this much: what stays in a cache from run to run is too fast.
BEYOND_CACHES_BYTES = 256 << 20


def session_bytes(graph: OpGraph) -> int:
    """Return the memory that one session of the whole model needs: weights, inputs, and values at their peak."""
    if not len(graph):
        return 0
    peak = graph.contract(np.zeros(len(graph), dtype=np.int32)).workspace_bytes
    kept = graph.is_output | (graph.producer < 0)
    return graph.total_weight_bytes + int(peak.max()) + int(graph.value_bytes[kept].sum())


def cut_into_chunks(graph: OpGraph, repeats: Iterable[Repeat], limit_bytes: int) -> list[range]:
    """Return consecutive stretches of nodes whose weights and values, all held at once, are within the limit.

    Repeated layers, as many as hold enough to be measured fairly, are stretches of their own; so is a node that does
    not fit alone.
    """
    borders = {0, len(graph)}
    for repeat in repeats:
        held = max(_held_bytes(graph, repeat.start, repeat.start + repeat.nodes), 1)
        together = max(min(limit_bytes, BEYOND_CACHES_BYTES) // held, 1)
        borders |= {*range(repeat.start, repeat.stop, repeat.nodes * together), repeat.stop}
    pieces = []
    for first, stop in pairwise(sorted(borders)):
        pieces += _filled(graph, first, stop, limit_bytes)
    return pieces


def _held_bytes(graph: OpGraph, first: int, stop: int) -> int:
    """Return the bytes of all weights and values of a stretch of nodes."""

    def among(lists: Csr) -> Ints:
        return np.unique(lists.items[lists.starts[first] : lists.starts[stop]])

    values = np.union1d(among(graph.inputs), among(graph.outputs))
    return int(graph.value_bytes[values].sum() + graph.weight_bytes[among(graph.weights)].sum())


def _filled(graph: OpGraph, first: int, stop: int, limit_bytes: int) -> list[range]:
    """Cut a stretch wherever the next node would exceed the limit."""
    pieces, begin, held = [], first, 0
    weights: set[int] = set()
    values: set[int] = set()
    for node in range(first, stop):
        for attempt in range(2):
            more_weights = set(graph.weights[node].tolist()) - weights
            more_values = {*graph.inputs[node].tolist(), *graph.outputs[node].tolist()} - values
            more = sum(int(graph.weight_bytes[w]) for w in more_weights)
            more += sum(int(graph.value_bytes[v]) for v in more_values)
            if held + more <= limit_bytes or node == begin or attempt:
                break
            pieces.append(range(begin, node))
            begin, held = node, 0
            weights, values = set(), set()
        held, weights, values = held + more, weights | more_weights, values | more_values
    return [*pieces, range(begin, stop)] if stop > begin else pieces


@dataclass(frozen=True)
class _Found:
    """What is known of the first of several equal pieces."""

    piece: range
    measured: Measurement
    outputs: dict[tuple[int, int], Any]
    """What it made, by position of the node in the piece and of the output at the node."""


def measure_chunks(
    model: Model,
    graph: OpGraph,
    kinds: Ints,
    pieces: Sequence[range],
    feeds: Mapping[str, Any],
    timer: MeasurementOptions,
) -> Measurement:
    """Measure piece by piece, each fed with what those before it made.

    Of equal pieces the first is run; what it made stands in for what the others would make. A piece that cannot be
    run alone, and what depends on it, is not measured.
    """
    values, last = dict(feeds), _last_readers(graph)
    seconds, spread, ran = np.zeros(len(graph)), np.zeros(len(graph)), np.zeros(len(graph), dtype=bool)
    unit, measured = np.zeros(len(graph), dtype=np.int32), np.zeros(len(graph), dtype=bool)
    sizes: dict[str, int] = {}
    known: dict[tuple[Any, ...], _Found | None] = {}
    offset = 0
    for piece in pieces:
        nodes, names = slice(piece.start, piece.stop), _leaving(model, graph, piece)
        key = _key(graph, kinds, piece, names.values())
        if key not in known:
            known[key] = _run(model, piece, names, values, timer)
        found = known[key]
        unit[nodes] = np.arange(len(piece)) + offset if found is None else found.measured.unit + offset
        offset = int(unit[nodes].max()) + 1
        if found is not None:
            seconds[nodes], ran[nodes], measured[nodes] = found.measured.seconds, found.measured.ran, True
            spread[nodes] = found.measured.spread
            sizes |= _sizes(model, piece, found)
            values |= {name: found.outputs[at] for name, at in names.items() if at in found.outputs}
        values = {name: value for name, value in values.items() if last.get(name, -1) >= piece.stop}
    return Measurement(seconds, unit, ran, measured, None, sizes, spread, None)


def _sizes(model: Model, piece: range, found: _Found) -> dict[str, int]:
    """Return the bytes of the values made in a piece, by those in the equal one that was measured."""
    known = found.measured.value_bytes
    return {
        name: known[first]
        for node, other in zip(piece, found.piece)
        for name, first in zip(model.nodes[node].output, model.nodes[other].output)
        if first in known
    }


def _key(graph: OpGraph, kinds: Ints, piece: range, leaving: Iterable[tuple[int, int]]) -> tuple[Any, ...]:
    """Return what equal pieces have in common: the kinds of their nodes, which reads which, and what leaves."""
    return kinds[piece.start : piece.stop].tobytes(), wiring(graph, piece.start, len(piece)), *leaving


def _last_readers(graph: OpGraph) -> dict[str, int]:
    last = np.full(len(graph.value_names), -1, dtype=np.int64)
    np.maximum.at(last, graph.inputs.items, graph.inputs.rows)
    return dict(zip(graph.value_names, last.tolist()))


def _leaving(model: Model, graph: OpGraph, piece: range) -> dict[str, tuple[int, int]]:
    """Return the values that are read after a piece, or given back, by where in the piece they are made."""
    names = {}
    for node in piece:
        slots = {name: (node - piece.start, slot) for slot, name in enumerate(model.nodes[node].output) if name}
        for value in graph.outputs[node].tolist():
            if graph.is_output[value] or graph.readers[value].max(initial=-1) >= piece.stop:
                names[graph.value_names[value]] = slots[graph.value_names[value]]
    if not names:  # a session without outputs cannot be run
        node = piece[-1]
        names = {name: (node - piece.start, i) for i, name in enumerate(model.nodes[node].output) if name}
    return names


def _run(
    model: Model, piece: range, names: Mapping[str, tuple[int, int]], values: Values, timer: MeasurementOptions
) -> _Found | None:
    """Measure a piece; None if it cannot be run with what there is."""
    nodes = model.nodes[piece.start : piece.stop]
    inner = {name for node in nodes for name in node.output}
    reads = dict.fromkeys(name for index in piece for name in model.reads[index] if name not in inner)
    weights = {name: model.initializers[name] for name in reads if name in model.initializers and name not in values}
    feeds = {name: values[name] for name in reads if name in values}
    if len(feeds) + len(weights) < len(reads):
        return None
    try:
        part = replace(
            model,
            nodes=nodes,
            initializers=MappingProxyType(weights),
            inputs=tuple(_described(model, name, value) for name, value in feeds.items()),
            outputs=tuple(ValueInfoProto(name=name) for name in names),
            sources=MappingProxyType({}),
        )
        measured, made = timer.measure(part, feeds)
    except (OnnxplaceError, KeyError):  # a type without a form in numpy, a kernel that is not there, no memory
        return None
    return _Found(piece, measured, {at: value for at, value in zip(names.values(), made) if value is not None})


def _described(model: Model, name: str, value: Any) -> ValueInfoProto:
    """Return the type of an input of a piece; raises KeyError where it is unknown."""
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OUS":
        element = helper.np_dtype_to_tensor_dtype(value.dtype)
        return helper.make_tensor_value_info(name, element, [None] * value.ndim)
    return ValueInfoProto(name=name, type=model.types[name])
