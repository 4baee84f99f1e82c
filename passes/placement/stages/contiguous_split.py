"""Contiguous splits into stages: good ones of single orders, and the best one over all ideals with a proof.

Single topological orders are cut optimally, and improved by local search: the incumbent. Where there are few ideals,
the dynamic program of `stage_dp` runs over all of them. It counts a value that several later stages read as sent once,
so its optimum is a lower bound. A branch and bound over the true loads closes the gap: it chooses stages from the last
one on, so that the number of later readers of each value is known, and the table of the program bounds the stages
before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from onnxplace.graph.op_graph import Floats, Ints, Longs, OpGraph
from onnxplace.passes.placement.stages.ideal_kernels import generate_orders
from onnxplace.passes.placement.stages.local_search_kernels import LocalSearch, MoveCosts
from onnxplace.passes.placement.stages.stage_dp import (
    CROSSING_BYTES,
    Cutting,
    assign_devices,
    build_chain_lattice,
    enumerate_lattice,
    least_held_bytes,
    prepare_cuts,
    tabulate,
    trace_devices,
    unit_seconds,
)
from onnxplace.passes.placement.stages.stage_kernels import (
    SUM,
    TRAFFIC,
    Lattice,
    StageTable,
    list_stages,
    new_scratch,
)
from onnxplace.problem import PlacementProblem, tighten_limits
from onnxplace.simulation.steady_state import list_transfers, steady_state_loads
from onnxplace.utils.jit import budget_clock

Stage = tuple[int, int, int]
"""The ideal before, the ideal after, and the kind of device."""

# The dynamic program over all ideals is tried below this number of them.
MAX_IDEALS = 50_000
# Limit of the dynamic program over one order: positions of cuts times nodes.
MAX_STEPS = 20_000_000
# Topological orders that are tried, and moves of the local search after each, at most 200 per node.
ORDER_COUNT = 6
MAX_MOVES = 200_000
# Shares of all outputs that are counted as staying on their device. The next one is tried when the simulated peak
# exceeds what the split had counted; the last ones come with tighter limits too.
RESIDENT_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0)
# More than any load, and finite.
LARGE_SECONDS = 1e30


@dataclass
class _BoundedSearch:
    """A search for stages whose largest load is below `bound`; exhaustive unless it `timed_out`.

    Stages are chosen from the last one on, so the number of later stages that read each value is known. The table
    bounds the cost of the stages before. A set of later stages matters only through the remaining nodes and devices,
    and through how often it reads each value: a state that failed once is not tried again. All links must be alike.
    """

    cutting: Cutting
    lattice: Lattice
    table: StageTable
    bound: float
    deadline: float
    failed: set[tuple[int, int, bytes]] = field(default_factory=set)
    timed_out: bool = False

    def complete(self, ideal: int, remaining: int, send_counts: Longs) -> list[Stage] | None:
        """Return stages for `ideal` on the remaining devices, the last one first; None if none are below the bound."""
        if ideal == 0:
            return []
        self.timed_out = self.timed_out or budget_clock() > self.deadline
        state_key = (ideal, remaining, send_counts.tobytes())
        if self.timed_out or state_key in self.failed:
            return None
        for begin, kind in self._list_stages(ideal, remaining, send_counts):
            rest = remaining - int(self.cutting.sets.step[kind])
            earlier = self.complete(begin, rest, self._count_sends(ideal, begin, send_counts))
            if earlier is not None:
                return [(begin, ideal, kind), *earlier]
        if not self.timed_out:
            self.failed.add(state_key)
        return None

    def _list_stages(self, ideal: int, remaining: int, send_counts: Longs) -> list[tuple[int, int]]:
        """Return possible stages that end with `ideal`: where they begin and the kind of device, best first."""
        cutting, graph, sets = self.cutting, self.cutting.graph, self.cutting.sets
        scratch = new_scratch(len(graph), len(send_counts), len(graph.weight_bytes), len(cutting.kinds))
        ideals = len(self.lattice.parent)
        begins, load = np.empty(ideals, dtype=np.int32), np.empty((ideals, len(cutting.kinds)))
        count = list_stages(
            ideal, self.lattice, cutting.flows, cutting.costs, send_counts, self.bound, scratch, begins, load
        )
        candidates = []
        for kind in np.flatnonzero(sets.has[remaining]):
            # The cost of a choice: this stage, exactly, and the rest, as bounded by the table.
            table_values = self.table.best[begins[:count], remaining - sets.step[kind]]
            values = np.maximum(load[:count, kind], table_values)
            candidates += [(float(values[k]), int(begins[k]), int(kind)) for k in np.flatnonzero(values < self.bound)]
        return [(table_values, kind) for _, table_values, kind in sorted(candidates)]

    def _count_sends(self, ideal: int, before: int, send_counts: Longs) -> Longs:
        """Return how often earlier stages send each value, with the stage between two ideals added."""
        graph = self.cutting.graph
        is_stage = self.lattice.inside(ideal, len(graph)) & ~self.lattice.inside(before, len(graph))
        read_here = np.zeros_like(send_counts)
        read_here[graph.inputs.items[is_stage[graph.inputs.rows]]] = 1
        outside = (graph.producer >= 0) & ~is_stage[np.maximum(graph.producer, 0)]
        return np.where(outside, send_counts + read_here, 0)


@dataclass(frozen=True)
class StageSplit:
    """A contiguous split of a Cutting."""

    device: Ints
    """Per node of the cutting's graph."""
    value: float
    """Its largest load in seconds, or its traffic."""
    bound: float
    """Lower bound on all contiguous splits within the limits; equal to `value` where that is proven optimal."""


def expand_seconds(cutting: Cutting, problem: PlacementProblem) -> Floats:
    """Return seconds [device of the target, node of the cutting]; infinite on devices that are not used."""
    seconds = np.full((len(problem.target.devices), len(cutting.graph)), np.inf)
    for kind, row in zip(cutting.kinds, cutting.seconds):
        seconds[list(kind)] = row
    return seconds


def evaluate_split(cutting: Cutting, problem: PlacementProblem, seconds: Floats, device: Ints) -> float:
    """Return the largest load of a placement of the cutting's graph, or its traffic."""
    if cutting.rule == TRAFFIC:
        value, _, _ = list_transfers(cutting.graph, device, len(seconds))
        return float((cutting.graph.value_bytes[value] + CROSSING_BYTES).sum())
    return steady_state_loads(
        cutting.graph, seconds, problem.target, device, "sum" if cutting.rule == SUM else "max"
    ).interval_seconds


def generate_splits(
    problem: PlacementProblem, rule: int, allowed: Longs, devices: Sequence[int], deadline: float, seed: int
) -> Iterator[tuple[Ints, float, Longs]]:
    """Yield contiguous splits between devices, each for where the one before did not fit.

    A split is the device of each node, a lower bound on the load of splits that fit, and the limits that it keeps to by
    its own account. That leaves out most outputs at first, then counts more and more of them as staying on their
    device. Then limits are tightened by what the simulated step needs beyond the `allowed` bytes.
    """
    for divided in problem.divide_pools():
        limit = np.minimum(allowed, divided.limit_bytes)
        for attempt, resident in enumerate(RESIDENT_SHARES):
            cuts = prepare_cuts(problem, rule, limit, tuple(devices), resident)
            is_possible = bool(np.isfinite(cuts.seconds.min(axis=0)).all())
            split = split_into_stages(cuts, problem, deadline, seed) if is_possible else None
            if split is None:
                break
            device = split.device[cuts.node].astype(np.int32)
            # Within divided pools, others may have a smaller load.
            yield device, split.bound if attempt == 0 and divided is problem else 0.0, limit
            if resident == 1.0:
                step = problem.simulate(device, problem.graph.order)
                limit = tighten_limits(problem, limit, allowed, step, attempt + 1)


def split_into_stages(cutting: Cutting, problem: PlacementProblem, deadline: float, seed: int) -> StageSplit | None:
    """Return the best contiguous split that the time allows, None if none is within the limits."""
    incumbent = _split_orders(cutting, problem, deadline, seed)
    lattice = enumerate_lattice(cutting.graph, MAX_IDEALS) if cutting.exhaustive else None
    if lattice is None:
        return _with_bound(incumbent, _lower_bound(cutting))
    return _search_all_splits(cutting, problem, lattice, incumbent, deadline)


def _split_orders(cutting: Cutting, problem: PlacementProblem, deadline: float, seed: int) -> StageSplit | None:
    """Cut several topological orders optimally, then improve each split by local search."""
    nodes, seconds = len(cutting.graph), expand_seconds(cutting, problem)
    lattice = build_chain_lattice(nodes, max(64, MAX_STEPS // nodes))
    limit = np.zeros(len(seconds), dtype=np.int64)
    for kind, amount in zip(cutting.kinds, cutting.limit_bytes):
        limit[list(kind)] = amount
    search = _make_local_search(problem, cutting.graph, seconds, limit, cutting.need_bytes, cutting.rule)
    best: StageSplit | None = None
    for attempt, order in enumerate(generate_orders(cutting.graph, ORDER_COUNT, seed)):
        if attempt and budget_clock() > deadline:
            break
        shuffled = cutting.reordered(order)
        table, _ = tabulate(
            shuffled,
            lattice,
            # A split that is up to a fifth longer than the best may become better by local search.
            LARGE_SECONDS if best is None else 1.2 * best.value,
            # The first order is cut whatever the time: there has to be some split.
            max(deadline, LARGE_SECONDS * (not attempt)),
        )
        split_device = None if table is None else trace_devices(shuffled, lattice, table)
        if split_device is None:
            continue
        device, first = np.empty_like(split_device), np.full(len(seconds), nodes, dtype=np.int64)
        device[order] = split_device
        # The position of each device's stage; devices without nodes come last.
        np.minimum.at(first, split_device, np.arange(nodes))
        stage = np.argsort(np.argsort(first, kind="stable")).astype(np.int32)
        device, _ = search.improve(device, stage, min(MAX_MOVES, 200 * nodes), seed + attempt)
        value = evaluate_split(cutting, problem, seconds, device)
        if best is None or value < best.value:
            best = StageSplit(device, value, 0.0)
    return best


def build_group_search(problem: PlacementProblem, rule: int, limit_bytes: Longs) -> LocalSearch:
    """Build the local search that moves the groups of a problem; stages may become non-contiguous."""
    seconds = unit_seconds(problem, problem.group)
    if rule == TRAFFIC:
        seconds = np.where(np.isfinite(seconds), 0.0, np.inf)
        seconds[limit_bytes <= 0] = np.inf
    need_bytes = least_held_bytes(problem, problem.group)
    return _make_local_search(problem, problem.graph.contract(problem.group), seconds, limit_bytes, need_bytes, rule)


def _make_local_search(
    problem: PlacementProblem, graph: OpGraph, seconds: Floats, limit_bytes: Longs, need_bytes: Longs, rule: int
) -> LocalSearch:
    latency, per_byte = problem.target.link_arrays()
    if rule == TRAFFIC:  # transfers count their bytes alone
        latency, per_byte = np.full_like(latency, CROSSING_BYTES), np.ones_like(per_byte)
    return LocalSearch(graph, MoveCosts(seconds, latency, per_byte, limit_bytes, need_bytes, rule))


def _search_all_splits(
    cutting: Cutting, problem: PlacementProblem, lattice: Lattice, incumbent: StageSplit | None, deadline: float
) -> StageSplit | None:
    """Search all contiguous splits: first the few that are close to a lower bound, then others."""
    lower_bound = _lower_bound(cutting)
    upper_bound = LARGE_SECONDS if incumbent is None else incumbent.value * (1 - 1e-9)
    if not np.isfinite(lower_bound) or (incumbent is not None and incumbent.value <= lower_bound * (1 + 1e-9)):
        return _with_bound(incumbent, LARGE_SECONDS)
    # A tight bound leaves few states. It is loosened step by step, so that the work is little more than that of the
    # first bound that admits a split.
    excess, proven_bound = 0.01, lower_bound
    while True:
        bound = lower_bound * (1 + excess)
        # Close to the incumbent, or far from the lower bound, one run up to the incumbent settles it.
        bound = upper_bound if bound <= 0 or bound > 0.9 * upper_bound or excess > 8 else bound
        table, is_complete = tabulate(cutting, lattice, bound, deadline)
        if table is None or not is_complete:
            return _with_bound(incumbent, proven_bound)
        if np.isfinite(table.best[-1, -1]):
            return _close_gap(cutting, problem, lattice, table, incumbent, deadline)
        if bound == upper_bound:
            return _with_bound(incumbent, LARGE_SECONDS)
        excess, proven_bound = 4 * excess, bound


def _lower_bound(cutting: Cutting) -> float:
    """Return a lower bound on the largest load: evenly spread work, or the largest node."""
    fastest = cutting.seconds.min(axis=0)
    devices = sum(len(kind) for kind in cutting.kinds)
    return 0.0 if cutting.rule == TRAFFIC else float(max(fastest.sum() / devices, fastest.max()))


def _with_bound(incumbent: StageSplit | None, bound: float) -> StageSplit | None:
    return None if incumbent is None else replace(incumbent, bound=min(bound, incumbent.value))


def _close_gap(
    cutting: Cutting,
    problem: PlacementProblem,
    lattice: Lattice,
    table: StageTable,
    incumbent: StageSplit | None,
    deadline: float,
) -> StageSplit:
    """Evaluate the table's best split by its true loads, and search for one between the two, if the time allows.

    The table counts a value that several later stages read as sent once, so its best is a lower bound.
    """
    seconds, least = expand_seconds(cutting, problem), float(table.best[-1, -1])
    device = trace_devices(cutting, lattice, table)
    assert device is not None
    value = evaluate_split(cutting, problem, seconds, device)
    if incumbent is None or value < incumbent.value:
        incumbent = StageSplit(device, value, least)
    while incumbent.value > least * (1 + 1e-9):
        bound = incumbent.value * (1 - 1e-9)
        if not cutting.exact_receives:
            return replace(incumbent, bound=least)
        bounds, is_complete = tabulate(cutting, lattice, bound, deadline)
        if bounds is None or not is_complete:
            return replace(incumbent, bound=least)
        search = _BoundedSearch(cutting, lattice, bounds, bound, deadline)
        # Behind the last stage nothing is read, so no value is sent yet.
        send_counts = np.zeros(len(cutting.graph.value_names), dtype=np.int64)
        stages = search.complete(len(lattice.parent) - 1, len(cutting.sets.used) - 1, send_counts)
        if stages is None:
            return replace(incumbent, bound=least if search.timed_out else incumbent.value)
        device = assign_devices(cutting, lattice, stages[::-1])
        incumbent = StageSplit(device, evaluate_split(cutting, problem, seconds, device), least)
    return replace(incumbent, bound=incumbent.value)
