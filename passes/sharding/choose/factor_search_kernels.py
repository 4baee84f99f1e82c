"""Local search over assignments that fit: force a value, let neighbours and holders of memory follow, keep or undo.

A walk holds, next to the choice, what each value of each variable would cost with the neighbours as they are, and the
bytes that are free at each point of time. Both follow each change.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils import compiled_part, in_place, random_uniform

# Variables that may change together, and the share of trials that change regions (they take many times as long).
MAX_REGION, FOLLOW_SHARE = 200, 0.05


@compiled_part
def _copy(source, target):
    # A slice would need memory of its own.
    for i in range(len(source)):
        target[i] = source[i]


@compiled_part
def _set_value(net, memory, walk, v, value):
    """Give a variable another value, and return the costs added."""
    old = walk.choice[v]
    first = net.start[v]
    added = walk.conditional[first + value] - walk.conditional[first + old]
    size = net.start[v + 1] - first
    for slot in range(net.first_edge[v], net.first_edge[v + 1]):
        e = net.incident[slot]
        a, b = net.edges[e, 0], net.edges[e, 1]
        place = net.table_start[e]
        if a == v:
            columns = net.start[b + 1] - net.start[b]
            for j in range(columns):
                walk.conditional[net.start[b] + j] += (
                    net.table[place + value * columns + j] - net.table[place + old * columns + j]
                )
        else:
            for i in range(net.start[a + 1] - net.start[a]):
                walk.conditional[net.start[a] + i] += (
                    net.table[place + i * size + value] - net.table[place + i * size + old]
                )
    for run in range(memory.first_run[v], memory.first_run[v + 1]):
        freed = memory.usage[memory.run_start[run] + old] - memory.usage[memory.run_start[run] + value]
        if freed != 0.0:
            for point in range(memory.run_from[run], memory.run_to[run]):
                walk.room[point] += freed
    walk.choice[v] = value
    return added


@compiled_part
def _fits(memory, walk, v, value):
    """Return whether another value of a variable leaves no point short that it needs more of."""
    old = walk.choice[v]
    for run in range(memory.first_run[v], memory.first_run[v + 1]):
        needed = memory.usage[memory.run_start[run] + value] - memory.usage[memory.run_start[run] + old]
        if needed > 0.0:
            for point in range(memory.run_from[run], memory.run_to[run]):
                if walk.room[point] < needed:
                    return False
    return True


@compiled_part
def _change(net, memory, walk, v, value):
    """Change a variable, note it, and queue its neighbours; return the costs added."""
    walk.changed[walk.counts[0]] = v
    walk.old[walk.counts[0]] = walk.choice[v]
    walk.counts[0] += 1
    for slot in range(net.first_edge[v], net.first_edge[v + 1]):
        e = net.incident[slot]
        w = net.edges[e, 0] + net.edges[e, 1] - v
        if walk.queued[w] == 0 and walk.counts[2] < len(walk.queue):
            walk.queued[w] = 1
            walk.queue[walk.counts[2]] = w
            walk.counts[2] += 1
    return _set_value(net, memory, walk, v, value)


@compiled_part
def _relax(net, memory, walk, forced):
    """Give queued variables their cheapest values that fit, until none saves anything; return the costs added."""
    added = 0.0
    while walk.counts[1] < walk.counts[2]:
        v = walk.queue[walk.counts[1]]
        walk.counts[1] += 1
        walk.queued[v] = 0
        if v == forced or walk.counts[0] == len(walk.changed):
            continue
        first = net.start[v]
        own = walk.conditional[first + walk.choice[v]]
        best, least = -1, own - 1e-9 * abs(own)
        for value in range(net.start[v + 1] - first):
            if walk.conditional[first + value] < least and _fits(memory, walk, v, value):
                best, least = value, walk.conditional[first + value]
        if best >= 0:
            added += _change(net, memory, walk, v, best)
    walk.counts[1] = walk.counts[2] = 0
    return added


@compiled_part
def _follow(net, memory, walk, guide, forced, position):
    """Let variables around a forced one take the values that suit it, as far as these differ; return the costs added.

    What lies beyond is not as it is now but as it would be at best, as messages tell: so a change runs through chains
    of variables that must all change together.
    """
    added = 0.0
    walk.stamps[forced] = walk.stamp[0]
    while position < walk.counts[2] and walk.counts[0] < MAX_REGION:
        v = walk.queue[position]
        position += 1
        if walk.stamps[v] == walk.stamp[0]:
            continue
        walk.stamps[v] = walk.stamp[0]
        first, size = net.start[v], net.start[v + 1] - net.start[v]
        for i in range(size):
            walk.scores[i] = guide.costs[first + i]
        for slot in range(net.first_edge[v], net.first_edge[v + 1]):
            e = net.incident[slot]
            a, b = net.edges[e, 0], net.edges[e, 1]
            w = a + b - v
            if walk.stamps[w] != walk.stamp[0]:
                place = net.message_start[e, 0 if a == v else 1]
                for i in range(size):
                    walk.scores[i] += guide.messages[place + i]
            elif a == v:
                columns = net.start[b + 1] - net.start[b]
                for i in range(size):
                    walk.scores[i] += net.table[net.table_start[e] + i * columns + walk.choice[w]]
            else:
                for i in range(size):
                    walk.scores[i] += net.table[net.table_start[e] + walk.choice[w] * size + i]
        best = walk.choice[v]
        for i in range(size):
            if walk.scores[i] < walk.scores[best]:
                best = i
        if best != walk.choice[v]:
            added += _change(net, memory, walk, v, best)
    return added


@compiled_part
def _shortest_point(walk):
    """Return the point of time with the least free bytes."""
    shortest = 0
    for point in range(len(walk.room)):
        if walk.room[point] < walk.room[shortest]:
            shortest = point
    return shortest


@compiled_part
def _repair(net, memory, walk, guide, forced, most_added):
    """Free what is held too much, at the least costs per byte; return the costs added, infinite if that fails.

    Where neighbours forbid a change as they are, it is judged by messages, and neighbours follow.
    """
    added = 0.0
    while len(walk.room) > 0:
        point = _shortest_point(walk)
        short = -walk.room[point]
        if short <= 0.0:
            break
        if added > most_added or walk.counts[0] == len(walk.changed):
            return np.inf
        best, best_value, least = -1, 0, np.inf
        for v in range(len(net.start) - 1):
            low, high = memory.first_run[v], memory.first_run[v + 1]
            if v == forced or low == high:
                continue
            # The last run that begins at the point or before it.
            while high - low > 1:
                middle = (low + high) // 2
                if memory.run_from[middle] <= point:
                    low = middle
                else:
                    high = middle
            if memory.run_from[low] > point or memory.run_to[low] <= point:
                continue
            first, own = memory.run_start[low], walk.choice[v]
            for value in range(net.start[v + 1] - net.start[v]):
                freed = min(memory.usage[first + own] - memory.usage[first + value], short)
                if freed > 0.0:
                    place = net.start[v]
                    price = walk.conditional[place + value] - walk.conditional[place + own]
                    if price > net.large / 2:
                        price = max(guide.marginals[place + value] - guide.marginals[place + own], 0.0)
                    # What saves costs as well comes first.
                    price = price / freed if price > 0.0 else price * freed
                    if price < least and _fits(memory, walk, v, value):
                        best, best_value, least = v, value, price
        if best < 0:
            return np.inf
        position = walk.counts[2]
        change = _change(net, memory, walk, best, best_value)
        if change > net.large / 2:
            walk.stamp[0] += 1
            if forced >= 0:
                walk.stamps[forced] = walk.stamp[0]
            change += _follow(net, memory, walk, guide, best, position)
        added += change
    return added


@in_place
def start_walk(net, memory, walk):
    """Set up a walk from its choice; return the costs."""
    total = 0.0
    _copy(net.costs, walk.conditional)
    _copy(memory.room, walk.room)
    for v in range(len(net.start) - 1):
        total += net.costs[net.start[v] + walk.choice[v]]
        for run in range(memory.first_run[v], memory.first_run[v + 1]):
            for point in range(memory.run_from[run], memory.run_to[run]):
                walk.room[point] -= memory.usage[memory.run_start[run] + walk.choice[v]]
    for e in range(len(net.edges)):
        a, b = net.edges[e, 0], net.edges[e, 1]
        rows, columns = net.start[a + 1] - net.start[a], net.start[b + 1] - net.start[b]
        place = net.table_start[e]
        total += net.table[place + walk.choice[a] * columns + walk.choice[b]]
        for i in range(rows):
            walk.conditional[net.start[a] + i] += net.table[place + i * columns + walk.choice[b]]
        for j in range(columns):
            walk.conditional[net.start[b] + j] += net.table[place + walk.choice[a] * columns + j]
    return total


@in_place
def settle(net, memory, walk, guide):
    """Make a choice fit, and lower its costs variable by variable; return the costs added, infinite if it fails."""
    walk.counts[:] = 0
    added = _repair(net, memory, walk, guide, -1, np.inf)
    if added == np.inf:
        return added
    while True:
        walk.counts[0] = walk.counts[1] = 0
        for v in range(len(net.start) - 1):
            walk.queue[v] = v
            walk.queued[v] = 1
        walk.counts[2] = len(net.start) - 1
        saved = _relax(net, memory, walk, -1)
        added += saved
        if walk.counts[0] == 0:
            return added


@in_place
def wander(net, memory, walk, guide, variables, trials, temperature, cost, best_cost, best):
    """Force random values one after the other, and keep changes as simulated annealing does.

    Returns the costs of the walk and of the best choice, which goes to `best`.
    """
    for _ in range(trials):
        v = variables[min(int(random_uniform(walk.rng) * len(variables)), len(variables) - 1)]
        first, size = net.start[v], net.start[v + 1] - net.start[v]
        # The cheapest of a few random values: values that cost much are seldom worth it.
        value, draws = -1, 1 + int(3 * random_uniform(walk.rng))
        for _ in range(draws):
            other = min(int(random_uniform(walk.rng) * (size - 1)), size - 2)
            other += other >= walk.choice[v]
            if value < 0 or walk.conditional[first + other] < walk.conditional[first + value]:
                value = other
        walk.counts[:] = 0
        walk.stamp[0] += 1
        added = _change(net, memory, walk, v, value)
        if random_uniform(walk.rng) < FOLLOW_SHARE:
            added += _follow(net, memory, walk, guide, v, 0)
        added += _relax(net, memory, walk, v)
        allowed = -temperature * np.log(random_uniform(walk.rng) + 1e-300)
        # Later changes seldom save more than a few times what chance allows.
        most = 10 * temperature + allowed
        if added <= most:
            added += _repair(net, memory, walk, guide, v, most - added)
            if added < np.inf:
                added += _relax(net, memory, walk, v)
        if added <= allowed:
            cost += added
            if cost < best_cost * (1 - 1e-12):
                best_cost = cost
                _copy(walk.choice, best)
        else:
            for number in range(walk.counts[0] - 1, -1, -1):
                _set_value(net, memory, walk, walk.changed[number], walk.old[number])
            for slot in range(walk.counts[1], walk.counts[2]):
                walk.queued[walk.queue[slot]] = 0
    return cost, best_cost
