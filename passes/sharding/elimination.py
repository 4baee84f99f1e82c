"""Minimise a sum of cost tables over discrete variables, by variable elimination.

Exact where all tables stay small (Bertelè and Brioschi, "Nonserial Dynamic Programming", 1972). Otherwise by
mini-buckets (Dechter and Rish, "Mini-buckets", Journal of the ACM 50(2), 2003): tables that would be too large are
minimised in parts, which gives a lower bound, and an assignment that windows of variables then improve.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]


class Factor(NamedTuple):
    """A cost table over some variables."""

    scope: tuple[int, ...]
    """Variables, rising."""
    table: Table
    """One axis per variable of the scope."""


@dataclass(frozen=True)
class Solution:
    """An assignment of all variables."""

    values: tuple[int, ...]
    cost: float
    lower_bound: float
    """No assignment costs less."""


def order_factor(scope: Sequence[int], table: Table) -> Factor:
    """Return a factor with its variables in rising order."""
    order = sorted(range(len(scope)), key=scope.__getitem__)
    if order == list(range(len(scope))):
        return Factor(tuple(scope), table)
    return Factor(tuple(scope[index] for index in order), table.transpose(order))


def minimise(sizes: Sequence[int], factors: Sequence[Factor], max_entries: int = 1 << 20, sweeps: int = 3) -> Solution:
    """Return an assignment of least cost.

    Args:
        sizes: Number of values of each variable.
        factors: Their sum is minimised; entries may be infinite.
        max_entries: The largest table. If larger ones would be needed, the result may not be optimal.
        sweeps: How often windows of variables are then improved.
    """
    factors = [_drop_constants(factor, sizes) for factor in factors]
    values, bound, is_exact = _eliminate(sizes, factors, max_entries)
    cost = evaluate(factors, values)
    if not is_exact:
        for _ in range(sweeps):
            improved = _improve_windows(sizes, factors, values, max_entries)
            if improved >= cost - 1e-12:
                break
            cost = improved
    return Solution(tuple(values), cost, min(bound, cost))


def evaluate(factors: Iterable[Factor], values: Sequence[int]) -> float:
    """Return the cost of an assignment."""
    return float(sum(factor.table[tuple(values[v] for v in factor.scope)] for factor in factors))


def _drop_constants(factor: Factor, sizes: Sequence[int]) -> Factor:
    """Return a factor without the variables that have one value."""
    if all(sizes[variable] > 1 for variable in factor.scope):
        return factor
    scope = tuple(variable for variable in factor.scope if sizes[variable] > 1)
    return Factor(scope, factor.table.reshape([sizes[variable] for variable in scope]))


def _eliminate(
    sizes: Sequence[int], factors: Sequence[Factor], max_entries: int, only: Iterable[int] | None = None
) -> tuple[list[int], float, bool]:
    """Eliminate variables, the one with the smallest table first.

    Returns values, a lower bound of the cost, and whether both are exact.
    """
    variables = list(range(len(sizes)) if only is None else only)
    live: dict[int, set[int]] = {variable: set() for variable in variables}
    pool: dict[int, Factor] = {}
    constant = 0.0
    for index, factor in enumerate(factors):
        if not factor.scope:
            constant += float(factor.table)
            continue
        pool[index] = factor
        for variable in factor.scope:
            live[variable].add(index)
    neighbours: dict[int, set[int]] = {
        variable: {other for index in live[variable] for other in pool[index].scope} - {variable}
        for variable in variables
    }

    def entries(variable: int) -> float:
        return math.prod((sizes[other] for other in neighbours[variable]), start=sizes[variable])

    heap = [(entries(variable), variable) for variable in variables]
    heapq.heapify(heap)
    current = {variable: size for size, variable in heap}
    buckets: list[tuple[int, list[Factor]]] = []
    number, is_exact = len(factors), True
    while heap:
        size, variable = heapq.heappop(heap)
        if variable not in live or current[variable] != size:
            continue
        bucket = [pool.pop(index) for index in sorted(live[variable])]
        del live[variable]
        for factor in bucket:
            for other in factor.scope:
                if other != variable:
                    live[other] = {index for index in live[other] if index in pool}
        parts = [bucket] if size <= max_entries else _partition(bucket, sizes, max_entries)
        is_exact = is_exact and len(parts) == 1
        touched = neighbours.pop(variable)
        for other in touched:
            neighbours[other].discard(variable)
        for part in parts:
            scope, table = _join(part, variable, sizes)
            reduced = table.min(axis=-1)
            if scope:
                pool[number] = Factor(scope, reduced)
                for other in scope:
                    live[other].add(number)
                    neighbours[other].update(scope)
                    neighbours[other].discard(other)
                number += 1
            else:
                constant += float(reduced)
        buckets.append((variable, bucket))
        for other in touched:
            current[other] = entries(other)
            heapq.heappush(heap, (current[other], other))
    values = [0] * len(sizes)
    for variable, bucket in reversed(buckets):
        values[variable] = _best_value(bucket, variable, sizes, values)
    return values, constant, is_exact


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


def _join(factors: Sequence[Factor], last: int, sizes: Sequence[int]) -> tuple[tuple[int, ...], Table]:
    """Return the sum of factors as a table whose last axis is one variable; and its other variables."""
    scope = sorted({variable for factor in factors for variable in factor.scope} - {last})
    position = {variable: index for index, variable in enumerate((*scope, last))}
    total = np.zeros([sizes[variable] for variable in (*scope, last)])
    for factor in factors:
        table = factor.table
        if last in factor.scope and factor.scope[-1] != last:
            table = np.moveaxis(table, factor.scope.index(last), -1)
        shape = [1] * (len(scope) + 1)
        for variable in factor.scope:
            shape[position[variable]] = sizes[variable]
        total += table.reshape(shape)
    return tuple(scope), total


def _best_value(bucket: Sequence[Factor], variable: int, sizes: Sequence[int], values: Sequence[int]) -> int:
    """Return the best value of a variable, given those of the others."""
    total = np.zeros(sizes[variable])
    for factor in bucket:
        index = tuple(slice(None) if item == variable else values[item] for item in factor.scope)
        total += factor.table[index]
    return int(total.argmin())


def _improve_windows(sizes: Sequence[int], factors: Sequence[Factor], values: list[int], max_entries: int) -> float:
    """Improve windows of consecutive variables, the others fixed; change `values`, and return the cost."""
    by_variable: dict[int, list[int]] = {}
    for index, factor in enumerate(factors):
        for variable in factor.scope:
            by_variable.setdefault(variable, []).append(index)
    free = sorted(by_variable)
    for width in (256, 64):
        for start in range(0, len(free), width // 2):
            window = free[start : start + width]
            _improve_window(window, sizes, [factors[i] for i in _touching(window, by_variable)], values, max_entries)
    return evaluate(factors, values)


def _touching(window: Sequence[int], by_variable: dict[int, list[int]]) -> list[int]:
    return sorted({index for variable in window for index in by_variable[variable]})


def _improve_window(
    window: Sequence[int], sizes: Sequence[int], factors: Sequence[Factor], values: list[int], max_entries: int
) -> None:
    """Set the variables of a window to their best values, the others fixed, unless that costs more."""
    inside = set(window)
    conditioned = []
    for factor in factors:
        index = tuple(slice(None) if variable in inside else values[variable] for variable in factor.scope)
        scope = tuple(variable for variable in factor.scope if variable in inside)
        conditioned.append(Factor(scope, np.asarray(factor.table[index])))
    best, _, _ = _eliminate(sizes, conditioned, max_entries, only=window)
    before = [values[variable] for variable in window]
    cost = evaluate(factors, values)
    for variable in window:
        values[variable] = best[variable]
    if evaluate(factors, values) > cost:
        for variable, value in zip(window, before):
            values[variable] = value
