"""Times that no placement can beat: what every report holds a makespan against.

All bounds are for the causal simulator and hold in each of its link models; each relaxes something: that devices
compute one thing at a time, that values have to be sent, or both but around one node.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from onnxplace.graph import Bools, Floats, Ints, Longs, OpGraph, sum_by
from onnxplace.simulation.lower_bound_kernels import best_threshold, connected, heads_of, new_near, tails_of
from onnxplace.target import Target

# How many head lengths are combined with every tail length.
HEADS = 16
# How many groups, those with the most work first, are looked at one by one.
GROUPS = 16
# Steps of the search for the weights of devices of different speed.
STEPS = 12


@dataclass(frozen=True)
class Reach:
    """What has to happen before and after each node, in seconds; its own time not counted."""

    head: Floats
    tail: Floats
    least: Floats
    """Of each node, on its fastest device."""
    send: Floats
    """Of each value, over the fastest link."""

    @property
    def longest_seconds(self) -> float:
        """Return the longest time from start to end through one node."""
        return float((self.head + self.least + self.tail).max(initial=0.0))


def heads_and_tails(graph: OpGraph, seconds: Floats, target: Target | None = None) -> Reach:
    """Return heads and tails: longest paths, tightened where a node has several successors (or predecessors).

    Those either follow one after the other on the node's device, or wait for a transfer, for which they queue where
    channels are shared; the cheapest such split counts (Papadimitriou and Yannakakis 1990, for direct neighbours
    only). Without a target, transfers count nothing. O((N + E) log N).
    """
    least = seconds.min(axis=0)
    send = np.zeros(len(graph.value_names))
    queues = target is not None and target.link_model != "parallel"
    if target is not None and len(target.devices) > 1:
        latency, per_byte = target.link_arrays()
        apart = ~np.eye(len(latency), dtype=bool)
        pairs = sorted(set(zip(latency[apart].tolist(), per_byte[apart].tolist())))
        send = np.min([fixed + graph.value_bytes * each for fixed, each in pairs], axis=0)
    elif target is not None:
        send = np.full(len(graph.value_names), np.inf)
    outputs, inputs, readers = graph.outputs, graph.inputs, graph.readers
    scratch, (head, tail) = new_near(len(graph)), np.zeros((2, len(graph)))
    heads_of(graph.order, graph.producer, inputs.starts, inputs.items, least, send, queues, scratch, head)
    tails_of(graph.order, outputs.starts, outputs.items, readers.starts, readers.items, least, send, queues, scratch,
             tail)  # fmt: skip
    return Reach(head, tail, least, send)


def lower_bound_seconds(
    graph: OpGraph,
    seconds: Floats,
    target: Target | None = None,
    group: Ints | None = None,
    pinned: Ints | None = None,
) -> float:
    """Return a time no placement can beat: the largest of several bounds, each cheap. O((N + E) log N).

    - the longest way through one node (`heads_and_tails`);
    - heads, work and tails: what starts after `a` and has `b` to come must share all devices in between; what is
      `pinned` to one device (device per group, -1 where free; `group` per node), or in one group, must share that one;
    - all work, spread over devices of different speed as well as a fractional placement can;
    - where no device can hold everything, or pins disagree: the cheapest edge to cut, with what is before and after.

    `seconds` is [device, node]. Without a target, transfers and memory are left out.
    """
    if not len(graph):
        return 0.0
    around = heads_and_tails(graph, seconds, target)
    bound = max(around.longest_seconds, _shared(around.least, around, len(seconds)))
    if (seconds != seconds[0]).any():
        bound = max(bound, _spread(seconds))
    homes = pinned[group] if group is not None and pinned is not None else np.full(len(graph), -1, dtype=np.int32)
    devices = np.unique(homes[homes >= 0])
    for device in devices.tolist():
        bound = max(bound, _shared(np.where(homes == device, seconds[device], 0.0), around, 1))
    for members in _heaviest(around.least, group):
        bound = max(bound, _shared(np.where(members, around.least, 0.0), around, 1))
    if target is not None and (len(devices) > 1 or not _fits_somewhere(graph, target)):
        bound = max(bound, _cheapest_cut(graph, around))
    return bound


def _shared(work: Floats, around: Reach, devices: int) -> float:
    """Return the largest `a + work / devices + b` over what has a head of at least `a` and a tail of at least `b`."""
    busy = np.flatnonzero(work > 0).astype(np.int64)
    if not len(busy):
        return 0.0
    levels = np.unique(np.quantile(around.head[busy], np.linspace(0, 1, HEADS), method="lower"))
    by_tail = busy[np.argsort(-around.tail[busy], kind="stable")]
    return float(best_threshold(by_tail, levels, around.head, around.tail, work, devices))


def _heaviest(least: Floats, group: Ints | None) -> Iterator[Bools]:
    """Yield the nodes of each group of several that has a large part of the work."""
    if group is None:
        return
    work, size = np.bincount(group, least), np.bincount(group)
    for heavy in np.argsort(-np.where(size > 1, work, 0.0), kind="stable")[:GROUPS].tolist():
        if size[heavy] > 1:
            yield group == heavy


def _spread(seconds: Floats) -> float:
    """Return a bound on the largest load of any fractional placement.

    For weights `p` of the devices that sum to one, the largest load is at least the sum over nodes of
    `min_d p[d] * seconds[d]` (the dual of the linear program); the weights move towards the busier devices.
    """
    weight = np.full(len(seconds), 1 / len(seconds))
    best = 0.0
    for step in range(STEPS):
        weighed = weight[:, None] * seconds
        home = weighed.argmin(axis=0)
        best = max(best, float(weighed.min(axis=0).sum()))
        load = sum_by(home.astype(np.int32), seconds[home, np.arange(len(home))], len(seconds))
        if not load.sum():
            break
        weight = weight * np.exp((load / load.sum() - 1 / len(load)) * 2 / (1 + step))
        weight /= weight.sum()
    return best


def node_bytes(graph: OpGraph) -> Longs:
    """Return, per node, memory its device must have free of weights while it runs: workspace, inputs and outputs.

    Views are not counted, nor what they look at where it may be elsewhere.
    """
    own = np.where(graph.alias < 0, graph.value_bytes, 0)
    made = np.flatnonzero(graph.producer >= 0)
    outputs = np.bincount(graph.producer[made], own[made], len(graph))
    inputs = np.bincount(graph.inputs.rows, own[graph.inputs.items], len(graph))
    return graph.workspace_bytes + (outputs + inputs).astype(np.int64)


def _fits_somewhere(graph: OpGraph, target: Target) -> bool:
    needs = graph.total_weight_bytes + int(node_bytes(graph).max(initial=0))
    return any(needs <= device.memory_bytes for device in target.devices)


def _cheapest_cut(graph: OpGraph, around: Reach) -> float:
    """Return what the cheapest edge costs that may be cut, with what comes before and after; 0 if none need be."""
    if not connected(graph.producer, graph.inputs.starts, graph.inputs.items):
        return 0.0
    reader, value = graph.inputs.rows, graph.inputs.items
    inner = graph.producer[value] >= 0
    reader, value = reader[inner], value[inner]
    if not len(value):
        return 0.0
    source = graph.producer[value]
    before, after = around.head + around.least, around.least + around.tail
    return float((before[source] + around.send[value] + after[reader]).min())
