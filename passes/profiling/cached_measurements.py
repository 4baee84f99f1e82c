"""Store measurements in the user's cache.

They are plain data, under a key of everything that was measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from onnxplace.errors import Diagnostic
from onnxplace.facts import Quality
from onnxplace.graph import OpGraph
from onnxplace.machine import list_operator_libraries, measurement_cache
from onnxplace.model import Model
from onnxplace.ort import import_onnxruntime
from onnxplace.passes.profiling.node_measurement import Measurement
from onnxplace.passes.profiling.plausible import MAX_ALL_BYTES, MAX_BYTES, MAX_FIGURE, MAX_WHOLE_SECONDS
from onnxplace.passes.profiling.repeated_layers import small_integer_bytes
from onnxplace.target import MAX_SECONDS, Device

# The fields with one entry per node.
_NODE_LISTS = ("seconds", "spread", "unit", "ran")
_Seconds = Annotated[float, Field(ge=0, le=MAX_SECONDS, allow_inf_nan=False)]
_Figure = Annotated[int, Field(ge=0, le=MAX_FIGURE)] | Annotated[float, Field(ge=0, le=MAX_FIGURE)]


_NOTE_KEYS = ("code", "message", "where", "hint")


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


def measurement_key(
    model: Model,
    graph: OpGraph,
    prints: Sequence[str],
    device: Device,
    feeds: Mapping[str, Any],
    settings: Sequence[object],
) -> str:
    """Return the key of a measurement.

    It covers nodes, wiring, inputs, device, versions and settings. Inputs and small integers count with their bytes,
    since the work of some models depends on them.
    """
    hardware = measurement_cache.processor() if device.kind == "cpu" else device.model
    small_integers = (small_integer_bytes(tensor) for tensor in model.initializers.values())
    return measurement_cache.key(
        [
            *(device.cost_class, hardware, import_onnxruntime().__version__),
            *map(repr, settings),
            *prints,
            *small_integers,
            graph.inputs.starts.tobytes(),
            graph.inputs.items.tobytes(),
            *graph.names,
            *graph.value_names,
            *map(measurement_cache.file_described, list_operator_libraries()),
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
            "notes": [{key: getattr(note, key) for key in _NOTE_KEYS} for note in notes],
        },
    )
