"""Profile a model: measure it or recall a measurement from the cache, and assemble the costs of nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from types import MappingProxyType
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from onnxplace.errors import Diagnostic, format_count
from onnxplace.facts import REFUSED_SECONDS, Profile, Quality, Repeat, Source
from onnxplace.graph.op_graph import Floats, Ints, OpGraph
from onnxplace.machine import measurement_cache
from onnxplace.machine.ort_sessions import list_operator_libraries
from onnxplace.machine.repeated_runs import DOUBTFUL_WAITING_SHARE
from onnxplace.model.lowering import build_op_graph
from onnxplace.model.model import Model
from onnxplace.passes.profiling.chunks import cut_into_chunks, has_repeated_chunks, measure_chunks, session_bytes
from onnxplace.passes.profiling.compiled_runs import RunMeasurer
from onnxplace.passes.profiling.node_measurement import Measurement, MeasurementOptions
from onnxplace.passes.profiling.repeated_layers import (
    find_repeats,
    fingerprints,
    node_kinds,
    pool_by_kind,
    small_integer_bytes,
)
from onnxplace.passes.profiling.roofline import device_peaks, estimate_seconds
from onnxplace.target.kind_table import find_kind
from onnxplace.target.target import Device
from onnxplace.utils.ort import import_onnxruntime

# Of one value or weight, and of all together: sums of such amounts are still 64-bit integers.
MAX_BYTES = 1 << 50
MAX_ALL_BYTES = 1 << 60
# Of one run of a whole model.
MAX_WHOLE_SECONDS = 1e9
# Figures of the quality of a measurement: runs, kernels, spread.
MAX_FIGURE = 1e15


# The code of the note that a measurement is doubtful; such measurements are not stored.
DOUBTFUL_CODE = "C004"


@dataclass(frozen=True)
class ModelStructure:
    """What measurements of a model need to know of it."""

    model: Model
    shapes: Mapping[str, tuple[int, ...]]
    """The shapes of values, by name."""
    graph: OpGraph
    kinds: Ints
    """Per node (`node_kinds`)."""
    fingerprints: tuple[str, ...]
    """Per node (`fingerprints`)."""
    repeats: tuple[Repeat, ...]

    @staticmethod
    def of(model: Model, shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[str, int]) -> ModelStructure:
        """Find the structure of a model with these shapes and sizes."""
        graph, kinds = build_op_graph(model, sizes), node_kinds(model, shapes)
        return ModelStructure(model, shapes, graph, kinds, fingerprints(model, shapes), find_repeats(kinds, graph))


@dataclass(frozen=True)
class ModelProfiler:
    """Measures a model on a class of device, or recalls a measurement."""

    structure: ModelStructure
    device: Device
    """Stands for all devices of its class."""
    limit_bytes: int
    """The most memory of any device of the class."""
    options: MeasurementOptions
    use_cache: bool

    def measure(self, feeds: Mapping[str, Any]) -> tuple[Measurement, list[Diagnostic]]:
        """Recall a stored measurement if `use_cache`, else measure and store; with notes."""
        options, cost_class, problems = self.options, self.device.cost_class, []
        limit: float | None = None if self._fits_whole() else self.limit_bytes
        if self.device.compiles:
            limit = self.device.segment_seconds
        settings = (options.repeat, options.seconds, options.tolerance, options.thorough, limit)
        key = measurement_key(self.structure, self.device, feeds, settings)
        try:
            stored = recall_measurement(key, len(self.structure.graph)) if self.use_cache else None
            if stored is not None:
                return stored
        except ValueError as error:
            problems.append(Diagnostic("C006", f"kept costs are not used: {error}", where=cost_class))
        measurement, notes = self._measure_now(feeds)
        try:
            if all(note.code != DOUBTFUL_CODE for note in notes):
                store_measurement(key, measurement, notes)
        except ValueError as error:
            problems.append(Diagnostic("C006", f"costs are not kept: {error}", where=cost_class))
        return measurement, notes + problems

    def _fits_whole(self) -> bool:
        return session_bytes(self.structure.graph) <= self.limit_bytes

    def _measure_now(self, feeds: Mapping[str, Any]) -> tuple[Measurement, list[Diagnostic]]:
        """Measure the whole model, or chunks if it does not fit or repeats layers; runs where the provider compiles."""
        model, graph, kinds = self.structure.model, self.structure.graph, self.structure.kinds
        if self.device.compiles:
            peaks = device_peaks(self.device)
            weights = estimate_seconds(model, self.structure.shapes, self.device.cost_class, peaks)
            return RunMeasurer(model, graph, kinds, self.device, self.options, weights).measure(feeds)
        fits, chunks = self._fits_whole(), cut_into_chunks(graph, self.structure.repeats, self.limit_bytes)
        if fits and (self.options.thorough or not has_repeated_chunks(graph, kinds, chunks)):
            measurement = self.options.measure(model, feeds)[0]
            pooled = pool_by_kind(measurement.seconds, measurement.unit, measurement.ran, kinds)
            return replace(measurement, seconds=pooled), report_doubts(measurement, self.device, self.options.tolerance)
        measurement = measure_chunks(model, graph, kinds, chunks, feeds, self.options)
        reason = "it repeats layers" if fits else f"it needs more than the {self.limit_bytes} bytes of a device"
        message = f"the model is measured in {len(chunks)} pieces, equal ones once: {reason}"
        if measurement.quality:
            message += f"; their sum is known to {measurement.quality.uncertainty:.1%}"
        if unmeasured := int((~measurement.measured).sum()):
            message += f"; {unmeasured} of {len(graph)} nodes could not be run alone, and are estimated"
        note = Diagnostic("C001", message, where=self.device.cost_class)
        return measurement, [note, *report_doubts(measurement, self.device, self.options.tolerance)]


def report_doubts(measurement: Measurement, device: Device, tolerance: float) -> list[Diagnostic]:
    """Return a note if the machine was busy or times were unstable."""
    quality = measurement.quality
    if quality is None:
        return []
    is_stable = quality.uncertainty <= max(DOUBTFUL_WAITING_SHARE, 2 * tolerance)
    if quality.waiting <= DOUBTFUL_WAITING_SHARE and is_stable:
        return []
    message = (
        f"costs are less sure than usual: runs waited {quality.waiting:.0%} of their time for a core, which was taken "
        f"off, and their median is known to {quality.uncertainty:.1%}"
    )
    hint = "profile again when the machine is idle; costs like these are not kept"
    return [Diagnostic(DOUBTFUL_CODE, message, where=device.cost_class, hint=hint)]


def report_unknown_sizes(model: Model, sizes: Mapping[str, int], unit: Ints) -> list[Diagnostic]:
    """Return a note on values without a size.

    Values within one unit need none.
    """
    unknown = [
        name
        for index, node in enumerate(model.nodes)
        for name in node.output
        if name not in sizes and any(unit[reader] != unit[index] for reader in model.readers.get(name, ()))
    ]
    if not unknown:
        return []
    message = f"the size of {format_count(len(unknown), 'value')} is unknown and counts as zero, such as {unknown[0]!r}"
    return [Diagnostic("C002", message, where=model.name)]


def assemble_profile(
    structure: ModelStructure,
    cost_classes: Iterable[str],
    sizes: Mapping[str, int],
    measurements: Mapping[str, Measurement],
    estimates: Mapping[str, Floats],
) -> Profile:
    """Assemble the profile of a model from measurements and estimates.

    Args:
        structure: Of the model.
        cost_classes: Of the target's devices, in their order.
        sizes: Of values in bytes, by name; unknown ones count as zero.
        measurements: By cost class.
        estimates: Seconds per node by cost class, for each class that is not measured completely.
    """
    count = len(structure.model.nodes)
    seconds: dict[str, Floats] = {}
    sources: dict[str, NDArray[np.uint8]] = {}
    for cost_class in dict.fromkeys(cost_classes):
        measurement = measurements.get(cost_class)
        if measurement is None:
            seconds[cost_class] = estimates[cost_class]
            sources[cost_class] = np.full(count, Source.ESTIMATED, dtype=np.uint8)
            continue
        measured = measurement.measured
        seconds[cost_class] = np.where(measured, measurement.seconds, estimates.get(cost_class, 0.0))
        known = np.where(measurement.ran, Source.MEASURED, Source.KNOWN)
        sources[cost_class] = np.where(measured, known, Source.ESTIMATED).astype(np.uint8)
    whole_seconds = {name: m.whole_seconds for name, m in measurements.items() if m.whole_seconds is not None}
    # Whole models first.
    units = [m.unit for m in sorted(measurements.values(), key=lambda m: m.whole_seconds is None)]
    return Profile(
        graph=replace(
            structure.graph,
            value_bytes=np.array([sizes.get(name, 0) for name in structure.graph.value_names], dtype=np.int64),
        ),
        seconds=MappingProxyType(seconds),
        sources=MappingProxyType(sources),
        unit=units[0] if units else np.arange(count, dtype=np.int32),
        whole_seconds=MappingProxyType(whole_seconds),
        repeats=structure.repeats,
        spread=MappingProxyType({name: m.spread for name, m in measurements.items()}),
        quality=MappingProxyType({name: m.quality for name, m in measurements.items() if m.quality is not None}),
        prints=structure.fingerprints,
    )


# ------------------------------------------------------------------------------------------------------------ the cache


# The fields with one entry per node.
_NODE_LISTS = ("seconds", "spread", "unit", "ran")
_Seconds = Annotated[float, Field(ge=0, le=REFUSED_SECONDS, allow_inf_nan=False)]
_Figure = Annotated[int, Field(ge=0, le=MAX_FIGURE)] | Annotated[float, Field(ge=0, le=MAX_FIGURE)]


class _StoredMeasurement(BaseModel):
    """A measurement as stored, with limits; other fields are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")

    seconds: list[_Seconds]
    spread: list[_Seconds]
    unit: list[Annotated[int, Field(ge=0)]]
    ran: list[bool]
    whole_seconds: Annotated[float, Field(ge=0, le=MAX_WHOLE_SECONDS)] | None
    value_bytes: dict[str, Annotated[int, Field(ge=0, le=MAX_BYTES)]]
    quality: dict[str, _Figure] | None
    notes: list[dict[str, str]]


def describe_class(device: Device) -> tuple[str, ...]:
    """Return what all measurements on a class of device depend on: hardware, versions and libraries."""
    hardware = measurement_cache.processor() if device.kind == "cpu" else device.model
    libraries = (*list_operator_libraries(), *find_kind(device.kind).libraries)
    files = map(measurement_cache.file_described, libraries)
    return device.cost_class, hardware, import_onnxruntime().__version__, *files


def measurement_key(
    structure: ModelStructure, device: Device, feeds: Mapping[str, Any], settings: Sequence[object]
) -> str:
    """Return the key of a measurement.

    It covers nodes, wiring, inputs, device, versions and settings. Inputs and small integers count with their bytes,
    since the work of some models depends on them.
    """
    model, graph = structure.model, structure.graph
    return measurement_cache.key(
        [
            *describe_class(device),
            *map(repr, settings),
            *structure.fingerprints,
            *map(small_integer_bytes, model.initializers.values()),
            graph.inputs.starts.tobytes(),
            graph.inputs.items.tobytes(),
            *graph.names,
            *graph.value_names,
            *(f"{name} {measurement_cache.described(value)}" for name, value in sorted(feeds.items())),
            *(output.name for output in model.outputs),
        ]
    )


def recall_measurement(key: str, nodes: int) -> tuple[Measurement, list[Diagnostic]] | None:
    """Return the measurement under a key and its notes, if any.

    Args:
        key: As `measurement_key` returns it.
        nodes: How many nodes the model has.

    Raises:
        ValueError: the entry is damaged; it is removed.
    """
    data = measurement_cache.read(key)
    if data is None:
        return None
    try:
        entry = _StoredMeasurement.model_validate(data)
        quality = None if entry.quality is None else Quality(**entry.quality)  # type: ignore[arg-type]
        notes = [Diagnostic(**note) for note in entry.notes]  # type: ignore[arg-type]
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise measurement_cache.damaged(key, f"{place}: {first['msg']}") from None
    except TypeError as error:
        raise measurement_cache.damaged(key, str(error)) from None
    if any(len(getattr(entry, item)) != nodes for item in _NODE_LISTS) or max(entry.unit, default=0) >= max(nodes, 1):
        raise measurement_cache.damaged(key, f"expected {nodes} entries per field, one for each node")
    if sum(entry.value_bytes.values()) > MAX_ALL_BYTES:
        raise measurement_cache.damaged(key, f"its values have more bytes than the maximum of {MAX_ALL_BYTES}")
    measurement = Measurement(
        seconds=np.array(entry.seconds, dtype=np.float64),
        unit=np.array(entry.unit, dtype=np.int32),
        ran=np.array(entry.ran, dtype=bool),
        measured=np.ones(nodes, dtype=bool),
        whole_seconds=entry.whole_seconds,
        value_bytes=entry.value_bytes,
        spread=np.array(entry.spread, dtype=np.float64),
        quality=quality,
    )
    return measurement, notes


def store_measurement(key: str, measurement: Measurement, notes: Sequence[Diagnostic]) -> None:
    """Store a measurement of all nodes under a key.

    Raises:
        ValueError: the cache cannot be written; the message says why.
    """
    if not measurement.measured.all():
        return
    measurement_cache.write(
        key,
        {
            **{item: getattr(measurement, item).tolist() for item in _NODE_LISTS},
            "whole_seconds": measurement.whole_seconds,
            "value_bytes": dict(measurement.value_bytes),
            "quality": None if measurement.quality is None else asdict(measurement.quality),
            "notes": [{key: getattr(note, key) for key in ("code", "message", "where", "hint")} for note in notes],
        },
    )
