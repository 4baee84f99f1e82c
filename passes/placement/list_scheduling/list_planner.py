"""Plan with the list scheduler under memory limits, with tighter ones where the simulated peak exceeds them.

The rule counts bytes while it plans, but a value may stay longer than planned, waiting for a channel. So each plan is
simulated, and what exceeds a device's memory is subtracted from the limit of the next plan. If no plan fits, single
devices are tried, and devices filled one after the other in topological order, which is the rule of m-TOPO.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, product

import numpy as np

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Schedule
from onnxplace.graph.op_graph import Csr, Floats, Ints, Longs, sum_by
from onnxplace.passes.placement.list_scheduling.scheduler_kernels import list_schedule
from onnxplace.passes.placement.list_scheduling.scheduler_records import new_queues, start_plan
from onnxplace.problem import (
    PlacementProblem,
    commit_if_fitting,
    commit_placement,
    out_of_memory_error,
    sort_by_start,
    tighten_limits,
)
from onnxplace.simulation.simulator import device_weights
from onnxplace.state import State

# Plans with ever tighter limits, while the simulated peak exceeds what the plan had counted. Each is simulated.
MAX_ATTEMPTS = 8
# Share of its memory that a device fills before it accepts no further group. Values of a group's first nodes stay on
# the device until its last nodes run, which may find the device full.
ADMISSION_SHARES = (1.0, 0.85, 0.7, 0.55, 0.4, 0.25)


def group_bytes(problem: PlacementProblem) -> Longs:
    """Return, per group, the total bytes of its weights (each once), outputs and workspaces."""
    graph = problem.graph
    count = len(problem.pinned)
    produced = np.flatnonzero(graph.producer >= 0)
    outputs = sum_by(problem.group[graph.producer[produced]], graph.value_bytes[produced], count)
    workspaces = sum_by(problem.group, graph.workspace_bytes, count)
    return device_weights(graph, problem.group, count) + (outputs + workspaces).astype(np.int64)


def fill_devices(problem: PlacementProblem, placer: str = "m-topo") -> Ints:
    """Fill devices with nodes in topological order; return the device of each node.

    The pass `m-topo` states the rule.

    Raises:
        InfeasibleError: The last device is full; the error names `placer`.
    """
    graph, need_bytes, devices = problem.graph, group_bytes(problem), len(problem.target.devices)
    # What must be free where a group goes: its weights and its largest workspace.
    reserved = np.zeros(len(problem.pinned), dtype=np.int64)
    np.maximum.at(reserved, problem.group, graph.workspace_bytes)
    reserved += device_weights(graph, problem.group, len(problem.pinned))
    # Devices that take turns on a processor have one share: that of the first of them.
    has_share = np.isin(np.arange(devices), problem.target.independent_devices)
    # An even share of all bytes, and room for one more group: so the last device is not left with the rest.
    fill_bytes = int(need_bytes.sum()) // int(has_share.sum()) + int(need_bytes.max(initial=0))
    weights = Csr.grouped(problem.group[graph.weights.rows], graph.weights.items, len(problem.pinned))
    used = np.zeros(devices, dtype=np.int64)
    stored = np.zeros((devices, len(graph.weight_bytes)), dtype=bool)
    stored_bytes = np.zeros(devices, dtype=np.int64)
    group_device, takes = problem.pinned.copy(), ~problem.refused_groups
    target, pool_of = problem.target, problem.target.pool_of
    for group in np.flatnonzero(group_device >= 0).tolist():
        used[group_device[group]] += need_bytes[group]
        stored[group_device[group], weights[group]] = True
    stored_bytes += stored @ graph.weight_bytes
    # Devices are filled one after the other, so `current` never goes back.
    current = 0
    for group in problem.group[graph.order].tolist():
        if group_device[group] < 0:
            group_weights = weights[group]
            added_bytes = ~stored[:, group_weights] @ graph.weight_bytes[group_weights]
            within_limit = stored_bytes + added_bytes <= problem.limit_bytes
            within_limit &= (np.bincount(pool_of, stored_bytes)[pool_of] + added_bytes) <= target.pool_bytes[pool_of]
            is_open = within_limit & ((used + reserved[group] < fill_bytes) | (used == 0))
            is_open &= takes[:, group] & has_share
            destination = next((index for index in range(current, devices) if is_open[index]), -1)
            # Even shares are not possible where devices refuse groups, or the rest of the memory is needed.
            if destination < 0 and not (takes.all() and has_share.all()):
                destination = next(iter(np.flatnonzero(within_limit & takes[:, group]).tolist()), -1)
            if destination < 0:
                raise out_of_memory_error(problem, placer)
            # Where the current device refuses the group, filling goes on there with the next one.
            current = max(current, destination) if takes[current, group] else current
            group_device[group] = destination
            used[destination] += need_bytes[group]
            stored_bytes[destination] += added_bytes[destination]
            stored[destination, group_weights] = True
    return group_device[problem.group].astype(np.int32)


def place_by_list_schedule(
    state: State, problem: PlacementProblem, favourite: Ints | None, placer: str, reserve_peak: bool
) -> State:
    """Commit the first fitting plan of the list scheduler to `state`; raise InfeasibleError if none fits.

    `favourite` holds the favourite child of each node, -1 for none; None where no node has one.
    """
    first_error: InfeasibleError | None = None
    for device, start in generate_plans(problem, favourite, reserve_peak):
        try:
            placed = commit_placement(state, problem, device, start, placer)
        except InfeasibleError as error:
            first_error = first_error or error
            continue
        return _keep_topological_order(placed, problem, placer) if (problem.pinned >= 0).all() else placed
    for device, start in _generate_last_resorts(problem):
        if last_resort := commit_if_fitting(state, problem, device, start, placer):
            return last_resort
    raise first_error or out_of_memory_error(problem, placer)


def _keep_topological_order(placed: State, problem: PlacementProblem, placer: str) -> State:
    """Return a placement whose nodes were all pinned with the better of two orders: its own, and the topological one.

    The rule knows no gaps of channels, so that it may order equal parts of operators differently on each device.
    """
    start = problem.graph.positions.astype(np.float64)
    in_order = commit_if_fitting(placed, problem, problem.pinned[problem.group], start, placer)
    plans = [in_order, placed] if in_order else [placed]
    return min(plans, key=lambda plan: plan[Schedule].simulation.makespan_seconds)


def find_best_plan(problem: PlacementProblem, favourite: Ints | None) -> tuple[Ints, Floats]:
    """Return device and planned start per node of the first plan whose simulated peak fits.

    Raises:
        InfeasibleError: There is none.
    """
    for device, start in chain(generate_plans(problem, favourite, False), _generate_last_resorts(problem)):
        if not problem.excess_bytes(problem.simulate(device, sort_by_start(problem.graph, start))).any():
            return device, start
    raise out_of_memory_error(problem, "m-etf")


def generate_plans(
    problem: PlacementProblem, favourite: Ints | None, reserve_peak: bool
) -> Iterator[tuple[Ints, Floats]]:
    """Yield plans (device and planned start per node) of the published rule, each under tighter limits.

    The rule counts the bytes on a device while it plans. A value may stay longer than planned, waiting for a channel.
    So the excess of a simulated plan is subtracted from the limit of the next one, mostly on devices that exceed it.
    """
    has_large_groups = len(problem.graph) > len(np.unique(problem.group))
    shares = ADMISSION_SHARES if has_large_groups else ADMISSION_SHARES[:1]
    for divided, share in product(problem.divide_pools(), shares):
        limit = divided.limit_bytes
        for attempt in range(1, MAX_ATTEMPTS + 1):
            device, start = plan(divided, limit, favourite, reserve_peak, share)
            if len(device) and device.min() < 0:
                break
            yield device, start
            step = problem.simulate(device, sort_by_start(problem.graph, start))
            limit = tighten_limits(divided, limit, divided.limit_bytes, step, attempt, everywhere=True)


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


def plan(
    problem: PlacementProblem, limit: Longs, favourite: Ints | None, reserve_peak: bool, share: float = 1.0
) -> tuple[Ints, Floats]:
    """Return device and planned start of each node under these limits; device -1 where no device has room."""
    size = np.bincount(problem.group, minlength=len(problem.pinned)).astype(np.int64)
    extra = _largest_step_bytes(problem, size) if reserve_peak else np.zeros_like(size)
    work, tick_seconds = start_plan(problem, limit, extra, share)
    nodes = work.nodes[:-1]
    if favourite is not None:
        nodes["favourite"] = favourite
    queues = new_queues(len(problem.graph), len(limit), bool((nodes["favourite"] >= 0).any()))
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
