"""Measurements that outlive the process: a Measurement as plain data in the user's cache, by what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from onnxplace import cost_cache
from onnxplace.facts import Quality
from onnxplace.graph import OpGraph
from onnxplace.machine import onnxruntime
from onnxplace.model import Model
from onnxplace.passes._measure import Measurement
from onnxplace.passes._repeats import held_integers
from onnxplace.sessions import operator_libraries
from onnxplace.state import Diagnostic
from onnxplace.target import Device

_NUMBERS = ("seconds", "spread")
_LISTS = (*_NUMBERS, "unit", "ran")


def key(
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
    hardware = cost_cache.processor() if device.kind == "cpu" else device.model
    held = (held_integers(tensor) for tensor in model.initializers.values())
    return cost_cache.key(
        [
            *(device.cost_class, hardware, onnxruntime().__version__),
            *map(repr, how),
            *prints,
            *held,
            graph.inputs.starts.tobytes(),
            graph.inputs.items.tobytes(),
            *graph.names,
            *graph.value_names,
            *map(cost_cache.file_described, operator_libraries()),
            *(f"{name} {cost_cache.described(value)}" for name, value in sorted(feeds.items())),
            *(output.name for output in model.outputs),
        ]
    )


def recall(name: str, nodes: int) -> tuple[Measurement, list[Diagnostic]] | None:
    """Return what is kept under a key for a model of so many nodes, with what was said then; None if nothing is.

    Raises ValueError, saying what, if it is damaged.
    """
    data = cost_cache.read(name)
    if data is None:
        return None
    try:
        arrays = {item: np.array(data[item]) for item in _LISTS}
        quality, sizes, notes = data["quality"], dict(data["value_bytes"]), data["notes"]
        found = Measurement(
            arrays["seconds"].astype(np.float64),
            arrays["unit"].astype(np.int32),
            arrays["ran"].astype(bool),
            np.ones(nodes, dtype=bool),
            data["whole_seconds"],
            sizes,
            arrays["spread"].astype(np.float64),
            None if quality is None else Quality(**quality),
        )
        said = [Diagnostic(**note) for note in notes]
    except (KeyError, TypeError, ValueError) as problem:
        raise ValueError(f"{cost_cache.folder() / name}.json is damaged: {problem!r}") from None
    good = all(array.shape == (nodes,) for array in arrays.values())
    good = good and all(bool((np.isfinite(arrays[item]) & (arrays[item] >= 0)).all()) for item in _NUMBERS)
    if not good:
        raise ValueError(f"{cost_cache.folder() / name}.json is damaged: it does not hold a time per node")
    return found, said


def keep(name: str, found: Measurement, notes: Sequence[Diagnostic]) -> None:
    """Keep a measurement of all nodes under a key; raises ValueError, saying why, if that cannot be."""
    if not found.measured.all():
        return
    cost_cache.write(
        name,
        {
            **{item: getattr(found, item).tolist() for item in _LISTS},
            "whole_seconds": found.whole_seconds,
            "value_bytes": dict(found.value_bytes),
            "quality": None if found.quality is None else asdict(found.quality),
            "notes": [vars(note) for note in notes],
        },
    )
