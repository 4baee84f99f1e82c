"""The kernels of `exact`: states of a step that is being scheduled, one action after the other, and what bounds them.

A state is a row of floats (the time `t` of the last action; then per device when it is free, when its outgoing and its
incoming channel are free, and the weights it holds; then per value and device when the value is there), a row of
integers (device per open group; per device the node whose values wait to be sent, and which of them is next; the
devices in use as bits; per value, as bits, the devices it was sent to and not yet read on) and the set of started
nodes as bits of one integer. No action is earlier than the one before it. Actions are integers: `node * D + device`
starts a node; from `N * D` on, a value that has been made is sent to a tuple of devices, perhaps none.

Nothing is lost by leaving states out that another one dominates: all times follow from the sequence of actions by
sums and maxima, so what completes the worse state completes the better one, no later. What could have started
earlier in an idle device is left out too: doing so gives another state, strictly better, with as many actions.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onnxplace.graph import Bools, Floats, Ints, Longs
from onnxplace.utils import compiled_loop, compiled_part, in_place

NEVER = 1e300
# How many states with the same nodes started and the same values in the same places are compared with a new one.
COMPARED = 256


class ProblemTables(NamedTuple):
    """A problem as the kernels read it; nodes, values (those that nodes make and read), groups, devices by index."""

    devices: int
    group: Ints
    group_mask: Longs
    group_bytes: Floats
    """Weights that no other group reads."""
    node_bytes: Floats
    value_bytes: Floats
    limit: Floats
    allowed: Bools
    """[group, device]"""
    alike: Ints
    """Per device, the first one that it can be exchanged with."""
    seconds: Floats
    least: Floats
    send: Floats
    """[value, source, destination]"""
    order: Ints
    by_tail: Ints
    tail: Floats
    in_starts: Longs
    ins: Ints
    out_starts: Longs
    outs: Ints
    read_starts: Longs
    readers: Ints
    read_mask: Longs
    before_mask: Longs
    joins: Ints
    """Nodes before which much has to be done."""
    join_starts: Longs
    join_nodes: Ints
    """What comes before each join, the longest `join_remote` first."""
    join_distance: Floats
    """Least time from the end of such a node to the start of the join."""
    join_remote: Floats
    """The same, if they are on different devices."""
    tuples: Ints
    """Ordered choices of destinations, filled up with -1."""
    shuffles: Ints
    """Ways to exchange devices that are alike."""
    free_links: bool
    """Transfers never wait."""
    one_channel: bool
    receives: bool
    """Count incoming channels too."""
    delays: bool
    """Nodes may hold back what they send, so that leaving out dominated states stays right with `receives`."""
    careful: bool
    """Keep the values at hand within memory, roughly; finds steps, bounds nothing."""
    patient: bool
    """Keep states that others dominate: they may need less memory."""


@compiled_part
def _ones(bits):
    """Count the bits that are set."""
    number = 0
    while bits:
        bits &= bits - 1
        number += 1
    return number


@compiled_part
def _may_go(value, there, mask, group_device, p):
    """Whether some reader of the value may still be started on this device."""
    for k in range(p.read_starts[value], p.read_starts[value + 1]):
        reader = p.readers[k]
        if not (mask >> reader) & 1:
            g = p.group[reader]
            if group_device[g] == there or (group_device[g] < 0 and p.allowed[g, there]):
                return True
    return False


@compiled_part
def _is_next(there, touched, p):
    """Whether a device is in use, or the first unused one of those that are alike."""
    if (touched >> there) & 1:
        return True
    unused = 0
    for d in range(there):
        unused += p.alike[d] == p.alike[there] and not (touched >> d) & 1
    return unused == 0


@compiled_part
def _advance(reals, ints, mask, home, p):
    """Skip values of the node on `home` that nobody elsewhere may read; free the device when none is left."""
    devices, groups = p.devices, len(p.group_mask)
    node = ints[groups + home]
    position = ints[groups + devices + home]
    while position < p.out_starts[node + 1] - p.out_starts[node]:
        value = p.outs[p.out_starts[node] + position]
        for there in range(devices):
            if there != home and _may_go(value, there, mask, ints[:groups], p):
                ints[groups + devices + home] = position
                return
        position += 1
    ints[groups + home] = -1
    ints[groups + devices + home] = 0


@compiled_part
def _in_the_way(reals, home, there, p):
    """Whether a node that finishes late may have let others go first: some channel was used since it could finish."""
    devices = p.devices
    if there[0] < 0:
        return True
    for k in range(devices):
        if there[k] < 0:
            break
        if reals[1 + 2 * devices + there[k]] > reals[1 + home]:
            return True
    return reals[1 + devices + home] > reals[1 + home]


@in_place
def apply(reals, ints, mask, action, p):
    """Carry out an action on a state in place; returns the new set of started nodes, -1 if it is not allowed."""
    devices, groups, count = p.devices, len(p.group_mask), len(p.group)
    base, promised = 1 + 4 * devices, groups + 2 * devices + 1
    if action < count * devices:
        node, home = action // devices, action % devices
        group = p.group[node]
        natural = reals[1 + home]
        for k in range(p.in_starts[node], p.in_starts[node + 1]):
            natural = max(natural, reals[base + p.ins[k] * devices + home])
        if natural >= NEVER:
            return np.int64(-1)
        if natural < reals[0] and p.seconds[home, node] > 0.0:
            return np.int64(-1)  # the same with an earlier start is another state, and no worse
        begin = max(reals[0], natural)
        if not p.delays:
            for d in range(devices):
                if ints[groups + d] >= 0 and reals[1 + d] < begin:
                    return np.int64(-1)  # what has finished by then is sent first
        if (p.group_mask[group] & mask) == 0:
            reals[1 + 3 * devices + home] += p.group_bytes[group]
        needed = reals[1 + 3 * devices + home] + p.node_bytes[node]
        if p.careful:
            for value in range(len(p.read_mask)):
                when = reals[base + value * devices + home]
                if when > 0.0 and when < NEVER:
                    needed += p.value_bytes[value]
        if needed > p.limit[home]:
            return np.int64(-1)
        finish = begin + p.seconds[home, node]
        reals[0] = begin
        reals[1 + home] = finish
        mask |= np.int64(1) << node
        ints[group] = home if (p.group_mask[group] & ~mask) != 0 else -1
        ints[groups + 2 * devices] |= 1 << home
        for k in range(p.in_starts[node], p.in_starts[node + 1]):
            value = p.ins[k]
            ints[promised + value] &= ~(1 << home)
            if _ones(ints[promised + value]) > _ones(p.read_mask[value] & ~mask):
                return np.int64(-1)
            if (p.read_mask[value] & ~mask) == 0:
                for d in range(devices):
                    reals[base + value * devices + d] = 0.0
        for k in range(p.out_starts[node], p.out_starts[node + 1]):
            value = p.outs[k]
            for d in range(devices):
                reals[base + value * devices + d] = finish + p.send[value, home, d] if p.free_links else NEVER
            reals[base + value * devices + home] = finish
        if not p.free_links:
            ints[groups + home] = node
            ints[groups + devices + home] = 0
            _advance(reals, ints, mask, home, p)
        return mask
    code = action - count * devices
    home, choice = code // len(p.tuples), code % len(p.tuples)
    node = ints[groups + home]
    value = p.outs[p.out_starts[node] + ints[groups + devices + home]]
    late = reals[0] > reals[1 + home]
    if late and not _in_the_way(reals, home, p.tuples[choice], p):
        return np.int64(-1)  # the same with an earlier finish is another state, and a better one
    reals[0] = max(reals[0], reals[1 + home])
    reals[1 + home] = reals[0]
    reals[base + value * devices + home] = reals[0]
    for k in range(devices):
        there = p.tuples[choice, k]
        if there < 0:
            break
        if there == home or not _is_next(there, ints[groups + 2 * devices], p):
            return np.int64(-1)
        if not _may_go(value, there, mask, ints[:groups], p):
            return np.int64(-1)
        ints[groups + 2 * devices] |= 1 << there
        ints[promised + value] |= 1 << there
        begin = max(reals[0], reals[1 + devices + home])
        if p.receives:
            begin = max(begin, reals[1 + 2 * devices + there])
        end = begin + p.send[value, home, there]
        reals[1 + devices + home] = end
        reals[base + value * devices + there] = end
        if p.receives:
            reals[1 + 2 * devices + there] = end
            if p.one_channel:
                reals[1 + devices + there] = end
                reals[1 + 2 * devices + home] = end
    if _ones(ints[promised + value]) > p.read_starts[value + 1] - p.read_starts[value]:
        return np.int64(-1)
    ints[groups + devices + home] += 1
    _advance(reals, ints, mask, home, p)
    return mask


@compiled_part
def _preemptive(count, jobs, release, work, tail, left):
    """Jackson's schedule of jobs on one machine: the latest end plus tail, a bound and the best with preemption."""
    for i in range(count):
        left[i] = work[jobs[i]]
    now, latest, remaining = 0.0, 0.0, count
    while remaining > 0:
        pick, later = -1, NEVER
        for i in range(count):
            if left[i] < 0.0:
                continue
            if release[jobs[i]] > now:
                later = min(later, release[jobs[i]])
            elif pick < 0 or tail[jobs[i]] > tail[jobs[pick]]:
                pick = i
        if pick < 0:
            now = later
        elif now + left[pick] <= later:
            now += left[pick]
            left[pick] = -1.0
            remaining -= 1
            latest = max(latest, now + tail[jobs[pick]])
        else:
            left[pick] -= later - now
            now = later
    return latest


@compiled_loop
def far_tails(order, succ_starts, successors, send, work, known):
    """Tails that count all descendants: each follows on the node's device or has a transfer on its way.

    As Papadimitriou and Yannakakis (1990) for heads: those that would be too late elsewhere must share the device,
    one after the other. `send` is the least time of a transfer per edge, `known` are tails to be no worse than.
    O(N^2 (E / N + N^2)), for small graphs.
    """
    count = len(order)
    tail, left = known.copy(), np.empty(count)
    remote, distance = np.full((count, count), -1.0), np.full((count, count), -1.0)
    for position in range(count - 1, -1, -1):
        node = order[position]
        for k in range(succ_starts[node], succ_starts[node + 1]):
            after = successors[k]
            away = send[k] + work[after] + tail[after]
            remote[node, after] = max(remote[node, after], away)
            distance[node, after] = max(distance[node, after], 0.0)
            for last in range(count):
                if remote[after, last] >= 0.0:
                    remote[node, last] = max(remote[node, last], min(away, work[after] + remote[after, last]))
                    distance[node, last] = max(distance[node, last], work[after] + distance[after, last])
        below = np.flatnonzero(remote[node] >= 0.0)
        if len(below) == 0:
            continue
        ranked = below[np.argsort(-remote[node][below], kind="mergesort")]
        least = NEVER
        for local in range(len(ranked) + 1):
            together = _preemptive(local, ranked[:local], distance[node], work, tail, left)
            least = min(least, max(together, remote[node, ranked[local]] if local < len(ranked) else 0.0))
            if together >= least:
                break
        tail[node] = max(tail[node], least)
    return tail


@compiled_loop
def distances(order, succ_starts, successors, send, work):
    """Least times from the end of a node to the start of a later one, and if those are on different devices.

    Both are [earlier, later], -1 where no path leads. `send` is the least time of a transfer per edge, NEVER where its
    ends share a device. O(N E).
    """
    count = len(order)
    distance, remote = np.full((count, count), -1.0), np.full((count, count), -1.0)
    for position in range(count - 1, -1, -1):
        node = order[position]
        for k in range(succ_starts[node], succ_starts[node + 1]):
            after = successors[k]
            distance[node, after] = max(distance[node, after], 0.0)
            remote[node, after] = max(remote[node, after], send[k])
            for last in range(count):
                if distance[after, last] >= 0.0:
                    here = work[after] + distance[after, last]
                    distance[node, last] = max(distance[node, last], here)
                    away = min(send[k] + here, work[after] + remote[after, last])
                    remote[node, last] = max(remote[node, last], away)
    return distance, remote


@in_place
def level(opening, skip, own, later, total):
    """When devices could have done `total` seconds of work: one from `own` on, the others `later` than `opening`.

    `opening` is ascending; the device at `skip` of it is the one that opens at `own`.
    """
    reached, opened, number = NEVER, 0.0, 0
    k, mine = 0, False
    while True:
        k += k == skip
        rest = opening[k] + later if k < len(opening) else NEVER
        following = rest if mine else min(own, rest)
        if following >= reached:
            return reached
        if not mine and own <= rest:
            mine = True
        else:
            k += 1
        opened += following
        number += 1
        reached = (opened + total) / number


@compiled_part
def _joined(mask, opening, first, early, p):
    """A bound from each join: what comes before it is done on its device, or elsewhere and sent there."""
    best = 0.0
    for t in range(len(p.joins)):
        join = p.joins[t]
        if (mask >> join) & 1:
            continue
        home, homes, own = 0, 0, p.least[join]
        for d in range(p.devices):
            if early[join, d] < NEVER:
                home = d
                homes += 1
        skip, opens = 0, opening[0]
        if homes == 1:
            own, opens = p.seconds[home, join], first[home]
            while opening[skip] != opens:
                skip += 1
        total, nearest = 0.0, NEVER
        for k in range(p.join_starts[t], p.join_starts[t + 1]):
            node = p.join_nodes[k]
            if (mask >> node) & 1 or p.least[node] == 0.0:
                continue
            total += p.least[node]
            nearest = min(nearest, p.join_distance[k])
            done = level(opening, skip, opens, p.join_remote[k] - nearest, total) + nearest
            best = max(best, done + own + p.tail[join])
    return best


@compiled_loop
def bound(reals, ints, mask, p, early, there_at):
    """A time that no completion of this state beats; `early` [N, D] and `there_at` [V, D] are scratch.

    Heads: earliest starts per node and device, values crossing at least cost, plus the node's tail. Loads: for each
    tail length, what has a tail at least as long must fit behind what the devices have done (all together, and what
    can run on one device only on that device). Joins: what comes before one must be done there or be sent.
    Also returns a guide, lower for states that look better.
    """
    devices, groups, count = p.devices, len(p.group_mask), len(p.group)
    base, promised = 1 + 4 * devices, groups + 2 * devices + 1
    now = reals[0]
    best = now
    first = np.full(devices, NEVER)
    for d in range(devices):
        if (ints[groups + 2 * devices] >> d) & 1:
            best = max(best, reals[1 + d])
    for position in range(count):
        node = p.order[position]
        started = (mask >> node) & 1
        group = p.group[node]
        shortest = NEVER
        if not started:
            for d in range(devices):
                early[node, d] = NEVER
                if ints[group] == d or (ints[group] < 0 and p.allowed[group, d]):
                    added = p.group_bytes[group] if (p.group_mask[group] & mask) == 0 else 0.0
                    if reals[1 + 3 * devices + d] + added > p.limit[d]:
                        continue
                    begin = max(now, reals[1 + d])
                    for k in range(p.in_starts[node], p.in_starts[node + 1]):
                        begin = max(begin, there_at[p.ins[k], d])
                        wanted = ints[promised + p.ins[k]]
                        promised_elsewhere = wanted != 0 and not (wanted >> d) & 1
                        if promised_elsewhere and _ones(wanted) == _ones(p.read_mask[p.ins[k]] & ~mask):
                            begin = NEVER
                    early[node, d] = begin
                    if begin < NEVER:
                        first[d] = min(first[d], begin)
                        shortest = min(shortest, begin + p.seconds[d, node])
            if shortest >= NEVER:
                return NEVER, NEVER
            best = max(best, shortest + p.tail[node])
        for k in range(p.out_starts[node], p.out_starts[node + 1]):
            value = p.outs[k]
            for d in range(devices):
                when = NEVER
                if started:
                    when = reals[base + value * devices + d]
                    if when >= NEVER:
                        for h in range(devices):
                            if ints[groups + h] == node:
                                sent = k - p.out_starts[node]
                                if sent >= ints[groups + devices + h]:
                                    when = max(max(now, reals[1 + h]), reals[1 + devices + h])
                                    when = max(when, reals[1 + 2 * devices + d]) + p.send[value, h, d]
                else:
                    for h in range(devices):
                        if early[node, h] < NEVER:
                            when = min(when, early[node, h] + p.seconds[h, node] + p.send[value, h, d])
                there_at[value, d] = when
    opening = np.sort(first)
    if opening[0] >= NEVER:
        return best, 3.0 * best
    best = max(best, _joined(mask, opening, first, early, p))
    total = 0.0
    # The guide takes it that every device that can do something still will: what idles now is lost.
    # Its parts: the longest way, all loads, and loads with what comes after them.
    way, promise, wasted, used = best, 0.0, 0.0, 0
    for k in range(devices):
        if opening[k] < NEVER:
            wasted += opening[k]
            used += 1
    alone = np.zeros(devices)
    for d in range(devices):
        alone[d] = first[d]
    for position in range(count):
        node = p.by_tail[position]
        if (mask >> node) & 1:
            continue
        only = -1
        for d in range(devices):
            if early[node, d] < NEVER:
                only = d if only == -1 else -2
        total += p.least[node]
        # Spread over the devices that open first, as many of them as it is worth opening.
        best = max(best, level(opening, 0, opening[0], 0.0, total) + p.tail[node])
        promise = max(promise, (wasted + total) / used + p.tail[node])
        if only >= 0:
            alone[only] += p.seconds[only, node]
            best = max(best, alone[only] + p.tail[node])
    return best, way + (wasted + total) / used + promise


@compiled_loop
def expand(reals, ints, masks, least_so_far, begin, end, threshold, p, parents, actions, bounds, guides, filled):
    """Generate the children of states `begin` to `end`; returns how many there are now, and the least bound cut off.

    Stops early, at a state boundary, when the output is nearly full: also returns the next state.
    """
    devices, groups, count = p.devices, len(p.group_mask), len(p.group)
    real, whole = np.empty(reals.shape[1]), np.empty(ints.shape[1], np.int32)
    early, there_at = np.empty((count, devices)), np.empty((len(p.read_mask), devices))
    most = count * devices + devices * len(p.tuples)
    cut = NEVER
    state = begin
    while state < end and filled + most <= len(parents):
        mask = masks[state]
        first = -1
        for d in range(devices):
            if ints[state, groups + d] >= 0 and (first < 0 or reals[state, 1 + d] < reals[state, 1 + first]):
                first = d
        for code in range(count * devices + devices * len(p.tuples)):
            if code < count * devices:
                node, home = code // devices, code % devices
                if (mask >> node) & 1 or (p.before_mask[node] & ~mask) != 0 or ints[state, groups + home] >= 0:
                    continue
                group = p.group[node]
                if ints[state, group] != home and (ints[state, group] >= 0 or not p.allowed[group, home]):
                    continue
                if not _is_next(home, ints[state, groups + 2 * devices], p):
                    continue
            else:
                home = (code - count * devices) // len(p.tuples)
                if ints[state, groups + home] < 0 or (home != first and not p.delays):
                    continue
            real[:] = reals[state]
            whole[:] = ints[state]
            after = apply(real, whole, mask, code, p)
            if after < 0:
                continue
            least, guide = bound(real, whole, after, p, early, there_at)
            least = max(least, least_so_far[state])
            if least >= threshold:
                cut = min(cut, least)
                continue
            parents[filled] = state
            actions[filled] = code
            bounds[filled] = least
            guides[filled] = guide
            filled += 1
        state += 1
    return filled, cut, state


@compiled_part
def _no_worse(reals, ints, mine, other, shuffle, devices, groups):
    """Whether state `mine`, its devices renamed by `shuffle`, can do all that `other` can, and no later."""
    now, then = reals[mine, 0], reals[other, 0]
    for d in range(devices):
        e = shuffle[d]
        if max(reals[mine, 1 + d], now) > max(reals[other, 1 + e], then):
            return False
        if max(reals[mine, 1 + devices + d], now) > max(reals[other, 1 + devices + e], then):
            return False
        if max(reals[mine, 1 + 2 * devices + d], now) > max(reals[other, 1 + 2 * devices + e], then):
            return False
        if reals[mine, 1 + 3 * devices + d] > reals[other, 1 + 3 * devices + e]:
            return False
        if ints[mine, groups + d] != ints[other, groups + e]:
            return False
        if ints[mine, groups + devices + d] != ints[other, groups + devices + e]:
            return False
    for g in range(groups):
        home = ints[mine, g]
        if (shuffle[home] if home >= 0 else -1) != ints[other, g]:
            return False
    for index in range(groups + 2 * devices + 1, ints.shape[1]):
        promised = 0
        for d in range(devices):
            if (ints[mine, index] >> d) & 1:
                promised |= 1 << shuffle[d]
        if promised != ints[other, index]:
            return False
    for start in range(1 + 4 * devices, reals.shape[1], devices):
        for d in range(devices):
            if max(reals[mine, start + d], now) > max(reals[other, start + shuffle[d]], then):
                return False
    return True


@compiled_part
def _signature(real, whole, mask, p):
    """A hash of what is started, what waits to be sent, and what is where; the same if alike devices are renamed."""
    devices, groups = p.devices, len(p.group_mask)
    base = 1 + 4 * devices
    key = np.uint64(mask) * np.uint64(0x9E3779B97F4A7C15)
    for d in range(devices):
        held = np.uint64(whole[groups + d] + 2 + 64 * whole[groups + devices + d])
        for value in range(len(p.read_mask)):
            if real[base + value * devices + d] < NEVER:
                promised = (whole[groups + 2 * devices + 1 + value] >> d) & 1
                held = (held ^ np.uint64(2 * value + 2 + promised)) * np.uint64(0xC2B2AE3D27D4EB4F)
        held ^= held >> np.uint64(29)
        key += held * np.uint64(0x165667B19E3779F9)
    key ^= key >> np.uint64(31)
    return key * np.uint64(0x9E3779B97F4A7C15)


@compiled_loop
def select(ranked, parents, actions, reals, ints, masks, p, new_reals, new_ints, new_masks, chosen):
    """Build the children in `ranked` order, leaving out those that another dominates, until the output is full.

    Returns how many were built and how many of `ranked` were looked at.
    """
    devices, groups, capacity = p.devices, len(p.group_mask), len(new_masks)
    size = 1
    while size < 2 * capacity:
        size *= 2
    heads, chain = np.full(size, -1, np.int64), np.empty(capacity, np.int64)
    shuffles = p.shuffles
    kept = 0
    looked_at = 0
    for index in range(len(ranked)):
        if kept == capacity:
            break
        looked_at += 1
        child = ranked[index]
        new_reals[kept] = reals[parents[child]]
        new_ints[kept] = ints[parents[child]]
        new_masks[kept] = apply(new_reals[kept], new_ints[kept], masks[parents[child]], actions[child], p)
        slot = np.int64(
            (_signature(new_reals[kept], new_ints[kept], new_masks[kept], p) >> np.uint64(20)) & np.uint64(size - 1)
        )
        worse = False
        other = heads[slot]
        last = np.int64(-1)
        for _ in range(0 if p.patient else COMPARED):
            if other < 0 or worse:
                break
            if new_masks[other] == new_masks[kept]:
                for s in range(len(p.shuffles)):
                    if _no_worse(new_reals, new_ints, other, kept, shuffles[s], devices, groups):
                        worse = True
                        break
            last = other
            other = chain[other]
        if worse:
            continue
        if last < 0:
            heads[slot] = kept
            chain[kept] = -1
        else:
            chain[kept] = chain[last]
            chain[last] = kept
        chosen[kept] = child
        kept += 1
    return kept, looked_at
