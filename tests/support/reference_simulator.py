"""The model of time (docs/architecture.md) once more, as plainly as possible: dicts and lists, no heap.

Time. A device computes the nodes it was given one at a time, in the given order; a node starts once its device is
free and all it reads is there. When a node finishes, each of its values is sent once to each other device that reads
it; a transfer is booked at that moment and starts when the channels it needs are free: behind all that the device sends
and, if it has a channel of its own to receive, in the first time that is free there for so long.

Processors. Where a device shares a processor, its next node asks for all processors of the device once the device is
free and all it reads is there. It starts when all nodes have finished that asked for one of them before.

Ties in time. Of nodes that finish at one instant, the one with the lowest number comes first; a node that takes no
time joins them as soon as it has started. When none is left, of nodes that ask at that instant, the one with the lowest
number does so. The values of one node are sent in order of their numbers, the copies of
one value to the devices behind its own, in order of their numbers, then to those from the first on.

Ties in memory. At one instant, on one device: first, sends that end let go of what they sent; then nodes, in schedule
order, start (taking room for their values and workspace) and finish (letting go of what nobody needs any more); then
room is taken for what starts to arrive. The model's inputs are there before all that, its outputs until after all.
So it is on the devices of a pool together.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import networkx
import numpy as np

from onnxplace.graph.op_graph import Csr, OpGraph
from onnxplace.target.target import Device, Link, LinkModel, Target, default_link

Moment = tuple[float, float]
"""A time, and a position among the events of that time."""
Place = tuple[int, int]
"""A value, and a device that holds it."""


@dataclass(frozen=True)
class Transfer:
    value: int
    source: int
    destination: int
    ready: float
    start: float
    finish: float


@dataclass(frozen=True)
class Step:
    start: list[float]
    finish: list[float]
    transfers: list[Transfer]
    makespan: float
    peak_bytes: list[int]
    pool_peak_bytes: list[int]


class CannotRunError(Exception):
    """The order makes a device wait for something that it would compute later."""


def reference_simulate(
    graph: OpGraph,
    seconds: Sequence[Sequence[float]],
    target: Target,
    device: Sequence[int],
    order: Sequence[int],
) -> Step:
    """Return one step of a placed graph; raises CannotRunError if it never ends."""
    plain = _Plain(graph, [int(d) for d in device], [int(n) for n in order], len(target.devices))
    start, finish, transfers = _in_time(plain, seconds, target)
    if len(finish) < len(plain.order):
        raise CannotRunError
    makespan = max([0.0, *finish.values(), *(t.finish for t in transfers)])
    pools = [[target.position(name) for name in pool.devices] for pool in target.pools]
    memories = [*([d] for d in range(plain.devices)), *pools]
    peaks = _peaks(plain, start, finish, transfers, makespan, memories)
    nodes = range(len(plain.order))
    times = [start[n] for n in nodes], [finish[n] for n in nodes]
    return Step(*times, transfers, makespan, peaks[: plain.devices], peaks[plain.devices :])


class _Plain:
    """The graph as lists and dicts."""

    def __init__(self, graph: OpGraph, device: list[int], order: list[int], devices: int) -> None:
        self.device, self.order, self.devices = device, order, devices
        nodes, values = range(len(graph.names)), range(len(graph.value_names))
        self.producer = [int(p) for p in graph.producer]
        self.reads = [[int(v) for v in graph.inputs[n]] for n in nodes]
        self.makes = [[v for v in values if self.producer[v] == n] for n in nodes]
        self.readers = [[n for n in nodes if v in self.reads[n]] for v in values]
        self.bytes = [int(b) for b in graph.value_bytes]
        self.alias = [int(a) for a in graph.alias]
        self.outputs = [v for v in values if graph.is_output[v]]
        self.workspace = [int(b) for b in graph.workspace_bytes]
        self.weights = [[int(w) for w in graph.weights[n]] for n in nodes]
        self.weight_bytes = [int(b) for b in graph.weight_bytes]


def _in_time(
    plain: _Plain, seconds: Sequence[Sequence[float]], target: Target
) -> tuple[dict[int, float], dict[int, float], list[Transfer]]:
    """Run until no device can start its next node; returns when each node started and finished, and what was sent."""
    queues = {d: [n for n in plain.order if plain.device[n] == d] for d in range(plain.devices)}
    processors = [device.processors or (device.id,) for device in target.devices]
    every = [name for names in processors for name in names]
    shares = [any(every.count(name) > 1 for name in names) for names in processors]
    taken: dict[str, float] = {}
    granted: dict[int, float] = {}
    free = dict.fromkeys(queues, 0.0)
    there: dict[Place, float] = {(v, d): 0.0 for v, p in enumerate(plain.producer) if p < 0 for d in queues}
    channels: dict[tuple[str, int], list[tuple[float, float]]] = {}
    start: dict[int, float] = {}
    finish: dict[int, float] = {}
    transfers: list[Transfer] = []
    while True:
        events = []
        for d, queue in queues.items():
            if queue and all((v, d) in there for v in plain.reads[queue[0]]):
                ready = max([free[d], *(there[v, d] for v in plain.reads[queue[0]])])
                if shares[d] and queue[0] not in granted:
                    events.append((ready, "to ask", queue[0], ready))
                else:
                    begin = granted.get(queue[0], ready)
                    events.append((begin + float(seconds[d][queue[0]]), "it ends", queue[0], begin))
        if not events:
            return start, finish, transfers
        now, kind, node, begin = min(events)  # "it ends" comes before "to ask"
        home = plain.device[node]
        if kind == "to ask":
            granted[node] = max([now, *(taken.get(name, 0.0) for name in processors[home])])
            taken |= dict.fromkeys(processors[home], granted[node] + float(seconds[home][node]))
            continue
        queues[home].remove(node)
        start[node], finish[node], free[home] = begin, now, now
        for value in plain.makes[node]:
            there[value, home] = now
            readers = dict.fromkeys(plain.device[reader] for reader in plain.readers[value])
            for other in sorted(readers, key=lambda other: (other - home) % plain.devices):
                if other != home:
                    sent = _book(target, channels, plain, value, home, other, now)
                    transfers.append(sent)
                    there[value, other] = sent.finish


def _book(
    target: Target,
    channels: dict[tuple[str, int], list[tuple[float, float]]],
    plain: _Plain,
    value: int,
    source: int,
    destination: int,
    ready: float,
) -> Transfer:
    needed = {
        "duplex": [("out of", source), ("into", destination)],
        "parallel": [],
        "sequential": [("at", source), ("at", destination)],
    }[target.link_model]
    link = _link(target, source, destination)
    seconds = link.latency_seconds + plain.bytes[value] / link.bytes_per_second
    fills_gaps = target.link_model == "duplex"
    # Where a channel is behind all that was booked on it: times at which the transfer may start.
    last = needed[:1] if fills_gaps else needed
    first = max([ready, *(end for channel in last for _, end in channels.get(channel, ()))])
    into = channels.get(needed[1], []) if fills_gaps else []
    starts = sorted([first, *(end for _, end in into if end > first)])
    start = next(s for s in starts if not any(begin < s + seconds and s < end for begin, end in into))
    finish = start + seconds
    for channel in needed:
        channels.setdefault(channel, []).append((start, finish))
    return Transfer(value, source, destination, ready, start, finish)


def share_processors(target: Target, *processors: str) -> Target:
    """Return a target whose devices compute on these processors, such as `"a", "b", "a b"`."""
    devices = zip(target.devices, processors, strict=True)
    return replace(target, devices=tuple(replace(device, processors=tuple(names.split())) for device, names in devices))


def share_at_random(target: Target, random: np.random.Generator) -> Target:
    """Return a target whose devices compute on one or more of a few processors."""
    names = "abcd"[: int(random.integers(1, 5))]
    picks = [random.choice(list(names), int(random.integers(1, len(names) + 1)), replace=False) for _ in target.devices]
    return share_processors(target, *(" ".join(pick) for pick in picks))


def _link(target: Target, source: int, destination: int) -> Link:
    a, b = target.devices[source], target.devices[destination]
    given = [link for link in target.links if (link.source, link.destination) == (a.id, b.id)]
    return given[-1] if given else default_link(a, b)


def _peaks(
    plain: _Plain,
    start: Mapping[int, float],
    finish: Mapping[int, float],
    transfers: Sequence[Transfer],
    makespan: float,
    memories: Sequence[Sequence[int]],
) -> list[int]:
    """Return, per group of devices, the most bytes that they hold at any moment at which something new is held."""
    rank = {node: position for position, node in enumerate(plain.order)}
    begins = {node: (start[node], 2.0 * rank[node]) for node in start}
    ends = {node: (finish[node], 2.0 * rank[node] + 1) for node in finish}
    born, used = _lives(plain, begins, ends, transfers, makespan)
    lives: list[tuple[int, int, Moment, Moment]] = [
        (plain.device[node], room, begins[node], ends[node]) for node, room in enumerate(plain.workspace)
    ]
    merged: dict[Place, list[Moment]] = {}
    for place, moments in used.items():
        merged.setdefault(_owner(plain, place, born), []).extend(moments)
    lives += [(place[1], plain.bytes[place[0]], born[place], max(moments)) for place, moments in merged.items()]
    peaks = []
    for devices in memories:
        weights = {(plain.device[n], w) for n in plain.order if plain.device[n] in devices for w in plain.weights[n]}
        mine = [(room, birth, death) for home, room, birth, death in lives if home in devices]
        stored = [sum(room for room, birth, death in mine if birth <= moment < death) for _, moment, _ in mine]
        peaks.append(sum(plain.weight_bytes[w] for _, w in weights) + max(stored, default=0))
    return peaks


def _lives(
    plain: _Plain,
    begins: Mapping[int, Moment],
    ends: Mapping[int, Moment],
    transfers: Sequence[Transfer],
    makespan: float,
) -> tuple[dict[Place, Moment], dict[Place, list[Moment]]]:
    """Return when each value starts to take room on each device that has it, and the moments until it is needed."""
    born: dict[Place, Moment] = {}
    used: dict[Place, list[Moment]] = {}
    for value, node in enumerate(plain.producer):
        readers = {d: [ends[n] for n in plain.readers[value] if plain.device[n] == d] for d in range(plain.devices)}
        sent = [t for t in transfers if t.value == value]
        if node < 0:
            for d in {plain.device[n] for n in plain.readers[value]}:
                born[value, d], used[value, d] = (0.0, -math.inf), readers[d]
            continue
        home = plain.device[node]
        born[value, home] = begins[node]
        used[value, home] = [ends[node], *readers[home], *((t.finish, -1.0) for t in sent)]
        if value in plain.outputs:
            used[value, home].append((makespan, math.inf))
        for t in sent:
            born[value, t.destination] = (t.start, 2.0 * len(plain.order))
            used[value, t.destination] = [(t.finish, -1.0), *readers[t.destination]]
    return born, used


def _owner(plain: _Plain, place: Place, born: Mapping[Place, Moment]) -> Place:
    """Follow a view to the memory it looks at, as long as that is on the same device and the view was made there."""
    value, home = place
    made_here = plain.producer[value] >= 0 and plain.device[plain.producer[value]] == home
    looked_at = (plain.alias[value], home)
    return _owner(plain, looked_at, born) if made_here and looked_at in born else place


def connect_nodes(graph: OpGraph) -> networkx.Graph:
    """Return the nodes of a graph, and which of them one edge or more connect, in either direction."""
    connected = networkx.Graph()
    connected.add_nodes_from(range(len(graph)))
    connected.add_edges_from((int(p), node) for node in range(len(graph)) for p in graph.predecessors[node])
    return connected


def graph_of(
    reads: Mapping[str, Sequence[str]],
    *,
    fed: Sequence[str] = (),
    sizes: Mapping[str, int] | None = None,
    outputs: Sequence[str] = (),
    views: Mapping[str, str] | None = None,
    weights: Mapping[str, Sequence[str]] | None = None,
    workspace: Mapping[str, int] | None = None,
) -> OpGraph:
    """Return a graph by hand: what each node reads. Each node makes one value of its own name; all sizes are 1."""
    sizes, views, weights, workspace = sizes or {}, views or {}, weights or {}, workspace or {}
    names, values = list(reads), [*fed, *reads]
    weight_names = list(dict.fromkeys(name for row in weights.values() for name in row))
    return OpGraph(
        names=tuple(names),
        ops=("Op",) * len(names),
        value_names=tuple(values),
        value_bytes=np.array([sizes.get(name, 1) for name in values], dtype=np.int64),
        producer=np.array([names.index(name) if name in reads else -1 for name in values], dtype=np.int32),
        is_output=np.array([name in outputs for name in values], dtype=bool),
        alias=np.array([values.index(views[name]) if name in views else -1 for name in values], dtype=np.int32),
        inputs=Csr.of([[values.index(name) for name in row] for row in reads.values()]),
        weight_names=tuple(weight_names),
        weight_bytes=np.array([sizes.get(name, 1) for name in weight_names], dtype=np.int64),
        weights=Csr.of([[weight_names.index(name) for name in weights.get(node, ())] for node in names]),
        workspace_bytes=np.array([workspace.get(name, 0) for name in names], dtype=np.int64),
    )


def even_target(
    devices: int = 2,
    *,
    memory_bytes: int | Sequence[int] = 1 << 40,
    latency: float = 0.0,
    link_model: LinkModel = "duplex",
) -> Target:
    """Return equal devices of one core; a transfer takes `latency` and a second for each byte."""
    limits = [memory_bytes] * devices if isinstance(memory_bytes, int) else list(memory_bytes)
    ids = [f"cpu:{index}" for index in range(devices)]
    return Target(
        tuple(Device(name, limit) for name, limit in zip(ids, limits)),
        tuple(Link(a, b, latency, 1.0) for a in ids for b in ids if a != b),
        link_model,
    )
