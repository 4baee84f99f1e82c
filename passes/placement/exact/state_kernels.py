"""Actions on states of the branch and bound: start a node, or send a value.

`branch_kernels` describes the arrays of a state and the numbers of actions.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils.jit import compiled_part, in_place

# Later than any time of a step, and finite.
NEVER = 1e300


@compiled_part
def count_bits(bits):
    """Return the number of bits that are set."""
    number = 0
    while bits:
        bits &= bits - 1
        number += 1
    return number


@compiled_part
def may_be_read_on(value, destination, mask, group_device, tables):
    """Return whether some unstarted reader of the value may run on this device."""
    for k in range(tables.read_starts[value], tables.read_starts[value + 1]):
        reader = tables.readers[k]
        if not (mask >> reader) & 1:
            g = tables.group[reader]
            if group_device[g] == destination or (group_device[g] < 0 and tables.allowed[g, destination]):
                return True
    return False


@compiled_part
def is_next_device(destination, touched, tables):
    """Return whether a device is in use, or the first unused one of interchangeable devices."""
    if (touched >> destination) & 1:
        return True
    unused = 0
    for d in range(destination):
        unused += tables.alike[d] == tables.alike[destination] and not (touched >> d) & 1
    return unused == 0


@compiled_part
def advance_sends(reals, ints, mask, home, tables):
    """Skip values of the node on `home` without readers elsewhere; free the device after the last value."""
    devices, groups = tables.devices, len(tables.group_mask)
    node = ints[groups + home]
    position = ints[groups + devices + home]
    while position < tables.out_starts[node + 1] - tables.out_starts[node]:
        value = tables.outs[tables.out_starts[node] + position]
        for destination in range(devices):
            if destination != home and may_be_read_on(value, destination, mask, ints[:groups], tables):
                ints[groups + devices + home] = position
                return
        position += 1
    ints[groups + home] = -1
    ints[groups + devices + home] = 0


@compiled_part
def _delays_others(reals, home, destinations, tables):
    """Return whether a late send can have a reason: some channel was used since the node finished."""
    devices = tables.devices
    if destinations[0] < 0:
        return True
    for k in range(devices):
        if destinations[k] < 0:
            break
        if reals[1 + 2 * devices + destinations[k]] > reals[1 + home]:
            return True
    return reals[1 + devices + home] > reals[1 + home]


@in_place
def apply_action(reals, ints, mask, action, tables):
    """Apply an action to a state in place; return the new set of started nodes, -1 if it is not allowed."""
    devices, groups, count = tables.devices, len(tables.group_mask), len(tables.group)
    base, promised = 1 + 7 * devices, groups + 2 * devices + 1
    if action < count * devices:
        # Start a node, when its inputs have arrived and its device is free.
        node, home = action // devices, action % devices
        group = tables.group[node]
        earliest = reals[1 + home]
        for k in range(tables.in_starts[node], tables.in_starts[node + 1]):
            earliest = max(earliest, reals[base + tables.ins[k] * devices + home])
        if earliest >= NEVER:
            return np.int64(-1)
        # Its processors are free once the nodes before it there have finished. In turn, none of those asked later.
        ready, asked = earliest, 1 + 5 * devices + home
        earliest = max(ready, reals[1 + 4 * devices + home])
        if tables.in_turn > 0 and ready < reals[asked]:
            return np.int64(-1)
        if tables.in_turn > 1 and ready == reals[asked] and node < reals[asked + devices]:
            return np.int64(-1)
        if earliest < reals[0] and tables.seconds[home, node] > 0.0:
            return np.int64(-1)  # the same with an earlier start is another state, and no worse
        begin = max(reals[0], earliest)
        if not tables.delays:
            for d in range(devices):
                if ints[groups + d] >= 0 and reals[1 + d] < begin:
                    return np.int64(-1)  # nodes that have finished by then send first
        # Memory: the weights of its group, the node itself, and, if `careful`, all values on hand.
        if (tables.group_mask[group] & mask) == 0:
            reals[1 + 3 * devices + home] += tables.group_bytes[group]
        needed = reals[1 + 3 * devices + home] + tables.node_bytes[node]
        if tables.careful:
            for value in range(len(tables.read_mask)):
                has_readers = (tables.read_mask[value] & ~mask) != 0
                if has_readers and reals[base + value * devices + home] < NEVER:
                    needed += tables.value_bytes[value]
        if needed > tables.limit[home]:
            return np.int64(-1)
        # Record the start. A group is closed once its last node has started.
        finish = begin + tables.seconds[home, node]
        reals[0] = begin
        reals[1 + home] = finish
        for d in range(devices):
            if d != home and tables.conflicts[home, d]:
                asked = 1 + 5 * devices + d
                reals[asked - devices] = max(reals[asked - devices], finish)
                if ready > reals[asked] or (ready == reals[asked] and node > reals[asked + devices]):
                    reals[asked], reals[asked + devices] = ready, node
        mask |= np.int64(1) << node
        ints[group] = home if (tables.group_mask[group] & ~mask) != 0 else -1
        ints[groups + 2 * devices] |= 1 << home
        # Inputs are read here. A value must not be sent to more devices than it has readers left.
        for k in range(tables.in_starts[node], tables.in_starts[node + 1]):
            value = tables.ins[k]
            ints[promised + value] &= ~(1 << home)
            if count_bits(ints[promised + value]) > count_bits(tables.read_mask[value] & ~mask):
                return np.int64(-1)
            if (tables.read_mask[value] & ~mask) == 0:
                for d in range(devices):
                    reals[base + value * devices + d] = 0.0
        # Outputs are here at once; elsewhere after a transfer, or once an action sends them.
        for k in range(tables.out_starts[node], tables.out_starts[node + 1]):
            value = tables.outs[k]
            for d in range(devices):
                reals[base + value * devices + d] = finish + tables.send[value, home, d] if tables.free_links else NEVER
            reals[base + value * devices + home] = finish
        if not tables.free_links:
            ints[groups + home] = node
            ints[groups + devices + home] = 0
            advance_sends(reals, ints, mask, home, tables)
        return mask
    # Send the next value of the node that has finished on `home` to a tuple of devices.
    code = action - count * devices
    home, choice = code // len(tables.tuples), code % len(tables.tuples)
    node = ints[groups + home]
    value = tables.outs[tables.out_starts[node] + ints[groups + devices + home]]
    is_late = reals[0] > reals[1 + home]
    if is_late and not _delays_others(reals, home, tables.tuples[choice], tables):
        return np.int64(-1)  # the same with an earlier send is another state, and a better one
    reals[0] = max(reals[0], reals[1 + home])
    reals[1 + home] = reals[0]
    reals[base + value * devices + home] = reals[0]
    # Transfers of one value go out in the order of the tuple.
    for k in range(devices):
        destination = tables.tuples[choice, k]
        if destination < 0:
            break
        if destination == home or not is_next_device(destination, ints[groups + 2 * devices], tables):
            return np.int64(-1)
        if not may_be_read_on(value, destination, mask, ints[:groups], tables):
            return np.int64(-1)
        ints[groups + 2 * devices] |= 1 << destination
        ints[promised + value] |= 1 << destination
        begin = max(reals[0], reals[1 + devices + home])
        if tables.receives:
            begin = max(begin, reals[1 + 2 * devices + destination])
        end = begin + tables.send[value, home, destination]
        reals[1 + devices + home] = end
        reals[base + value * devices + destination] = end
        if tables.receives:
            reals[1 + 2 * devices + destination] = end
            if tables.one_channel:
                reals[1 + devices + destination] = end
                reals[1 + 2 * devices + home] = end
    if count_bits(ints[promised + value]) > tables.read_starts[value + 1] - tables.read_starts[value]:
        return np.int64(-1)
    ints[groups + devices + home] += 1
    advance_sends(reals, ints, mask, home, tables)
    return mask
