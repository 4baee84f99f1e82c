"""Dynamic programming over ideals: the loads of stages, and the best split for each set of devices.

A stage is what one ideal has more than another. So the last stages of an ideal are found by a walk down through smaller
ideals, which removes one node at a time and updates the load of the stage. The table keeps, for each ideal and each set
of devices, the best split that ends there.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs
from onnxplace.utils.jit import compiled_loop, in_place

DUPLEX, SEQUENTIAL, PARALLEL, SUM, TRAFFIC = range(5)
"""Rules for the load of a stage from its compute, sends and receives; see `combine_loads`."""


class Flows(NamedTuple):
    """A graph to cut: what its nodes make, read and store."""

    producer: Ints
    out_starts: Longs
    outs: Ints
    in_starts: Longs
    ins: Ints
    weight_starts: Longs
    weights: Ints
    weight_bytes: Longs
    read_starts: Longs


class Lattice(NamedTuple):
    """Ideals of a graph, all or those of one topological order; supersets have higher numbers."""

    parent: Ints
    """Per ideal, the one without its last node; -1 for the empty one."""
    last: Ints
    starts: Longs
    """Where the lists of each ideal start: removable nodes, ascending, and the ideals that remain."""
    node: Ints
    below: Ints
    is_cut: Bools
    """Whether stages may begin and end at an ideal."""
    away: Floats
    """Per ideal, least seconds from there down to one where a stage may begin; 0 until `fill_table` computes it."""

    def inside(self, ideal: int, nodes: int) -> Bools:
        """Return whether each node is in an ideal."""
        is_inside = np.zeros(nodes, dtype=bool)
        while ideal > 0:
            is_inside[self.last[ideal]] = True
            ideal = int(self.parent[ideal])
        return is_inside


class Costs(NamedTuple):
    """Costs and limits of each class of devices."""

    seconds: Floats
    """[class, node]."""
    send: Floats
    """[class, value]."""
    receive: Floats
    limit_bytes: Longs
    need_bytes: Longs
    """Per node."""
    rule: int


class DeviceSets(NamedTuple):
    """The sets of devices that stages may use, by number."""

    step: Longs
    """Per class, how much one more device of it adds to the number of a set."""
    has: Bools
    """[set, class]: whether the last stage may go to a device of this class."""
    used: Longs
    """The number of devices in each set."""


class StageTable(NamedTuple):
    """The dynamic program's result for each ideal and set of devices."""

    best: Floats
    """[ideal, set]: the least largest load; infinite where no split is below the bound."""
    origin: Ints
    """[ideal, set]: the ideal where the last stage begins."""
    by: NDArray[np.int8]
    """[ideal, set]: the class of the device of the last stage."""


class Scratch(NamedTuple):
    """Working memory of `list_stages`: the stage on its path down to smaller ideals."""

    reads: Longs
    """Per value, how many nodes of the stage read it."""
    weight_readers: Longs
    """Per weight, how many nodes of the stage read it."""
    stack: Longs
    """The ideals on the path; per depth, as all below."""
    pointer: Longs
    """The next entry of the list of that ideal."""
    compute: Floats
    """[depth, class]."""
    sent: Floats
    received: Floats
    stored_bytes: Longs
    largest: Longs
    """The need of the neediest node."""


@in_place
def combine_loads(rule, compute, sent, received):
    """Return the load of a stage under one of the rules at the top of this file."""
    # What overlaps counts by its maximum, what takes turns by its sum. Duplex links have a channel for each direction,
    # sequential ones one for both, and parallel ones never queue. The last rule counts each transfer at its receiver.
    if rule == DUPLEX:
        return max(compute, max(sent, received))
    if rule == SEQUENTIAL:
        return max(compute, sent + received)
    if rule == PARALLEL:
        return compute
    if rule == SUM:
        return compute + sent + received
    return received


@in_place
def list_stages(ideal, lattice, flows, costs, send_counts, bound, scratch, begins, load):
    """List the stages that end with `ideal`: where they begin (`begins`) and their load on each class of device.

    A stage is an ideal less a smaller one. Nodes are removed one by one, last first. Memory, compute and sends only
    grow, so a path is cut off as soon as they exceed the bound, with `away` added for the way to the next possible
    beginning. `send_counts` says how often each value is sent if the stage produces it. Loads of `bound` and more are
    infinite. Returns the number of stages; leaves `scratch` zero.
    """
    _, _, down_starts, down_node, down_ideal, is_cut, away = lattice
    producer, out_starts, outs, in_starts, ins, weight_starts, weights, weight_bytes, _ = flows
    seconds, send, receive, limit, need, rule = costs
    reads, weight_readers, stack, pointer, compute, sent, received, stored_bytes, largest = scratch
    classes = len(limit)
    count = 0
    depth = 0
    stack[0] = ideal
    pointer[0] = down_starts[ideal + 1] - 1
    while depth >= 0:
        current = stack[depth]
        e = pointer[depth]
        # All smaller ideals are done: put the last removed node back.
        if e < down_starts[current]:
            if depth > 0:
                x = down_node[pointer[depth - 1] + 1]
                for k in range(in_starts[x], in_starts[x + 1]):
                    reads[ins[k]] -= 1
                for k in range(weight_starts[x], weight_starts[x + 1]):
                    weight_readers[weights[k]] -= 1
            depth -= 1
            continue
        pointer[depth] -= 1
        # Remove only nodes before the one removed last: each smaller ideal is then reached in one way.
        x = down_node[e]
        if depth > 0 and x > down_node[pointer[depth - 1] + 1]:
            continue
        # Memory with this node: weights that no other node of the stage reads, and the neediest node.
        weight_total_bytes = stored_bytes[depth]
        for k in range(weight_starts[x], weight_starts[x + 1]):
            if weight_readers[weights[k]] == 0:
                weight_total_bytes += weight_bytes[weights[k]]
        most_bytes = max(largest[depth], need[x])
        # Compute and sends per class of device; stop unless some class may stay below the bound.
        possible = False
        for c in range(classes):
            outward = sent[depth, c]
            for k in range(out_starts[x], out_starts[x + 1]):
                if send_counts[outs[k]] > 0:
                    outward += send_counts[outs[k]] * send[c, outs[k]]
            sent[depth + 1, c] = outward
            compute[depth + 1, c] = compute[depth, c] + seconds[c, x]
            if weight_total_bytes + most_bytes > limit[c]:
                compute[depth + 1, c] = np.inf
            possible = possible or (
                compute[depth + 1, c] < np.inf
                and combine_loads(rule, compute[depth + 1, c] + away[down_ideal[e]], outward, 0.0) < bound
            )
        if not possible:
            continue
        # Receives may also shrink: a value produced in the stage is no longer received.
        for c in range(classes):
            inward = received[depth, c]
            for k in range(out_starts[x], out_starts[x + 1]):
                if reads[outs[k]] > 0:
                    inward -= receive[c, outs[k]]
            for k in range(in_starts[x], in_starts[x + 1]):
                if producer[ins[k]] >= 0 and reads[ins[k]] == 0:
                    inward += receive[c, ins[k]]
            received[depth + 1, c] = inward
        # Descend to the smaller ideal.
        for k in range(in_starts[x], in_starts[x + 1]):
            reads[ins[k]] += 1
        for k in range(weight_starts[x], weight_starts[x + 1]):
            weight_readers[weights[k]] += 1
        depth += 1
        stack[depth] = down_ideal[e]
        pointer[depth] = down_starts[down_ideal[e] + 1] - 1
        stored_bytes[depth] = weight_total_bytes
        largest[depth] = most_bytes
        # A stage may begin here: list it if its load is below the bound on some class.
        if is_cut[down_ideal[e]]:
            useful = False
            for c in range(classes):
                stage_load = np.inf
                if compute[depth, c] < bound:
                    stage_load = combine_loads(rule, compute[depth, c], sent[depth, c], max(received[depth, c], 0.0))
                    if stage_load >= bound:
                        stage_load = np.inf
                load[count, c] = stage_load
                useful = useful or stage_load < np.inf
            if useful:
                begins[count] = down_ideal[e]
                count += 1
    return count


@compiled_loop
def new_scratch(nodes, values, weights, classes):
    """Allocate the working memory of `list_stages`."""
    return Scratch(
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
def update_unread(x, sign, unread, flows):
    """Add node `x` to an ideal (1) or remove it (-1); `unread` counts, per value made inside, its outside readers."""
    for k in range(flows.in_starts[x], flows.in_starts[x + 1]):
        if flows.producer[flows.ins[k]] >= 0:
            unread[flows.ins[k]] -= sign
    for k in range(flows.out_starts[x], flows.out_starts[x + 1]):
        value = flows.outs[k]
        unread[value] = flows.read_starts[value + 1] - flows.read_starts[value] if sign > 0 else 0


@in_place
def walk_to(ideal, depth, path, lattice, unread, flows):
    """Move along the tree of ideals, from the end of `path` to `ideal`, updating `unread`; return the new depth."""
    # Leave ideals until an ancestor of the destination is reached, which has a lower number.
    additions = 0
    cursor = ideal
    while cursor != path[depth]:
        if path[depth] > cursor:
            update_unread(lattice.last[path[depth]], -1, unread, flows)
            depth -= 1
        else:
            cursor = lattice.parent[cursor]
            additions += 1
    cursor = ideal
    for offset in range(additions):
        path[depth + additions - offset] = cursor
        cursor = lattice.parent[cursor]
    for offset in range(additions):
        update_unread(lattice.last[path[depth + 1 + offset]], 1, unread, flows)
    return depth + additions


@compiled_loop
def mark_possible(lattice, flows, rule, bound, fastest, send, receive, used, possible):
    """Mark in `possible[ideal, set]` which ideals a split below `bound` may pass with these devices used.

    The devices in the set must have time for the ideal and its crossing values, the others for the rest.
    """
    nodes, values, ideals = len(fastest), len(flows.producer), len(lattice.parent)
    work = np.zeros(ideals, np.float64)
    unread = np.zeros(values, np.int64)
    path = np.zeros(nodes + 1, np.int64)
    depth = 0
    devices = used[len(used) - 1]
    total_work = fastest.sum()
    slack = bound * (1.0 + 1e-9)
    for ideal in range(ideals):
        if ideal > 0:
            work[ideal] = work[lattice.parent[ideal]] + fastest[lattice.last[ideal]]
        if not lattice.is_cut[ideal]:
            continue
        # Values that cross the border of the ideal are sent by one side and received by the other. Ideals come in
        # preorder of their tree, so `walk_to` passes each edge of the tree twice at most.
        depth = walk_to(ideal, depth, path, lattice, unread, flows)
        outward = 0.0
        inward = 0.0
        if rule != PARALLEL and rule != TRAFFIC:
            for v in range(values):
                if unread[v] > 0:
                    outward += send[v]
                    inward += receive[v]
        # Compare both sides with the time that their devices have in total.
        for s in range(len(used)):
            inside_seconds = used[s] * slack
            outside_seconds = (devices - used[s]) * slack
            if rule == SUM:
                possible[ideal, s] = (
                    work[ideal] + outward <= inside_seconds and total_work - work[ideal] + inward <= outside_seconds
                )
            else:
                possible[ideal, s] = (
                    max(work[ideal], outward) <= inside_seconds
                    and max(total_work - work[ideal], inward) <= outside_seconds
                )


@compiled_loop
def fill_table(first, end, lattice, flows, costs, bound, sets, possible, fastest, table):
    """Fill in `table` for ideals `first` to `end`; all smaller ideals must be filled in.

    An entry is the minimum of the largest load (rule `TRAFFIC`: of the sum of loads) over splits of the ideal into
    stages for these devices. Devices may stay unused. An entry that cannot lead below `bound` stays infinite, and no
    stage may begin there. Returns the number of stages considered.

    For the chain a -> b -> c with 2, 3 and 4 seconds on two equal devices, and no time to send:

        ideal             {}   a   ab   abc
        with one device    0   2    5     9
        with two           0   2    3     5     its last stage is c, behind ab on one device: max(4, 5)
    """
    _, _, down_starts, down_node, down_ideal, is_cut, away = lattice
    nodes, values, classes = len(fastest), len(flows.producer), len(sets.step)
    scratch = new_scratch(nodes, values, len(flows.weight_bytes), classes)
    begins = np.empty(len(is_cut), np.int32)
    load = np.empty((len(is_cut), classes), np.float64)
    unread = np.zeros(values, np.int64)
    path = np.zeros(nodes + 1, np.int64)
    depth = 0
    stage_count = 0
    for ideal in range(first, end):
        # The least compute that a stage has to add from here before it may begin.
        away[ideal] = 0.0 if ideal == 0 else np.inf
        for e in range(down_starts[ideal], down_starts[ideal + 1]):
            away[ideal] = min(away[ideal], away[down_ideal[e]] + fastest[down_node[e]])
        if ideal == 0 or not is_cut[ideal]:
            continue
        depth = walk_to(ideal, depth, path, lattice, unread, flows)
        # List the possible last stages, then choose the best one for each set of devices.
        count = list_stages(ideal, lattice, flows, costs, np.minimum(unread, 1), bound, scratch, begins, load)
        stage_count += count
        for c in range(classes):
            for s in range(possible.shape[1]):
                if not sets.has[s, c] or not possible[ideal, s]:
                    continue
                # The last stage takes one device of its class; the others do what lies before it.
                remaining = s - sets.step[c]
                least = table.best[ideal, s]
                for k in range(count):
                    largest = table.best[begins[k], remaining]
                    largest = largest + load[k, c] if costs.rule == TRAFFIC else max(largest, load[k, c])
                    if largest < least and largest < bound:
                        least = largest
                        table.origin[ideal, s] = begins[k]
                        table.by[ideal, s] = c
                table.best[ideal, s] = least
        # Stages may begin here only if some set of devices stays below the bound.
        is_cut[ideal] = table.best[ideal].min() < bound
        if is_cut[ideal]:
            away[ideal] = 0.0
    return stage_count
