"""Measurements that outlive the process: a Measurement as plain data in the user's cache, by what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from onnxplace.errors import Diagnostic
from onnxplace.facts import Quality
from onnxplace.graph import OpGraph
from onnxplace.machine import import_onnxruntime, measurement_cache, operator_libraries
from onnxplace.model import Model
from onnxplace.passes.profiling.plausible import MAX_ALL_BYTES, MAX_BYTES, MAX_FIGURE, MAX_WHOLE_SECONDS
from onnxplace.passes.profiling.repeated_layers import held_integers
from onnxplace.passes.profiling.timer import Measurement
from onnxplace.target import MAX_SECONDS, Device

_LISTS = ("seconds", "spread", "unit", "ran")
_Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
_Figure = Annotated[int, Field(ge=0, le=MAX_FIGURE)] | Annotated[float, Field(ge=0, le=MAX_FIGURE)]


class _Entry(BaseModel):
    """A measurement as it is kept, each number within what it can be; other fields are passed over."""

    model_config = ConfigDict(strict=True, extra="ignore")

    seconds: list[_Seconds]
    spread: list[_Seconds]
    unit: list[Annotated[int, Field(ge=0)]]
    ran: list[bool]
    whole_seconds: Annotated[float, Field(ge=0, le=MAX_WHOLE_SECONDS)] | None
    value_bytes: dict[str, Annotated[int, Field(ge=0, le=MAX_BYTES)]]
    quality: dict[str, _Figure] | None
    notes: list[dict[str, str]]


def measurement_key(
    model: Model,
    graph: OpGraph,
    prints: Sequence[str],
    device: Device,
    feeds: Mapping[str, Any],
    how: Sequence[object],
) -> str:
    """Return the key of a measurement: what each node does, which reads which, with which inputs, on what, and how.

    Inputs and small integers count with their bytes, since the work of some models depends on them.
    """
    hardware = measurement_cache.processor() if device.kind == "cpu" else device.model
    held = (held_integers(tensor) for tensor in model.initializers.values())
    return measurement_cache.key(
        [
            *(device.cost_class, hardware, import_onnxruntime().__version__),
            *map(repr, how),
            *prints,
            *held,
            graph.inputs.starts.tobytes(),
            graph.inputs.items.tobytes(),
            *graph.names,
            *graph.value_names,
            *map(measurement_cache.file_described, operator_libraries()),
            *(f"{name} {measurement_cache.described(value)}" for name, value in sorted(feeds.items())),
            *(output.name for output in model.outputs),
        ]
    )


def recall_measurement(name: str, nodes: int) -> tuple[Measurement, list[Diagnostic]] | None:
    """Return what is kept under a key for a model of so many nodes, with what was said then; None if nothing is.

    Raises ValueError, saying what, if it is damaged; then it is removed.
    """
    data = measurement_cache.read(name)
    if data is None:
        return None
    try:
        entry = _Entry.model_validate(data)
        quality = None if entry.quality is None else Quality(**entry.quality)  # type: ignore[arg-type]
        notes = [Diagnostic(**note) for note in entry.notes]
    except ValidationError as problem:
        first = problem.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise measurement_cache.damaged(name, f"{place}: {first['msg']}") from None
    except TypeError as problem:
        raise measurement_cache.damaged(name, str(problem)) from None
    if any(len(getattr(entry, item)) != nodes for item in _LISTS) or max(entry.unit, default=0) >= max(nodes, 1):
        raise measurement_cache.damaged(name, "it does not hold a time per node")
    if sum(entry.value_bytes.values()) > MAX_ALL_BYTES:
        raise measurement_cache.damaged(name, "its values have more bytes than there can be")
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


def store_measurement(name: str, found: Measurement, notes: Sequence[Diagnostic]) -> None:
    """Keep a measurement of all nodes under a key; raises ValueError, saying why, if that cannot be."""
    if not found.measured.all():
        return
    measurement_cache.write(
        name,
        {
            **{item: getattr(found, item).tolist() for item in _LISTS},
            "whole_seconds": found.whole_seconds,
            "value_bytes": dict(found.value_bytes),
            "quality": None if found.quality is None else asdict(found.quality),
            "notes": [vars(note) for note in notes],
        },
    )
