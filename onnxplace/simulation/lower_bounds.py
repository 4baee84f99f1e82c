"""Lower bounds on the makespan of any placement.

All bounds are for the causal simulator and hold in each of its link models. Each relaxes something: that processors
run one node at a time, that values have to be sent, or both except around one node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs, OpGraph, sum_by
from onnxplace.simulation.lower_bound_kernels import (
    best_threshold,
    compute_heads,
    compute_tails,
    is_connected,
    new_neighbourhood,
)
from onnxplace.target.target import Target

# Head lengths that are combined with every tail length.
MAX_HEAD_LEVELS = 16
# Groups with the most work that give a bound each.
MAX_GROUPS = 16
# Steps of the search for dual weights of devices of different speed.
SUBGRADIENT_STEPS = 12


@dataclass(frozen=True)
class Reach:
    """Lower bounds on the seconds before and after each node, without its own."""

    head: Floats
    tail: Floats
    least: Floats
    """Seconds of each node on its fastest device."""
    send: Floats
    """Seconds to send each value over the fastest link."""

    @property
    def longest_seconds(self) -> float:
        """Return the longest time from start to end through one node."""
        return float((self.head + self.least + self.tail).max(initial=0.0))


def heads_and_tails(graph: OpGraph, seconds: Floats, target: Target | None = None) -> Reach:
    """Compute heads and tails: longest paths, tightened where a node has several neighbours.

    Its successors (or predecessors) either run one after the other on the node's device, or wait for a transfer, for
    which they queue where channels are shared. The cheapest such split counts (Papadimitriou and Yannakakis 1990, for
    direct neighbours only). Without a target, transfers count nothing. O((N + E) log N).
    """
    least = seconds.min(axis=0)
    send = np.zeros(len(graph.value_names))
    has_channels = target is not None and target.link_model != "parallel"
    if target is not None and len(target.devices) > 1:
        # Few distinct links, so the fastest one for each value is found by trying all of them.
        pairs = sorted(set(zip(*(array.tolist() for array in target.remote_link_arrays()))))
        send = np.min([fixed + graph.value_bytes * rate for fixed, rate in pairs], axis=0)
    elif target is not None:
        # On a single device nothing can be sent, and all nodes run one after the other.
        send = np.full(len(graph.value_names), np.inf)
    outputs, inputs, readers = graph.outputs, graph.inputs, graph.readers
    scratch, (head, tail) = new_neighbourhood(len(graph)), np.zeros((2, len(graph)))
    compute_heads(graph.order, graph.producer, inputs.starts, inputs.items, least, send, has_channels, scratch, head)
    compute_tails(graph.order, *outputs.arrays, *readers.arrays, least, send, has_channels, scratch, tail)
    return Reach(head, tail, least, send)


def lower_bound_seconds(
    graph: OpGraph,
    seconds: Floats,
    target: Target | None = None,
    group: Ints | None = None,
    pinned: Ints | None = None,
) -> float:
    """Return a lower bound on the makespan: the largest of several cheap bounds. O((N + E) log N).

    - the longest way through one node (`heads_and_tails`);
    - heads, work and tails: what starts after `a` and has `b` to come must share all processors in between; what is
      `pinned` to one processor (device per group, -1 where free; `group` per node), or in one group, must share that;
    - all work, spread over processors by devices of different speed as well as a fractional placement can;
    - where no device can hold everything, or pins disagree: the cheapest edge to cut, with what is before and after.

    `seconds` is [device, node]. Without a target, transfers and memory are left out.
    """
    if not len(graph):
        return 0.0
    reach = heads_and_tails(graph, seconds, target)
    processors = np.eye(len(seconds), dtype=bool) if target is None else target.processors
    used = processors.sum(axis=1)
    # A node takes at least this much of the time of all processors.
    work = (seconds * used[:, None]).min(axis=0)
    bound = max(reach.longest_seconds, _threshold_bound(work, reach, processors.shape[1]))
    # Devices of one speed and one processor need no dual: the mean load is the bound.
    if (seconds != seconds[0]).any() or used.max() > 1:
        bound = max(bound, bound_divisible_work(seconds, processors))
    pinned_device = (
        pinned[group] if group is not None and pinned is not None else np.full(len(graph), -1, dtype=np.int32)
    )
    devices = np.unique(pinned_device[pinned_device >= 0])
    pinned_seconds = seconds[pinned_device, np.arange(len(graph))]
    # Nodes that must share a processor run one after the other: their work is not divided by the number of processors.
    for users in processors[:, processors[devices].any(axis=0)].T:
        is_user = (pinned_device >= 0) & users[pinned_device]
        bound = max(bound, _threshold_bound(np.where(is_user, pinned_seconds, 0.0), reach, 1))
    for is_member in _heaviest_groups(reach.least, group):
        bound = max(bound, _threshold_bound(np.where(is_member, reach.least, 0.0), reach, 1))
    if target is not None:
        needs = graph.total_weight_bytes + int(node_bytes(graph).max(initial=0))
        if len(devices) > 1 or all(needs > device.memory_bytes for device in target.devices):
            bound = max(bound, _cheapest_cut_bound(graph, reach))
    return bound


def _threshold_bound(work: Floats, reach: Reach, processors: int) -> float:
    """Return the largest `a + work / processors + b` over what has a head of at least `a` and a tail of `b`."""
    busy = np.flatnonzero(work > 0).astype(np.int64)
    if not len(busy):
        return 0.0
    # All tails, but only some heads: the loop takes their product.
    levels = np.unique(np.quantile(reach.head[busy], np.linspace(0, 1, MAX_HEAD_LEVELS), method="lower"))
    by_tail = busy[np.argsort(-reach.tail[busy], kind="stable")]
    return float(best_threshold(by_tail, levels, reach.head, reach.tail, work, processors))


def _heaviest_groups(least: Floats, group: Ints | None) -> Iterator[Bools]:
    """Yield the nodes of each of the heaviest groups of several nodes."""
    if group is None:
        return
    work, size = np.bincount(group, least), np.bincount(group)
    for heavy in np.argsort(-np.where(size > 1, work, 0.0), kind="stable")[:MAX_GROUPS].tolist():
        if size[heavy] > 1:
            yield group == heavy


def bound_divisible_work(seconds: Floats, processors: Bools) -> float:
    """Return a bound on the largest load, however nodes, or parts of them, are shared among devices.

    For weights of the processors that sum to one, and the sum `p[d]` of those of device `d`, the largest load is at
    least the sum over nodes of `min_d p[d] * seconds[d]` (the dual of the linear program); the weights move towards the
    busier processors.
    """
    weight = np.full(processors.shape[1], 1 / processors.shape[1])
    best = 0.0
    for step in range(SUBGRADIENT_STEPS):
        weighted = (processors @ weight)[:, None] * seconds
        cheapest = weighted.argmin(axis=0)
        best = max(best, float(weighted.min(axis=0).sum()))
        load = sum_by(cheapest.astype(np.int32), seconds[cheapest, np.arange(len(cheapest))], len(seconds)) @ processors
        if not load.sum():
            break
        # Multiplicative weights: busier processors become dearer. Steps shrink, and any weights give a valid bound, so
        # the best one of all steps counts.
        weight = weight * np.exp((load / load.sum() - 1 / len(load)) * 2 / (1 + step))
        weight /= weight.sum()
    return best


def node_bytes(graph: OpGraph) -> Longs:
    """Return, per node, the bytes next to weights that it needs while it runs: workspace, inputs and outputs.

    Views are not counted, nor are their roots, which may be on another device.
    """
    owned_bytes = np.where(graph.alias < 0, graph.value_bytes, 0)
    produced = np.flatnonzero(graph.producer >= 0)
    outputs = np.bincount(graph.producer[produced], owned_bytes[produced], len(graph))
    inputs = np.bincount(graph.inputs.rows, owned_bytes[graph.inputs.items], len(graph))
    return graph.workspace_bytes + (outputs + inputs).astype(np.int64)


def _cheapest_cut_bound(graph: OpGraph, reach: Reach) -> float:
    """Return the least length of a path over a cut edge; 0 if no edge has to be cut."""
    # Pieces without common values can go to different devices without a cut.
    if not is_connected(graph.producer, graph.inputs.starts, graph.inputs.items):
        return 0.0
    reader, value = graph.inputs.rows, graph.inputs.items
    inner = graph.producer[value] >= 0
    reader, value = reader[inner], value[inner]
    if not len(value):
        return 0.0
    source = graph.producer[value]
    before, after = reach.head + reach.least, reach.least + reach.tail
    return float((before[source] + reach.send[value] + after[reader]).min())
