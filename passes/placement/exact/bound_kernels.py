"""Lower bounds on completions of a state of the branch and bound: heads, loads and joins.

Each bound relaxes something else: heads let devices run several nodes at once, loads let values move at no cost, and
joins keep both in part, for the nodes before one node. The largest of them counts.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.passes.placement.exact.state_kernels import NEVER, count_bits
from onnxplace.utils.jit import compiled_loop, compiled_part, in_place


@compiled_part
def _schedule_preemptively(count, jobs, release, work, tail, remaining_work):
    """Return the latest end plus tail of jobs on one machine in Jackson's preemptive schedule, which is optimal."""
    for i in range(count):
        remaining_work[i] = work[jobs[i]]
    # Run the released job of longest tail until it ends or the next job is released.
    now, latest, unfinished = 0.0, 0.0, count
    while unfinished > 0:
        chosen, next_release = -1, NEVER
        for i in range(count):
            if remaining_work[i] < 0.0:
                continue
            if release[jobs[i]] > now:
                next_release = min(next_release, release[jobs[i]])
            elif chosen < 0 or tail[jobs[i]] > tail[jobs[chosen]]:
                chosen = i
        if chosen < 0:
            now = next_release
        elif now + remaining_work[chosen] <= next_release:
            now += remaining_work[chosen]
            remaining_work[chosen] = -1.0
            unfinished -= 1
            latest = max(latest, now + tail[jobs[chosen]])
        else:
            remaining_work[chosen] -= next_release - now
            now = next_release
    return latest


@compiled_loop
def compute_far_tails(order, succ_starts, successors, send, work, known_tails):
    """Compute tails that count all descendants: each is on the node's device or after a transfer.

    As Papadimitriou and Yannakakis (1990) for heads: those that would be too late elsewhere must share the device,
    one after the other. `send` is the least time of a transfer per edge; the result is at least `known_tails`.
    O(N^2 (E / N + N^2)), for small graphs.
    """
    count = len(order)
    tail, remaining_work = known_tails.copy(), np.empty(count)
    remote, distance = np.full((count, count), -1.0), np.full((count, count), -1.0)
    for position in range(count - 1, -1, -1):
        node = order[position]
        # Distances to all descendants, if they share the device and if they do not.
        for k in range(succ_starts[node], succ_starts[node + 1]):
            successor = successors[k]
            away = send[k] + work[successor] + tail[successor]
            remote[node, successor] = max(remote[node, successor], away)
            distance[node, successor] = max(distance[node, successor], 0.0)
            for last in range(count):
                if remote[successor, last] >= 0.0:
                    remote[node, last] = max(remote[node, last], min(away, work[successor] + remote[successor, last]))
                    distance[node, last] = max(distance[node, last], work[successor] + distance[successor, last])
        descendants = np.flatnonzero(remote[node] >= 0.0)
        if len(descendants) == 0:
            continue
        # The more descendants are local, the later these end and the earlier the first remote one.
        ranked = descendants[np.argsort(-remote[node][descendants], kind="mergesort")]
        best = NEVER
        for local in range(len(ranked) + 1):
            local_end = _schedule_preemptively(local, ranked[:local], distance[node], work, tail, remaining_work)
            best = min(best, max(local_end, remote[node, ranked[local]] if local < len(ranked) else 0.0))
            if local_end >= best:
                break
        tail[node] = max(tail[node], best)
    return tail


@compiled_loop
def compute_distances(order, succ_starts, successors, send, work):
    """Compute least times from the end of a node to the start of a later one, on any and on different devices.

    Both are [earlier, later], -1 where no path leads. `send` is the least time of a transfer per edge, NEVER where its
    ends share a device. O(N E).
    """
    count = len(order)
    distance, remote = np.full((count, count), -1.0), np.full((count, count), -1.0)
    # Backwards: the distances of all successors are known.
    for position in range(count - 1, -1, -1):
        node = order[position]
        for k in range(succ_starts[node], succ_starts[node + 1]):
            successor = successors[k]
            distance[node, successor] = max(distance[node, successor], 0.0)
            remote[node, successor] = max(remote[node, successor], send[k])
            for last in range(count):
                if distance[successor, last] >= 0.0:
                    via = work[successor] + distance[successor, last]
                    distance[node, last] = max(distance[node, last], via)
                    # Either this edge crosses, or a later one does: the cheaper counts. Of several paths the longest
                    # counts, since all of them have to be waited for.
                    away = min(send[k] + via, work[successor] + remote[successor, last])
                    remote[node, last] = max(remote[node, last], away)
    return distance, remote


@in_place
def fill_level(opening, skip, own, later, total):
    """Return when devices can finish `total` seconds of work: one opens at `own`, the others `later` than `opening`.

    `opening` is ascending; the device at index `skip` is the one that opens at `own`.
    """
    # Open devices in order of time, until the next one opens after the level that is reached without it.
    reached, opened, number = NEVER, 0.0, 0
    k, own_open = 0, False
    while True:
        k += k == skip
        next_other = opening[k] + later if k < len(opening) else NEVER
        following = next_other if own_open else min(own, next_other)
        if following >= reached:
            return reached
        if not own_open and own <= next_other:
            own_open = True
        else:
            k += 1
        opened += following
        number += 1
        reached = (opened + total) / number


@compiled_part
def _bound_by_joins(mask, opening, first, early, tables):
    """Return a bound from joins: nodes before a join run on its device, or elsewhere and are sent there."""
    best = 0.0
    for t in range(len(tables.joins)):
        join = tables.joins[t]
        if (mask >> join) & 1:
            continue
        # The device of the join, if only one is possible.
        home, homes, join_seconds = 0, 0, tables.least[join]
        for d in range(tables.devices):
            if early[join, d] < NEVER:
                home = d
                homes += 1
        skip, own_opening = 0, opening[0]
        if homes == 1:
            join_seconds, own_opening = tables.seconds[home, join], first[home]
            while opening[skip] != own_opening:
                skip += 1
        # Add the nodes before the join one by one; each prefix gives a bound.
        total, nearest = 0.0, NEVER
        for k in range(tables.join_starts[t], tables.join_starts[t + 1]):
            node = tables.join_nodes[k]
            if (mask >> node) & 1 or tables.least[node] == 0.0:
                continue
            total += tables.least[node]
            nearest = min(nearest, tables.join_distance[k])
            level_seconds = fill_level(opening, skip, own_opening, tables.join_remote[k] - nearest, total) + nearest
            best = max(best, level_seconds + join_seconds + tables.tail[join])
    return best


@compiled_loop
def bound_state(reals, ints, mask, tables, early, arrival):
    """Return a lower bound on all completions of a state; `early` [N, D] and `arrival` [V, D] are scratch.

    Heads: earliest starts per node and device, values crossing at least cost, plus the node's tail. Loads: for each
    tail length, nodes with a tail at least as long must fit behind the work done so far (all together, and nodes with
    one possible device on that device). Joins: nodes before one must run there or be sent. Also returns a guide, lower
    for more promising states.
    """
    devices, groups, count = tables.devices, len(tables.group_mask), len(tables.group)
    base, promised = 1 + 7 * devices, groups + 2 * devices + 1
    now = reals[0]
    best = now
    opening_of = np.full(devices, NEVER)
    for d in range(devices):
        if (ints[groups + 2 * devices] >> d) & 1:
            best = max(best, reals[1 + d])
    # Heads, in topological order: the earliest start of each node on each device, and arrivals of its values.
    for position in range(count):
        node = tables.order[position]
        started = (mask >> node) & 1
        group = tables.group[node]
        shortest = NEVER
        if not started:
            for d in range(devices):
                early[node, d] = NEVER
                if ints[group] == d or (ints[group] < 0 and tables.allowed[group, d]):
                    added = tables.group_bytes[group] if (tables.group_mask[group] & mask) == 0 else 0.0
                    if reals[1 + 3 * devices + d] + added > tables.limit[d]:
                        continue
                    begin = max(max(now, reals[1 + d]), reals[1 + 4 * devices + d])
                    for k in range(tables.in_starts[node], tables.in_starts[node + 1]):
                        begin = max(begin, arrival[tables.ins[k], d])
                        # Each device that a value was sent to will read it. If it was sent to as many devices as it
                        # has unstarted readers, none of them can run elsewhere.
                        destinations = ints[promised + tables.ins[k]]
                        promised_elsewhere = destinations != 0 and not (destinations >> d) & 1
                        if promised_elsewhere and count_bits(destinations) == count_bits(
                            tables.read_mask[tables.ins[k]] & ~mask
                        ):
                            begin = NEVER
                    early[node, d] = begin
                    if begin < NEVER:
                        opening_of[d] = min(opening_of[d], begin)
                        shortest = min(shortest, begin + tables.seconds[d, node])
            if shortest >= NEVER:
                return NEVER, NEVER
            best = max(best, shortest + tables.tail[node])
        for k in range(tables.out_starts[node], tables.out_starts[node + 1]):
            value = tables.outs[k]
            for d in range(devices):
                time = NEVER
                if started:
                    # When it arrived or will; else it may be sent from now on. One that was passed over stays away.
                    time = reals[base + value * devices + d]
                    if time >= NEVER:
                        for h in range(devices):
                            if ints[groups + h] == node:
                                position_sent = k - tables.out_starts[node]
                                if position_sent >= ints[groups + devices + h]:
                                    time = max(max(now, reals[1 + h]), reals[1 + devices + h])
                                    time = max(time, reals[1 + 2 * devices + d]) + tables.send[value, h, d]
                else:
                    for h in range(devices):
                        if early[node, h] < NEVER:
                            time = min(time, early[node, h] + tables.seconds[h, node] + tables.send[value, h, d])
                arrival[value, d] = time
    # When devices can start their next node.
    opening = np.sort(opening_of)
    if opening[0] >= NEVER:
        # No node is left. The guide is a sum of three estimates, each of which is the bound then.
        return best, 3.0 * best
    best = max(best, _bound_by_joins(mask, opening, opening_of, early, tables))
    # When processors can: devices that share some have less than one each.
    processors = 0
    for d in range(devices):
        while tables.uses[d] >> processors:
            processors += 1
    own_load = np.full(processors, NEVER)
    for d in range(devices):
        for p in range(processors):
            if (tables.uses[d] >> p) & 1:
                own_load[p] = min(own_load[p], opening_of[d])
    opening = np.sort(own_load)
    total = 0.0
    # The guide assumes that every device that can do something will: its idle time until now is lost.
    # It adds up the longest path, all loads, and loads with their tails.
    longest_path, load_and_tail, opening_seconds, used = best, 0.0, 0.0, 0
    for k in range(processors):
        if opening[k] < NEVER:
            opening_seconds += opening[k]
            used += 1
    for position in range(count):
        node = tables.by_tail[position]
        if (mask >> node) & 1:
            continue
        needed, shortest = np.int64(-1), NEVER
        for d in range(devices):
            if early[node, d] < NEVER:
                needed &= tables.uses[d]
                shortest = min(shortest, tables.seconds[d, node])
        total += tables.least_work[node]
        # Spread the work over the processors that open first, as many of them as help.
        best = max(best, fill_level(opening, 0, opening[0], 0.0, total) + tables.tail[node])
        load_and_tail = max(load_and_tail, (opening_seconds + total) / used + tables.tail[node])
        # Processors that the node needs wherever it runs.
        for p in range(processors if needed else 0):
            if (needed >> p) & 1:
                own_load[p] += shortest
                best = max(best, own_load[p] + tables.tail[node])
    return best, longest_path + (opening_seconds + total) / used + load_and_tail
