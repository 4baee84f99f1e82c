"""Compiled loops of recognising training steps: what nodes lead to, what they come from, and their forward nodes.

A label is the index of a parameter, `NONE` for no parameter, or `MANY` for several.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils.jit import compiled_part, linear_loop

NONE = -1
MANY = -2


@compiled_part
def _join(one, other):
    """Return the label of what has two labels."""
    if one == NONE:
        return other
    if other == NONE:
        return one
    return one if one == other else MANY


@linear_loop
def label_ends(order, in_starts, ins, out_starts, outs, value_label, is_scalar):
    """Return, per node and per value, the label of the ends that it leads to; O(E).

    `value_label` labels the ends. What leads to several ends through a value of `is_scalar` is not counted: one number
    that all parameters share, such as a norm of all gradients, connects none of them.
    """
    label = value_label.copy()
    node_label = np.full(len(order), NONE, np.int32)
    # Against the order: all readers of a value come before its producer.
    for index in range(len(order) - 1, -1, -1):
        node = order[index]
        joined = NONE
        for k in range(out_starts[node], out_starts[node + 1]):
            value = outs[k]
            if is_scalar[value] and label[value] == MANY:
                continue
            joined = _join(joined, label[value])
        node_label[node] = joined
        for k in range(in_starts[node], in_starts[node + 1]):
            label[ins[k]] = _join(label[ins[k]], joined)
    return node_label, label


@linear_loop
def label_origins(order, producer, in_starts, ins, own_label, value_label, carries):
    """Return, per node, the label of what it comes from; O(E).

    A node comes from `own_label` of the producers of its inputs, from `value_label` of values without producer, and
    from what its producers come from. Nodes pass on what they come from only where they carry it.
    """
    label = np.full(len(order), NONE, np.int32)
    for node in order:
        if not carries[node]:
            continue
        joined = NONE
        for k in range(in_starts[node], in_starts[node + 1]):
            source = producer[ins[k]]
            if source < 0:
                joined = _join(joined, value_label[ins[k]])
            elif own_label[source] != NONE:
                joined = _join(joined, own_label[source])
            else:
                joined = _join(joined, label[source])
        label[node] = joined
    return label


@linear_loop
def assign_forward_nodes(order, is_forward, is_backward, owner, producer, value_bytes, in_starts, ins):
    """Complete `owner`, the forward node per backward node, by what backward nodes read; O(E).

    That is the producer of the largest forward value that a backward node reads, the last input of several. Owners that
    are given stay.
    """
    for node in order:
        if not is_backward[node] or owner[node] >= 0:
            continue
        largest = np.int64(-1)
        for k in range(in_starts[node], in_starts[node + 1]):
            source = producer[ins[k]]
            if source >= 0 and is_forward[source] and value_bytes[ins[k]] >= largest:
                largest = value_bytes[ins[k]]
                owner[node] = source
    return owner
