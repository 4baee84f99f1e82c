"""A factor graph as flat arrays, reduced: equal choices are one variable, impossible and fixed values are gone.

And the memory of its variables over time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.passes.sharding.choose.elimination import Factor
from onnxplace.passes.sharding.choose.reduction_kernels import add_tables, drop_values, group_variables

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

# More bytes than anything holds.
_ENDLESS = 2.0**62


class FactorNetwork(NamedTuple):
    """Variables with costs, and edges with tables: flat arrays, see `reduction_kernels`."""

    start: Integers
    """Where the costs of each variable begin; one more entry at the end."""
    costs: Floats
    edges: Integers
    """Two variables each."""
    table_start: Integers
    """Where the table of each edge begins; one more entry at the end."""
    table: Floats
    """Tables one after the other, a row per value of the first variable."""
    large: float
    """Entries at least as large forbid. Sums of others, and differences of such sums, are less than half of it."""

    @property
    def sizes(self) -> Integers:
        return np.diff(self.start)


@dataclass(frozen=True)
class ReducedNetwork:
    """A network whose variables stand for groups of the original ones."""

    network: FactorNetwork
    group: Integers
    """Original variable -> variable that decides it."""
    value_start: Integers
    values: Integers
    """Original variable v takes `values[value_start[v] + k]` where its group takes k."""
    is_possible: bool

    def expand(self, choice: Integers) -> list[int]:
        """Return the values of all original variables."""
        result: list[int] = self.values[self.value_start[:-1] + choice[self.group]].tolist()
        return result


def build_network(sizes: Sequence[int], factors: Sequence[Factor]) -> FactorNetwork:
    """Return factors as a network of pairs.

    A factor over more variables gets a variable of its own with a value per finite entry, tied to those by edges.
    """
    all_sizes, pairs, tables = list(sizes), [], []
    unary: list[tuple[int, Floats]] = []
    for scope, table in factors:
        if len(scope) == 1:
            unary.append((scope[0], table))
        elif len(scope) == 2:
            pairs.append(scope)
            tables.append(table.ravel())
        else:
            entries = np.argwhere(np.isfinite(table))
            unary.append((len(all_sizes), table[tuple(entries.T)]))
            for axis, variable in enumerate(scope):
                pairs.append((variable, len(all_sizes)))
                is_equal = np.arange(sizes[variable])[:, None] == entries[:, axis]
                tables.append(np.where(is_equal, 0.0, math.inf).ravel())
            all_sizes.append(len(entries))
    start = np.concatenate([[0], np.cumsum(all_sizes, dtype=np.int64)])
    costs = np.zeros(int(start[-1]))
    for variable, entries_of_variable in unary:
        costs[start[variable] : start[variable + 1]] += entries_of_variable
    table = np.concatenate([np.zeros(0), *tables])
    edges = np.array(pairs, np.int64).reshape(-1, 2)
    table_start = np.concatenate([[0], np.cumsum([len(entries) for entries in tables], dtype=np.int64)])
    # Sums and differences of what does not forbid are less than half of this, those with what forbids are more.
    largest = _sum_of_largest(costs, start) + _sum_of_largest(table, table_start)
    large = max(8 * largest, 1.0)
    return FactorNetwork(
        start=start,
        costs=np.where(np.isfinite(costs), costs, large),
        edges=edges,
        table_start=table_start,
        table=np.where(np.isfinite(table), table, large),
        large=large,
    )


def _sum_of_largest(entries: Floats, start: Integers) -> float:
    if len(start) < 2:
        return 0.0
    finite = np.abs(np.where(np.isfinite(entries), entries, 0.0))
    is_filled = np.diff(start) > 0
    return float(np.maximum.reduceat(finite, start[:-1][is_filled]).sum()) if is_filled.any() else 0.0


def reduce_network(network: FactorNetwork) -> ReducedNetwork:
    """Contract edges that tie two variables one to one, and merge parallel edges, until nothing changes."""
    count = len(network.sizes)
    start = network.start
    whole = ReducedNetwork(
        network=network,
        group=np.arange(count),
        value_start=start,
        values=np.arange(start[-1]) - np.repeat(start[:-1], network.sizes),
        is_possible=True,
    )
    while True:
        reduced = _contract(whole)
        if not reduced.is_possible or len(reduced.network.table) == len(whole.network.table):
            return reduced
        whole = reduced


def _contract(whole: ReducedNetwork) -> ReducedNetwork:
    network = whole.network
    start, edges, table_start = network.start, network.edges, network.table_start
    alive = network.costs < network.large
    drop_values(start, edges, table_start, network.table, network.large, alive)
    owner, values, kept = group_variables(start, edges, table_start, network.table, network.large, alive)
    owners = np.flatnonzero(owner == np.arange(len(owner)))
    group = np.searchsorted(owners, owner)
    sizes = kept[owners]
    new_start = np.concatenate([[0], np.cumsum(sizes)])
    # Sums over the members of each group, value by value.
    position = np.arange(kept.sum()) - np.repeat(np.cumsum(kept) - kept, kept)
    source = np.repeat(start[:-1], kept) + position
    source = np.repeat(start[:-1], kept) + values[source]
    target = np.repeat(new_start[group], kept) + position
    costs = np.bincount(target, network.costs[source], minlength=int(new_start[-1]))
    # Edges between the same two groups become one.
    ends = np.sort(group[edges], axis=1)
    is_kept = (ends[:, 0] != ends[:, 1]) & (sizes[ends] > 1).all(axis=1)
    keys, slot = np.unique(ends[is_kept, 0] * len(owners) + ends[is_kept, 1], return_inverse=True)
    slots = np.zeros(len(edges), np.int64)
    slots[is_kept] = slot
    new_edges = np.stack([keys // len(owners), keys % len(owners)], axis=1)
    new_table_start = np.concatenate([[0], np.cumsum(sizes[new_edges].prod(axis=1))])
    table = np.zeros(int(new_table_start[-1]))
    add_tables(
        start,
        edges,
        table_start,
        network.table,
        group,
        values,
        new_start,
        slots,
        new_edges,
        new_table_start,
        costs,
        table,
    )
    # Follow the original variables.
    member, members = group[whole.group], sizes[group[whole.group]]
    value_start = np.concatenate([[0], np.cumsum(members)])
    position = np.arange(value_start[-1]) - np.repeat(value_start[:-1], members)
    inner = values[np.repeat(start[whole.group], members) + position]
    return ReducedNetwork(
        network=FactorNetwork(
            start=new_start,
            costs=np.minimum(costs, network.large),
            edges=new_edges,
            table_start=new_table_start,
            table=np.minimum(table, network.large),
            large=network.large,
        ),
        group=member,
        value_start=value_start,
        values=whole.values[np.repeat(whole.value_start[:-1], members) + inner],
        is_possible=bool((sizes > 0).all()),
    )


class MemoryOverTime(NamedTuple):
    """Runs of points at which a variable holds equally much, per variable and value.

    Points are those at which the most intervals overlap: where some interval begins and the next event is an end.
    """

    room: Floats
    """Bytes per point that are left for what depends on the choice."""
    first_run: Integers
    """Where the runs of each variable begin; one more entry at the end."""
    run_from: Integers
    run_to: Integers
    run_start: Integers
    """Where the usages of a run begin in `usage`."""
    usage: Floats
    """Bytes per run and value, above the least of the variable's values in this run."""


def collect_memory(
    reduced: ReducedNetwork,
    holders: Sequence[int],
    usages: Sequence[Floats],
    intervals: Sequence[tuple[int, int]],
    limit: float,
) -> MemoryOverTime:
    """Return the memory of a reduced network; bytes are rounded up, the limit down."""
    spans = np.array(intervals, np.int64).reshape(-1, 2)
    held = np.flatnonzero(spans[:, 1] > spans[:, 0])
    begins, ends = np.unique(spans[held, 0]), np.unique(spans[held, 1])
    points = begins[np.unique(np.searchsorted(begins, ends) - 1)]
    spans = np.searchsorted(points, spans)
    base = np.zeros(len(points) + 1)
    sizes = reduced.network.sizes
    items: list[list[tuple[int, int, Floats]]] = [[] for _ in sizes]
    for item in held.tolist():
        variable, (begin, end) = holders[item], spans[item].tolist()
        first, last = reduced.value_start[variable], reduced.value_start[variable + 1]
        usage = np.ceil(usages[item])[reduced.values[first:last]]
        least = usage.min()
        base[begin] += least
        base[end] -= least
        usage = usage - least
        if begin < end and usage.any():
            items[reduced.group[variable]].append((begin, end, usage))
    counts, run_from, run_to, tables = [], [], [], [np.zeros(0)]
    for own, size in zip(items, sizes):
        places = np.unique([place for begin, end, _ in own for place in (begin, end)]).astype(np.int64)
        changes = np.zeros((len(places), size))
        for begin, end, usage in own:
            changes[np.searchsorted(places, begin)] += usage
            changes[np.searchsorted(places, end)] -= usage
        table = changes.cumsum(axis=0)[:-1]
        is_used = table.any(axis=1) if len(table) else np.zeros(0, bool)
        counts.append(int(is_used.sum()))
        run_from.append(places[:-1][is_used])
        run_to.append(places[1:][is_used])
        tables.append(table[is_used].ravel())
    first_run = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
    per_run = np.repeat(sizes, counts)
    return MemoryOverTime(
        room=math.floor(min(limit, _ENDLESS)) - base.cumsum()[:-1],
        first_run=first_run,
        run_from=np.concatenate(run_from),
        run_to=np.concatenate(run_to),
        run_start=np.cumsum(per_run) - per_run,
        usage=np.concatenate(tables),
    )
