"""Cut the layers of a training step into consecutive stages of about equal time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from onnxplace.graph import Floats, Ints, OpGraph
from onnxplace.passes.placement.pipelining.step_layers import StepLayers

# How far a cut may be from where stages are of equal time, in shares of the step; and the window around each of these
# places in which the cut with the fewest bytes is taken.
_SHIFTS = (0.0, -0.03, 0.03, -0.07, 0.07)
_WINDOW = 0.015
# With more cuts, each one stays where stages are of equal time.
_MAX_SHIFTED_CUTS = 2


@dataclass(frozen=True)
class StageCuts:
    """The stage of each node."""

    stage: Ints


def list_stage_cuts(graph: OpGraph, layers: StepLayers, shares: Sequence[float]) -> Iterator[StageCuts]:
    """Yield cuts into stages without repeats, first the one that balances times the best.

    Args:
        graph: The training step.
        layers: Its units.
        shares: Of the time, by stage.
    """
    order = np.argsort(layers.depth, kind="stable").astype(np.int32)
    elapsed = np.cumsum(layers.seconds[order])
    total = max(float(elapsed[-1]), 1e-30) if len(elapsed) else 1e-30
    crossing = _crossing_bytes(graph, layers, order)
    goals = np.cumsum(shares)[:-1] / sum(shares)
    shifts = _SHIFTS if len(goals) <= _MAX_SHIFTED_CUTS else (0.0,)
    seen: set[tuple[int, ...]] = set()
    for offsets in sorted(product(shifts, repeat=len(goals)), key=lambda item: sum(map(abs, item))):
        places = tuple(_place_cut(elapsed / total, crossing, goal + shift) for goal, shift in zip(goals, offsets))
        if places in seen or list(places) != sorted(places):
            continue
        seen.add(places)
        stage_of_rank = np.searchsorted(np.array(places), np.arange(len(order)), side="right")
        stage = np.empty(len(order), dtype=np.int32)
        stage[order] = stage_of_rank
        yield StageCuts(stage[layers.unit])


def _crossing_bytes(graph: OpGraph, layers: StepLayers, order: Ints) -> Floats:
    """Return, per rank of a unit, the bytes that cross a cut before it."""
    rank = np.empty(len(order), dtype=np.int64)
    rank[order] = np.arange(len(order))
    position = rank[layers.unit]
    change = np.zeros(len(order) + 1)
    producer = graph.producer
    for value in np.flatnonzero(producer >= 0).tolist():
        readers = graph.readers[value]
        if len(readers):
            ends = position[readers]
            own = position[producer[value]]
            change[min(own, int(ends.min())) + 1] += graph.value_bytes[value]
            change[max(own, int(ends.max())) + 1] -= graph.value_bytes[value]
    return np.cumsum(change)[:-1]


def _place_cut(elapsed: Floats, crossing: Floats, goal: float) -> int:
    """Return the rank of the first unit behind a cut: near a share of the time, with the fewest bytes across."""
    before = np.concatenate([[0.0], elapsed[:-1]])
    near = np.flatnonzero(np.abs(before - goal) <= _WINDOW)
    if not len(near):
        return int(np.abs(before - goal).argmin())
    return int(near[crossing[near].argmin()])
