"""Cost tables over discrete variables, and their sums."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Table = NDArray[np.float64]

# Sums of costs have this many bits; those of 64-bit floats have 53.
_SUM_BITS = 48


class Factor(NamedTuple):
    """A cost table over some variables."""

    scope: tuple[int, ...]
    """Variables, rising."""
    table: Table
    """One axis per variable of the scope."""


def order_factor(scope: Sequence[int], table: Table) -> Factor:
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
    tables: dict[object, Table] = {}
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
    unit = math.ldexp(1.0, math.frexp(largest)[1] - _SUM_BITS)
    large = 2 * (highest - lowest) + 2 * largest
    rounded: dict[int, Table] = {}
    equal: dict[object, Table] = {}
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
        self._results: dict[object, tuple[Table, float, Sequence[Factor]]] = {}
        self._tables: dict[object, Table] = {}

    def minimum(self, factors: Sequence[Factor], variable: int, scope: Sequence[int]) -> tuple[Table, float]:
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


def _add_up(tables: Sequence[Table], places: Sequence[tuple[int, ...]], sizes: Sequence[int]) -> Table:
    """Return the sum of tables, whose axes have these places in the result."""
    total = np.zeros(sizes)
    for table, place in zip(tables, places):
        order = sorted(range(len(place)), key=place.__getitem__)
        if order != list(range(len(place))):
            table = table.transpose(order)
        shape = [1] * len(sizes)
        for axis in place:
            shape[axis] = sizes[axis]
        total += table.reshape(shape)
    return total
