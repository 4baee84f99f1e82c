"""Plan with the list scheduler under memory limits, with tighter ones where the simulated peak exceeds them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain

import numpy as np

from onnxplace.errors import InfeasibleError
from onnxplace.graph import Floats, Ints, Longs
from onnxplace.passes.placement.list_scheduling.filling import fill_devices
from onnxplace.passes.placement.list_scheduling.records import new_queues, start_plan
from onnxplace.passes.placement.list_scheduling.scheduler_kernels import list_schedule
from onnxplace.problem import PlacementProblem, commit_placement, out_of_memory_error, sort_by_start
from onnxplace.state import State

# Plans with ever tighter limits, while the simulated peak exceeds what the plan had counted.
MAX_ATTEMPTS = 8
# Share of its memory that a device fills before it accepts no further group. Values of a group's first nodes stay on
# the device until its last nodes run, which may find the device full.
ADMISSION_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25)


def place_by_list_schedule(
    state: State, problem: PlacementProblem, favourite: Ints, placer: str, reserve_peak: bool
) -> State:
    """Commit the first fitting plan of the list scheduler to `state`; raise InfeasibleError if none fits."""
    first_error: InfeasibleError | None = None
    for device, start in generate_plans(problem, favourite, reserve_peak):
        try:
            return commit_placement(state, problem, device, start, placer)
        except InfeasibleError as error:
            first_error = first_error or error
    for device, start in _generate_last_resorts(problem):
        with suppress(InfeasibleError):
            return commit_placement(state, problem, device, start, placer)
    raise first_error or out_of_memory_error(problem, placer)


def find_best_plan(
    problem: PlacementProblem, favourite: Ints, reserve_peak: bool = False, placer: str = "m-etf"
) -> tuple[Ints, Floats]:
    """Return device and planned start per node of the first plan whose simulated peak fits.

    Raises:
        InfeasibleError: There is none; the error names `placer`.
    """
    for device, start in chain(generate_plans(problem, favourite, reserve_peak), _generate_last_resorts(problem)):
        if not _simulate_excess(problem, device, start).any():
            return device, start
    raise out_of_memory_error(problem, placer)


def generate_plans(problem: PlacementProblem, favourite: Ints, reserve_peak: bool) -> Iterator[tuple[Ints, Floats]]:
    """Yield plans (device and planned start per node) of the published rule, each under tighter limits.

    The rule counts the bytes on a device while it plans. A value may stay longer than planned, waiting for a channel.
    So the excess of a simulated plan is subtracted from the limit of the next one.
    """
    has_large_groups = len(problem.graph) > len(np.unique(problem.group))
    for share in ADMISSION_SHARES if has_large_groups else ADMISSION_SHARES[:1]:
        yield from _generate_tightened_plans(problem, favourite, reserve_peak, share)


def _generate_last_resorts(problem: PlacementProblem) -> Iterator[tuple[Ints, Floats]]:
    """Yield plans for where the rule finds none: single devices, then devices filled one after the other.

    So a graph that fits on one device is always placed.
    """
    pins = np.unique(problem.pinned[problem.pinned >= 0])
    if len(pins) < 2:
        for index in pins.tolist() or range(len(problem.limit_bytes)):
            yield _plan_in_order(problem, np.full(len(problem.graph), index, dtype=np.int32))
    with suppress(InfeasibleError):
        yield _plan_in_order(problem, fill_devices(problem))


def _plan_in_order(problem: PlacementProblem, device: Ints) -> tuple[Ints, Floats]:
    return device, problem.simulate(device, problem.graph.order).start_seconds


def _generate_tightened_plans(
    problem: PlacementProblem, favourite: Ints, reserve_peak: bool, share: float
) -> Iterator[tuple[Ints, Floats]]:
    """Yield plans under ever tighter limits, mostly on devices where the last plan exceeds them."""
    limit = problem.limit_bytes
    for attempt in range(1, MAX_ATTEMPTS + 1):
        device, start = plan(problem, limit, favourite, reserve_peak, share)
        if len(device) and device.min() < 0:
            return
        yield device, start
        excess = _simulate_excess(problem, device, start)
        limit = np.maximum(limit - np.maximum(attempt * excess, problem.limit_bytes // 64), 0)


def _simulate_excess(problem: PlacementProblem, device: Ints, start: Floats) -> Longs:
    return problem.excess_bytes(problem.simulate(device, sort_by_start(problem.graph, start)))


def plan(
    problem: PlacementProblem, limit: Longs, favourite: Ints, reserve_peak: bool, share: float = 1.0
) -> tuple[Ints, Floats]:
    """Return device and planned start of each node under these limits; device -1 where no device has room."""
    size = np.bincount(problem.group, minlength=len(problem.pinned)).astype(np.int64)
    extra = _largest_step_bytes(problem, size) if reserve_peak else np.zeros_like(size)
    work, tick_seconds = start_plan(problem, limit, extra, share)
    has_favourites = bool((favourite >= 0).any())
    queues = new_queues(len(problem.graph), len(limit), has_favourites)
    nodes = work.nodes[:-1]
    nodes["favourite"] = favourite
    list_schedule(work, queues)
    return nodes["device"].copy(), nodes["start"] * tick_seconds


def _largest_step_bytes(problem: PlacementProblem, size: Longs) -> Longs:
    """Return, per group of several nodes, the sum of its largest workspace and its largest output."""
    graph = problem.graph
    produced = np.flatnonzero(graph.producer >= 0)
    output = np.bincount(graph.producer[produced], graph.value_bytes[produced], len(graph)).astype(np.int64)
    largest_output, largest_workspace = np.zeros_like(size), np.zeros_like(size)
    np.maximum.at(largest_output, problem.group, output)
    np.maximum.at(largest_workspace, problem.group, graph.workspace_bytes)
    return np.where(size > 1, largest_output + largest_workspace, 0)
