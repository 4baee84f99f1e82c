"""The placement problem: graph, costs on each device, memory limits, groups and pins; and what a step should take."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from onnxplace.errors import BrokenPassError, InfeasibleError
from onnxplace.facts import (
    REFUSED_SECONDS,
    Clusters,
    Groups,
    Placement,
    Profile,
    Schedule,
    Segments,
    is_refused,
)
from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs, OpGraph, sum_by
from onnxplace.simulation.lower_bounds import lower_bound_seconds
from onnxplace.simulation.simulator import Simulation, device_weights, simulate
from onnxplace.state import State
from onnxplace.target.target import Target, request_overhead_seconds

# For every error about memory.
_HINT = "add devices, raise --max-memory, or try another --placer"


@dataclass(frozen=True)
class PlacementProblem:
    """A placement problem: a device for each node of `graph`, and an order."""

    graph: OpGraph
    """Contracted, if there are clusters."""
    seconds: Floats
    """Costs [device, node]; `REFUSED_SECONDS` or more where a device refuses the node, or another one of its group."""
    target: Target
    limit_bytes: Longs
    """Memory limit per device."""
    group: Ints
    """Dense id per node; nodes of one group share a device."""
    pinned: Ints
    """Device per group, -1 where free."""
    members: Ints
    """Per node of the profile's graph, the node of this graph that contains it."""

    @property
    def refused(self) -> Bools:
        """Return [device, node]: whether the device does not take the node, or another one of its group."""
        return is_refused(self.seconds)

    @property
    def refused_groups(self) -> Bools:
        """Return [device, group]: whether the device does not take the group."""
        refused = np.zeros((len(self.seconds), len(self.pinned)), dtype=bool)
        refused[:, self.group] = self.refused
        return refused

    def refuses(self, device: Ints) -> bool:
        """Return whether a placement of this graph has a node on a device that refuses it."""
        return bool(is_refused(self.seconds[device, np.arange(len(device))]).any())

    def find_homes(self) -> Ints:
        """Return, per node, where its group is pinned to, or else the device that is fastest for the group."""
        group_seconds = np.stack([sum_by(self.group, row, len(self.pinned)) for row in self.seconds])
        return np.where(self.pinned >= 0, self.pinned, group_seconds.argmin(axis=0))[self.group].astype(np.int32)

    def avoid_refused(self, device: Ints) -> Ints:
        """Return a placement with groups on their fastest device where the given one refuses them."""
        is_misplaced = is_refused(self.seconds[device, np.arange(len(device))])
        return np.where(is_misplaced, self.find_homes(), device) if is_misplaced.any() else device

    def simulate(self, device: Ints, order: Ints) -> Simulation:
        """Return the simulated step of a placement of this graph; raises BrokenPassError unless it is one."""
        _require_devices(self.target, device)
        return simulate(self.graph, self.seconds, self.target, device, order)

    def contracted(self, cluster: Ints) -> PlacementProblem:
        """Return this problem with each cluster contracted into one node.

        `cluster` is a dense id per node. Each cluster lies within one group.
        """
        count = int(cluster.max(initial=-1)) + 1
        group = np.zeros(count, dtype=np.int32)
        group[cluster] = self.group
        seconds = np.stack([sum_by(cluster, row, count) for row in self.seconds])
        members = cluster[self.members].astype(np.int32)
        return replace(self, graph=self.graph.contract(cluster), seconds=seconds, group=group, members=members)

    def alone_bytes(self) -> Longs:
        """Return, per device, its peak memory with the whole graph on it."""
        devices = range(len(self.target.devices))
        placements = [np.full(len(self.graph), device, dtype=np.int32) for device in devices]
        peaks = [self.simulate(placement, self.graph.order).peak_bytes for placement in placements]
        return np.array([peaks[device][device] for device in devices])

    def excess_bytes(self, simulation: Simulation, allowed: Longs | None = None) -> Longs:
        """Return, per device, the bytes beyond its limit, or beyond the `allowed` bytes, as `find_excess` does."""
        allowed = self.limit_bytes if allowed is None else allowed
        return find_excess(self.target, allowed, simulation, simulation.peak_bytes)

    def may_exceed(self, needed_bytes: float) -> bool:
        """Return whether a limit could be exceeded where each device holds at most so many bytes."""
        pools = (pool.memory_bytes < needed_bytes * len(pool.devices) for pool in self.target.pools)
        return bool((self.limit_bytes < needed_bytes).any()) or any(pools)

    def divide_pools(self) -> Iterator[PlacementProblem]:
        """Yield this problem, then with limits of devices whose sums keep those of pools: evenly, and one device each.

        Plans within such limits keep the pools whenever their devices hold most.
        """
        yield self
        pools = [np.flatnonzero(self.target.pool_of == index) for index in range(len(self.target.pools))]
        for turn in range(-1, max(map(len, pools), default=-1)):
            limit = self.limit_bytes.copy()
            for members, pool in zip(pools, self.target.pools):
                chosen = members if turn < 0 else members[[turn % len(members)]]
                limit[np.setdiff1d(members, chosen)] = 0
                limit[chosen] = np.minimum(limit[chosen], pool.memory_bytes // len(chosen))
            yield replace(self, limit_bytes=limit)


def find_excess(target: Target, limit_bytes: Longs, simulation: Simulation, part_bytes: Longs) -> Longs:
    """Return, per device, the bytes by which its peak exceeds its limit, or its part of what its pool lacks if larger.

    The devices of a pool have parts of that in proportion to `part_bytes`.
    """
    excess: Longs = np.maximum(simulation.peak_bytes - limit_bytes, 0)
    for index, (pool, peak) in enumerate(zip(target.pools, simulation.pool_peak_bytes.tolist())):
        members = target.pool_of == index
        parts = members * (part_bytes if part_bytes[members].any() else 1)
        if peak > pool.memory_bytes:
            shares = np.ceil((peak - pool.memory_bytes) * (parts / parts.sum()))
            excess = np.maximum(excess, shares.astype(np.int64))
    return excess


def interchangeable_devices(problem: PlacementProblem) -> Ints:
    """Return, per device, the first one with which swapping it changes no cost, limit, pin, link or conflict."""
    devices = np.arange(len(problem.limit_bytes))
    pins = np.where(np.isin(devices, problem.pinned), devices, -1)
    costs = np.column_stack([problem.seconds, problem.limit_bytes, pins, problem.target.pool_of])
    return find_equal_devices(costs, *problem.target.link_arrays(), problem.target.conflicts)


def find_equal_devices(costs: Floats, *links: Floats | Bools) -> Ints:
    """Return, per device, the first one with equal costs ([device, anything]) and links ([device, device])."""
    first = np.arange(len(costs), dtype=np.int32)
    for b in range(len(costs)):
        for a in range(b):
            swapped = np.arange(len(costs))
            swapped[[a, b]] = b, a
            if (costs[a] == costs[b]).all() and all((link[np.ix_(swapped, swapped)] == link).all() for link in links):
                first[b] = first[a]
                break
    return first


def _require_devices(target: Target, device: Ints) -> None:
    """Raise BrokenPassError for an index that is none of a device."""
    if not ((device >= 0) & (device < len(target.devices))).all():
        raise BrokenPassError("B002", "its Placement is wrong: a node is on no device")


def predict_step_seconds(state: State) -> float:
    """Return the predicted step of a split model, from the call to the last output."""
    return state[Segments].simulation.makespan_seconds + predict_request_seconds(state)


def predict_request_seconds(state: State) -> float:
    """Return the overhead of a request to a split model."""
    return request_overhead_seconds(len({segment.device for segment in state[Segments].segments}))


def predict_waiting_seconds(state: State) -> float:
    """Return the part of the predicted step of a split model that is due to waits for weights."""
    segments, simulation = state[Segments], state[Segments].simulation
    device = np.array([segment.device for segment in segments.segments], dtype=np.int32)
    seconds = np.broadcast_to(
        simulation.finish_seconds - simulation.start_seconds, (len(state.target.devices), len(device))
    )
    order = np.arange(len(device), dtype=np.int32)
    held = simulate(segments.graph, seconds, state.target, device, order)
    return max(simulation.makespan_seconds - held.makespan_seconds, 0.0)


def predict_single_device_seconds(state: State, *, must_fit: bool = False) -> Floats:
    """Return, per device, the predicted step of the whole model on it, from the call to the last output.

    It is infinite where the device cannot be alone and, with `must_fit`, where the memory is too small for the model.
    """
    seconds: Floats = single_device_seconds(state[Profile], state.target) + request_overhead_seconds(1)
    return np.where(fits_single_device(state), seconds, np.inf) if must_fit else seconds


def list_transfer_bytes(state: State) -> list[int]:
    """Return the bytes of each transfer in a step of a split model."""
    graph = state[Profile].graph
    size = dict(zip(graph.value_names, graph.value_bytes.tolist()))
    return [size[step.value] for program in state[Segments].programs for step in program if step.op == "send"]


def single_device_seconds(profile: Profile, target: Target) -> Floats:
    """Return, per device, the seconds of a step that it runs alone, as one segment, without the request's overhead.

    It is infinite where the device cannot be alone. For a sharded model, that is the step of the original.
    """
    call_seconds = np.array([device.segment_seconds for device in target.devices])
    step_seconds: Floats = sum_node_seconds(profile, target) + call_seconds
    return step_seconds


def sum_node_seconds(profile: Profile, target: Target) -> Floats:
    """Return, per device, the seconds of all nodes of the model, before it was sharded, on it.

    It is infinite where the device cannot be alone: it refuses a node, or it is not a CPU device, although there is
    one, and some values can be on a host only. Without a CPU device, sessions of others compute those on the host.
    """
    node_seconds = device_seconds(profile, target).sum(axis=1)
    if profile.unsharded_seconds:
        node_seconds = np.array([profile.unsharded_seconds[device.cost_class] for device in target.devices])
    is_cpu = np.array([device.kind == "cpu" for device in target.devices])
    lacks_host = ~is_cpu & (profile.needs_host and is_cpu.any())
    return np.where(is_refused(node_seconds) | lacks_host, np.inf, node_seconds)


def fits_single_device(state: State) -> Bools:
    """Return, per device, whether it takes every node, and the whole model fits into its memory."""
    problem, takes_all = placement_problem(state), np.isfinite(sum_node_seconds(state[Profile], state.target))
    fits: Bools = (problem.alone_bytes() <= problem.limit_bytes) & ~problem.refused.any(axis=1) & takes_all
    return fits


def device_seconds(profile: Profile, target: Target) -> Floats:
    """Return the cost of each node on each device: seconds [device, node]."""
    return np.stack([profile.seconds[device.cost_class] for device in target.devices])


def bound_speedup(profile: Profile, target: Target) -> float:
    """Return how many times as fast as the best single device all devices can be, by the costs of nodes.

    That is the work on the best one over the time in which all together, each at its own speed, do it without
    transfers. Of devices that share processors, the best one for a node counts on each processor. It is infinite where
    the costs show no limit, such as where each device refuses some node.
    """
    seconds, processors = device_seconds(profile, target), target.processors
    seconds = np.where(is_refused(seconds), np.inf, seconds)
    with np.errstate(divide="ignore", invalid="ignore"):
        rates = 1 / (seconds * processors.sum(axis=1)[:, None])
        together = float((1 / np.stack([rates[users].max(axis=0) for users in processors.T]).sum(axis=0)).sum())
    best = float(sum_node_seconds(profile, target).min(initial=np.inf))
    return best / together if 0 < together < np.inf else np.inf


def placement_problem(state: State) -> PlacementProblem:
    """Return the placement problem of a state; Groups and Clusters are optional facts.

    Raises:
        InfeasibleError: No device takes all nodes of a group, or the device that it is pinned to does not.
    """
    profile = state[Profile]
    graph, seconds = profile.graph, device_seconds(profile, state.target)
    single = np.arange(len(graph), dtype=np.int32)
    group, pinned = single, np.full(len(graph), -1, dtype=np.int32)
    if Groups in state:
        group, pinned = state[Groups].group, state[Groups].pinned
    # A device takes all nodes of a group, or the group cannot be there.
    refusals = np.zeros((len(seconds), len(pinned)), dtype=bool)
    devices, nodes = np.nonzero(is_refused(seconds))
    refusals[devices, group[nodes]] = True
    seconds = np.where(refusals[:, group], REFUSED_SECONDS, seconds)
    problem = PlacementProblem(
        graph=graph,
        seconds=seconds,
        target=state.target,
        limit_bytes=state.target.limit_bytes,
        group=group,
        pinned=pinned,
        members=single,
    )
    if refusals.any():
        require_taken(state, problem.find_homes(), "")
    return problem.contracted(state[Clusters].cluster) if Clusters in state else problem


def simulate_plan(
    state: State, problem: PlacementProblem, device: Ints, start_seconds: Floats
) -> tuple[Ints, Ints, Simulation]:
    """Return device and order of the profile's nodes, and the simulated step.

    `device` and `start_seconds` (planned starts, which give the order) are per node of the problem's graph.
    """
    graph, fine_device = state[Profile].graph, device[problem.members].astype(np.int32)
    order = schedule_order(graph, problem, start_seconds)
    seconds = device_seconds(state[Profile], state.target)
    return fine_device, order, simulate(graph, seconds, state.target, fine_device, order)


def commit_placement(
    state: State,
    problem: PlacementProblem,
    device: Ints,
    start_seconds: Floats,
    placer: str,
    bound_seconds: float = 0.0,
) -> State:
    """Return `state` with a placer's Placement and Schedule, as `simulate_plan` computes them.

    `bound_seconds` is a lower bound that the placer proved for the profile's graph: the better bound is kept. Raises
    InfeasibleError, naming devices and missing bytes, if the simulated peak exceeds a limit, or naming device and node
    if a device refuses one of its nodes, and BrokenPassError for a device that the target does not have.
    """
    _require_devices(state.target, device)
    require_taken(state, device[problem.members], placer)
    fine_device, order, simulation = simulate_plan(state, problem, device, start_seconds)
    require_memory(state.target, simulation.peak_bytes, simulation.pool_peak_bytes, placer)
    groups = (state[Groups].group, state[Groups].pinned) if Groups in state else (None, None)
    bound = bound_step_seconds(state, simulation.makespan_seconds, *groups)
    bound = min(max(bound, bound_seconds), simulation.makespan_seconds)
    return state.with_facts(Placement(fine_device, placer), Schedule(order, simulation, bound))


def commit_if_fitting(
    state: State, problem: PlacementProblem, device: Ints, start_seconds: Floats, placer: str
) -> State | None:
    """Return `state` with a placement as `commit_placement` commits it, None if a device cannot hold its part."""
    try:
        return commit_placement(state, problem, device, start_seconds, placer)
    except InfeasibleError:
        return None


def tighten_limits(
    problem: PlacementProblem, limit: Longs, allowed: Longs, step: Simulation, attempt: int, *, everywhere: bool = False
) -> Longs:
    """Return smaller limits for planning again, after a plan within `limit` exceeded the `allowed` bytes in a step.

    Later attempts (1, 2, ...) subtract more than the excess, and never less than a 64th of what is allowed. With
    `everywhere`, devices without excess lose that too: the next plan then differs even if what exceeds only moves.
    """
    excess = problem.excess_bytes(step, allowed)
    # A device of a pool that lacks memory may be far from its own limit.
    limit = np.where(excess > 0, np.minimum(limit, step.peak_bytes), limit)
    less = np.where((excess > 0) | everywhere, np.maximum(attempt * excess, allowed // 64), 0)
    return np.maximum(limit - less, 0).astype(np.int64)


def bound_step_seconds(
    state: State, makespan_seconds: float, group: Ints | None = None, pinned: Ints | None = None
) -> float:
    """Return a lower bound of a step on the devices of `state`, at most the makespan of a known placement.

    Without groups and pins, the bound holds for every placement.
    """
    profile = state[Profile]
    bound = lower_bound_seconds(profile.graph, device_seconds(profile, state.target), state.target, group, pinned)
    return min(bound, makespan_seconds)  # sums in another order may round the bound above the makespan


def schedule_order(graph: OpGraph, problem: PlacementProblem, start_seconds: Floats) -> Ints:
    """Return a topological order of all nodes by the planned starts of the contracted nodes.

    Members of one contracted node stay together, in topological order.
    """
    coarse_rank = np.empty(len(problem.graph), dtype=np.int64)
    coarse_rank[sort_by_start(problem.graph, start_seconds)] = np.arange(len(problem.graph))
    return np.lexsort((graph.positions, coarse_rank[problem.members])).astype(np.int32)


def sort_by_start(graph: OpGraph, start_seconds: Floats) -> Ints:
    """Return the nodes by planned start; ties are in topological order."""
    return np.lexsort((graph.positions, start_seconds)).astype(np.int32)


def require_taken(state: State, device: Ints, where: str) -> None:
    """Raise InfeasibleError if a node is on a device that refuses it; `device` is per node of the profile's graph."""
    graph, devices = state[Profile].graph, state.target.devices
    seconds = device_seconds(state[Profile], state.target)[device, np.arange(len(device))]
    for node in np.flatnonzero(is_refused(seconds)).tolist():
        refusing = devices[device[node]].id
        hosts = [f"put it on {item.id}" for item in devices if item.kind == "cpu"]
        elsewhere = hosts[0] if hosts else "add cpu:0 to the devices"
        message = f"{refusing} does not take {graph.ops[node]} {graph.names[node]!r}"
        hint = f"{elsewhere}, or let sessions of the device run it on the host: {refusing}{{fallback=true}}"
        raise InfeasibleError("P004", message, where=where, hint=hint)


def require_memory(target: Target, peak_bytes: Longs, pool_peak_bytes: Longs, placer: str) -> None:
    """Raise InfeasibleError if a device or a pool needs more than its limit, naming devices and missing bytes."""
    if shortage := describe_shortage(target, peak_bytes, pool_peak_bytes):
        raise InfeasibleError("P001", shortage, where=placer, hint=_HINT)


def out_of_memory_error(problem: PlacementProblem, placer: str) -> InfeasibleError:
    """Return the error for a model that does not fit the devices: names devices and missing bytes.

    What each device needs is its peak with the whole model on it alone; a pool, the least of those of its devices.
    """
    target, peak_bytes = problem.target, problem.alone_bytes()
    pools = np.array([peak_bytes[target.pool_of == index].min() for index in range(len(target.pools))], dtype=np.int64)
    shortage = describe_shortage(target, peak_bytes, pools)
    missing = problem.graph.total_weight_bytes - target.total_bytes
    reason = "this placer found no split that fits"
    if missing > 0:
        reason = f"all together lack {missing} bytes for the weights alone"
    needs = shortage or f"there is room on {target.describe_memory()}"
    message = f"for the whole model {needs}; {reason}; {_describe_largest_group(problem)}"
    return InfeasibleError("P002", message, where=placer, hint=_HINT)


def describe_shortage(target: Target, peak_bytes: Longs, pool_peak_bytes: Longs) -> str:
    """Return which device or pool lacks how many bytes, as a text; empty if none does."""
    peaks = (*peak_bytes.tolist(), *pool_peak_bytes.tolist())
    return "; ".join(
        f"{memory.id} lacks {peak - memory.memory_bytes} bytes (needs {peak}, may use {memory.memory_bytes})"
        for memory, peak in zip(target.memories, peaks)
        if peak > memory.memory_bytes
    )


def _describe_largest_group(problem: PlacementProblem) -> str:
    """Describe the group with the most weights, which is the hardest to place."""
    if not len(problem.group):
        return "there are no nodes"
    weight_bytes = device_weights(problem.graph, problem.group, int(problem.group.max()) + 1)
    group = int(weight_bytes.argmax())
    size = int(weight_bytes[group])
    name = problem.graph.names[int(np.flatnonzero(problem.group == group)[0])]
    limits = problem.target.limit_bytes
    missing, largest = size - int(limits.max()), problem.target.devices[int(limits.argmax())].id
    shortage = f", for which {largest} lacks {missing} bytes" if missing > 0 else ""
    return f"the largest group that must stay together, at {name!r}, has {size} bytes of weights{shortage}"
