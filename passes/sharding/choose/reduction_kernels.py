"""Compiled loops that contract variables of a factor graph whose choices correspond one to one.

Networks are `FactorNetwork`s; `_contract` in `factor_network` has an example.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils.jit import compiled_loop, compiled_part, in_place


@compiled_part
def _restrict(first, count, other, other_count, table, row_step, column_step, large, alive):
    """Drop values of a variable that no value of a neighbour goes with; return whether any was dropped."""
    is_changed = False
    for i in range(count):
        if alive[first + i]:
            is_possible = False
            for j in range(other_count):
                if alive[other + j] and table[i * row_step + j * column_step] < large:
                    is_possible = True
                    break
            if not is_possible:
                alive[first + i] = False
                is_changed = True
    return is_changed


@in_place
def drop_values(network, alive):
    """Drop values without a partner at some edge, until all have one (arc consistency)."""
    start, large = network.start, network.large
    is_changed = True
    while is_changed:
        is_changed = False
        for e in range(len(network.edges)):
            a, b = network.edges[e, 0], network.edges[e, 1]
            rows, columns = start[a + 1] - start[a], start[b + 1] - start[b]
            entries = network.table[network.table_start[e] :]
            is_changed |= _restrict(start[a], rows, start[b], columns, entries, columns, 1, large, alive)
            is_changed |= _restrict(start[b], columns, start[a], rows, entries, 1, columns, large, alive)


@compiled_part
def _is_one_to_one(a, b, rows, columns, table, large, alive, partner):
    """Return whether each value left goes with exactly one of the other variable; fill in `partner` by rows."""
    for j in range(columns):
        partner[rows + j] = 0
    for i in range(rows):
        if alive[a + i]:
            count = 0
            for j in range(columns):
                if alive[b + j] and table[i * columns + j] < large:
                    count += 1
                    partner[i] = j
            if count != 1 or partner[rows + partner[i]] > 0:
                return False
            partner[rows + partner[i]] = 1
    is_each_met = True
    for j in range(columns):
        is_each_met &= partner[rows + j] > 0 or not alive[b + j]
    return is_each_met


@compiled_loop
def group_variables(network, alive):
    """Group variables that edges tie one to one.

    Returns, per variable, the owner of its group, which is the first variable in it; from `start`, its own value for
    each value of the group; and how many values the group has.
    """
    start, edges, large = network.start, network.edges, network.large
    count = len(start) - 1
    degree = np.zeros(count + 1, np.int64)
    is_tied = np.zeros(len(edges), np.bool_)
    partner = np.zeros(2 * np.max(start[1:] - start[:-1]) + 1, np.int64)
    for e in range(len(edges)):
        a, b = edges[e, 0], edges[e, 1]
        rows, columns = start[a + 1] - start[a], start[b + 1] - start[b]
        if _is_one_to_one(
            start[a], start[b], rows, columns, network.table[network.table_start[e] :], large, alive, partner
        ):
            is_tied[e] = True
            degree[a] += 1
            degree[b] += 1
    first = np.zeros(count + 1, np.int64)
    for v in range(count):
        first[v + 1] = first[v] + degree[v]
    incident, filled = np.empty(first[count], np.int64), first.copy()
    for e in range(len(edges)):
        if is_tied[e]:
            for side in range(2):
                v = edges[e, side]
                incident[filled[v]] = e
                filled[v] += 1
    # Breadth first from each variable that has no group yet; values are propagated along the edges.
    owner, values, kept = np.full(count, -1, np.int64), np.zeros(start[count], np.int64), np.zeros(count, np.int64)
    queue = np.empty(count, np.int64)
    for root in range(count):
        if owner[root] >= 0:
            continue
        owner[root] = root
        for i in range(start[root + 1] - start[root]):
            if alive[start[root] + i]:
                values[start[root] + kept[root]] = i
                kept[root] += 1
        head, tail = 0, 1
        queue[0] = root
        while head < tail:
            v = queue[head]
            head += 1
            for slot in range(first[v], first[v + 1]):
                e = incident[slot]
                a, b = edges[e, 0], edges[e, 1]
                w = a + b - v
                if owner[w] >= 0:
                    continue
                owner[w], kept[w] = root, kept[root]
                columns = start[b + 1] - start[b]
                for k in range(kept[root]):
                    i = values[start[v] + k]
                    for j in range(start[w + 1] - start[w]):
                        place = i * columns + j if v == a else j * columns + i
                        if alive[start[w] + j] and network.table[network.table_start[e] + place] < large:
                            values[start[w] + k] = j
                            break
                queue[tail] = w
                tail += 1
    return owner, values, kept


@in_place
def add_tables(network, group, values, merged_edge, merged):
    """Add the tables of edges to those of the groups that they connect, or to the costs of one group.

    `group` and `values` are those of variables, `merged_edge` is the edge of `merged` that each edge becomes.
    """
    for e in range(len(network.edges)):
        a, b = network.edges[e, 0], network.edges[e, 1]
        of_a, of_b = network.start[a], network.start[b]
        p, q = group[a], group[b]
        left, right = merged.start[p + 1] - merged.start[p], merged.start[q + 1] - merged.start[q]
        for i in range(left):
            row = network.table_start[e] + values[of_a + i] * (network.start[b + 1] - of_b)
            if p == q:
                merged.costs[merged.start[p] + i] += network.table[row + values[of_b + i]]
                continue
            for j in range(right):
                entry = network.table[row + values[of_b + j]]
                # A group with one value has none to choose: the other one pays.
                if right == 1:
                    merged.costs[merged.start[p] + i] += entry
                elif left == 1:
                    merged.costs[merged.start[q] + j] += entry
                elif p == merged.edges[merged_edge[e], 0]:
                    merged.table[merged.table_start[merged_edge[e]] + i * right + j] += entry
                else:
                    merged.table[merged.table_start[merged_edge[e]] + j * left + i] += entry
