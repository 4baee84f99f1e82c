"""Plan with the list scheduler under memory limits, and plan again with less where the simulated peak exceeds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain

import numpy as np

from onnxplace.errors import InfeasibleError
from onnxplace.graph import Floats, Ints, Longs
from onnxplace.passes.placement.list_scheduling.filling import fill_devices
from onnxplace.passes.placement.list_scheduling.records import empty_queues, nothing_placed
from onnxplace.passes.placement.list_scheduling.scheduler_kernels import list_schedule
from onnxplace.problem import PlacementProblem, commit_placement, out_of_memory_error, sort_by_start
from onnxplace.state import State

# How often to plan again with tighter limits when the simulated peak exceeds what the plan had counted.
ATTEMPTS = 8
# What part of its memory a device fills before it takes on no further group: the values of a group's first nodes stay
# until its last ones run, on the same device, and those may find it full.
ADMISSION = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25)


def place_by_list_schedule(
    state: State, asked: PlacementProblem, favourite: Ints, placer: str, reserve_peak: bool
) -> State:
    """Return `state` with the placement of the list scheduler; raises InfeasibleError if nothing fits."""
    refused: InfeasibleError | None = None
    for device, start in generate_plans(asked, favourite, reserve_peak):
        try:
            return commit_placement(state, asked, device, start, placer)
        except InfeasibleError as problem:
            refused = refused or problem
    for device, start in _last_resorts(asked):
        with suppress(InfeasibleError):
            return commit_placement(state, asked, device, start, placer)
    raise refused or out_of_memory_error(asked, placer)


def find_best_plan(
    asked: PlacementProblem, favourite: Ints, reserve_peak: bool = False, placer: str = "m-etf"
) -> tuple[Ints, Floats]:
    """Return device and planned start per node of the first plan whose simulated peak is within the limits.

    Raises InfeasibleError in the name of `placer` if there is none.
    """
    for device, start in chain(generate_plans(asked, favourite, reserve_peak), _last_resorts(asked)):
        if not _excess(asked, device, start).any():
            return device, start
    raise out_of_memory_error(asked, placer)


def generate_plans(asked: PlacementProblem, favourite: Ints, reserve_peak: bool) -> Iterator[tuple[Ints, Floats]]:
    """Yield plans (device and planned start per node) of the published rule, each more cautious than the one before.

    The rule counts what is on a device while it plans, but a value may be there longer than planned, waiting for a
    channel; so whatever a device exceeds its limit by when simulated is taken off what may be filled.
    """
    several = len(asked.graph) > len(np.unique(asked.group))
    for share in ADMISSION if several else ADMISSION[:1]:
        yield from _tightened(asked, favourite, reserve_peak, share)


def _last_resorts(asked: PlacementProblem) -> Iterator[tuple[Ints, Floats]]:
    """Yield what remains where no plan of the rule fits: all on one device, then one device filled after the other.

    So what fits on one device is never refused.
    """
    pins = np.unique(asked.pinned[asked.pinned >= 0])
    if len(pins) < 2:
        for index in pins.tolist() or range(len(asked.limit_bytes)):
            yield _in_order(asked, np.full(len(asked.graph), index, dtype=np.int32))
    with suppress(InfeasibleError):
        yield _in_order(asked, fill_devices(asked))


def _in_order(asked: PlacementProblem, device: Ints) -> tuple[Ints, Floats]:
    return device, asked.simulate(device, asked.graph.order).start_seconds


def _tightened(
    asked: PlacementProblem, favourite: Ints, reserve_peak: bool, share: float
) -> Iterator[tuple[Ints, Floats]]:
    """Yield plans under limits that become tighter, most where the plan before exceeds them."""
    limit = asked.limit_bytes
    for attempt in range(1, ATTEMPTS + 1):
        device, start = plan(asked, limit, favourite, reserve_peak, share)
        if len(device) and device.min() < 0:
            return
        yield device, start
        excess = _excess(asked, device, start)
        limit = np.maximum(limit - np.maximum(attempt * excess, asked.limit_bytes // 64), 0)


def _excess(asked: PlacementProblem, device: Ints, start: Floats) -> Longs:
    return asked.excess_bytes(asked.simulate(device, sort_by_start(asked.graph, start)))


def plan(
    asked: PlacementProblem, limit: Longs, favourite: Ints, reserve_peak: bool, share: float = 1.0
) -> tuple[Ints, Floats]:
    """Return device and planned start of each node under these limits; device -1 where nothing fits."""
    size = np.bincount(asked.group, minlength=len(asked.pinned)).astype(np.int64)
    extra = _largest_step(asked, size) if reserve_peak else np.zeros_like(size)
    work, tick_seconds = nothing_placed(asked, limit, extra, share)
    guided = bool((favourite >= 0).any())
    queues = empty_queues(len(asked.graph), len(limit), guided)
    nodes = work.nodes[:-1]
    nodes["favourite"] = favourite
    list_schedule(work, queues)
    return nodes["device"].copy(), nodes["start"] * tick_seconds


def _largest_step(asked: PlacementProblem, size: Longs) -> Longs:
    """Return, per group of several nodes, the largest workspace and the largest output of a member together."""
    graph = asked.graph
    made = np.flatnonzero(graph.producer >= 0)
    output = np.bincount(graph.producer[made], graph.value_bytes[made], len(graph)).astype(np.int64)
    largest_output, largest_workspace = np.zeros_like(size), np.zeros_like(size)
    np.maximum.at(largest_output, asked.group, output)
    np.maximum.at(largest_workspace, asked.group, graph.workspace_bytes)
    return np.where(size > 1, largest_output + largest_workspace, 0)
