"""Dynamic programming over ideals: the loads of stages, and the best split for each set of devices.

A stage is what one ideal has more than another. So the last stages of an ideal are found by a walk down through smaller
ideals, which removes one node at a time and updates the load of the stage. The table keeps, for each ideal and each set
of devices, the best split that ends there.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

import numpy as np

from onnxplace.utils import compiled_loop, in_place

DUPLEX, SEQUENTIAL, PARALLEL, SUM, TRAFFIC = range(5)
"""Rules for the load of a stage from its compute, sends and receives; see `combine_loads`."""


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
def list_stages(ideal, lattice, graph, costs, send_counts, rule, bound, scratch, begins, load):
    """List the stages that end with `ideal`: where they begin (`begins`) and their load on each class of device.

    A stage is an ideal less a smaller one. Nodes are removed one by one, last first. Memory, compute and sends only
    grow, so a path is cut off as soon as they exceed the bound, with `away` added for the way to the next possible
    beginning. `send_counts` says how often each value is sent if the stage produces it. Loads of `bound` and more are
    infinite. Returns the number of stages; leaves `scratch` zero.
    """
    _, _, down_starts, down_node, down_ideal, cut, away = lattice
    producer, out_starts, outs, in_starts, ins, weight_starts, weights, weight_bytes, _ = graph
    seconds, send, receive, limit, need = costs
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
        if cut[down_ideal[e]]:
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
def update_unread(x, sign, unread, graph):
    """Add node `x` to an ideal (1) or remove it (-1); `unread` counts, per value made inside, its outside readers."""
    producer, out_starts, outs, in_starts, ins, _, _, _, read_starts = graph
    for k in range(in_starts[x], in_starts[x + 1]):
        if producer[ins[k]] >= 0:
            unread[ins[k]] -= sign
    for k in range(out_starts[x], out_starts[x + 1]):
        value = outs[k]
        unread[value] = read_starts[value + 1] - read_starts[value] if sign > 0 else 0


@in_place
def walk_to(ideal, depth, path, parent, last, unread, graph):
    """Move along the tree of ideals, from the end of `path` to `ideal`, updating `unread`; return the new depth."""
    # Leave ideals until an ancestor of the destination is reached, which has a lower number.
    additions = 0
    cursor = ideal
    while cursor != path[depth]:
        if path[depth] > cursor:
            update_unread(last[path[depth]], -1, unread, graph)
            depth -= 1
        else:
            cursor = parent[cursor]
            additions += 1
    cursor = ideal
    for offset in range(additions):
        path[depth + additions - offset] = cursor
        cursor = parent[cursor]
    for offset in range(additions):
        update_unread(last[path[depth + 1 + offset]], 1, unread, graph)
    return depth + additions


@compiled_loop
def mark_possible(lattice, graph, rule, bound, fastest, send, receive, used, possible):
    """Mark in `possible[ideal, set]` which ideals a split below `bound` may pass with these devices used.

    The devices in the set must have time for the ideal and its crossing values, the others for the rest.
    """
    parent, last, _, _, _, cut, _ = lattice
    nodes, values = len(fastest), len(graph[0])
    work = np.zeros(len(parent), np.float64)
    unread = np.zeros(values, np.int64)
    path = np.zeros(nodes + 1, np.int64)
    depth = 0
    devices = used[len(used) - 1]
    total_work = fastest.sum()
    slack = bound * (1.0 + 1e-9)
    for ideal in range(len(parent)):
        if ideal > 0:
            work[ideal] = work[parent[ideal]] + fastest[last[ideal]]
        if not cut[ideal]:
            continue
        # Values that cross the border of the ideal are sent by one side and received by the other. Ideals come in
        # preorder of their tree, so `walk_to` passes each edge of the tree twice at most.
        depth = walk_to(ideal, depth, path, parent, last, unread, graph)
        outward = 0.0
        inward = 0.0
        if rule != PARALLEL and rule != TRAFFIC:
            for v in range(values):
                if unread[v] > 0:
                    outward += send[v]
                    inward += receive[v]
        # Compare both sides with the time that their devices have in total.
        for s in range(len(used)):
            inside_room = used[s] * slack
            outside_room = (devices - used[s]) * slack
            if rule == SUM:
                possible[ideal, s] = (
                    work[ideal] + outward <= inside_room and total_work - work[ideal] + inward <= outside_room
                )
            else:
                possible[ideal, s] = (
                    max(work[ideal], outward) <= inside_room and max(total_work - work[ideal], inward) <= outside_room
                )


@compiled_loop
def fill_table(first, end, lattice, graph, costs, rule, bound, step, has, possible, fastest, best, origin, kind_of):
    """Fill in `best[ideal, set of devices]` for ideals `first` to `end`; all smaller ideals must be filled in.

    It is the minimum of the largest load (rule `TRAFFIC`: of the sum of loads) over splits of the ideal into stages for
    these devices. `origin` and `kind_of` say where the last stage begins and the class of its device. Devices may stay
    unused. An entry that cannot lead below `bound` stays infinite, and no stage may begin there. Returns the number of
    stages considered.
    """
    parent, last, down_starts, down_node, down_ideal, cut, away = lattice
    nodes, values, classes = len(fastest), len(graph[0]), len(step)
    scratch = new_scratch(nodes, values, len(graph[7]), classes)
    begins = np.empty(len(parent), np.int32)
    load = np.empty((len(parent), classes), np.float64)
    unread = np.zeros(values, np.int64)
    path = np.zeros(nodes + 1, np.int64)
    depth = 0
    stage_count = 0
    for ideal in range(first, end):
        # The least compute that a stage has to add from here before it may begin.
        away[ideal] = 0.0 if ideal == 0 else np.inf
        for e in range(down_starts[ideal], down_starts[ideal + 1]):
            away[ideal] = min(away[ideal], away[down_ideal[e]] + fastest[down_node[e]])
        if ideal == 0 or not cut[ideal]:
            continue
        depth = walk_to(ideal, depth, path, parent, last, unread, graph)
        # List the possible last stages, then choose the best one for each set of devices.
        count = list_stages(ideal, lattice, graph, costs, np.minimum(unread, 1), rule, bound, scratch, begins, load)
        stage_count += count
        for c in range(classes):
            for s in range(possible.shape[1]):
                if not has[s, c] or not possible[ideal, s]:
                    continue
                # The last stage takes one device of its class; the others do what lies before it.
                remaining = s - step[c]
                least = best[ideal, s]
                for k in range(count):
                    largest = best[begins[k], remaining]
                    largest = largest + load[k, c] if rule == TRAFFIC else max(largest, load[k, c])
                    if largest < least and largest < bound:
                        least = largest
                        origin[ideal, s] = begins[k]
                        kind_of[ideal, s] = c
                best[ideal, s] = least
        # Stages may begin here only if some set of devices stays below the bound.
        cut[ideal] = best[ideal].min() < bound
        if cut[ideal]:
            away[ideal] = 0.0
    return stage_count
