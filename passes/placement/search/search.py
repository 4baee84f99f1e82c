"""Search for better placements of a problem: where to begin, for how long, and what came of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from onnxplace.graph import Floats, Ints
from onnxplace.passes.placement.list_scheduling import generate_plans as list_plans
from onnxplace.passes.placement.search.anneal_kernels import BEST, TRIED, Atoms, anneal, atoms, take, undo, walk
from onnxplace.passes.placement.search.coarsening import Level
from onnxplace.passes.placement.search.decode_kernels import Wiring, decode, run_order, scratch, wiring
from onnxplace.passes.placement.search.heft_kernels import critical_path_plan
from onnxplace.problem import PlacementProblem, sort_by_start

# The temperature that a search begins with, as a part of the step.
HOT = 4e-4
# Proposals beyond which a search of so many atoms finds nothing more.
ENOUGH, ENOUGH_PER_ATOM = 20_000, 1_000
# How the budget is shared between the first searches and those that go on from the best of them.
ROUNDS = (0.65, 0.35)
MULTILEVEL = "multilevel"
# What one call of the kernel should take: it cannot be interrupted.
SLICE_SECONDS = 0.02


@dataclass(frozen=True)
class SearchSpace:
    """A problem with what searches of it share."""

    problem: PlacementProblem

    @cached_property
    def wiring(self) -> Wiring:
        return wiring(self.problem.graph, self.problem.seconds, self.problem.target)

    @cached_property
    def atoms(self) -> Atoms:
        return atoms(self.problem)

    @cached_property
    def memory_binds(self) -> bool:
        """Return whether some device could be given more than it holds."""
        graph = self.problem.graph
        most = graph.total_weight_bytes + int(graph.value_bytes.sum()) + int(graph.workspace_bytes.max(initial=0))
        return bool((self.problem.limit_bytes < most).any())

    def fits(self, device: Ints, order: Ints) -> bool:
        """Return whether a placement keeps within memory, run in this order."""
        if not self.memory_binds:
            return True
        simulation = self.problem.simulate(device, order)
        return not self.problem.excess_bytes(simulation).any()


@dataclass(frozen=True)
class Candidate:
    """A placement, with the urgencies that make devices run their nodes in a good order."""

    name: str
    device: Ints
    """Per node of the problem."""
    bias: Floats
    lean: float
    """How much bottom levels count beside `bias`."""
    order: Ints
    """The nodes as they run."""
    seconds: float
    """The step, calls of segments counted."""


Improve = Callable[[int, "Candidate"], "Candidate"]


@dataclass(frozen=True)
class Budget:
    """How long to search: the wall clock, or a number of proposals, whichever ends first; 0 for no such limit."""

    seconds: float
    proposals: int

    def __str__(self) -> str:
        return f" within {self.seconds:g} s" if self.seconds else ""

    def part(self, share: float) -> Budget:
        return Budget(self.seconds * share, int(np.ceil(self.proposals * share)))


def evaluate_candidate(ground: SearchSpace, name: str, device: Ints, order: Ints) -> Candidate | None:
    """Return a placement as a candidate, its nodes by bottom level or in the order given, whichever is better.

    None if it does not fit.
    """
    planned = np.empty(len(device))
    planned[order] = -np.arange(len(device), dtype=np.float64)
    options = (by_urgency(ground, name, device, bias, lean) for bias, lean in ((0 * planned, 1.0), (planned, 0.0)))
    fitting = [option for option in options if ground.fits(device, option.order)]
    return min(fitting, key=lambda option: option.seconds, default=None)


def by_urgency(ground: SearchSpace, name: str, device: Ints, bias: Floats, lean: float) -> Candidate:
    """Return a placement whose nodes run by urgency."""
    s = scratch(len(device), len(ground.problem.target.devices))
    seconds, _ = decode(ground.wiring, device.astype(np.int32), bias, lean, np.inf, s)
    return Candidate(name, device.astype(np.int32), bias, lean, run_order(ground.problem.graph, s), float(seconds))


def project(ground: SearchSpace, found: Candidate, coarse: SearchSpace, cluster: Ints) -> Candidate | None:
    """Return a candidate of the finer problem from one of a coarser one; None if it does not fit there."""
    rank = np.empty(len(coarse.problem.graph))
    rank[found.order] = np.arange(len(rank))
    inherited = by_urgency(ground, found.name, found.device[cluster], found.bias[cluster], found.lean)
    order = np.lexsort((ground.problem.graph.positions, rank[cluster])).astype(np.int32)
    planned = evaluate_candidate(ground, found.name, found.device[cluster], order)
    options = [planned] if planned else []
    if ground.fits(inherited.device, inherited.order):
        options.append(inherited)
    return min(options, key=lambda option: option.seconds, default=None)


def improve(
    ground: SearchSpace, begin: Candidate, budget: Budget, seed: int, hot: float = HOT, goal: float = 0.0
) -> tuple[Candidate, int]:
    """Anneal from a candidate; returns the best one met, at least as good, and how many proposals were tried.

    Deterministic under `seed` as long as proposals, not the wall clock, end the search. Stops at `goal` seconds.
    """
    asked, a, w = ground.problem, ground.atoms, ground.wiring
    free = int((asked.pinned < 0).sum())
    if len(asked.target.devices) < 2 or not free or begin.seconds <= goal:
        return begin, 0
    most = ENOUGH + ENOUGH_PER_ATOM * free
    most = min(most, budget.proposals) if budget.proposals else most
    s, k = scratch(len(asked.graph), len(asked.target.devices)), walk(begin.device, begin.bias, len(asked.pinned), seed)
    best_device, best_bias = begin.device.copy(), begin.bias.copy()
    seconds, _ = decode(w, k.device, k.bias, begin.lean, np.inf, s)
    k.times[3:] = seconds, 0.0
    take(s, k)
    began, size = time.perf_counter(), 8
    while (done := int(k.counts[TRIED])) < most and k.times[BEST] > goal:
        now = time.perf_counter()
        by_clock = (now - began) / budget.seconds if budget.seconds else 0.0
        if by_clock >= 1.0:
            break
        # Cool by the count while the count is what will end the search: then nothing depends on the clock.
        by_count, step = done / most, 1.0 / most
        progress, step = (by_count, step) if by_count >= by_clock else (by_clock, 0.0)
        asks = anneal(w, s, a, k, begin.lean, min(size, most - done), hot * begin.seconds, progress, step,
                      ground.memory_binds, best_device, best_bias)  # fmt: skip
        if asks and not ground.fits(k.device, run_order(asked.graph, s)):
            undo(a, k)
        elif asks and take(s, k):
            best_device, best_bias = k.device.copy(), k.bias.copy()
        if not asks:
            size = max(1, int(size * min(2.0, SLICE_SECONDS / max(time.perf_counter() - now, 1e-6))))
    found = by_urgency(ground, begin.name, best_device, best_bias, begin.lean)
    return (replace(found, name=begin.name) if found.seconds < begin.seconds else begin), int(k.counts[TRIED])


@dataclass(frozen=True)
class Explored:
    """What a search came to."""

    best: Candidate
    proposals: int
    """How many were tried, by all searches together."""


def explore(ladder: Sequence[Level], begin: Sequence[Candidate], budget: Budget, seed: int, goal: float) -> Explored:
    """Search from coarse placements of our own, then from the best of what they come to and of some candidates.

    `ladder` is the problem and its coarser versions. Two searches run at a time: they descend from two of those, or
    one starts from the best candidate where there are not two; then two more go on from the best of all. `goal`:
    seconds not to be beaten. Raises LookupError if no candidate fits.
    """
    grounds = [SearchSpace(level.problem) for level in ladder]
    coarse = [_best_plan(ground) for ground in grounds]
    starts = [*begin, *(_descend(ladder, grounds, level, found, None) for level, found in enumerate(coarse) if found)]
    fitting = [found for found in starts if found is not None]
    if not fitting:
        raise LookupError("no candidate fits")
    best = min(fitting, key=lambda found: found.seconds)
    _compile(grounds[0], best)
    first, second = (budget.part(share) for share in ROUNDS)
    coarser = [(level, found) for level, found in enumerate(coarse) if level and found]

    def from_level(level: int, own: Candidate) -> Callable[[], tuple[Candidate, int]]:
        return lambda: _search_down(ladder, grounds, level, own, first, seed + 100 * level, goal)

    # The finest of the coarser levels keeps most of the choice, the coarsest most of the overview.
    jobs = [from_level(*each) for each in coarser[:1] + coarser[1:][-1:]]
    if len(jobs) < 2:
        jobs.append(lambda: improve(grounds[0], best, first, seed, goal=goal))
    results = _in_parallel(jobs)
    proposals = sum(tried for _, tried in results)
    best = min([best, *(found for found, _ in results)], key=lambda found: found.seconds)
    best, tried = _two(grounds[0], best, second, seed + 2, HOT / 4, goal)
    proposals += tried
    return Explored(best, proposals)


def polish(ground: SearchSpace, begin: Candidate, budget: Budget, seed: int, goal: float) -> Explored:
    """Search from a candidate, two searches at a time, the second pair from the best of the first."""
    _compile(ground, begin)
    first, second = (budget.part(share) for share in ROUNDS)
    best, tried = _two(ground, begin, first, seed, HOT, goal)
    best, more = _two(ground, best, second, seed + 2, HOT / 4, goal)
    return Explored(best, tried + more)


def _two(
    ground: SearchSpace, begin: Candidate, budget: Budget, seed: int, hot: float, goal: float
) -> tuple[Candidate, int]:
    """Search twice from one candidate, at two temperatures at a time; returns the better result."""
    results = _in_parallel([
        lambda: improve(ground, begin, budget, seed, hot, goal),
        lambda: improve(ground, begin, budget, seed + 1, HOT, goal),
    ])  # fmt: skip
    return min((found for found, _ in results), key=lambda found: found.seconds), sum(tried for _, tried in results)


def _best_plan(ground: SearchSpace) -> Candidate | None:
    """Return the best placement of a problem that takes no search: list schedules, and one device after the other."""
    asked = ground.problem
    plans = [critical_path_plan(asked, ground.wiring, weight) for weight in (0.0, 0.5, 1.0)]
    plans += [next(list_plans(asked, np.full(len(asked.graph), -1, dtype=np.int32), False), plans[0])]
    placed = [(device, sort_by_start(asked.graph, start)) for device, start in plans if device.min(initial=0) >= 0]
    placed += [(on_one(asked, device), asked.graph.order) for device in distinct_devices(asked)]
    found = (evaluate_candidate(ground, MULTILEVEL, device, order) for device, order in placed)
    return min((option for option in found if option), key=lambda option: option.seconds, default=None)


def on_one(asked: PlacementProblem, device: int) -> Ints:
    """Return the placement with every free group on one device."""
    return np.where(asked.pinned >= 0, asked.pinned, device)[asked.group].astype(np.int32)


def distinct_devices(asked: PlacementProblem) -> list[int]:
    """Return the devices but those that are just like an earlier one, which a pin would tell apart."""
    if (asked.pinned >= 0).any():
        return list(range(len(asked.target.devices)))
    first: dict[tuple[str, int], int] = {}
    for index, device in enumerate(asked.target.devices):
        first.setdefault((device.cost_class, device.memory_bytes), index)
    return list(first.values())


def _descend(
    ladder: Sequence[Level], grounds: Sequence[SearchSpace], level: int, found: Candidate | None, then: Improve | None
) -> Candidate | None:
    """Carry a candidate of a coarse level down to the problem itself, improving it by `then` on each level below."""
    while level > 0 and found is not None:
        found = project(grounds[level - 1], found, grounds[level], ladder[level].cluster)
        level -= 1
        if found is not None and then is not None:
            found = then(level, found)
    return found


def _search_down(
    ladder: Sequence[Level],
    grounds: Sequence[SearchSpace],
    top: int,
    begin: Candidate,
    budget: Budget,
    seed: int,
    goal: float,
) -> tuple[Candidate, int]:
    """Search on the coarsest level, then on each finer one; half of what is left of the budget on each."""
    tried = [0]

    def search(level: int, found: Candidate) -> Candidate:
        share = 0.5 ** (top - level + (level > 0))
        better, proposals = improve(grounds[level], found, budget.part(share), seed + 10 * level, goal=goal)
        tried[0] += proposals
        return better

    found = _descend(ladder, grounds, top, search(top, begin), search)
    return (found or begin, tried[0]) if found else (replace(begin, seconds=np.inf), tried[0])


def _compile(ground: SearchSpace, begin: Candidate) -> None:
    """Have the kernels compiled before the clock runs."""
    improve(ground, begin, Budget(0, 1), 0)


def _in_parallel(jobs: Sequence[Callable[[], tuple[Candidate, int]]]) -> list[tuple[Candidate, int]]:
    """Run searches at the same time; kernels do not hold the interpreter's lock."""
    with ThreadPoolExecutor(len(jobs)) as pool:
        return [job.result() for job in [pool.submit(job) for job in jobs]]
