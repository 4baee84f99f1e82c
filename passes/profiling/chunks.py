"""Measure a model in chunks: one that is too large for a device, or that repeats large layers.

Equal chunks are measured once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import ValueInfoProto, helper

from onnxplace.errors import OnnxplaceError
from onnxplace.facts import Quality, Repeat
from onnxplace.graph.op_graph import Csr, Ints, OpGraph
from onnxplace.model.model import Model
from onnxplace.passes.profiling.node_measurement import Measurement, MeasurementOptions
from onnxplace.passes.profiling.repeated_layers import wiring
from onnxplace.utils.progress import progress_part

# By position of a node in its chunk, and of the output at the node.
_OutputSlot = tuple[int, int]

# Layers are measured together until they hold this much: a chunk that stays in a cache from run to run is too fast.
BEYOND_CACHES_BYTES = 256 << 20
# A model that fits is cut where chunks that differ hold at most this share of it: each needs its own sessions.
MAX_DISTINCT_SHARE = 0.5


def session_bytes(graph: OpGraph) -> int:
    """Return the memory of one session: weights, inputs, and peak values."""
    if not len(graph):
        return 0
    peak = graph.contract(np.zeros(len(graph), dtype=np.int32)).workspace_bytes
    held_throughout = graph.is_output | (graph.producer < 0)
    return graph.total_weight_bytes + int(peak.max()) + int(graph.value_bytes[held_throughout].sum())


def cut_into_chunks(graph: OpGraph, repeats: Iterable[Repeat], limit_bytes: int) -> list[range]:
    """Return consecutive ranges of nodes that fit within the limit.

    All weights and values of a range count together. Repeated layers, as many as hold enough to be measured fairly, are
    their own chunks. So is a node that does not fit alone.
    """
    borders = {0, len(graph)}
    for repeat in repeats:
        layer_bytes = max(_range_bytes(graph, repeat.start, repeat.start + repeat.nodes), 1)
        layers = max(min(limit_bytes, BEYOND_CACHES_BYTES) // layer_bytes, 1)
        borders |= {*range(repeat.start, repeat.stop, repeat.nodes * layers), repeat.stop}
    # Weights are numbered behind the values.
    sizes = [*graph.value_bytes.tolist(), *graph.weight_bytes.tolist()]
    return [
        chunk for pair in pairwise(sorted(borders)) for chunk in _cut_range(graph, range(*pair), sizes, limit_bytes)
    ]


def has_repeated_chunks(graph: OpGraph, kinds: Ints, chunks: Sequence[range]) -> bool:
    """Return whether measuring chunks that differ takes clearly less than measuring the whole model.

    Only if the model is many times what caches hold are its chunks as slow by themselves as in the model.
    """
    whole = _range_bytes(graph, 0, len(graph))
    distinct = {kinds[item.start : item.stop].tobytes(): _range_bytes(graph, item.start, item.stop) for item in chunks}
    return whole >= 4 * BEYOND_CACHES_BYTES and sum(distinct.values()) <= MAX_DISTINCT_SHARE * whole


def _range_bytes(graph: OpGraph, start: int, stop: int) -> int:
    """Return the bytes of weights and values of a range."""

    def items_of(lists: Csr) -> Ints:
        return np.unique(lists.items[lists.starts[start] : lists.starts[stop]])

    values = np.union1d(items_of(graph.inputs), items_of(graph.outputs))
    return int(graph.value_bytes[values].sum() + graph.weight_bytes[items_of(graph.weights)].sum())


def _cut_range(graph: OpGraph, nodes: range, sizes: Sequence[int], limit_bytes: int) -> Iterator[range]:
    """Cut a range wherever the next node would exceed the limit; `sizes` are those of values, then of weights."""
    begin, held, free_bytes = nodes.start, set[int](), limit_bytes
    for node in nodes:
        weights = graph.weights[node] + len(graph.value_names)
        items = {*graph.inputs[node].tolist(), *graph.outputs[node].tolist(), *weights.tolist()}
        added_bytes = sum([sizes[item] for item in items - held])
        if added_bytes > free_bytes and node > begin:
            yield range(begin, node)
            begin, held, free_bytes = node, set(), limit_bytes
            added_bytes = sum([sizes[item] for item in items])
        free_bytes -= added_bytes
        held |= items
    if nodes:
        yield range(begin, nodes.stop)


@dataclass(frozen=True)
class _ChunkRun:
    """The run of the first of several equal chunks."""

    chunk: range
    measurement: Measurement
    outputs: dict[_OutputSlot, Any]
    """The values that left the chunk."""


def measure_chunks(
    model: Model,
    graph: OpGraph,
    kinds: Ints,
    chunks: Sequence[range],
    feeds: Mapping[str, Any],
    options: MeasurementOptions,
) -> Measurement:
    """Measure chunk by chunk, each fed with earlier outputs.

    Of equal chunks the first is run; its outputs stand in for those of the others. A chunk that cannot be run alone,
    and the nodes that depend on it, are not measured.
    """
    values, last_readers = dict(feeds), list_last_readers(graph)
    seconds, spread, ran = np.zeros(len(graph)), np.zeros(len(graph)), np.zeros(len(graph), dtype=bool)
    unit, measured = np.zeros(len(graph), dtype=np.int32), np.zeros(len(graph), dtype=bool)
    sizes: dict[str, int] = {}
    runs: dict[tuple[Any, ...], _ChunkRun | None] = {}
    first_unit, parts = 0, list[Measurement]()
    for number, chunk in enumerate(chunks):
        nodes, slots = slice(chunk.start, chunk.stop), _leaving_values(model, graph, chunk)
        # What equal chunks share: kinds, wiring, and leaving outputs.
        key = kinds[nodes].tobytes(), wiring(graph, chunk.start, len(chunk)), *slots.values()
        if key not in runs:
            with progress_part(number, len(chunks)):
                runs[key] = _run_chunk(model, chunk, slots, values, options)
        run = runs[key]
        unit[nodes] = first_unit + (np.arange(len(chunk)) if run is None else run.measurement.unit)
        first_unit = int(unit[nodes].max()) + 1
        if run is not None:
            seconds[nodes], spread[nodes] = run.measurement.seconds, run.measurement.spread
            ran[nodes], measured[nodes] = run.measurement.ran, True
            parts.append(run.measurement)
            sizes |= _translate_sizes(model, chunk, run)
            values |= {name: run.outputs[slot] for name, slot in slots.items() if slot in run.outputs}
        values = {name: value for name, value in values.items() if last_readers.get(name, -1) >= chunk.stop}
    return Measurement(
        seconds=seconds,
        unit=unit,
        ran=ran,
        measured=measured,
        value_bytes=sizes,
        spread=spread,
        quality=_join_quality(parts),
    )


def _join_quality(parts: Sequence[Measurement]) -> Quality | None:
    """Return the quality of the sum of chunks, of which equal ones err together: errors add up."""
    qualities = [part.quality for part in parts if part.quality]
    if not qualities:
        return None

    shares = np.array([item.kernel_seconds for item in qualities]) + 1e-9

    def average(name: str) -> float:
        return float(np.average([getattr(item, name) for item in qualities], weights=shares))

    return Quality(
        runs=min(item.runs for item in qualities),
        spread=average("spread"),
        uncertainty=average("uncertainty"),
        waiting=average("waiting"),
        kernels=sum(item.kernels for item in qualities),
        kernel_seconds=sum(item.kernel_seconds for item in qualities),
        overhead_seconds=average("overhead_seconds"),
    )


def _translate_sizes(model: Model, chunk: range, run: _ChunkRun) -> dict[str, int]:
    """Return the value sizes of a chunk by an equal chunk."""
    sizes = run.measurement.value_bytes
    return {
        name: sizes[measured_name]
        for node, measured_node in zip(chunk, run.chunk)
        for name, measured_name in zip(model.nodes[node].output, model.nodes[measured_node].output)
        if measured_name in sizes
    }


def list_last_readers(graph: OpGraph) -> dict[str, int]:
    """Return the last reader of each value, -1 if unread."""
    last = np.full(len(graph.value_names), -1, dtype=np.int64)
    np.maximum.at(last, graph.inputs.items, graph.inputs.rows)
    return dict(zip(graph.value_names, last.tolist()))


def _leaving_values(model: Model, graph: OpGraph, chunk: range) -> dict[str, _OutputSlot]:
    """Return the slots of values that are needed outside of a chunk."""
    outputs = ((node - chunk.start, list(model.nodes[node].output)) for node in chunk)
    slots = {name: (node, slot) for node, names in outputs for slot, name in enumerate(names)}
    return {name: slots[name] for name in name_outputs(graph, chunk)}


def _run_chunk(
    model: Model,
    chunk: range,
    slots: Mapping[str, _OutputSlot],
    values: Mapping[str, Any],
    options: MeasurementOptions,
) -> _ChunkRun | None:
    """Measure a chunk; None if it cannot be run alone."""
    try:
        part, feeds = extract_nodes(model, chunk, slots, values)
        measurement, results = options.measure(part, feeds)
    except (OnnxplaceError, KeyError):  # a type without a form in numpy, a missing kernel, no memory
        return None
    outputs = {slot: value for slot, value in zip(slots.values(), results) if value is not None}
    return _ChunkRun(chunk, measurement, outputs)


def list_outputs(graph: OpGraph, nodes: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return the values that some nodes make, and those of them that others read, or that are outputs."""
    inside = set(nodes)
    made = [value for node in nodes for value in graph.outputs[node].tolist()]
    return made, [value for value in made if graph.is_output[value] or set(graph.readers[value].tolist()) - inside]


def name_outputs(graph: OpGraph, nodes: Sequence[int]) -> list[str]:
    """Return the names of the values that leave some nodes; of what the last one makes if there are none."""
    # A session without outputs cannot be run.
    return [graph.value_names[value] for value in list_outputs(graph, nodes)[1] or graph.outputs[nodes[-1]].tolist()]


def extract_nodes(
    model: Model, nodes: Sequence[int], outputs: Iterable[str], values: Mapping[str, Any], *, is_static: bool = False
) -> tuple[Model, dict[str, Any]]:
    """Return some nodes as a model, and its inputs among `values`; raises KeyError if one is missing.

    With `is_static`, the inputs declare the sizes that they have here.
    """
    inner = {name for index in nodes for name in model.nodes[index].output}
    reads = dict.fromkeys(name for index in nodes for name in model.reads[index] if name not in inner)
    weights = {name: model.initializers[name] for name in reads if name in model.initializers and name not in values}
    feeds = {name: values[name] for name in reads if name not in weights}
    part = replace(
        model,
        nodes=tuple(model.nodes[index] for index in nodes),
        initializers=MappingProxyType(weights),
        inputs=tuple(_describe_input(model, name, value, is_static) for name, value in feeds.items()),
        outputs=tuple(ValueInfoProto(name=name) for name in outputs),
        sources=MappingProxyType({}),
    )
    return part, feeds


def _describe_input(model: Model, name: str, value: Any, is_static: bool) -> ValueInfoProto:
    """Return the declaration of an input; raises KeyError without a type."""
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OUS":
        element = helper.np_dtype_to_tensor_dtype(value.dtype)
        return helper.make_tensor_value_info(name, element, value.shape if is_static else [None] * value.ndim)
    return ValueInfoProto(name=name, type=model.types[name])
