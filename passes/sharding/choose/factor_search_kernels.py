"""Local search over assignments that fit: force a value, let neighbours and holders of memory change too, keep or undo.

A state holds, next to the choice, what each value of each variable would cost with the neighbours as they are, and the
bytes that are free at each point of time. Both follow each change.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils.jit import compiled_part, in_place
from onnxplace.utils.random_kernels import random_uniform

# A change of a variable, to undo it.
CHANGE = np.dtype([("variable", np.int64), ("old_value", np.int64)], align=True)
# How many changes there are, the part [head, tail) of the queue that is in use, and the mark of visited variables.
CURSOR = np.dtype([("changes", np.int64), ("head", np.int64), ("tail", np.int64), ("stamp", np.int64)], align=True)

# Variables that may change together, and the share of trials that change regions (they take many times as long).
MAX_REGION, PROPAGATE_SHARE = 200, 0.05


@compiled_part
def _copy(source, target):
    # Assigning to a slice would allocate memory.
    for i in range(len(source)):
        target[i] = source[i]


@compiled_part
def _set_value(graph, memory, state, v, value):
    """Give a variable another value, and return the costs added."""
    old = state.choice[v]
    first = graph.start[v]
    added = state.conditional[first + value] - state.conditional[first + old]
    # Each neighbour pays by the new row of the table between the two, no longer by the old one.
    for slot in range(graph.first_arc[v], graph.first_arc[v + 1]):
        arc = graph.arcs[slot]
        other = graph.start[arc.other]
        new_row, old_row, step = arc.table + value * arc.own_step, arc.table + old * arc.own_step, arc.other_step
        for j in range(graph.start[arc.other + 1] - other):
            state.conditional[other + j] += graph.table[new_row + j * step] - graph.table[old_row + j * step]
    for number in range(memory.first_span[v], memory.first_span[v + 1]):
        span = memory.spans[number]
        freed = memory.usage[span.usage + old] - memory.usage[span.usage + value]
        if freed != 0.0:
            for point in range(span.begin, span.end):
                state.free_bytes[point] += freed
    state.choice[v] = value
    return added


@compiled_part
def _fits(memory, state, v, value):
    """Return whether another value of a variable leaves no point short that it needs more of."""
    for number in range(memory.first_span[v], memory.first_span[v + 1]):
        span = memory.spans[number]
        needed = memory.usage[span.usage + value] - memory.usage[span.usage + state.choice[v]]
        if needed > 0.0:
            for point in range(span.begin, span.end):
                if state.free_bytes[point] < needed:
                    return False
    return True


@compiled_part
def _change(graph, memory, state, v, value):
    """Change a variable, note it, and queue its neighbours; return the costs added."""
    cursor = state.cursor[0]
    change = state.changes[cursor.changes]
    change.variable, change.old_value = v, state.choice[v]
    cursor.changes += 1
    for slot in range(graph.first_arc[v], graph.first_arc[v + 1]):
        other = graph.arcs[slot].other
        if state.queued[other] == 0 and cursor.tail < len(state.queue):
            state.queued[other] = 1
            state.queue[cursor.tail] = other
            cursor.tail += 1
    return _set_value(graph, memory, state, v, value)


@compiled_part
def _relax(graph, memory, state, forced):
    """Give queued variables their cheapest values that fit, until none saves anything; return the costs added."""
    added = 0.0
    cursor = state.cursor[0]
    while cursor.head < cursor.tail:
        v = state.queue[cursor.head]
        cursor.head += 1
        state.queued[v] = 0
        if v == forced or cursor.changes == len(state.changes):
            continue
        first = graph.start[v]
        own = state.conditional[first + state.choice[v]]
        # Savings within the rounding of sums could repeat for ever.
        best, least = -1, own - 1e-9 * abs(own)
        for value in range(graph.start[v + 1] - first):
            if state.conditional[first + value] < least and _fits(memory, state, v, value):
                best, least = value, state.conditional[first + value]
        if best >= 0:
            added += _change(graph, memory, state, v, best)
    cursor.head, cursor.tail = 0, 0
    return added


@compiled_part
def _propagate(graph, memory, state, guide, forced, position):
    """Let variables around a forced one take the values that suit it, as far as these differ; return the costs added.

    What lies beyond is not as it is now but as it would be at best, as messages tell: so a change runs through chains
    of variables that must all change together. The queue holds the frontier, from `position` on.
    """
    added = 0.0
    cursor = state.cursor[0]
    state.stamps[forced] = cursor.stamp
    while position < cursor.tail and cursor.changes < MAX_REGION:
        v = state.queue[position]
        position += 1
        if state.stamps[v] == cursor.stamp:
            continue
        state.stamps[v] = cursor.stamp
        first, size = graph.start[v], graph.start[v + 1] - graph.start[v]
        for i in range(size):
            state.scores[i] = guide.costs[first + i]
        for slot in range(graph.first_arc[v], graph.first_arc[v + 1]):
            arc = graph.arcs[slot]
            if state.stamps[arc.other] != cursor.stamp:
                received = arc.received
                for i in range(size):
                    state.scores[i] += guide.messages[received + i]
            else:
                # It was decided before.
                column, step = arc.table + state.choice[arc.other] * arc.other_step, arc.own_step
                for i in range(size):
                    state.scores[i] += graph.table[column + i * step]
        best = state.choice[v]
        for i in range(size):
            if state.scores[i] < state.scores[best]:
                best = i
        if best != state.choice[v]:
            added += _change(graph, memory, state, v, best)
    return added


@compiled_part
def _free_memory(graph, memory, state, guide, forced, most_added):
    """Free what is held too much, at the least costs per byte; return the costs added, infinite if that fails.

    Where neighbours forbid a change as they are, it is judged by messages, and the change is propagated.
    """
    added = 0.0
    cursor = state.cursor[0]
    while len(state.free_bytes) > 0:
        # The point of time that is shortest of memory; a change never takes more of it.
        point = 0
        for other in range(len(state.free_bytes)):
            if state.free_bytes[other] < state.free_bytes[point]:
                point = other
        short = -state.free_bytes[point]
        if short <= 0.0:
            break
        if added > most_added or cursor.changes == len(state.changes):
            return np.inf
        best, best_value, least = -1, 0, np.inf
        for v in range(len(graph.start) - 1):
            low, high = memory.first_span[v], memory.first_span[v + 1]
            if v == forced or low == high:
                continue
            # The last span that begins at the point or before it.
            while high - low > 1:
                middle = (low + high) // 2
                if memory.spans[middle].begin <= point:
                    low = middle
                else:
                    high = middle
            span = memory.spans[low]
            if span.begin > point or span.end <= point:
                continue
            first, own = graph.start[v], state.choice[v]
            for value in range(graph.start[v + 1] - first):
                freed = min(memory.usage[span.usage + own] - memory.usage[span.usage + value], short)
                if freed > 0.0:
                    price = state.conditional[first + value] - state.conditional[first + own]
                    if price > graph.large / 2:
                        price = max(guide.marginals[first + value] - guide.marginals[first + own], 0.0)
                    # What saves costs as well comes first.
                    price = price / freed if price > 0.0 else price * freed
                    if price < least and _fits(memory, state, v, value):
                        best, best_value, least = v, value, price
        if best < 0:
            return np.inf
        position = cursor.tail
        change = _change(graph, memory, state, best, best_value)
        if change > graph.large / 2:
            # Some neighbour forbids it, and has to change, too; the forced variable stays.
            cursor.stamp += 1
            if forced >= 0:
                state.stamps[forced] = cursor.stamp
            change += _propagate(graph, memory, state, guide, best, position)
        added += change
    return added


@in_place
def start_state(graph, memory, state):
    """Set up a state from its choice; return the costs."""
    total = 0.0
    _copy(graph.costs, state.conditional)
    _copy(memory.free_bytes, state.free_bytes)
    for v in range(len(graph.start) - 1):
        total += graph.costs[graph.start[v] + state.choice[v]]
        for number in range(memory.first_span[v], memory.first_span[v + 1]):
            span = memory.spans[number]
            for point in range(span.begin, span.end):
                state.free_bytes[point] -= memory.usage[span.usage + state.choice[v]]
    for v in range(len(graph.start) - 1):
        first = graph.start[v]
        for slot in range(graph.first_arc[v], graph.first_arc[v + 1]):
            arc = graph.arcs[slot]
            column = arc.table + state.choice[arc.other] * arc.other_step
            for i in range(graph.start[v + 1] - first):
                state.conditional[first + i] += graph.table[column + i * arc.own_step]
            # Each table counts once: at the first of its variables.
            if arc.other > v:
                total += graph.table[column + state.choice[v] * arc.own_step]
    return total


@in_place
def repair(graph, memory, state, guide):
    """Make a choice fit, and lower its costs variable by variable; return the costs added, infinite if it fails."""
    cursor = state.cursor[0]
    cursor.changes, cursor.head, cursor.tail = 0, 0, 0
    added = _free_memory(graph, memory, state, guide, -1, np.inf)
    if added == np.inf:
        return added
    while True:
        for v in range(len(graph.start) - 1):
            state.queue[v] = v
            state.queued[v] = 1
        cursor.changes, cursor.head, cursor.tail = 0, 0, len(graph.start) - 1
        added += _relax(graph, memory, state, -1)
        if cursor.changes == 0:
            return added


@in_place
def anneal(graph, memory, state, guide, variables, trials, temperature, cost, best_cost, best):
    """Force random values one after the other, and keep changes as simulated annealing does.

    Returns the costs of the state and of the best choice, which goes to `best`.
    """
    cursor = state.cursor[0]
    for _ in range(trials):
        v = variables[min(int(random_uniform(state.rng) * len(variables)), len(variables) - 1)]
        first, size = graph.start[v], graph.start[v + 1] - graph.start[v]
        # The cheapest of a few random values: values that cost much are seldom worth it.
        value, draws = -1, 1 + int(3 * random_uniform(state.rng))
        for _ in range(draws):
            other = min(int(random_uniform(state.rng) * (size - 1)), size - 2)
            other += other >= state.choice[v]
            if value < 0 or state.conditional[first + other] < state.conditional[first + value]:
                value = other
        cursor.changes, cursor.head, cursor.tail = 0, 0, 0
        cursor.stamp += 1
        added = _change(graph, memory, state, v, value)
        if random_uniform(state.rng) < PROPAGATE_SHARE:
            added += _propagate(graph, memory, state, guide, v, 0)
        added += _relax(graph, memory, state, v)
        allowed = -temperature * np.log(random_uniform(state.rng) + 1e-300)
        # Later changes seldom save more than a few times what chance allows.
        most = 10 * temperature + allowed
        if added <= most:
            added += _free_memory(graph, memory, state, guide, v, most - added)
            if added < np.inf:
                added += _relax(graph, memory, state, v)
        if added <= allowed:
            cost += added
            if cost < best_cost * (1 - 1e-12):
                best_cost = cost
                _copy(state.choice, best)
        else:
            # Undone in reverse: a variable may have changed twice.
            for number in range(cursor.changes - 1, -1, -1):
                change = state.changes[number]
                _set_value(graph, memory, state, change.variable, change.old_value)
            for slot in range(cursor.head, cursor.tail):
                state.queued[state.queue[slot]] = 0
    return cost, best_cost
