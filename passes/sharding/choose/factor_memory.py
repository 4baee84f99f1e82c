"""Memory over time of a reduced network: what each value of each variable holds, at which points of time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from onnxplace.passes.sharding.choose.factor_network import Floats, Integers, ReducedNetwork

# More bytes than anything holds.
_ENDLESS = 2.0**62


class MemoryOverTime(NamedTuple):
    """Runs of points at which a variable holds equally much, per variable and value.

    Points are those at which the most intervals overlap: where some interval begins and the next event is an end.
    """

    room: Floats
    """Bytes per point that are left for what depends on the choice."""
    first_run: Integers
    """Where the runs of each variable begin; one more entry at the end."""
    run_from: Integers
    run_to: Integers
    run_start: Integers
    """Where the usages of a run begin in `usage`."""
    usage: Floats
    """Bytes per run and value, above the least of the variable's values in this run."""


def collect_memory(
    reduced: ReducedNetwork,
    holders: Sequence[int],
    usages: Sequence[Floats],
    intervals: Sequence[tuple[int, int]],
    limit: float,
) -> MemoryOverTime:
    """Return the memory of a reduced network; bytes are rounded up, the limit down."""
    spans = np.array(intervals, np.int64).reshape(-1, 2)
    held = np.flatnonzero(spans[:, 1] > spans[:, 0])
    begins, ends = np.unique(spans[held, 0]), np.unique(spans[held, 1])
    points = begins[np.unique(np.searchsorted(begins, ends) - 1)]
    spans = np.searchsorted(points, spans)
    base = np.zeros(len(points) + 1)
    sizes = reduced.network.sizes
    items: list[list[tuple[int, int, Floats]]] = [[] for _ in sizes]
    for item in held.tolist():
        variable, (begin, end) = holders[item], spans[item].tolist()
        first, last = reduced.value_start[variable], reduced.value_start[variable + 1]
        usage = np.ceil(usages[item])[reduced.values[first:last]]
        least = usage.min()
        base[begin] += least
        base[end] -= least
        usage = usage - least
        if begin < end and usage.any():
            items[reduced.group[variable]].append((begin, end, usage))
    counts, run_from, run_to, tables = [], [], [], [np.zeros(0)]
    for own, size in zip(items, sizes):
        places = np.unique([place for begin, end, _ in own for place in (begin, end)]).astype(np.int64)
        changes = np.zeros((len(places), size))
        for begin, end, usage in own:
            changes[np.searchsorted(places, begin)] += usage
            changes[np.searchsorted(places, end)] -= usage
        table = changes.cumsum(axis=0)[:-1]
        is_used = table.any(axis=1) if len(table) else np.zeros(0, bool)
        counts.append(int(is_used.sum()))
        run_from.append(places[:-1][is_used])
        run_to.append(places[1:][is_used])
        tables.append(table[is_used].ravel())
    first_run = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    per_run = np.repeat(sizes, counts)
    return MemoryOverTime(
        room=math.floor(min(limit, _ENDLESS)) - base.cumsum()[:-1],
        first_run=first_run,
        run_from=np.concatenate(run_from),
        run_to=np.concatenate(run_to),
        run_start=np.cumsum(per_run) - per_run,
        usage=np.concatenate(tables),
    )
