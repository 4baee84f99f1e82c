"""Minimise a sum of cost tables over discrete variables, by variable elimination.

To eliminate a variable, the tables that it occurs in are added up, and the sum is minimised over it: a new table over
its neighbours takes their place. When no variable is left, the sum of the remaining numbers is the least cost, and the
best values follow in reverse order. The variable whose new table is smallest goes first.

Exact where all tables stay small (Bertelè and Brioschi, "Nonserial Dynamic Programming", 1972). Otherwise by mini-
buckets (Dechter and Rish, "Mini-buckets", Journal of the ACM 50(2), 2003): tables that would be too large are minimised
in parts, which gives a lower bound, and an assignment that windows of variables then improve.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.utils.groups import group_pairs

CostTable = NDArray[np.float64]

# Sums of costs have this many bits; those of 64-bit floats have 53. The rest leaves room for the large entries that
# stand for infinity.
_SUM_BITS = 48

# Limits of tables that are tried in turn, where larger ones take too much work or prove little.
_SMALLER_LIMITS = (1 << 16, 1 << 12)
# One elimination may add up this many entries of tables, about a second of work.
MAX_WORK = 1 << 28
_WORK_PER_VARIABLE = 1 << 14
# Assignments this close to the lower bound are not improved further.
_SMALL_GAP = 1e-4
# Overlapping windows of variables are improved, wide ones first, until this many variables were or this took this work.
_WINDOW_WIDTHS = (256, 64)
_MAX_WINDOW_WORK, _MAX_SWEPT_WORK = MAX_WORK >> 3, MAX_WORK << 1
_MAX_SWEPT_VARIABLES = 40_000
# More entries than any limit: tables beyond it are not told apart.
_MANY_ENTRIES = 1 << 40


class Factor(NamedTuple):
    """A cost table over some variables."""

    scope: tuple[int, ...]
    """Variables, rising."""
    table: CostTable
    """One axis per variable of the scope."""


def order_factor(scope: Sequence[int], table: CostTable) -> Factor:
    """Return a factor with its variables in rising order."""
    order = sorted(range(len(scope)), key=scope.__getitem__)
    if order == list(range(len(scope))):
        return Factor(tuple(scope), table)
    return Factor(tuple(scope[index] for index in order), table.transpose(order))


def evaluate(factors: Iterable[Factor], values: Sequence[int]) -> float:
    """Return the cost of an assignment."""
    return float(sum(factor.table[tuple([values[v] for v in factor.scope])] for factor in factors))


def drop_constants(factors: Sequence[Factor], sizes: Sequence[int]) -> list[Factor]:
    """Return factors without the variables that have one value; equal tables stay the same object."""
    tables: dict[object, CostTable] = {}
    result = []
    for factor in factors:
        scope = tuple([variable for variable in factor.scope if sizes[variable] > 1])
        if len(scope) < len(factor.scope):
            key = id(factor.table)
            if key not in tables:
                tables[key] = factor.table.reshape([size for size in factor.table.shape if size > 1])
            factor = Factor(scope, tables[key])
        result.append(factor)
    return result


def round_costs(factors: Sequence[Factor]) -> tuple[list[Factor], float]:
    """Return factors with rounded entries, and a cost that only assignments with infinite entries exceed.

    Entries become multiples of a power of two that is so large that all sums are exact: equal parts of a model then
    have equal sums. Infinite entries become so large that every assignment without them costs less.
    """
    tables = {id(factor.table): factor.table for factor in factors}
    spans = {}
    for key, table in tables.items():
        finite = table[np.isfinite(table)]
        spans[key] = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
    lowest = sum(spans[id(factor.table)][0] for factor in factors)
    highest = sum(spans[id(factor.table)][1] for factor in factors)
    largest = max(sum(max(map(abs, spans[id(factor.table)])) for factor in factors), 1e-300)
    # The unit is a power of two, so dividing by it and multiplying again is exact.
    unit = math.ldexp(1.0, math.frexp(largest)[1] - _SUM_BITS)
    large = 2 * (highest - lowest) + 2 * largest
    rounded: dict[int, CostTable] = {}
    equal: dict[object, CostTable] = {}
    for key, table in tables.items():
        entries = np.rint(np.where(np.isfinite(table), table, spans[key][0] + large) / unit) * unit
        rounded[key] = equal.setdefault((table.shape, entries.tobytes()), entries)
    return [Factor(factor.scope, rounded[id(factor.table)]) for factor in factors], highest + largest / 2


class Joins:
    """Sums of tables minimised over one variable.

    Equal sums are computed once. Layers that repeat soon give equal sums: their minima, less the least one, converge in
    finitely many steps (Baccelli et al., "Synchronization and Linearity", 1992, theorem 3.112).
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.work = 0
        """Entries of tables that were added up."""
        self._results: dict[object, tuple[CostTable, float, Sequence[Factor]]] = {}
        self._tables: dict[object, CostTable] = {}

    def minimum(self, factors: Sequence[Factor], variable: int, scope: Sequence[int]) -> tuple[CostTable, float]:
        """Return the minimum over a variable of the sum of factors: a table over `scope`, and a number to add to it."""
        # The variable has the first axis, along which numpy finds minima the fastest.
        position = {item: index for index, item in enumerate((variable, *scope))}
        places = [tuple([position[item] for item in factor.scope]) for factor in factors]
        key = tuple([(id(factor.table), place) for factor, place in zip(factors, places)])
        if key not in self._results:
            shape = [self.sizes[item] for item in (variable, *scope)]
            table = np.asarray(_add_up([factor.table for factor in factors], places, shape).min(axis=0))
            self.work += table.size * shape[0] * len(factors)
            least = float(table.min())
            table = table - least
            table = self._tables.setdefault((table.shape, table.tobytes()), table)
            # The factors are kept, so that no other table gets the identity of one of them.
            self._results[key] = table, least, factors
        return self._results[key][:2]


def _add_up(tables: Sequence[CostTable], places: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> CostTable:
    """Return the sum of tables, whose axes have these places in the result."""
    total = np.zeros(sizes)
    for table, place in zip(tables, places):
        order = sorted(range(len(place)), key=place.__getitem__)
        shape = [size if axis in place else 1 for axis, size in enumerate(sizes)]
        total += table.transpose(order).reshape(shape)
    return total


@dataclass(frozen=True)
class Solution:
    """An assignment of all variables."""

    values: Sequence[int]
    cost: float
    lower_bound: float
    """No assignment, within the limit of memory if there is one, costs less."""
    fits: bool = True
    """Whether the assignment keeps within the limit of memory."""


def minimise(sizes: Sequence[int], factors: Sequence[Factor], max_entries: int = 1 << 20, sweeps: int = 3) -> Solution:
    """Return an assignment of least cost.

    Args:
        sizes: Number of values of each variable.
        factors: Their sum is minimised; entries may be infinite.
        max_entries: The largest table. If larger ones would be needed, the result may not be optimal.
        sweeps: How often windows of variables are then improved.
    """
    rounded, max_cost = round_costs(drop_constants(factors, sizes))
    variables = [variable for variable, size in enumerate(sizes) if size > 1]
    joins, bound, starts = Joins(sizes), -math.inf, [[0] * len(sizes)]
    max_work = max(MAX_WORK, _WORK_PER_VARIABLE * len(variables))
    # Smaller limits give weaker bounds with less work; the first one that proves its assignment ends the search.
    for limit in (max_entries, *(limit for limit in _SMALLER_LIMITS if limit < max_entries)):
        attempt = Elimination(joins, rounded, variables, limit, max_work)
        if not attempt.run():
            continue
        starts.insert(0, attempt.assign(starts[-1]))
        cost = evaluate(rounded, starts[0])
        bound = cost if attempt.is_exact else max(bound, attempt.bound)
        if cost - bound <= _SMALL_GAP * abs(cost):
            break
    else:
        for values in starts:
            improve_windows(sizes, rounded, values, max_entries, sweeps)
    values = min(starts, key=lambda item: evaluate(rounded, item))
    cost = evaluate(factors, values)
    return Solution(values, cost, math.inf if bound > max_cost else min(bound, cost))


def eliminate_exactly(sizes: Sequence[int], factors: Sequence[Factor], max_entries: int = 1 << 20) -> Solution | None:
    """Return an assignment of least cost; None if that needs larger tables or more work than allowed."""
    rounded, max_cost = round_costs(drop_constants(factors, sizes))
    variables = [variable for variable, size in enumerate(sizes) if size > 1]
    max_work = max(MAX_WORK, _WORK_PER_VARIABLE * len(variables))
    elimination = Elimination(Joins(sizes), rounded, variables, max_entries, max_work)
    if not elimination.run(only_exactly=True):
        return None
    values = elimination.assign([0] * len(sizes))
    cost = evaluate(factors, values) if evaluate(rounded, values) <= max_cost else math.inf
    return Solution(values, cost, cost)


# The pool holds all tables that are left, by number. A variable knows the numbers of its tables, and its neighbours:
# the variables that share a table with it. When it is eliminated, its tables leave the pool, and the new one makes all
# its neighbours neighbours of each other. Buckets keep the tables in the order of elimination, which `assign` follows
# backwards.
class Elimination:
    """Eliminates variables, the one with the smallest table first."""

    def __init__(
        self,
        joins: Joins,
        factors: Sequence[Factor],
        variables: Sequence[int],
        max_entries: int,
        max_work: int = MAX_WORK,
    ) -> None:
        self._joins, self._sizes, self._max_entries = joins, joins.sizes, max_entries
        self.bound = 0.0
        """After `run`: no assignment costs less."""
        self.is_exact = True
        """After `run`: whether the assignment is optimal."""
        self._count, self._max_work = 0, joins.work + max_work
        self._pool: dict[int, Factor] = {}
        self._factors_of: dict[int, list[int]] = {variable: [] for variable in variables}
        self._neighbours: dict[int, set[int]] = {variable: set() for variable in variables}
        self._buckets: list[tuple[int, list[Factor]]] = []
        for factor in factors:
            self._add(factor)
        self._turns = dict.fromkeys(variables, 0)
        self._entries: dict[int, int] = {}
        self._heap: list[tuple[int, int, int]] = []
        for variable in variables:
            self._push(variable)

    def _add(self, factor: Factor) -> None:
        scope = factor.scope
        if not scope:
            self.bound += float(factor.table)
            return
        self._pool[self._count] = factor
        for variable in scope:
            self._factors_of[variable].append(self._count)
            if len(scope) > 1:
                self._neighbours[variable].update(scope)
                self._neighbours[variable].discard(variable)
        self._count += 1

    def _push(self, variable: int) -> None:
        """Queue a variable by the entries of the table that eliminating it takes."""
        sizes, entries = self._sizes, self._sizes[variable]
        for other in self._neighbours[variable]:
            entries *= sizes[other]
            if entries >= _MANY_ENTRIES:
                entries = _MANY_ENTRIES
                break
        # The heap keeps outdated entries; `run` skips those whose number of entries has changed.
        if self._entries.get(variable) != entries:
            self._entries[variable] = entries
            heapq.heappush(self._heap, (entries, self._turns[variable], variable))

    def run(self, *, only_exactly: bool = False) -> bool:
        """Eliminate all variables; return whether the work kept within its limit, and, if asked for, all is exact."""
        heap, turns = self._heap, self._turns
        while heap and self._joins.work <= self._max_work:
            entries, turn, variable = heapq.heappop(heap)
            if variable not in self._factors_of or self._entries[variable] != entries:
                continue
            # Of equal variables, those touched last come last: equal parts of a model then have equal sums.
            if turn < turns[variable]:
                heapq.heappush(heap, (entries, turns[variable], variable))
                continue
            if only_exactly and entries > self._max_entries:
                return False
            self._eliminate(variable, entries)
        return self._joins.work <= self._max_work

    def _eliminate(self, variable: int, entries: int) -> None:
        pool = self._pool
        bucket = [pool.pop(number) for number in self._factors_of.pop(variable) if number in pool]
        touched = sorted(self._neighbours.pop(variable))
        for other in touched:
            self._neighbours[other].discard(variable)
            self._turns[other] += 1
        # One table over all neighbours if it is small; else mini-buckets, whose minima add up to a lower bound.
        if entries <= self._max_entries:
            self._add(self._minimum(bucket, variable, tuple(touched)))
        else:
            parts = _partition(bucket, self._sizes, self._max_entries)
            self.is_exact = self.is_exact and len(parts) == 1
            for part in parts:
                scope = sorted({item for factor in part for item in factor.scope} - {variable})
                self._add(self._minimum(part, variable, tuple(scope)))
        self._buckets.append((variable, bucket))
        for other in touched:
            self._push(other)

    def _minimum(self, factors: Sequence[Factor], variable: int, scope: tuple[int, ...]) -> Factor:
        table, least = self._joins.minimum(factors, variable, scope)
        self.bound += least
        return Factor(scope, table)

    def assign(self, values: Sequence[int]) -> list[int]:
        """Return `values` with the best ones of the eliminated variables, after `run`."""
        result = list(values)
        # Backwards: when a variable is set, all variables that its tables share with it are set already.
        for variable, bucket in reversed(self._buckets):
            total: CostTable = np.zeros(self._sizes[variable])
            for factor in bucket:
                place = tuple([slice(None) if item == variable else result[item] for item in factor.scope])
                total = total + factor.table[place]
            result[variable] = int(total.argmin())
        return result


def _partition(bucket: Sequence[Factor], sizes: Sequence[int], max_entries: int) -> list[list[Factor]]:
    """Return the factors of a bucket in parts whose joined tables keep within the limit."""
    parts: list[tuple[set[int], list[Factor]]] = []
    for factor in sorted(bucket, key=lambda item: -item.table.size):
        # First fit, the largest tables first; any partition gives a bound, few parts give a good one.
        for scope, members in parts:
            joined = scope.union(factor.scope)
            if math.prod(sizes[variable] for variable in joined) <= max_entries:
                scope.update(factor.scope)
                members.append(factor)
                break
        else:
            parts.append((set(factor.scope), [factor]))
    return [members for _, members in parts]


def improve_windows(
    sizes: Sequence[int], factors: Sequence[Factor], values: list[int], max_entries: int, sweeps: int
) -> None:
    """Improve windows of variables that are next to each other, the others fixed; change `values`."""
    factors_of = group_pairs((variable, index) for index, factor in enumerate(factors) for variable in factor.scope)
    # A variable stays next to the first one that it shares a table with: a value next to the node that makes it.
    order = sorted(factors_of, key=lambda item: (min(factors[index].scope[0] for index in factors_of[item]), item))
    windows = [order[start : start + width] for width in _WINDOW_WIDTHS for start in range(0, len(order), width // 2)]
    swept = work = 0
    for _ in range(sweeps):
        is_better = False
        for window in windows:
            touching = sorted({index for variable in window for index in factors_of[variable]})
            # Conditioned tables are new objects in each window, so results of earlier windows would not be found.
            joins = Joins(sizes)
            is_better |= _improve_window(window, [factors[index] for index in touching], joins, values, max_entries)
            swept, work = swept + len(window), work + joins.work
            if swept > _MAX_SWEPT_VARIABLES or work > _MAX_SWEPT_WORK:
                return
        if not is_better:
            return


def _improve_window(
    window: Sequence[int], factors: Sequence[Factor], joins: Joins, values: list[int], max_entries: int
) -> bool:
    """Set the variables of a window to their best values, the others fixed, unless that saves nothing."""
    # Tables that reach outside are cut at the values of the fixed variables, which makes the window exact or small.
    inside = set(window)
    conditioned = []
    for factor in factors:
        scope = tuple([variable for variable in factor.scope if variable in inside])
        table = factor.table
        if len(scope) < len(factor.scope):
            table = table[tuple([slice(None) if item in inside else values[item] for item in factor.scope])]
        conditioned.append(Factor(scope, np.asarray(table)))
    elimination = Elimination(joins, conditioned, window, max_entries, _MAX_WINDOW_WORK)
    if not elimination.run():
        return False
    best = elimination.assign(values)
    # Mini-buckets may return a worse assignment than the one that is there.
    if evaluate(conditioned, best) >= evaluate(conditioned, values):
        return False
    values[:] = best
    return True
