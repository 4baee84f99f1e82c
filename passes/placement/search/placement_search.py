"""Search for better placements of a problem from several starts, within a budget.

A search is simulated annealing (Kirkpatrick, Gelatt and Vecchi, 1983): moves of groups and changes of urgency are
scored by a simulation of the whole step. Coarser versions of the problem, whose nodes are groups that are cheaper to
move together, are searched first, and the next finer level begins from the result, as in multilevel graph partitioning
(Karypis and Kumar, 1998).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from onnxplace.graph.op_graph import Floats, Ints
from onnxplace.passes.placement.grouping.contraction_kernels import contract
from onnxplace.passes.placement.grouping.group_kernels import join_light_groups, number_sets
from onnxplace.passes.placement.grouping.node_groups import first_equal
from onnxplace.passes.placement.list_scheduling.list_planner import generate_plans as list_plans
from onnxplace.passes.placement.search.anneal_kernels import (
    BEST_MAKESPAN,
    PROPOSALS,
    Atoms,
    accept,
    anneal,
    build_atoms,
    start_state,
    undo,
)
from onnxplace.passes.placement.search.decode_kernels import Wiring, build_wiring, decode, new_scratch, run_order
from onnxplace.passes.placement.search.heft_kernels import critical_path_plan
from onnxplace.problem import PlacementProblem, sort_by_start
from onnxplace.utils.threads import run_in_threads

# The most work of a node on each coarser level, as a share of one device's even part of all work.
WORK_SHARES = (0.01, 0.03, 0.1, 0.3)
# A level is kept only if it has at most this share of the groups of the one below.
MAX_SIZE_RATIO = 0.9

# The temperature at the start of a search, as a share of the step: a step that is longer by this share is then accepted
# with probability 1/e.
START_TEMPERATURE = 4e-4
# Beyond this number of proposals, with so many more for each group that can move, a search finds nothing better.
MAX_PROPOSALS, MAX_PROPOSALS_PER_ATOM = 20_000, 1_000
# Shares of the budget: for the first searches, and for those that continue from the best of them.
ROUND_SHARES = (0.65, 0.35)
# Name of the placements that the search constructs itself.
MULTILEVEL = "multilevel"
# One call of the compiled loop should take this long: it cannot be interrupted.
SLICE_SECONDS = 0.02


@dataclass(frozen=True)
class Level:
    """A problem, and its nodes' origin in the finer one."""

    problem: PlacementProblem
    cluster: Ints
    """The node of this level that each node of the finer level belongs to."""


def finest_level(problem: PlacementProblem) -> Level:
    """Return the problem itself as a level."""
    return Level(problem, np.arange(len(problem.graph), dtype=np.int32))


def coarsen(problem: PlacementProblem) -> list[Level]:
    """Return the problem itself and its coarser versions, the coarsest last."""
    levels = [finest_level(problem)]
    if len(problem.target.devices) < 2:
        return levels
    work = float(problem.seconds.min(axis=0).sum()) / len(problem.target.independent_devices)
    for share in WORK_SHARES:
        coarse = _coarsen_once(levels[-1].problem, share * work)
        # A level that is hardly smaller than the one below costs a search and shows nothing new.
        if len(coarse.problem.pinned) <= MAX_SIZE_RATIO * len(levels[-1].problem.pinned):
            levels.append(coarse)
    return levels


def _coarsen_once(fine: PlacementProblem, max_seconds: float) -> Level:
    """Join groups along the longest transfers up to `max_seconds` of work each, and contract them.

    The heaviest edges go first, as in Kruskal's algorithm and in multilevel graph partitioning. A transfer is saved
    only if all readers of its value join the producer, so each edge weighs its share of the transfer. Groups need not
    be convex: nodes are contracted only where that makes no cycle.
    """
    graph, count = fine.graph, len(fine.graph)
    pin = fine.pinned[fine.group].astype(np.int32)
    parent, load, nodes = np.arange(count, dtype=np.int32), fine.seconds.min(axis=0), np.arange(count, dtype=np.int32)
    # Groups of the finer problem stay together, whatever they weigh; then edges join up to the limit.
    # numpy 2.0 gives the inverse two dimensions.
    taken_by = np.unique(fine.refused, axis=1, return_inverse=True)[1].reshape(-1).astype(np.int32)
    join_light_groups(parent, pin, taken_by, load, first_equal(fine.group).astype(np.int32), nodes, np.inf)
    inner = graph.producer[graph.inputs.items] >= 0
    value, reader = graph.inputs.items[inner], graph.inputs.rows[inner]
    latency, per_byte = fine.target.remote_link_arrays()
    transfer = latency.mean() + graph.value_bytes[value] * per_byte.mean()
    # The saving per reader, largest first; ties by value and reader, so that the result is deterministic.
    heaviest = np.lexsort((reader, value, -transfer / np.bincount(value)[value]))
    join_light_groups(parent, pin, taken_by, load, graph.producer[value[heaviest]], reader[heaviest], max_seconds)
    group, groups = number_sets(parent)
    cluster = contract(group, nodes, graph.producer, graph.inputs.starts, graph.inputs.items)
    pinned = np.full(groups, -1, dtype=np.int32)
    np.maximum.at(pinned, group, fine.pinned[fine.group])
    return Level(replace(fine, group=group, pinned=pinned).contracted(cluster), cluster)


@dataclass(frozen=True)
class SearchSpace:
    """A problem with the arrays that its searches share."""

    problem: PlacementProblem

    @cached_property
    def wiring(self) -> Wiring:
        return build_wiring(self.problem.graph, self.problem.seconds, self.problem.target)

    @cached_property
    def atoms(self) -> Atoms:
        return build_atoms(self.problem)

    @cached_property
    def memory_binds(self) -> bool:
        """Return whether some placement could exceed the memory of a device or a pool."""
        graph = self.problem.graph
        max_bytes = graph.total_weight_bytes + int(graph.value_bytes.sum()) + int(graph.workspace_bytes.max(initial=0))
        return self.problem.may_exceed(max_bytes)

    def fits(self, device: Ints, order: Ints) -> bool:
        """Return whether devices take their nodes, and a placement fits into memory if it runs in this order."""
        if self.problem.refuses(device):
            return False
        if not self.memory_binds:
            return True
        simulation = self.problem.simulate(device, order)
        return not self.problem.excess_bytes(simulation).any()


@dataclass(frozen=True)
class Candidate:
    """A placement with the urgencies that order the nodes of each device."""

    name: str
    device: Ints
    """Per node of the problem."""
    bias: Floats
    level_weight: float
    """Factor of the bottom level in the urgency, to which `bias` is added."""
    order: Ints
    """The nodes in the order of their starts."""
    seconds: float
    """The step, with the calls of segments."""


ImproveLevel = Callable[[int, "Candidate"], "Candidate"]


@dataclass(frozen=True)
class Budget:
    """Limits of a search in seconds and in proposals, whichever ends first; 0 for no limit."""

    seconds: float
    proposals: int
    eager: bool = False
    """Whether a search ends before its time where it gains nothing (`search_and_commit`)."""
    tolerance: float = 0.0
    """Share of the lower bound by which a step may exceed it for the search to end."""
    cancelled: threading.Event = field(default_factory=threading.Event, compare=False)
    """Once set, searches with this budget, or a part of it, end."""

    def __str__(self) -> str:
        return f" within {self.seconds:g} s" if self.seconds else ""

    def part(self, share: float) -> Budget:
        return replace(self, seconds=self.seconds * share, proposals=int(np.ceil(self.proposals * share)))


def evaluate_candidate(space: SearchSpace, name: str, device: Ints, order: Ints) -> Candidate | None:
    """Return a placement as a candidate, None if it does not fit.

    Its nodes run by bottom level or in the given order, whichever is better.
    """
    rank_bias = -np.argsort(order).astype(np.float64)
    options = (
        decode_candidate(space, name, device, bias, level_weight)
        for bias, level_weight in ((0 * rank_bias, 1.0), (rank_bias, 0.0))
    )
    fitting = [option for option in options if space.fits(device, option.order)]
    return min(fitting, key=lambda option: option.seconds, default=None)


def decode_candidate(space: SearchSpace, name: str, device: Ints, bias: Floats, level_weight: float) -> Candidate:
    """Return a placement as a candidate whose nodes run by urgency."""
    scratch = new_scratch(space.wiring)
    seconds, _ = decode(space.wiring, device.astype(np.int32), bias, level_weight, np.inf, scratch)
    return Candidate(
        name, device.astype(np.int32), bias, level_weight, run_order(space.problem.graph, scratch), float(seconds)
    )


def project(space: SearchSpace, candidate: Candidate, cluster: Ints) -> Candidate | None:
    """Carry a candidate of a coarser problem over to a finer one; return None if it does not fit there."""
    # Two ways to inherit: the urgencies of the coarse nodes, or the order in which these started.
    rank = np.argsort(candidate.order)
    inherited = decode_candidate(
        space, candidate.name, candidate.device[cluster], candidate.bias[cluster], candidate.level_weight
    )
    order = np.lexsort((space.problem.graph.positions, rank[cluster])).astype(np.int32)
    ordered = evaluate_candidate(space, candidate.name, candidate.device[cluster], order)
    options = [ordered] if ordered else []
    if space.fits(inherited.device, inherited.order):
        options.append(inherited)
    return min(options, key=lambda option: option.seconds, default=None)


def count_worthwhile_moves(problem: PlacementProblem) -> int:
    """Return the proposals beyond which a search finds nothing better."""
    return MAX_PROPOSALS + MAX_PROPOSALS_PER_ATOM * int((problem.pinned < 0).sum())


def improve(
    space: SearchSpace,
    start: Candidate,
    budget: Budget,
    seed: int,
    temperature: float = START_TEMPERATURE,
    goal: float = 0.0,
) -> tuple[Candidate, int]:
    """Anneal from a candidate; return the best candidate, at least as good, and the number of proposals.

    Deterministic under `seed` as long as proposals, not the wall clock, end the search. Stops at `goal` seconds.
    """
    problem, atoms, wiring = space.problem, space.atoms, space.wiring
    if len(problem.target.devices) < 2 or (problem.pinned >= 0).all() or start.seconds <= goal:
        return start, 0
    max_proposals = count_worthwhile_moves(problem)
    max_proposals = min(max_proposals, budget.proposals) if budget.proposals else max_proposals
    scratch = new_scratch(wiring)
    state = start_state(start.device, start.bias, len(problem.pinned), seed)
    best_device, best_bias = start.device.copy(), start.bias.copy()
    seconds, _ = decode(wiring, state.device, state.bias, start.level_weight, np.inf, scratch)
    # The start counts as a first accepted proposal: it gives the state its critical chain.
    state.times[3:] = seconds, 0.0
    accept(scratch, state)
    # The first slice is short, since it is not known yet how long a proposal takes.
    start_time, size = time.perf_counter(), 8
    while (proposals := int(state.counts[PROPOSALS])) < max_proposals and state.times[BEST_MAKESPAN] > goal:
        now = time.perf_counter()
        clock_progress = (now - start_time) / budget.seconds if budget.seconds else 0.0
        if clock_progress >= 1.0 or budget.cancelled.is_set():
            break
        # Cool by the count while the count will end the search: then nothing depends on the clock.
        count_progress, step = proposals / max_proposals, 1.0 / max_proposals
        progress, step = (count_progress, step) if count_progress >= clock_progress else (clock_progress, 0.0)
        passes = anneal(
            wiring, scratch, atoms, state, start.level_weight, min(size, max_proposals - proposals),
            temperature * start.seconds, progress, step, space.memory_binds, best_device, best_bias,
        )  # fmt: skip
        # Where memory binds, the loop stops at each proposal that passes at this temperature: it may not fit.
        if passes and not space.fits(state.device, run_order(problem.graph, scratch)):
            undo(atoms, state)
        elif passes and accept(scratch, state):
            best_device, best_bias = state.device.copy(), state.bias.copy()
        # Slices of the loop grow until one takes SLICE_SECONDS.
        if not passes:
            size = max(1, int(size * min(2.0, SLICE_SECONDS / max(time.perf_counter() - now, 1e-6))))
    improved = decode_candidate(space, start.name, best_device, best_bias, start.level_weight)
    return improved if improved.seconds < start.seconds else start, int(state.counts[PROPOSALS])


@dataclass(frozen=True)
class Explored:
    """The result of a search."""

    best: Candidate
    proposals: int
    """The number of proposals of all searches together."""


def explore(
    ladder: Sequence[Level],
    given: Sequence[Candidate],
    budget: Budget,
    seed: int,
    goal: float,
    promising: Candidate | None = None,
) -> Explored:
    """Search from coarse constructed placements, then from the best of their results and the given candidates.

    Two searches run at a time. The first two descend from two coarser versions, or one of them starts from the best
    candidate where there are not two. Two more continue from the best of all.

    Args:
        ladder: The problem and its coarser versions.
        given: Candidates to start from, too.
        budget: Limits of all searches together.
        seed: Seed of the random moves.
        goal: Seconds of a step at which the search stops.
        promising: A given candidate from which one of the first two searches starts, instead of from a coarser version.

    Raises:
        LookupError: No candidate fits.
    """
    # Starts: constructed placements of every level, carried down to the problem itself, and the given ones.
    spaces = [SearchSpace(level.problem) for level in ladder]
    constructed = [_construct_candidate(space) for space in spaces]
    projected = (_descend(ladder, spaces, level, start, None) for level, start in enumerate(constructed) if start)
    fitting = [candidate for candidate in [*given, *projected] if candidate is not None]
    if not fitting:
        raise LookupError("no candidate fits")
    best = min(fitting, key=lambda candidate: candidate.seconds)
    improve(spaces[0], best, Budget(0, 1), 0)  # compile the loops before the clock runs
    first, second = (budget.part(share) for share in ROUND_SHARES)
    coarser = [(level, candidate) for level, candidate in enumerate(constructed) if level and candidate]

    def descend_from(level: int, candidate: Candidate) -> Callable[[], tuple[Candidate, int]]:
        # Every search has its own seed, so that results do not depend on the thread that ends first.
        return lambda: _search_levels(ladder, spaces, level, candidate, first, seed + 100 * level, goal)

    # The finest of the coarser levels keeps most of the choice, the coarsest most of the overview.
    chosen = coarser[-1:] if promising else coarser[:1] + coarser[1:][-1:]
    jobs = [descend_from(level, candidate) for level, candidate in chosen]
    if promising:
        jobs.append(lambda: improve(spaces[0], promising, first, seed, goal=goal))
    # Two searches keep two cores busy; fewer coarse levels leave room for one from the best so far.
    if len(jobs) < 2:
        jobs.append(lambda: improve(spaces[0], best, first, seed, goal=goal))
    results = run_in_threads(jobs, budget.cancelled.set)
    proposals = sum(count for _, count in results)
    best = min([best, *(candidate for candidate, _ in results)], key=lambda candidate: candidate.seconds)
    # The second round is colder: it keeps what the first one reached, and mends details.
    best, further = _improve_twice(spaces[0], best, second, seed + 2, START_TEMPERATURE / 4, goal)
    return Explored(best, proposals + further)


def polish(space: SearchSpace, start: Candidate, budget: Budget, seed: int, goal: float) -> Explored:
    """Search from a candidate with two searches at a time, the second pair from the best of the first."""
    improve(space, start, Budget(0, 1), 0)  # compile the loops before the clock runs
    first, second = (budget.part(share) for share in ROUND_SHARES)
    best, proposals = _improve_twice(space, start, first, seed, START_TEMPERATURE, goal)
    best, further = _improve_twice(space, best, second, seed + 2, START_TEMPERATURE / 4, goal)
    return Explored(best, proposals + further)


def _improve_twice(
    space: SearchSpace, start: Candidate, budget: Budget, seed: int, temperature: float, goal: float
) -> tuple[Candidate, int]:
    """Run two searches from one candidate, at two temperatures; return the better result and all proposals."""
    searches = [
        lambda: improve(space, start, budget, seed, temperature, goal),
        lambda: improve(space, start, budget, seed + 1, START_TEMPERATURE, goal),
    ]
    results = run_in_threads(searches, budget.cancelled.set)
    best = min((candidate for candidate, _ in results), key=lambda candidate: candidate.seconds)
    return best, sum(proposals for _, proposals in results)


def _construct_candidate(space: SearchSpace) -> Candidate | None:
    """Return the best placement without a search: of list schedules and of single devices."""
    # Placements that need no search: they are valid, and give the search a step to beat.
    problem = space.problem
    plans = [critical_path_plan(problem, space.wiring, weight) for weight in (0.0, 0.5, 1.0)]
    plans += [next(list_plans(divided, None, False), plans[0]) for divided in problem.divide_pools()]
    placements = [
        (device, sort_by_start(problem.graph, start)) for device, start in plans if device.min(initial=0) >= 0
    ]
    placements += [
        (place_on_one_device(problem, device), problem.graph.order) for device in list_distinct_devices(problem)
    ]
    candidates = (evaluate_candidate(space, MULTILEVEL, device, order) for device, order in placements)
    return min((option for option in candidates if option), key=lambda option: option.seconds, default=None)


def place_on_one_device(problem: PlacementProblem, device: int) -> Ints:
    """Return the placement with every free group on one device, but for those that it refuses."""
    placement = np.where(problem.pinned >= 0, problem.pinned, device)[problem.group].astype(np.int32)
    return problem.avoid_refused(placement)


def list_distinct_devices(problem: PlacementProblem) -> list[int]:
    """Return the devices that differ from all earlier ones; with pins, all devices."""
    if (problem.pinned >= 0).any():
        return list(range(len(problem.target.devices)))
    first: dict[tuple[str, int], int] = {}
    # Pins tell devices apart; without them, one of each class and memory size is enough.
    for index, (device, size) in enumerate(zip(problem.target.devices, problem.limit_bytes.tolist())):
        first.setdefault((device.cost_class, size), index)
    return list(first.values())


def _descend(
    ladder: Sequence[Level],
    spaces: Sequence[SearchSpace],
    level: int,
    candidate: Candidate | None,
    improve_level: ImproveLevel | None,
) -> Candidate | None:
    """Carry a candidate of a coarse level down to the problem itself, improving it on each finer level."""
    while level > 0 and candidate is not None:
        candidate = project(spaces[level - 1], candidate, ladder[level].cluster)
        level -= 1
        if candidate is not None and improve_level is not None:
            candidate = improve_level(level, candidate)
    return candidate


def _search_levels(
    ladder: Sequence[Level],
    spaces: Sequence[SearchSpace],
    top: int,
    start: Candidate,
    budget: Budget,
    seed: int,
    goal: float,
) -> tuple[Candidate, int]:
    """Search on level `top`, then on each finer one, with half of the remaining budget on each."""
    proposals = [0]

    def search(level: int, candidate: Candidate) -> Candidate:
        # 1/2, 1/4, ... of the budget; the finest level gets as much as the one before it, so that all add up to 1.
        share = 0.5 ** (top - level + (level > 0))
        improved, count = improve(spaces[level], candidate, budget.part(share), seed + 10 * level, goal=goal)
        proposals[0] += count
        return improved

    candidate = _descend(ladder, spaces, top, search(top, start), search)
    return candidate or replace(start, seconds=np.inf), proposals[0]
