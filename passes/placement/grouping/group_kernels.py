"""The hot loops of grouping: disjoint sets, who reads what, who follows whom, which device has room."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils import compiled_loop, in_place


@in_place
def find(parent, node):
    """Root of the set of `node`; halves the path on the way."""
    while parent[node] != node:
        parent[node] = parent[parent[node]]
        node = parent[node]
    return node


@compiled_loop
def join(parent, pinned, reason, first, second, code):
    """Join `first[i]` and `second[i]`, in that order, unless they are pinned to different devices.

    The root of a set is its lowest node and holds its pin and its reason: the lowest code that joined two of its
    nodes. Returns which pairs were refused.
    """
    refused = np.zeros(len(first), np.bool_)
    for k in range(len(first)):
        a, b = find(parent, np.int64(first[k])), find(parent, np.int64(second[k]))
        if a == b:
            continue
        if pinned[a] >= 0 and pinned[b] >= 0 and pinned[a] != pinned[b]:
            refused[k] = True
            continue
        low, high = min(a, b), max(a, b)
        parent[high] = low
        pinned[low] = max(pinned[low], pinned[high])
        best = code
        if reason[low] > 0:
            best = min(best, reason[low])
        if reason[high] > 0:
            best = min(best, reason[high])
        reason[low] = best
    return refused


@in_place
def join_light_groups(parent, pinned, load, first, second, most):
    """Join `first[i]` and `second[i]`, in that order, unless they are pinned apart or together heavier than `most`.

    The root of a set holds its load and its pin.
    """
    for k in range(len(first)):
        a, b = find(parent, np.int64(first[k])), find(parent, np.int64(second[k]))
        if a == b or load[a] + load[b] > most:
            continue
        if pinned[a] >= 0 and pinned[b] >= 0 and pinned[a] != pinned[b]:
            continue
        low, high = min(a, b), max(a, b)
        parent[high] = low
        load[low] += load[high]
        pinned[low] = max(pinned[low], pinned[high])


@compiled_loop
def number_sets(parent):
    """Dense number per node of its set, by first node, and how many sets there are."""
    numbers = np.full(len(parent), -1, np.int32)
    numbered = np.empty(len(parent), np.int32)
    count = 0
    for node in range(len(parent)):
        root = find(parent, node)
        if numbers[root] < 0:
            numbers[root] = count
            count += 1
        numbered[node] = numbers[root]
    return numbered, count


@compiled_loop
def first_readers(producer, value_bytes, in_starts, ins, counts):
    """Who reads each node's values, of the readers that count.

    Returns per node: its lowest reader (-1 if none), its highest, how many of its values are read, and their bytes.
    """
    count = len(in_starts) - 1
    lowest = np.full(count, -1, np.int32)
    highest = np.full(count, -1, np.int32)
    sent = np.zeros(count, np.int64)
    sent_bytes = np.zeros(count, np.int64)
    seen = np.zeros(len(producer), np.bool_)
    for node in range(count):
        if not counts[node]:
            continue
        for k in range(in_starts[node], in_starts[node + 1]):
            value = ins[k]
            maker = producer[value]
            if maker < 0:
                continue
            if lowest[maker] < 0:
                lowest[maker] = node
            highest[maker] = node
            if not seen[value]:
                seen[value] = True
                sent[maker] += 1
                sent_bytes[maker] += value_bytes[value]
    return lowest, highest, sent, sent_bytes


@compiled_loop
def owners(order, backward, color, producer, out_starts, outs, in_starts, ins, read_starts, readers):
    """The forward node that each backward node belongs to, -1 for none and for forward nodes.

    By color (-1: none), by what it reads, else that of the nearest backward node: `coplace` states the rule.
    """
    count = len(order)
    latest = np.full(color.max() + 1 if count else 0, -1, np.int32)
    position = np.empty(count, np.int64)
    for k in range(count):
        node = order[k]
        position[node] = k
        if not backward[node] and color[node] >= 0:
            latest[color[node]] = node
    owner = np.full(count, -1, np.int32)
    queue = np.empty(count, np.int32)
    tail = 0
    for at in range(count):
        node = order[at]
        if not backward[node]:
            continue
        colored = color[node] >= 0 and latest[color[node]] >= 0
        best = -1
        for k in range(in_starts[node], in_starts[node + 1]):
            maker = producer[ins[k]]
            if maker < 0 or backward[maker] or (colored and color[maker] != color[node]):
                continue
            if best < 0 or position[maker] > position[best]:
                best = maker
        if best < 0 and colored:
            best = latest[color[node]]
        if best >= 0:
            owner[node] = best
            queue[tail] = node
            tail += 1
    head = 0
    while head < tail:
        node = queue[head]
        head += 1
        for k in range(out_starts[node], out_starts[node + 1]):
            for j in range(read_starts[outs[k]], read_starts[outs[k] + 1]):
                other = readers[j]
                if backward[other] and owner[other] < 0:
                    owner[other] = owner[node]
                    queue[tail] = other
                    tail += 1
        for k in range(in_starts[node], in_starts[node + 1]):
            other = producer[ins[k]]
            if other >= 0 and backward[other] and owner[other] < 0:
                owner[other] = owner[node]
                queue[tail] = other
                tail += 1
    return owner


@compiled_loop
def choose_devices(sequence, choices, pinned, weight_starts, weights, weight_bytes, staying_bytes, step_bytes, limit):
    """Give each group, in `sequence`, the first of its `choices` (or its pin) that has room for it.

    A device holds each weight once, what stays of each group, and what the neediest step of one takes. Returns the
    device per group, -1 from the first group on that fits nowhere, and that group (-1 if all fit).
    """
    held = np.zeros((len(limit), len(weight_bytes)), np.bool_)
    used = np.zeros(len(limit), np.int64)
    step = np.zeros(len(limit), np.int64)
    device = np.full(len(pinned), -1, np.int32)
    for group in sequence:
        for choice in choices[group]:
            if pinned[group] >= 0 and choice != pinned[group]:
                continue
            more = staying_bytes[group]
            for k in range(weight_starts[group], weight_starts[group + 1]):
                if not held[choice, weights[k]]:
                    more += weight_bytes[weights[k]]
            need = max(step[choice], step_bytes[group])
            if used[choice] + more + need <= limit[choice]:
                device[group] = choice
                used[choice] += more
                step[choice] = need
                for k in range(weight_starts[group], weight_starts[group + 1]):
                    held[choice, weights[k]] = True
                break
        if device[group] < 0:
            return device, group
    return device, -1
