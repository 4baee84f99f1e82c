"""Compiled loops of the branch and bound of `exact`: expand the states of a layer, and select the next layer.

A state is a step that is partly scheduled, one action after the other. It consists of

- a row of floats: the time of the last action; then per device when it is free, when its outgoing and its incoming
  channel are free, the bytes of weights on it, when other devices leave its processors, and when and for which node
  one of those last asked for them; then per value and device when the value arrives there;
- a row of integers: the device of each open group; per device the node whose values wait to be sent, and the index of
  the next of them; the devices in use as bits; per value, as bits, the devices it was sent to and not yet read on;
- the set of started nodes, as bits of one integer.

No action is earlier than the one before it. Actions are integers: `node * D + device` starts a node; from `N * D` on, a
value that has been produced is sent to a tuple of devices, perhaps none.

Dominated states may be left out: all times follow from the sequence of actions by sums and maxima, so what completes
the worse state completes the better one, no later. States in which an idle device could have started earlier are left
out too: starting earlier gives another state, strictly better, with as many actions.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs
from onnxplace.passes.placement.exact.bound_kernels import bound_state
from onnxplace.passes.placement.exact.state_kernels import NEVER, apply_action, is_next_device
from onnxplace.utils.jit import compiled_loop, compiled_part

# A new state is compared with at most so many states that have the same hash.
MAX_COMPARISONS = 256


class ProblemTables(NamedTuple):
    """A problem as compiled loops read it; nodes, values between nodes, groups and devices by index."""

    devices: int
    group: Ints
    group_mask: Longs
    group_bytes: Floats
    """Weights that no other group reads, per group."""
    node_bytes: Floats
    value_bytes: Floats
    limit: Floats
    allowed: Bools
    """[group, device]."""
    alike: Ints
    """Per device, the first device that it is interchangeable with."""
    conflicts: Bools
    """[device, device]: whether they share a processor."""
    uses: Longs
    """Per device, the processors that it computes on, as bits."""
    seconds: Floats
    least: Floats
    least_work: Floats
    """Per node, the least seconds of all processors together."""
    send: Floats
    """[value, source, destination], seconds."""
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
    """Nodes with much work before them."""
    join_starts: Longs
    join_nodes: Ints
    """Nodes before each join, the longest `join_remote` first."""
    join_distance: Floats
    """Least time from the end of such a node to the start of the join."""
    join_remote: Floats
    """The same, if the two are on different devices."""
    tuples: Ints
    """Ordered choices of destinations, padded with -1."""
    shuffles: Ints
    """Permutations of interchangeable devices."""
    free_links: bool
    """Transfers never wait."""
    one_channel: bool
    receives: bool
    """Whether incoming channels count too."""
    delays: bool
    """Whether nodes may delay their sends, which keeps dominance correct with `receives`."""
    in_turn: int
    """1: nodes take a processor in the order in which they could start; 2: of two at a time, the first one too.

    0: in any order, which is no later. Dominance does not know of turns.
    """
    careful: bool
    """Whether values must fit into memory, roughly: this finds steps, but proves no bound."""
    patient: bool
    """Whether dominated states are kept: they may need less memory."""


class StateLayer(NamedTuple):
    """States after the same number of actions."""

    reals: Floats
    ints: Ints
    masks: Longs
    bounds: Floats

    def select(self, kept: Any) -> StateLayer:
        """Return some of the states."""
        return StateLayer(self.reals[kept], self.ints[kept], self.masks[kept], self.bounds[kept])


class Children(NamedTuple):
    """Children of the states of a layer."""

    parents: Ints
    actions: Ints
    bounds: Floats
    guides: Floats


@compiled_loop
def expand_states(layer, begin, end, threshold, tables, children, filled):
    """Generate the children of states `begin` to `end`; return their number, the least bound cut off, and a state.

    It stops early, before the returned state, when the output is nearly full.
    """
    reals, ints = layer.reals, layer.ints
    devices, groups, count = tables.devices, len(tables.group_mask), len(tables.group)
    child_reals, child_ints = np.empty(reals.shape[1]), np.empty(ints.shape[1], np.int32)
    early, there_at = np.empty((count, devices)), np.empty((len(tables.read_mask), devices))
    max_children = count * devices + devices * len(tables.tuples)
    cut = NEVER
    state = begin
    while state < end and filled + max_children <= len(children.parents):
        mask = layer.masks[state]
        # Of devices that wait to send, only the one that finished first may act, unless sends may be delayed.
        first_sender = -1
        for d in range(devices):
            if ints[state, groups + d] >= 0 and (
                first_sender < 0 or reals[state, 1 + d] < reals[state, 1 + first_sender]
            ):
                first_sender = d
        for code in range(count * devices + devices * len(tables.tuples)):
            if code < count * devices:
                # Start a node: its predecessors have started, its device has nothing to send, its group may be there,
                # and of interchangeable unused devices only the first one is tried.
                node, home = code // devices, code % devices
                if (mask >> node) & 1 or (tables.before_mask[node] & ~mask) != 0 or ints[state, groups + home] >= 0:
                    continue
                group = tables.group[node]
                if ints[state, group] != home and (ints[state, group] >= 0 or not tables.allowed[group, home]):
                    continue
                if not is_next_device(home, ints[state, groups + 2 * devices], tables):
                    continue
            else:
                home = (code - count * devices) // len(tables.tuples)
                if ints[state, groups + home] < 0 or (home != first_sender and not tables.delays):
                    continue
            # Apply the action to a copy, and cut the child off if its bound reaches the threshold.
            child_reals[:] = reals[state]
            child_ints[:] = ints[state]
            child_mask = apply_action(child_reals, child_ints, mask, code, tables)
            if child_mask < 0:
                continue
            child_bound, guide = bound_state(child_reals, child_ints, child_mask, tables, early, there_at)
            # A parent's bound holds for its children, even where their own is weaker.
            child_bound = max(child_bound, layer.bounds[state])
            if child_bound >= threshold:
                cut = min(cut, child_bound)
                continue
            children.parents[filled] = state
            children.actions[filled] = code
            children.bounds[filled] = child_bound
            children.guides[filled] = guide
            filled += 1
        state += 1
    return filled, cut, state


@compiled_part
def _dominates(reals, ints, state, other, shuffle, devices, groups):
    """Return whether a state, its devices renamed by `shuffle`, can do all that `other` can, no later."""
    # Devices: free no later, with no more weights, and the same values to send.
    # Nothing can happen before the last action, so earlier times count as the time of that action.
    now, then = reals[state, 0], reals[other, 0]
    for d in range(devices):
        e = shuffle[d]
        if max(reals[state, 1 + d], now) > max(reals[other, 1 + e], then):
            return False
        if max(reals[state, 1 + devices + d], now) > max(reals[other, 1 + devices + e], then):
            return False
        if max(reals[state, 1 + 2 * devices + d], now) > max(reals[other, 1 + 2 * devices + e], then):
            return False
        if reals[state, 1 + 3 * devices + d] > reals[other, 1 + 3 * devices + e]:
            return False
        if max(reals[state, 1 + 4 * devices + d], now) > max(reals[other, 1 + 4 * devices + e], then):
            return False
        if ints[state, groups + d] != ints[other, groups + e]:
            return False
        if ints[state, groups + devices + d] != ints[other, groups + devices + e]:
            return False
    # The same groups on the same devices, and the same pending sends.
    for g in range(groups):
        home = ints[state, g]
        if (shuffle[home] if home >= 0 else -1) != ints[other, g]:
            return False
    for index in range(groups + 2 * devices + 1, ints.shape[1]):
        promised = 0
        for d in range(devices):
            if (ints[state, index] >> d) & 1:
                promised |= 1 << shuffle[d]
        if promised != ints[other, index]:
            return False
    # Values arrive no later.
    for start in range(1 + 7 * devices, reals.shape[1], devices):
        for d in range(devices):
            if max(reals[state, start + d], now) > max(reals[other, start + shuffle[d]], then):
                return False
    return True


@compiled_part
def _hash_state(reals, ints, mask, tables):
    """Return a hash of started nodes, pending sends and locations; interchangeable devices do not affect it."""
    devices, groups = tables.devices, len(tables.group_mask)
    base = 1 + 7 * devices
    key = np.uint64(mask) * np.uint64(0x9E3779B97F4A7C15)
    # The keys of devices are added up, so their order does not count.
    for d in range(devices):
        device_key = np.uint64(ints[groups + d] + 2 + 64 * ints[groups + devices + d])
        for value in range(len(tables.read_mask)):
            if reals[base + value * devices + d] < NEVER:
                promised = (ints[groups + 2 * devices + 1 + value] >> d) & 1
                device_key = (device_key ^ np.uint64(2 * value + 2 + promised)) * np.uint64(0xC2B2AE3D27D4EB4F)
        device_key ^= device_key >> np.uint64(29)
        key += device_key * np.uint64(0x165667B19E3779F9)
    key ^= key >> np.uint64(31)
    return key * np.uint64(0x9E3779B97F4A7C15)


@compiled_loop
def select_states(ranked, children, layer, tables, selected, chosen):
    """Build the children in `ranked` order, without dominated ones, until the output is full.

    The caller fills in their bounds. Returns the numbers of children built and of entries of `ranked` considered.
    """
    # A hash table with a chain per slot.
    devices, groups, capacity = tables.devices, len(tables.group_mask), len(selected.masks)
    new_reals, new_ints, new_masks = selected.reals, selected.ints, selected.masks
    size = 1
    # At least two slots for each state, which keeps chains short.
    while size < 2 * capacity:
        size *= 2
    heads, chain = np.full(size, -1, np.int64), np.empty(capacity, np.int64)
    shuffles = tables.shuffles
    kept = 0
    looked_at = 0
    for index in range(len(ranked)):
        if kept == capacity:
            break
        looked_at += 1
        child = ranked[index]
        # Build the child at the end of the output, where the next one replaces it if it is dominated.
        parent, action = children.parents[child], children.actions[child]
        new_reals[kept] = layer.reals[parent]
        new_ints[kept] = layer.ints[parent]
        new_masks[kept] = apply_action(new_reals[kept], new_ints[kept], layer.masks[parent], action, tables)
        slot = np.int64(
            (_hash_state(new_reals[kept], new_ints[kept], new_masks[kept], tables) >> np.uint64(20))
            & np.uint64(size - 1)
        )
        # Compare it with earlier states of the same slot, which rank higher.
        worse = False
        other = heads[slot]
        last_compared = np.int64(-1)
        for _ in range(0 if tables.patient else MAX_COMPARISONS):
            if other < 0 or worse:
                break
            if new_masks[other] == new_masks[kept]:
                for s in range(len(tables.shuffles)):
                    if _dominates(new_reals, new_ints, other, kept, shuffles[s], devices, groups):
                        worse = True
                        break
            last_compared = other
            other = chain[other]
        if worse:
            continue
        # Insert it into the chain after the last state compared.
        if last_compared < 0:
            heads[slot] = kept
            chain[kept] = -1
        else:
            chain[kept] = chain[last_compared]
            chain[last_compared] = kept
        chosen[kept] = child
        kept += 1
    return kept, looked_at
