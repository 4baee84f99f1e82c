"""Compiled loops of recomputation: where clones run, and how long buffers live with them."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from onnxplace.utils.jit import in_place


@in_place
def place_clones(order, position, turn, is_cloned, out_starts, outs, read_starts, readers, clone_slot, slots, sequence):
    """Place each clone directly before its first reader; number all nodes and clones in their sequence.

    Readers behind the position `turn` read the clone of a value, earlier ones the value. Fills `clone_slot` (per node,
    the position before which its clone runs; `len(order)` for clones that nothing reads) and `sequence`: row 0 numbers
    nodes, row 1 clones (-1 before). `slots` (one longer than `order`) counts clones before each position, zero before.
    Returns the length of the sequence.
    """
    count = len(order)
    # From the last node back: the clones that read a clone are placed before it is.
    for p in range(turn, -1, -1):
        node = order[p]
        if not is_cloned[node]:
            continue
        slot = count
        for k in range(out_starts[node], out_starts[node + 1]):
            for j in range(read_starts[outs[k]], read_starts[outs[k] + 1]):
                reader = readers[j]
                if position[reader] > turn:
                    slot = min(slot, position[reader])
                elif is_cloned[reader]:
                    slot = min(slot, clone_slot[reader])
        clone_slot[node] = slot
        slots[slot] += 1
    # `slots` becomes the number in the sequence of the next clone of each slot.
    following = 0
    for p in range(count):
        clones = slots[p]
        slots[p] = following
        following += clones
        sequence[0, order[p]] = following
        following += 1
    for p in range(turn + 1):
        node = order[p]
        if is_cloned[node] and clone_slot[node] < count:
            sequence[1, node] = slots[clone_slot[node]]
            slots[clone_slot[node]] += 1
    return following


@in_place
def buffer_spans(
    producer, alias, is_output, position, turn, is_cloned, in_starts, ins, read_starts, readers, sequence, end, span
):
    """Compute the first and last number in the sequence of each buffer.

    `span[0]` and `span[1]` are first and last of the values, `span[2]` and `span[3]` of their clones; -1 before, and
    for buffers that do not exist or that another one holds, being views.
    """
    for value in range(len(producer)):
        node = producer[value]
        cloned = node >= 0 and is_cloned[node]
        span[0, value] = sequence[0, node] if node >= 0 else 0
        # An input that is also returned is the caller's: it is held until its last reader.
        span[1, value] = end - 1 if is_output[value] and node >= 0 else span[0, value]
        if cloned:
            span[2, value] = sequence[1, node]
            span[3, value] = sequence[1, node]
        for j in range(read_starts[value], read_starts[value + 1]):
            reader = readers[j]
            which = 3 if cloned and position[reader] > turn else 1
            span[which, value] = max(span[which, value], sequence[0, reader])
    # Clones read clones, or values that stay until then.
    for node in range(len(is_cloned)):
        if is_cloned[node] and sequence[1, node] >= 0:
            for k in range(in_starts[node], in_starts[node + 1]):
                source = producer[ins[k]]
                which = 3 if source >= 0 and is_cloned[source] else 1
                span[which, ins[k]] = max(span[which, ins[k]], sequence[1, node])
    # A buffer lives as long as its views, the last of which have the highest indices.
    for value in range(len(producer) - 1, -1, -1):
        source = alias[value]
        if source < 0 or producer[value] < 0:
            continue
        span[1, source] = max(span[1, source], span[1, value])
        span[0, value] = -1
        if span[2, value] >= 0:
            origin = producer[source]
            which = 3 if origin >= 0 and is_cloned[origin] else 1
            span[which, source] = max(span[which, source], span[3, value])
            span[2, value] = -1
