"""Compiled loops of the solver of factor graphs: message passing, memory over time, and local search.

Flat networks are laid out as in `reduction_kernels`. `first_edge` and `incident` list the edges of each variable; the
first variable of an edge is the smaller one.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils import compiled_part, in_place


@compiled_part
def _pass_message(first, count, other_count, is_row, table, total, weight, back, message):
    """Send the least costs along an edge, less their minimum, which is returned."""
    if is_row:
        for j in range(other_count):
            message[j] = np.inf
        for i in range(count):
            own = weight * total[first + i] - back[i]
            for j in range(other_count):
                message[j] = min(message[j], own + table[i * other_count + j])
    else:
        for j in range(other_count):
            least = np.inf
            for i in range(count):
                least = min(least, weight * total[first + i] - back[i] + table[j * count + i])
            message[j] = least
    lowest = np.inf
    for j in range(other_count):
        lowest = min(lowest, message[j])
    for j in range(other_count):
        message[j] -= lowest
    return lowest


@in_place
def pass_messages(net, costs, messages, total, choice, is_forward):
    """Do one pass of TRW-S; returns a lower bound, and sets `choice` to an assignment found on the way.

    Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization", PAMI 28(10), 2006. Messages from
    other costs are a valid start, and the bound holds after each pass.
    """
    count = len(net.start) - 1
    bound = 0.0
    for step in range(count):
        v = step if is_forward else count - 1 - step
        first, size = net.start[v], net.start[v + 1] - net.start[v]
        ahead = 0
        for slot in range(net.first_edge[v], net.first_edge[v + 1]):
            if (net.edges[net.incident[slot], 0] == v) == is_forward:
                ahead += 1
        # A value is chosen first: by messages from variables ahead, and by tables from those that have theirs already.
        for i in range(size):
            total[first + i] = costs[first + i]
        for slot in range(net.first_edge[v], net.first_edge[v + 1]):
            e = net.incident[slot]
            is_first = net.edges[e, 0] == v
            place, step_size = net.message_start[e, 0 if is_first else 1], 1
            entries = messages
            if is_first != is_forward:
                entries = net.table
                w = net.edges[e, 1 if is_first else 0]
                columns = net.start[w + 1] - net.start[w]
                place = net.table_start[e] + choice[w] * (1 if is_first else size)
                step_size = columns if is_first else 1
            for i in range(size):
                total[first + i] += entries[place + i * step_size]
        choice[v] = 0
        for i in range(1, size):
            if total[first + i] < total[first + choice[v]]:
                choice[v] = i
        for i in range(size):
            total[first + i] = costs[first + i]
        for slot in range(net.first_edge[v], net.first_edge[v + 1]):
            place = net.message_start[net.incident[slot], 0 if net.edges[net.incident[slot], 0] == v else 1]
            for i in range(size):
                total[first + i] += messages[place + i]
        least = np.inf
        for i in range(size):
            least = min(least, total[first + i])
        for i in range(size):
            total[first + i] -= least
        bound += least
        behind = net.first_edge[v + 1] - net.first_edge[v] - ahead
        weight = 1.0 / max(ahead, behind, 1)
        for slot in range(net.first_edge[v], net.first_edge[v + 1]):
            e = net.incident[slot]
            is_first = net.edges[e, 0] == v
            if is_first == is_forward:
                w = net.edges[e, 1] if is_first else net.edges[e, 0]
                back, there = net.message_start[e, 0], net.message_start[e, 1]
                if not is_first:
                    back, there = there, back
                bound += _pass_message(
                    first,
                    size,
                    net.start[w + 1] - net.start[w],
                    is_first,
                    net.table[net.table_start[e] :],
                    total,
                    weight,
                    messages[back:],
                    messages[there:],
                )
    return bound


@in_place
def add_prices(net, memory, total_prices, priced):
    """Set `priced` to costs with those of memory at prices per point, given as sums up to each point."""
    for i in range(len(priced)):
        priced[i] = net.costs[i]
    for v in range(len(net.start) - 1):
        first, size = net.start[v], net.start[v + 1] - net.start[v]
        for run in range(memory.first_run[v], memory.first_run[v + 1]):
            price = total_prices[memory.run_to[run]] - total_prices[memory.run_from[run]]
            for i in range(size):
                priced[first + i] += price * memory.usage[memory.run_start[run] + i]


@in_place
def add_usage(memory, choice, usage):
    """Set `usage` to the bytes that an assignment holds at each point."""
    usage[:] = 0.0
    for v in range(len(choice)):
        for run in range(memory.first_run[v], memory.first_run[v + 1]):
            held = memory.usage[memory.run_start[run] + choice[v]]
            usage[memory.run_from[run]] += held
            usage[memory.run_to[run]] -= held
    for point in range(1, len(usage)):
        usage[point] += usage[point - 1]
