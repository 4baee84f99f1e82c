"""Compiled loops of the solver of factor graphs: message passing, prices of memory, and memory over time.

Fields of records are copied before a loop that writes to arrays: it would read them again each time.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils.jit import compiled_part, in_place


@compiled_part
def _send_message(graph, arc, v, guide, weight):
    """Send a neighbour the least costs of each of its values, less their minimum, which is returned."""
    first, size = graph.start[v], graph.start[v + 1] - graph.start[v]
    other_size = graph.start[arc.other + 1] - graph.start[arc.other]
    sent, received, table = guide.messages[arc.sent :], guide.messages[arc.received :], graph.table[arc.table :]
    for i in range(size):
        # What the neighbour sent is not sent back.
        guide.scratch[i] = weight * guide.marginals[first + i] - received[i]
    # Both loops go through the table as it is in memory.
    if arc.other_step == 1:
        for j in range(other_size):
            sent[j] = np.inf
        for i in range(size):
            own = guide.scratch[i]
            for j in range(other_size):
                sent[j] = min(sent[j], own + table[i * other_size + j])
    else:
        for j in range(other_size):
            least = np.inf
            for i in range(size):
                least = min(least, guide.scratch[i] + table[j * size + i])
            sent[j] = least
    lowest = np.inf
    for j in range(other_size):
        lowest = min(lowest, sent[j])
    for j in range(other_size):
        sent[j] -= lowest
    return lowest


@in_place
def pass_messages(graph, guide, choice, is_forward):
    """Do one pass of TRW-S; returns a lower bound, and sets `choice` to an assignment found on the way.

    Kolmogorov, "Convergent Tree-Reweighted Message Passing for Energy Minimization", PAMI 28(10), 2006. Messages from
    other costs are a valid start, and the bound holds after each pass. Variables are visited in order, or backwards;
    messages go to those that are ahead.
    """
    count = len(graph.start) - 1
    total = guide.marginals
    bound = 0.0
    for number in range(count):
        v = number if is_forward else count - 1 - number
        first, size = graph.start[v], graph.start[v + 1] - graph.start[v]
        # A value is chosen first: by messages from variables ahead, and by tables from those that have theirs already.
        ahead = 0
        for i in range(size):
            total[first + i] = guide.costs[first + i]
        for slot in range(graph.first_arc[v], graph.first_arc[v + 1]):
            arc = graph.arcs[slot]
            if (arc.other > v) == is_forward:
                ahead, received = ahead + 1, arc.received
                for i in range(size):
                    total[first + i] += guide.messages[received + i]
            else:
                column, step = arc.table + choice[arc.other] * arc.other_step, arc.own_step
                for i in range(size):
                    total[first + i] += graph.table[column + i * step]
        choice[v] = 0
        for i in range(1, size):
            if total[first + i] < total[first + choice[v]]:
                choice[v] = i
        # Then the least costs with each value, by messages from all sides. Their minimum adds to the bound.
        for i in range(size):
            total[first + i] = guide.costs[first + i]
        for slot in range(graph.first_arc[v], graph.first_arc[v + 1]):
            received = graph.arcs[slot].received
            for i in range(size):
                total[first + i] += guide.messages[received + i]
        least = np.inf
        for i in range(size):
            least = min(least, total[first + i])
        for i in range(size):
            total[first + i] -= least
        bound += least
        # Each of the chains of variables through this one gets an equal share of its costs.
        behind = graph.first_arc[v + 1] - graph.first_arc[v] - ahead
        weight = 1.0 / max(ahead, behind, 1)
        for slot in range(graph.first_arc[v], graph.first_arc[v + 1]):
            if (graph.arcs[slot].other > v) == is_forward:
                bound += _send_message(graph, graph.arcs[slot], v, guide, weight)
    return bound


@in_place
def add_prices(graph, memory, total_prices, priced):
    """Set `priced` to costs with those of memory at prices per point, given as sums up to each point."""
    for i in range(len(priced)):
        priced[i] = graph.costs[i]
    for v in range(len(graph.start) - 1):
        first, size = graph.start[v], graph.start[v + 1] - graph.start[v]
        for number in range(memory.first_span[v], memory.first_span[v + 1]):
            span = memory.spans[number]
            price = total_prices[span.end] - total_prices[span.begin]
            usage = span.usage
            for i in range(size):
                priced[first + i] += price * memory.usage[usage + i]


@in_place
def add_usage(memory, choice, usage):
    """Set `usage` to the bytes that an assignment holds at each point."""
    usage[:] = 0.0
    for v in range(len(choice)):
        for number in range(memory.first_span[v], memory.first_span[v + 1]):
            span = memory.spans[number]
            held = memory.usage[span.usage + choice[v]]
            usage[span.begin] += held
            usage[span.end] -= held
    for point in range(1, len(usage)):
        usage[point] += usage[point - 1]
