"""Minimise a sum of cost tables over discrete variables, by variable elimination.

Exact where all tables stay small (Bertelè and Brioschi, "Nonserial Dynamic Programming", 1972). Otherwise by
mini-buckets (Dechter and Rish, "Mini-buckets", Journal of the ACM 50(2), 2003): tables that would be too large are
minimised in parts, which gives a lower bound, and an assignment that windows of variables then improve.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.passes.sharding.cost_tables import Factor, Joins, Table, drop_constants, evaluate, round_costs

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


@dataclass(frozen=True)
class Solution:
    """An assignment of all variables."""

    values: tuple[int, ...]
    cost: float
    lower_bound: float
    """No assignment costs less."""


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
    return Solution(tuple(values), cost, math.inf if bound > max_cost else min(bound, cost))


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
        if self._entries.get(variable) != entries:
            self._entries[variable] = entries
            heapq.heappush(self._heap, (entries, self._turns[variable], variable))

    def run(self) -> bool:
        """Eliminate all variables; return whether the work kept within its limit."""
        heap, turns = self._heap, self._turns
        while heap and self._joins.work <= self._max_work:
            entries, turn, variable = heapq.heappop(heap)
            if variable not in self._factors_of or self._entries[variable] != entries:
                continue
            # Of equal variables, those touched last come last: equal parts of a model then have equal sums.
            if turn < turns[variable]:
                heapq.heappush(heap, (entries, turns[variable], variable))
                continue
            self._eliminate(variable, entries)
        return self._joins.work <= self._max_work

    def _eliminate(self, variable: int, entries: int) -> None:
        pool = self._pool
        bucket = [pool.pop(number) for number in self._factors_of.pop(variable) if number in pool]
        touched = sorted(self._neighbours.pop(variable))
        for other in touched:
            self._neighbours[other].discard(variable)
            self._turns[other] += 1
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
        for variable, bucket in reversed(self._buckets):
            total: Table = np.zeros(self._sizes[variable])
            for factor in bucket:
                place = tuple([slice(None) if item == variable else result[item] for item in factor.scope])
                total = total + factor.table[place]
            result[variable] = int(total.argmin())
        return result


def _partition(bucket: Sequence[Factor], sizes: Sequence[int], max_entries: int) -> list[list[Factor]]:
    """Return the factors of a bucket in parts whose joined tables keep within the limit."""
    parts: list[tuple[set[int], list[Factor]]] = []
    for factor in sorted(bucket, key=lambda item: -item.table.size):
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
    factors_of: dict[int, list[int]] = {}
    for index, factor in enumerate(factors):
        for variable in factor.scope:
            factors_of.setdefault(variable, []).append(index)
    # A variable stays next to the first one that it shares a table with: a value next to the node that makes it.
    order = sorted(factors_of, key=lambda item: (min(factors[index].scope[0] for index in factors_of[item]), item))
    windows = [order[start : start + width] for width in _WINDOW_WIDTHS for start in range(0, len(order), width // 2)]
    swept = work = 0
    for _ in range(sweeps):
        is_better = False
        for window in windows:
            touching = sorted({index for variable in window for index in factors_of[variable]})
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
    if evaluate(conditioned, best) >= evaluate(conditioned, values):
        return False
    values[:] = best
    return True
