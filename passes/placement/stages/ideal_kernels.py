"""Ideals (sets of nodes with all their predecessors) of a graph, and dynamic programming over them: the kernels.

Nodes are numbered in topological order. An ideal is written as its nodes in ascending order; without its last node it
is an ideal too, its *parent*. So ideals form a tree, and none is met twice if only nodes behind the last one are added
(or, from an ideal downwards, only nodes before the one removed last). Ideals are numbered in preorder of that tree,
larger nodes first, which puts every ideal behind all of its subsets. Neither bitsets nor a hash table are needed.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils import compiled_loop, in_place

DUPLEX, SEQUENTIAL, PARALLEL, SUM, TRAFFIC = range(5)
"""How the load of a stage follows from its compute, sends and receives; see `combined`."""


@compiled_loop
def enumerate_ideals(pred_starts, succ_starts, succs, limit):
    """Return parent, last node, and per ideal the nodes that can be added with the ideals they lead to.

    The third array, where the lists start, has length 1 if there are more than `limit` ideals; then the result is of
    no use. An ideal to which w nodes can be added has 2^w ideals above it, so lists are short. O(ideals * width).
    """
    nodes = len(pred_starts) - 1
    widest = 0
    while 2 ** (widest + 1) <= limit:
        widest += 1
    waiting = np.empty(nodes, np.int64)
    parent = np.full(limit, -1, np.int32)
    last = np.full(limit, -1, np.int32)
    starts = np.zeros(limit + 1, np.int64)
    add = np.empty(4 * limit + nodes, np.int32)
    leads = np.empty(4 * limit + nodes, np.int32)
    stack = np.empty(nodes + 1, np.int64)
    pointer = np.empty(nodes + 1, np.int64)
    edges = 0
    for node in range(nodes):
        waiting[node] = pred_starts[node + 1] - pred_starts[node]
        if waiting[node] == 0:
            add[edges] = node
            leads[edges] = -1
            edges += 1
    starts[1] = edges
    count = 1
    depth = 0
    stack[0] = 0
    pointer[0] = edges - 1
    while depth >= 0:
        ideal = stack[depth]
        e = pointer[depth]
        if e < starts[ideal] or add[e] < last[ideal]:
            if depth > 0:
                x = last[ideal]
                for k in range(succ_starts[x], succ_starts[x + 1]):
                    waiting[succs[k]] += 1
            depth -= 1
            continue
        pointer[depth] -= 1
        if count == limit or starts[ideal + 1] - starts[ideal] > widest:
            return parent, last, starts[:1], add, leads
        x = add[e]
        child = count
        count += 1
        parent[child] = ideal
        last[child] = x
        leads[e] = child
        width = starts[ideal + 1] - starts[ideal]
        if edges + width + succ_starts[x + 1] - succ_starts[x] > len(add):
            more = np.empty(len(add) + width + nodes, np.int32)
            add = np.concatenate((add, more))
            leads = np.concatenate((leads, more))
        for k in range(starts[ideal], starts[ideal + 1]):
            if add[k] != x:
                add[edges] = add[k]
                leads[edges] = -1
                edges += 1
        for k in range(succ_starts[x], succ_starts[x + 1]):
            y = succs[k]
            waiting[y] -= 1
            if waiting[y] == 0:
                at = edges
                while at > starts[child] and add[at - 1] > y:
                    add[at] = add[at - 1]
                    at -= 1
                add[at] = y
                leads[edges] = -1
                edges += 1
        starts[child + 1] = edges
        depth += 1
        stack[depth] = child
        pointer[depth] = edges - 1
    # I = P + {z} and x < z, x addable to I: then x is addable to P, and I + {x} = (P + {x}) + {z}.
    for ideal in range(1, count):
        z = last[ideal]
        for e in range(starts[ideal], starts[ideal + 1]):
            if add[e] > z:
                break
            k = starts[parent[ideal]]
            while add[k] != add[e]:
                k += 1
            beside = leads[k]
            k = starts[beside]
            while add[k] != z:
                k += 1
            leads[e] = leads[k]
    return parent[:count], last[:count], starts[: count + 1], add[:edges], leads[:edges]


@compiled_loop
def removals(starts, add, leads):
    """Turn `(node that can be added, ideal)` lists into `(node that can be removed, ideal)` lists, nodes ascending."""
    count = len(starts) - 1
    down_starts = np.zeros(count + 1, np.int64)
    for e in range(len(leads)):
        down_starts[leads[e] + 1] += 1
    for ideal in range(count):
        down_starts[ideal + 1] += down_starts[ideal]
    end = down_starts[:-1].copy()
    down_node = np.empty(len(leads), np.int32)
    down_ideal = np.empty(len(leads), np.int32)
    for ideal in range(count):
        for e in range(starts[ideal], starts[ideal + 1]):
            above = leads[e]
            at = end[above]
            while at > down_starts[above] and down_node[at - 1] > add[e]:
                down_node[at] = down_node[at - 1]
                down_ideal[at] = down_ideal[at - 1]
                at -= 1
            down_node[at] = add[e]
            down_ideal[at] = ideal
            end[above] += 1
    return down_starts, down_node, down_ideal


@in_place
def combined(rule, compute, sent, received):
    """Load of a stage under one of the rules at the top of this file."""
    if rule == 0:
        return max(compute, max(sent, received))
    if rule == 1:
        return max(compute, sent + received)
    if rule == 2:
        return compute
    if rule == 3:
        return compute + sent + received
    return received


@in_place
def stages_below(
    ideal,
    lattice,
    graph,
    costs,
    times,
    rule,
    bound,
    scratch,
    found,
    load,
):
    """List the stages that end with `ideal`: where they begin (`found`) and their load on each class of device.

    A stage is what an ideal has more than a smaller one. Nodes are removed one by one, last first; memory, computing
    and sends only grow, so what exceeds them before a stage may begin again (`away`) is not followed further. `times`
    says how often each value is sent if it is made in the stage. Loads of `bound` and more are infinite. Returns how
    many there are; leaves `scratch` zero.
    """
    down_starts, down_node, down_ideal, cut, away = lattice
    producer, out_starts, outs, in_starts, ins, weight_starts, weights, weight_bytes = graph
    seconds, send, receive, limit, need = costs
    reads, holds, stack, pointer, compute, sent, received, held, largest = scratch
    classes = len(limit)
    count = 0
    depth = 0
    stack[0] = ideal
    pointer[0] = down_starts[ideal + 1] - 1
    while depth >= 0:
        here = stack[depth]
        e = pointer[depth]
        if e < down_starts[here]:
            if depth > 0:
                x = down_node[pointer[depth - 1] + 1]
                for k in range(in_starts[x], in_starts[x + 1]):
                    reads[ins[k]] -= 1
                for k in range(weight_starts[x], weight_starts[x + 1]):
                    holds[weights[k]] -= 1
            depth -= 1
            continue
        pointer[depth] -= 1
        x = down_node[e]
        if depth > 0 and x > down_node[pointer[depth - 1] + 1]:
            continue
        weight = held[depth]
        for k in range(weight_starts[x], weight_starts[x + 1]):
            if holds[weights[k]] == 0:
                weight += weight_bytes[weights[k]]
        most = max(largest[depth], need[x])
        possible = False
        for c in range(classes):
            outward = sent[depth, c]
            for k in range(out_starts[x], out_starts[x + 1]):
                if times[outs[k]] > 0:
                    outward += times[outs[k]] * send[c, outs[k]]
            sent[depth + 1, c] = outward
            compute[depth + 1, c] = compute[depth, c] + seconds[c, x]
            if weight + most > limit[c]:
                compute[depth + 1, c] = np.inf
            possible = possible or (
                compute[depth + 1, c] < np.inf
                and combined(rule, compute[depth + 1, c] + away[down_ideal[e]], outward, 0.0) < bound
            )
        if not possible:
            continue
        for c in range(classes):
            inward = received[depth, c]
            for k in range(out_starts[x], out_starts[x + 1]):
                if reads[outs[k]] > 0:
                    inward -= receive[c, outs[k]]
            for k in range(in_starts[x], in_starts[x + 1]):
                if producer[ins[k]] >= 0 and reads[ins[k]] == 0:
                    inward += receive[c, ins[k]]
            received[depth + 1, c] = inward
        for k in range(in_starts[x], in_starts[x + 1]):
            reads[ins[k]] += 1
        for k in range(weight_starts[x], weight_starts[x + 1]):
            holds[weights[k]] += 1
        depth += 1
        stack[depth] = down_ideal[e]
        pointer[depth] = down_starts[down_ideal[e] + 1] - 1
        held[depth] = weight
        largest[depth] = most
        if cut[down_ideal[e]]:
            useful = False
            for c in range(classes):
                amount = np.inf
                if compute[depth, c] < bound:
                    amount = combined(rule, compute[depth, c], sent[depth, c], max(received[depth, c], 0.0))
                    if amount >= bound:
                        amount = np.inf
                load[count, c] = amount
                useful = useful or amount < np.inf
            if useful:
                found[count] = down_ideal[e]
                count += 1
    return count


@compiled_loop
def new_scratch(nodes, values, weights, classes):
    """Working memory of `stages_below`."""
    return (
        np.zeros(values, np.int64),
        np.zeros(weights, np.int64),
        np.empty(nodes + 1, np.int64),
        np.empty(nodes + 1, np.int64),
        np.zeros((nodes + 1, classes), np.float64),
        np.zeros((nodes + 1, classes), np.float64),
        np.zeros((nodes + 1, classes), np.float64),
        np.zeros(nodes + 1, np.int64),
        np.zeros(nodes + 1, np.int64),
    )


@in_place
def cross(x, sign, unread, graph):
    """Count node `x` in (1) or out (-1) of an ideal in `unread`: per value made inside, its readers outside."""
    producer, out_starts, outs, in_starts, ins, read_starts = graph
    for k in range(in_starts[x], in_starts[x + 1]):
        if producer[ins[k]] >= 0:
            unread[ins[k]] -= sign
    for k in range(out_starts[x], out_starts[x + 1]):
        value = outs[k]
        unread[value] = read_starts[value + 1] - read_starts[value] if sign > 0 else 0


@in_place
def walk(ideal, depth, path, parent, last, unread, graph):
    """Move along the tree of ideals, from the end of `path` to `ideal`, keeping `unread`; return the new depth."""
    missing = 0
    step = ideal
    while step != path[depth]:
        if path[depth] > step:
            cross(last[path[depth]], -1, unread, graph)
            depth -= 1
        else:
            step = parent[step]
            missing += 1
    step = ideal
    for back in range(missing):
        path[depth + missing - back] = step
        step = parent[step]
    for ahead in range(missing):
        cross(last[path[depth + 1 + ahead]], 1, unread, graph)
    return depth + missing


@compiled_loop
def windows(parent, last, cut, walked, rule, bound, fastest, send, receive, used, possible):
    """Mark in `possible[ideal, set]` where a split that costs less than `bound` may pass through.

    The devices in the set must have time for the ideal and what crosses its border, the others for the rest.
    """
    nodes, values = len(fastest), len(walked[0])
    work = np.zeros(len(parent), np.float64)
    unread = np.zeros(values, np.int64)
    path = np.zeros(nodes + 1, np.int64)
    depth = 0
    devices = used[len(used) - 1]
    whole = fastest.sum()
    slack = bound * (1.0 + 1e-9)
    for ideal in range(len(parent)):
        if ideal > 0:
            work[ideal] = work[parent[ideal]] + fastest[last[ideal]]
        if not cut[ideal]:
            continue
        depth = walk(ideal, depth, path, parent, last, unread, walked)
        out = 0.0
        inward = 0.0
        if rule != 2 and rule != 4:
            for v in range(values):
                if unread[v] > 0:
                    out += send[v]
                    inward += receive[v]
        for s in range(len(used)):
            room = used[s] * slack
            rest = (devices - used[s]) * slack
            if rule == 3:
                possible[ideal, s] = work[ideal] + out <= room and whole - work[ideal] + inward <= rest
            else:
                possible[ideal, s] = max(work[ideal], out) <= room and max(whole - work[ideal], inward) <= rest


@compiled_loop
def sweep(
    first,
    end,
    parent,
    last,
    lattice,
    graph,
    walked,
    costs,
    rule,
    bound,
    step,
    has,
    possible,
    fastest,
    best,
    origin,
    by,
):
    """Fill in `best[ideal, set of devices]` for ideals `first` to `end`; all smaller ideals must be filled in.

    It is the least that the largest load (rule `TRAFFIC`: the sum of loads) can be if the nodes of the ideal are
    split into stages for these devices; `origin` and `by` say where the last stage begins and the class of its
    device. A device may stay unused. What cannot lead to less than `bound` stays infinite, and is taken out of the
    ideals where stages may begin. Returns how many stages were looked at.
    """
    down_starts, down_node, down_ideal, cut, away = lattice
    nodes, values, classes = len(walked[1]) - 1, len(walked[0]), len(step)
    scratch = new_scratch(nodes, values, len(graph[7]), classes)
    found = np.empty(len(parent), np.int32)
    load = np.empty((len(parent), classes), np.float64)
    unread = np.zeros(values, np.int64)
    path = np.zeros(nodes + 1, np.int64)
    depth = 0
    looked = 0
    for ideal in range(first, end):
        # What a stage still has to take in from here to begin anywhere at all.
        away[ideal] = 0.0 if ideal == 0 else np.inf
        for e in range(down_starts[ideal], down_starts[ideal + 1]):
            away[ideal] = min(away[ideal], away[down_ideal[e]] + fastest[down_node[e]])
        if ideal == 0 or not cut[ideal]:
            continue
        depth = walk(ideal, depth, path, parent, last, unread, walked)
        count = stages_below(ideal, lattice, graph, costs, np.minimum(unread, 1), rule, bound, scratch, found, load)
        looked += count
        for c in range(classes):
            for s in range(possible.shape[1]):
                if not has[s, c] or not possible[ideal, s]:
                    continue
                before = s - step[c]
                least = best[ideal, s]
                for k in range(count):
                    whole = best[found[k], before]
                    whole = whole + load[k, c] if rule == 4 else max(whole, load[k, c])
                    if whole < least and whole < bound:
                        least = whole
                        origin[ideal, s] = found[k]
                        by[ideal, s] = c
                best[ideal, s] = least
        cut[ideal] = best[ideal].min() < bound
        if cut[ideal]:
            away[ideal] = 0.0
    return looked
