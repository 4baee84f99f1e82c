"""Compiled loops of grouping: sets, only readers, owners of backward nodes, parameters, and space on devices."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.graph import op_graph
from onnxplace.utils.jit import compiled_loop, linear_in_place, linear_loop

find_root = linear_in_place(op_graph.find_root)


@linear_loop
def join_sets(parent, pinned, refused_by, reason, first, second, code, is_required):
    """Join `first[i]` and `second[i]`, in that order, unless they are pinned to different devices.

    Unless `is_required`, those are not joined either that other devices refuse. The root of a set is its lowest node
    and holds its pin, the set of classes of devices that refuse it, as bits, and its reason: the lowest code that
    joined two of its nodes. Returns which pairs were refused.
    """
    refused = np.zeros(len(first), np.bool_)
    # Refuse a pair whose sets are pinned to two devices; else the lower root keeps the pin and the earliest reason.
    for k in range(len(first)):
        a, b = find_root(parent, np.int64(first[k])), find_root(parent, np.int64(second[k]))
        if a == b:
            continue
        if pinned[a] >= 0 and pinned[b] >= 0 and pinned[a] != pinned[b]:
            refused[k] = True
            continue
        if refused_by[a] != refused_by[b] and not is_required:
            continue
        low, high = min(a, b), max(a, b)
        parent[high] = low
        pinned[low] = max(pinned[low], pinned[high])
        refused_by[low] |= refused_by[high]
        best = code
        if reason[low] > 0:
            best = min(best, reason[low])
        if reason[high] > 0:
            best = min(best, reason[high])
        reason[low] = best
    return refused


@linear_in_place
def join_light_groups(parent, pinned, taken_by, load, first, second, max_load):
    """Join `first[i]` and `second[i]`, in that order, unless they are pinned apart or together heavier than `max_load`.

    Nor are those joined that other devices take: `taken_by` is a number per node for the set of devices. The root of a
    set holds its load and its pin.
    """
    # In the given order, so that the caller decides which pairs take the room that the limit leaves.
    for k in range(len(first)):
        a, b = find_root(parent, np.int64(first[k])), find_root(parent, np.int64(second[k]))
        if a == b or load[a] + load[b] > max_load or taken_by[a] != taken_by[b]:
            continue
        if pinned[a] >= 0 and pinned[b] >= 0 and pinned[a] != pinned[b]:
            continue
        low, high = min(a, b), max(a, b)
        parent[high] = low
        load[low] += load[high]
        pinned[low] = max(pinned[low], pinned[high])


@linear_loop
def number_sets(parent):
    """Return a dense number per node for its set, in order of first nodes, and the number of sets."""
    numbers = np.full(len(parent), -1, np.int32)
    numbered = np.empty(len(parent), np.int32)
    # The first node of a set gives it the next number.
    count = 0
    for node in range(len(parent)):
        root = find_root(parent, node)
        if numbers[root] < 0:
            numbers[root] = count
            count += 1
        numbered[node] = numbers[root]
    return numbered, count


@linear_loop
def first_readers(producer, value_bytes, in_starts, ins, is_counted):
    """Return, per node, its lowest and highest counted reader, and the number and bytes of values that are read.

    Readers are -1 for none.
    """
    count = len(in_starts) - 1
    lowest = np.full(count, -1, np.int32)
    highest = np.full(count, -1, np.int32)
    sent = np.zeros(count, np.int64)
    sent_bytes = np.zeros(count, np.int64)
    is_seen = np.zeros(len(producer), np.bool_)
    # Readers come in ascending order: the first one met is the lowest, the last one the highest.
    for node in range(count):
        if not is_counted[node]:
            continue
        for k in range(in_starts[node], in_starts[node + 1]):
            value = ins[k]
            source = producer[value]
            if source < 0:
                continue
            if lowest[source] < 0:
                lowest[source] = node
            highest[source] = node
            if not is_seen[value]:
                is_seen[value] = True
                sent[source] += 1
                sent_bytes[source] += value_bytes[value]
    return lowest, highest, sent, sent_bytes


@linear_loop
def assign_owners(order, backward, color, producer, in_starts, ins):
    """Return the forward node of each backward node, -1 where neither color (-1: none) nor inputs tell; O(E).

    `coplace` states the rule.
    """
    count = len(order)
    # The latest forward node of each color, and positions in topological order.
    latest = np.full(color.max() + 1 if count else 0, -1, np.int32)
    position = np.empty(count, np.int64)
    for k in range(count):
        node = order[k]
        position[node] = k
        if not backward[node] and color[node] >= 0:
            latest[color[node]] = node
    owner = np.full(count, -1, np.int32)
    for index in range(count):
        node = order[index]
        if not backward[node]:
            continue
        # The latest forward node that it reads, of its own color if it has one; else the last one of its color.
        colored = color[node] >= 0 and latest[color[node]] >= 0
        best = -1
        for k in range(in_starts[node], in_starts[node + 1]):
            source = producer[ins[k]]
            if source < 0 or backward[source] or (colored and color[source] != color[node]):
                continue
            if best < 0 or position[source] > position[best]:
                best = source
        if best < 0 and colored:
            best = latest[color[node]]
        if best >= 0:
            owner[node] = best
    return owner


@linear_loop
def fill_owners(order, is_taken, owner, producer, out_starts, outs, in_starts, ins, read_starts, readers):
    """Complete `owner`: nodes of `is_taken` without one belong where the nearest such node does; O(E).

    Breadth first from the first in topological order, over readers, then producers.
    """
    queue = np.empty(len(order), np.int32)
    tail = 0
    for node in order:
        if is_taken[node] and owner[node] >= 0:
            queue[tail] = node
            tail += 1
    head = 0
    while head < tail:
        node = queue[head]
        head += 1
        for k in range(out_starts[node], out_starts[node + 1]):
            for j in range(read_starts[outs[k]], read_starts[outs[k] + 1]):
                neighbour = readers[j]
                if is_taken[neighbour] and owner[neighbour] < 0:
                    owner[neighbour] = owner[node]
                    queue[tail] = neighbour
                    tail += 1
        for k in range(in_starts[node], in_starts[node + 1]):
            neighbour = producer[ins[k]]
            if neighbour >= 0 and is_taken[neighbour] and owner[neighbour] < 0:
                owner[neighbour] = owner[node]
                queue[tail] = neighbour
                tail += 1
    return owner


@linear_loop
def label_derived(order, producer, in_starts, ins, value_label, is_carried):
    """Return, per node, the label that all values it reads come from alone, -1 for other nodes; O(E).

    `value_label` labels values without producer. Values that are not `is_carried` pass nothing on.
    """
    label = np.full(len(order), -1, np.int32)
    for node in order:
        joined = -1
        for k in range(in_starts[node], in_starts[node + 1]):
            value = ins[k]
            source = producer[value]
            own = value_label[value] if source < 0 else label[source]
            # A value without label, and one with another label, end it.
            if own < 0 or not is_carried[value] or (joined >= 0 and own != joined):
                joined = -1
                break
            joined = own
        label[node] = joined
    return label


@compiled_loop
def choose_devices(sequence, choices, pinned, weight_starts, weights, weight_bytes, staying_bytes, step_bytes, limit):
    """Give each group, in `sequence`, the first of its `choices` (or its pin) that has room for it.

    A device holds each weight once, `staying_bytes` of each group, and the largest `step_bytes` of one. Returns the
    device per group, -1 from the first group on that fits nowhere, and that group (-1 if all fit).
    """
    stored = np.zeros((len(limit), len(weight_bytes)), np.bool_)
    used_bytes = np.zeros(len(limit), np.int64)
    largest_step = np.zeros(len(limit), np.int64)
    device = np.full(len(pinned), -1, np.int32)
    for group in sequence:
        for choice in choices[group]:
            if pinned[group] >= 0 and choice != pinned[group]:
                continue
            # Weights that the device stores already cost nothing.
            added_bytes = staying_bytes[group]
            for k in range(weight_starts[group], weight_starts[group + 1]):
                if not stored[choice, weights[k]]:
                    added_bytes += weight_bytes[weights[k]]
            # Nodes run one at a time, so only the largest need of a step counts.
            needed_step = max(largest_step[choice], step_bytes[group])
            if used_bytes[choice] + added_bytes + needed_step <= limit[choice]:
                device[group] = choice
                used_bytes[choice] += added_bytes
                largest_step[choice] = needed_step
                for k in range(weight_starts[group], weight_starts[group + 1]):
                    stored[choice, weights[k]] = True
                break
        # Stop at the first group without room; the caller names it.
        if device[group] < 0:
            return device, group
    return device, -1
