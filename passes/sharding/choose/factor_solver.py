"""Choose values of discrete variables: least sum of cost tables, within memory that variables hold for intervals.

1. What elimination solves exactly, and what then fits, needs nothing else.
2. Variables whose choices correspond one to one become one (`factor_network`): graphs of compilers with tens of
   thousands of nodes shrink to hundreds of variables.
3. A limit of memory couples all variables that are alive at the same time. So each point of time gets a price per byte
   (Lagrangian relaxation), which rises where the limit is exceeded. At fixed prices the problem is a sum of tables:
   message passing (TRW-S) gives a lower bound, less the price of the limit, and an assignment. Each one is repaired
   until it fits.
4. Simulated annealing improves the best one that fits (`factor_search_kernels`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph.lifetimes import sum_alive
from onnxplace.passes.sharding.choose.elimination import Factor, Solution, eliminate_exactly, evaluate
from onnxplace.passes.sharding.choose.factor_kernels import add_prices, add_usage, pass_messages
from onnxplace.passes.sharding.choose.factor_network import (
    FactorNetwork,
    Floats,
    Holding,
    Integers,
    MemoryOverTime,
    ReducedNetwork,
    build_network,
    collect_memory,
    connect,
    reduce_network,
)
from onnxplace.passes.sharding.choose.factor_search_kernels import CHANGE, CURSOR, anneal, repair, start_state

# Rounds of message passing, each with new prices, and every how many of them an assignment is repaired. Rounds end
# early when the bound has not risen by a ten-thousandth over this many of them.
_ROUNDS, _REPAIR_EVERY, _PATIENCE, _MIN_ROUNDS = 20_000, 10, 500, 300
# The shares of time at which the search begins and ends; before and after it, prices rise.
_PRICE_SHARE, _ANNEAL_SHARE = 0.25, 0.85
# Prices move by a share of the step to the aim, which falls when the bound does not rise for some rounds; directions
# are averaged over rounds.
_STEP_FALL, _FALL_AFTER, _MOMENTUM = 0.7, 30, 0.7
# Annealing: cycles, trials between looks at the clock, and trials per value in the first cycle. Temperatures are in
# units of the best cost per variable: one chain explores, the other one refines, and both cool by the same factor.
_CYCLES, _TRIALS, _TRIALS_PER_VALUE = 3, 500, 200
_HOTTEST, _COOLING = (6.0, 1.0), 1e-5
_SMALL_GAP = 1e-9
# Prices are raised by at most this power of two to find an assignment that fits.
_MAX_PRICE_POWER = 30


@dataclass(frozen=True)
class FactorProblem:
    """A sum of cost tables over discrete variables, and memory that they hold over time."""

    sizes: Sequence[int]
    """Number of values of each variable."""
    factors: Sequence[Factor]
    """Their sum is minimised; infinite entries forbid."""
    holdings: Sequence[Holding] = ()
    """What the choices of variables hold, in whole bytes."""
    limit: float = math.inf
    """Bytes that all variables together may hold at any time."""

    @cached_property
    def spans(self) -> Integers:
        """Return, per holding, its first moment and the first one after it; moments are where some holding begins."""
        intervals = np.array([(item.begin, max(item.begin, item.end)) for item in self.holdings], np.int64)
        intervals = intervals.reshape(-1, 2)
        return np.searchsorted(np.unique(intervals[:, 0]), intervals)

    @property
    def moment_count(self) -> int:
        return int(self.spans[:, 0].max(initial=-1)) + 1

    def held_bytes(self, values: Sequence[int]) -> Floats:
        """Return the bytes that an assignment holds at each moment: no other time has more."""
        held = np.array([item.bytes[values[item.variable]] for item in self.holdings], np.float64)
        return sum_alive(self.spans[:, 0], self.spans[:, 1], held, self.moment_count)


def solve(problem: FactorProblem, *, seconds: float, seed: int = 0, max_entries: int = 1 << 20) -> Solution:
    """Return the best assignment found, with a lower bound on the cost of all that fit.

    Args:
        problem: Tables, sizes, and memory over time.
        seconds: The search ends after this time; whatever ends before is the same in each run.
        seed: Of random choices.
        max_entries: The largest table of exact elimination.
    """
    begin = time.monotonic()
    exact = eliminate_exactly(problem.sizes, problem.factors, max_entries)
    bound = -math.inf
    if exact is not None:
        bound = exact.cost
        if peak_bytes(problem, exact.values) <= problem.limit:
            return exact
    reduced = reduce_network(build_network(problem.sizes, problem.factors))
    if not reduced.is_possible:
        return Solution([0] * len(problem.sizes), math.inf, math.inf, fits=False)
    memory = collect_memory(reduced, problem.holdings, problem.limit)
    search = _Search(reduced.network, memory, seed)
    # What has been done so far has no share in the phases.
    deadline = _Clock(time.monotonic(), seconds - (time.monotonic() - begin))
    if exact is not None and memory.free_bytes.min(initial=0.0) < 0:
        return replace(exact, lower_bound=math.inf, fits=False)
    search.raise_prices(deadline, _PRICE_SHARE)
    if search.best_cost < math.inf and not search.is_proven(bound):
        search.anneal(deadline, _ANNEAL_SHARE)
        # With a good assignment as the aim, prices rise further.
        search.raise_prices(deadline, 1.0)
    return _finish(problem, reduced, search, bound)


def _finish(problem: FactorProblem, reduced: ReducedNetwork, search: _Search, bound: float) -> Solution:
    values = reduced.expand(search.best)[: len(problem.sizes)]
    cost = evaluate(problem.factors, values)
    fits = peak_bytes(problem, values) <= problem.limit
    # Sums of prices and messages are rounded.
    bound = max(bound, search.bound - _SMALL_GAP * abs(search.bound))
    return Solution(values, cost, min(bound, cost) if fits else bound, fits)


def peak_bytes(problem: FactorProblem, values: Sequence[int]) -> float:
    """Return the most bytes that an assignment holds at any time."""
    return float(problem.held_bytes(values).max(initial=0.0))


@dataclass(frozen=True)
class _Clock:
    begin: float
    seconds: float

    def share(self) -> float:
        """Return the share of the time that is over."""
        return (time.monotonic() - self.begin) / max(self.seconds, 1e-9)


class _Guide(NamedTuple):
    """What message passing tells of the whole; the search goes by it where a change must spread."""

    costs: Floats
    """With the prices of memory."""
    messages: Floats
    """Least costs beyond each arc, per value of the variable that receives them."""
    marginals: Floats
    """Least costs of the whole with each value, less the least of all."""
    scratch: Floats
    """Per value of the variable that sends."""


class _State(NamedTuple):
    """A state of the local search, and its scratch memory: see `factor_search_kernels`."""

    choice: Integers
    conditional: Floats
    """Costs of each value with the neighbours as they are."""
    free_bytes: Floats
    """Per point of time."""
    changes: NDArray[np.void]
    """Records of `CHANGE`: what the current trial changed, in order."""
    queue: Integers
    """Variables whose neighbours changed."""
    queued: Integers
    """Per variable, 1 while it is in the queue."""
    stamps: Integers
    """Per variable, the last region that it was part of."""
    scores: Floats
    """Per value of the variable that is decided."""
    cursor: NDArray[np.void]
    """One record of `CURSOR`."""
    rng: Integers


class _Search:
    """Bound and best assignment of a reduced network, first by prices, then by local search."""

    def __init__(self, network: FactorNetwork, memory: MemoryOverTime, seed: int) -> None:
        self._memory, self._graph = memory, connect(network)
        self._free = np.flatnonzero(network.sizes > 1)
        messages = np.zeros(int(network.sizes[network.edges].sum()))
        scratch = np.zeros(int(network.sizes.max(initial=1)))
        self._guide = _Guide(network.costs.copy(), messages, np.zeros(len(network.costs)), scratch)
        self._states = [self._make_state(seed, number) for number in range(len(_HOTTEST))]
        self.bound = -math.inf
        """No assignment that fits costs less."""
        self.best = np.zeros(len(network.sizes), np.int64)
        self.best_cost = math.inf
        """Infinite until an assignment fits."""
        self._prices = np.zeros(len(memory.free_bytes))

    def _make_state(self, seed: int, number: int) -> _State:
        sizes = np.diff(self._graph.start)
        count = len(sizes)
        return _State(
            choice=np.zeros(count, np.int64),
            conditional=np.zeros(len(self._graph.costs)),
            free_bytes=self._memory.free_bytes.copy(),
            changes=np.zeros(4 * count + 100, CHANGE),
            queue=np.zeros(8 * count + 400, np.int64),
            queued=np.zeros(count, np.int64),
            stamps=np.zeros(count, np.int64),
            scores=np.zeros(int(sizes.max(initial=1))),
            cursor=np.zeros(1, CURSOR),
            # The generator needs a seed other than zero.
            rng=(np.random.SeedSequence([seed, number]).generate_state(1, np.uint64) | np.uint64(1)).view(np.int64),
        )

    def is_proven(self, bound: float) -> bool:
        """Return whether no assignment costs less than the best one, as far as the precision of sums tells."""
        return self.best_cost - max(bound, self.bound) <= _SMALL_GAP * abs(self.best_cost)

    def raise_prices(self, clock: _Clock, share: float) -> None:
        """Search prices with a high bound by sub-gradients; keep the best assignment that fits."""
        memory, choice = self._memory, np.zeros_like(self.best)
        prices = best_prices = self._prices
        # Without prices, messages converge first.
        for _ in range(_FALL_AFTER):
            self.bound = max(self.bound, self._bound_at(prices, choice))
        direction, step, rose_at, progress = np.zeros_like(prices), 1.0, 0, -math.inf
        for number in range(_ROUNDS):
            bound = self._bound_at(prices, choice)
            if bound > self.bound:
                self.bound, best_prices, rose_at = bound, prices.copy(), number
            elif number - rose_at > _FALL_AFTER:
                step, rose_at, prices = step * _STEP_FALL, number, best_prices.copy()
            if number % _REPAIR_EVERY == 0:
                self._repair(choice)
                # A search from a poor start seldom recovers, so that some rounds are worth twice their share.
                is_late = clock.share() > (share if number >= _MIN_ROUNDS else min(2 * share, 1))
                if is_late or self.is_proven(self.bound):
                    break
            if number % _PATIENCE == 0:
                if self.bound - progress <= 1e-4 * abs(self.bound):
                    break
                progress = self.bound
            usage = np.zeros(len(memory.free_bytes) + 1)
            add_usage(memory, choice, usage)
            over = usage[:-1] - memory.free_bytes
            direction = _MOMENTUM * direction + (1 - _MOMENTUM) * np.where((prices > 0) | (over > 0), over, 0.0)
            direction = np.where((prices > 0) | (direction > 0), direction, 0.0)
            # The step of Polyak, towards the best cost known or, while that is far, twice the bound.
            aim = min(self.best_cost, 2 * abs(self.bound) + 1e-9)
            gap = max(aim - bound, 1e-3 * abs(self.bound))
            prices = np.maximum(prices + step * gap / max(float(direction @ direction), 1e-300) * direction, 0.0)
        self._prices = best_prices
        # If nothing fits yet, the same dear price at all points makes memory scarce everywhere.
        dear = (abs(self.bound) + 1) / max(float(np.abs(memory.free_bytes).sum()), 1.0)
        for power in range(0, _MAX_PRICE_POWER, 2):
            if self.best_cost < math.inf:
                break
            for _ in range(_FALL_AFTER):
                self._bound_at((best_prices + dear) * 2.0**power, choice)
            self._repair(choice)
        for _ in range(_FALL_AFTER):
            self._bound_at(best_prices, choice)

    def _bound_at(self, prices: Floats, choice: Integers) -> float:
        """Return a lower bound at these prices, and set `choice` to an assignment."""
        graph, memory, guide = self._graph, self._memory, self._guide
        add_prices(graph, memory, np.concatenate([[0.0], prices.cumsum()]), guide.costs)
        bound = -math.inf
        for is_forward in (True, False):
            bound = pass_messages(graph, guide, choice, is_forward)
        return bound - float(prices @ memory.free_bytes)

    def _repair(self, choice: Integers) -> None:
        state = self._states[0]
        state.choice[:] = choice
        cost = start_state(self._graph, self._memory, state)
        cost += repair(self._graph, self._memory, state, self._guide)
        # An assignment with a forbidden entry costs at least `large`.
        if cost < min(self.best_cost, self._graph.large / 2):
            self.best_cost = cost
            self.best[:] = state.choice

    def anneal(self, clock: _Clock, share: float) -> None:
        """Improve the best assignment by two chains at a time, until this share of time is over or all cycles are."""
        values = int(np.diff(self._graph.start)[self._free].sum())
        with ThreadPoolExecutor(len(_HOTTEST)) as pool:
            for cycle in range(_CYCLES):
                # Each cycle is twice as long as the one before it.
                begin, trials = clock.share(), _TRIALS_PER_VALUE * values << cycle
                end = begin + (share - begin) / (2 ** (_CYCLES - cycle) - 1)
                chains = [
                    pool.submit(self._cool, state, hottest, trials, clock, end)
                    for state, hottest in zip(self._states, _HOTTEST)
                ]
                for chain in chains:
                    cost, best = chain.result()
                    if cost < self.best_cost:
                        self.best_cost, self.best = cost, best
                if clock.share() >= share:
                    break

    def _cool(self, state: _State, hottest: float, trials: int, clock: _Clock, end: float) -> tuple[float, Integers]:
        """Anneal one chain from the best assignment, and return the best one with its cost."""
        best, best_cost, begin, done = self.best.copy(), self.best_cost, clock.share(), 0
        state.choice[:] = best
        cost = start_state(self._graph, self._memory, state)
        while done < trials and (now := clock.share()) < end:
            progress = max(done / trials, (now - begin) / (end - begin))
            temperature = abs(best_cost) / len(self._free) * hottest * _COOLING**progress
            cost, best_cost = anneal(
                self._graph, self._memory, state, self._guide, self._free, _TRIALS, temperature, cost, best_cost, best
            )
            done += _TRIALS
        return best_cost, best
