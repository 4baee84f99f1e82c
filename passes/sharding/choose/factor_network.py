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
    """Variables with costs, and edges with tables, as flat arrays.

    Two variables of 2 and 3 values, with one edge:

        variable     0       1                edge      0
        start      [ 0,      2,      5 ]      edges  [[ 0, 1 ]]
        costs      [ a0 a1 | b0 b1 b2 ]       table   [ a0b0 a0b1 a0b2 a1b0 a1b1 a1b2 ]
    """

    start: Integers
    """Where the costs of each variable begin; one more entry at the end."""
    costs: Floats
    edges: Integers
    """Two variables each; after a reduction, the first is the smaller one."""
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

    A factor over more variables gets one more variable, with a value per finite entry, tied to those by edges.
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
    start = _begin_each(np.array(all_sizes, np.int64))
    costs = np.zeros(int(start[-1]))
    for variable, entries_of_variable in unary:
        costs[start[variable] : start[variable + 1]] += entries_of_variable
    table = np.concatenate([np.zeros(0), *tables])
    edges = np.array(pairs, np.int64).reshape(-1, 2)
    table_start = _begin_each(np.array([len(entries) for entries in tables], np.int64))
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
    finite = np.abs(np.where(np.isfinite(entries), entries, 0.0))
    is_filled = np.diff(start) > 0
    return float(np.maximum.reduceat(finite, start[:-1][is_filled]).sum()) if is_filled.any() else 0.0


def reduce_network(network: FactorNetwork) -> ReducedNetwork:
    """Contract edges that tie two variables one to one, and merge parallel edges, until nothing changes."""
    whole = ReducedNetwork(
        network=network,
        group=np.arange(len(network.sizes)),
        value_start=network.start,
        values=_count_up(network.sizes),
        is_possible=True,
    )
    while True:
        reduced = _contract(whole)
        if not reduced.is_possible or len(reduced.network.table) == len(whole.network.table):
            return reduced
        whole = reduced


def _contract(whole: ReducedNetwork) -> ReducedNetwork:
    """Contract the edges that tie variables one to one as they are now.

    Two variables `a` and `b`, and an edge whose table forbids (x) all but one value of `b` for each value of `a`:

        costs of a   costs of b   table  b=0  b=1            group     k=0            k=1
        [ 0, 5 ]     [ 3, 4 ]     a=0     x    1      ->     (a, b)  = (0, 1)         (1, 0)
                                  a=1     2    x             costs   = [ 0 + 4 + 1,   5 + 3 + 2 ]

    They become one variable, `a` its owner. `values` says what each member takes where the group takes k: [0, 1] for
    `a`, [1, 0] for `b`. Edges from a third variable to both become one, whose table is the sum of the two.
    """
    network = whole.network
    alive = network.costs < network.large
    drop_values(network, alive)
    owner, values, kept = group_variables(network, alive)
    owners = np.flatnonzero(owner == np.arange(len(owner)))
    group, sizes = np.searchsorted(owners, owner), kept[owners]
    start = _begin_each(sizes)
    # Costs are summed over the members of each group, value by value.
    position = _count_up(kept)
    first = np.repeat(network.start[:-1], kept)
    source, target = first + values[first + position], np.repeat(start[group], kept) + position
    costs = np.bincount(target, network.costs[source], minlength=int(start[-1])).astype(np.float64)
    # Edges between the same two groups become one: a pair of groups is a number.
    ends = np.sort(group[network.edges], axis=1)
    is_kept = (ends[:, 0] != ends[:, 1]) & (sizes[ends] > 1).all(axis=1)
    pairs, numbers = np.unique(ends[is_kept, 0] * len(owners) + ends[is_kept, 1], return_inverse=True)
    merged_edge = np.zeros(len(network.edges), np.int64)
    merged_edge[is_kept] = numbers
    edges = np.stack(np.divmod(pairs, len(owners)), axis=1)
    table_start = _begin_each(sizes[edges].prod(axis=1))
    merged = FactorNetwork(start, costs, edges, table_start, np.zeros(int(table_start[-1])), network.large)
    add_tables(network, group, values, merged_edge, merged)
    # An original variable takes what its variable of before takes, where the new group takes k.
    member = group[whole.group]
    inner = values[np.repeat(network.start[whole.group], sizes[member]) + _count_up(sizes[member])]
    return ReducedNetwork(
        network=merged._replace(
            costs=np.minimum(merged.costs, network.large), table=np.minimum(merged.table, network.large)
        ),
        group=member,
        value_start=_begin_each(sizes[member]),
        values=whole.values[np.repeat(whole.value_start[:-1], sizes[member]) + inner],
        is_possible=bool((sizes > 0).all()),
    )


def _begin_each(sizes: Integers) -> Integers:
    """Return where parts of these sizes begin, one after the other, with the end of the last one."""
    return np.concatenate([[0], np.cumsum(sizes, dtype=np.int64)])


def _count_up(sizes: Integers) -> Integers:
    """Return 0, 1, ... for each part of these sizes."""
    total = np.cumsum(sizes)
    return np.arange(sizes.sum()) - np.repeat(total - sizes, sizes)


# An edge as one of its variables sees it. Where this one takes value i and the other one j, it costs
# `table[arc.table + i * arc.own_step + j * arc.other_step]`.
ARC = np.dtype(
    [
        ("other", np.int64),  # the other variable
        ("table", np.int64),
        ("own_step", np.int64),
        ("other_step", np.int64),
        ("received", np.int64),  # where the messages from the other variable begin, one per own value
        ("sent", np.int64),  # and those to it
    ],
    align=True,
)


class SearchGraph(NamedTuple):
    """A network as the search sees it: variables with arcs to their neighbours."""

    start: Integers
    costs: Floats
    table: Floats
    large: float
    first_arc: Integers
    """Where the arcs of each variable begin; one more entry at the end."""
    arcs: NDArray[np.void]
    """Records of `ARC`, two per edge, by variable and then by edge."""


def connect(network: FactorNetwork) -> SearchGraph:
    """Return the graph of a reduced network."""
    sizes, edges = network.sizes, network.edges
    lengths, ends = sizes[edges], edges.ravel()
    arcs = np.zeros(edges.shape, ARC)
    arcs["other"] = edges[:, ::-1]
    arcs["table"] = network.table_start[:-1, None]
    # Tables have a row per value of the first variable.
    arcs["own_step"][:, 0] = arcs["other_step"][:, 1] = lengths[:, 1]
    arcs["own_step"][:, 1] = arcs["other_step"][:, 0] = 1
    arcs["received"] = _begin_each(lengths.ravel())[:-1].reshape(-1, 2)
    arcs["sent"] = arcs["received"][:, ::-1]
    return SearchGraph(
        start=network.start,
        costs=network.costs,
        table=network.table,
        large=network.large,
        first_arc=_begin_each(np.bincount(ends, minlength=len(sizes))),
        arcs=arcs.ravel()[np.argsort(ends, kind="stable")],
    )


# A stretch of points [begin, end) during which a variable holds the same: `usage[span.usage + i]` bytes with value i.
SPAN = np.dtype([("begin", np.int64), ("end", np.int64), ("usage", np.int64)], align=True)


class MemoryOverTime(NamedTuple):
    """What each variable holds with each of its values, span by span.

    Points are those at which the most intervals overlap: where some interval begins and the next event is an end.
    """

    free_bytes: Floats
    """Bytes per point that are left for what depends on the choice."""
    first_span: Integers
    """Where the spans of each variable begin; one more entry at the end."""
    spans: NDArray[np.void]
    """Records of `SPAN`, in the order of time."""
    usage: Floats
    """Bytes per span and value, above the least of the variable's values in this span."""


class Holding(NamedTuple):
    """Memory that a variable's choice takes for some time."""

    variable: int
    begin: int
    end: int
    """The first position after it."""
    bytes: Floats
    """Per value of the variable."""


def collect_memory(reduced: ReducedNetwork, holdings: Sequence[Holding], limit: float) -> MemoryOverTime:
    """Return the memory of a reduced network; bytes are rounded up, the limit down."""
    spans = np.array([(item.begin, item.end) for item in holdings], np.int64).reshape(-1, 2)
    held = np.flatnonzero(spans[:, 1] > spans[:, 0])
    begins, ends = np.unique(spans[held, 0]), np.unique(spans[held, 1])
    points = begins[np.unique(np.searchsorted(begins, ends) - 1)]
    spans = np.searchsorted(points, spans)
    base = np.zeros(len(points) + 1)
    sizes = reduced.network.sizes
    items: list[list[tuple[int, int, Floats]]] = [[] for _ in sizes]
    for item in held.tolist():
        variable, (begin, end) = holdings[item].variable, spans[item].tolist()
        first, last = reduced.value_start[variable], reduced.value_start[variable + 1]
        usage = np.ceil(holdings[item].bytes)[reduced.values[first:last]]
        least = usage.min()
        base[begin] += least
        base[end] -= least
        usage = usage - least
        if begin < end and usage.any():
            items[reduced.group[variable]].append((begin, end, usage))
    counts, begins_of_spans, ends_of_spans, tables = [], [], [], [np.zeros(0)]
    for own, size in zip(items, sizes):
        places = np.unique([place for begin, end, _ in own for place in (begin, end)]).astype(np.int64)
        changes = np.zeros((len(places), size))
        for begin, end, usage in own:
            changes[np.searchsorted(places, begin)] += usage
            changes[np.searchsorted(places, end)] -= usage
        table = changes.cumsum(axis=0)[:-1]
        is_used = table.any(axis=1)
        counts.append(int(is_used.sum()))
        begins_of_spans.append(places[:-1][is_used])
        ends_of_spans.append(places[1:][is_used])
        tables.append(table[is_used].ravel())
    records = np.zeros(sum(counts), SPAN)
    records["begin"], records["end"] = np.concatenate(begins_of_spans), np.concatenate(ends_of_spans)
    records["usage"] = _begin_each(np.repeat(sizes, counts))[:-1]
    return MemoryOverTime(
        free_bytes=math.floor(min(limit, _ENDLESS)) - base.cumsum()[:-1],
        first_span=_begin_each(np.array(counts, np.int64)),
        spans=records,
        usage=np.concatenate(tables),
    )
