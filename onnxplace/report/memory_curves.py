"""Memory over a step: the curve of each device, and what fills it at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from onnxplace.graph import Floats, Longs
from onnxplace.report.page_records import MemoryCurve, MemoryItem
from onnxplace.report.placed_step import PlacedStep
from onnxplace.simulation import MemoryChanges, list_memory_changes

# Points of a curve; of more changes, the largest of each interval is kept.
MAX_POINTS = 2000
# Parts of the peak that are named.
MAX_CONTENTS = 12


def draw_memory(step: PlacedStep, weights_bytes: Sequence[int]) -> tuple[MemoryCurve, ...]:
    """Return the memory of each device over a step.

    Args:
        step: The simulated step.
        weights_bytes: Per device, the weights, which it holds throughout.
    """
    simulation = step.simulation
    changes = list_memory_changes(
        step.graph,
        step.device,
        step.order,
        simulation.start_seconds,
        simulation.finish_seconds,
        simulation.transfers,
        simulation.makespan_seconds,
    )
    return tuple(_draw_device(step, changes, index, base) for index, base in enumerate(weights_bytes))


def _draw_device(step: PlacedStep, changes: MemoryChanges, device: int, weights_bytes: int) -> MemoryCurve:
    own = np.flatnonzero(changes.device == device)
    held = weights_bytes + np.cumsum(changes.change_bytes[own])
    peak = int(held.argmax()) if len(held) and held.max() > weights_bytes else -1
    seconds, sizes = _thin(changes.seconds[own], held)
    contents = _list_contents(step, changes, own[: peak + 1])
    if weights_bytes:
        contents.append(MemoryItem("weights", "weights", weights_bytes))
    contents.sort(key=lambda item: (-item.bytes, item.name))
    return MemoryCurve(
        device=device,
        limit_bytes=step.target.devices[device].memory_bytes,
        seconds=(0.0, *seconds.tolist(), step.simulation.makespan_seconds),
        bytes=(weights_bytes, *sizes.tolist(), int(held[-1]) if len(held) else weights_bytes),
        peak_seconds=float(changes.seconds[own[peak]]) if peak >= 0 else 0.0,
        peak_bytes=int(held[peak]) if peak >= 0 else weights_bytes,
        contents=tuple(contents[:MAX_CONTENTS]),
        other_items=len(contents[MAX_CONTENTS:]),
        other_bytes=sum(item.bytes for item in contents[MAX_CONTENTS:]),
    )


def _list_contents(step: PlacedStep, changes: MemoryChanges, until: Longs) -> list[MemoryItem]:
    """Return the values and workspaces that are held after these changes."""
    values: Counter[int] = Counter()
    nodes: Counter[int] = Counter()
    for value, node, size in zip(
        changes.value[until].tolist(), changes.node[until].tolist(), changes.change_bytes[until].tolist()
    ):
        if value >= 0:
            values[value] += size
        else:
            nodes[node] += size
    return [
        *(MemoryItem(step.graph.value_names[value], "value", size) for value, size in values.items() if size > 0),
        *(MemoryItem(step.graph.names[node], "workspace", size) for node, size in nodes.items() if size > 0),
    ]


def _thin(seconds: Floats, sizes: Longs) -> tuple[Floats, Longs]:
    """Return at most `MAX_POINTS` points of a curve, with the largest and the last one of each interval."""
    if len(seconds) <= MAX_POINTS:
        return seconds, sizes
    parts = np.array_split(np.arange(len(seconds)), MAX_POINTS // 2)
    kept = np.unique([index for part in parts for index in (part[int(sizes[part].argmax())], part[-1])])
    return seconds[kept], sizes[kept]
