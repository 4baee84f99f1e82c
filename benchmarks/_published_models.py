"""Rules by which published benchmarks of placement score an assignment of nodes to devices, and a search under them.

A rule takes the device of each node and returns a time in seconds, infinite for what the benchmark does not allow. The
rules are written from the papers' descriptions:

- `MaxLoad` and `CallLatency`: the time per sample and the latency of Tarnawski et al. (NeurIPS 2020);
- `FirstInFirstOut`: the simulator of Doppler (ICLR 2026), where a device runs nodes in the order in which they become
  ready, and transfers do not compete.
"""

from __future__ import annotations

import heapq
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph.op_graph import Floats, Ints

Score = Callable[[Ints], float]

# Of the moves, so many go to the device of a neighbour; others to any device.
NEIGHBOUR_SHARE = 0.7
# The temperature at which a search begins, as a share of the time.
START_TEMPERATURE = 0.01


@dataclass(frozen=True)
class Costs:
    """A graph with the costs that the rules read."""

    seconds: Floats
    """[device, node]."""
    transfer_seconds: Floats
    """Per node, of its output to another device, or between an accelerator and the host's memory."""
    edges: NDArray[np.int64]
    """[edge, 2]: producer and reader."""
    sizes: Floats
    """Per node, bytes on an accelerator."""
    limit: float
    """Bytes of each accelerator."""

    def fits(self, device: Ints) -> bool:
        """Return whether all devices but the last, the host, have room."""
        return bool(np.bincount(device, self.sizes, len(self.seconds))[:-1].max() <= self.limit)

    def find_crossing(self, device: Ints) -> NDArray[np.bool_]:
        """Return [device, node]: whether the output of the node enters or leaves the device."""
        crossing = np.zeros(self.seconds.shape, dtype=bool)
        source, reader = self.edges.T
        cut = device[source] != device[reader]
        crossing[device[source[cut]], source[cut]] = True
        crossing[device[reader[cut]], source[cut]] = True
        return crossing


@dataclass(frozen=True)
class MaxLoad:
    """The largest load: compute, and on accelerators each value that enters or leaves, once. The host comes last."""

    costs: Costs

    def __call__(self, device: Ints) -> float:
        costs = self.costs
        if not costs.fits(device):
            return np.inf
        devices, nodes = costs.seconds.shape
        loads = np.bincount(device, costs.seconds[device, np.arange(nodes)], devices).astype(np.float64)
        loads[:-1] += (costs.find_crossing(device) @ costs.transfer_seconds)[:-1]
        return float(loads.max())


@dataclass(frozen=True)
class CallLatency:
    """The latency where each accelerator runs its part in one call, which waits for all inputs.

    Compute and transfers of a call add up. The host, the last device, runs its nodes in parallel, and pays for no
    transfer. Parts that wait for each other are not allowed.
    """

    costs: Costs

    def __call__(self, device: Ints) -> float:
        costs = self.costs
        if not costs.fits(device):
            return np.inf
        devices, nodes = costs.seconds.shape
        host = devices - 1
        # A unit is an accelerator or a single node of the host.
        unit = np.where(device == host, devices + np.arange(nodes), device)
        load = np.bincount(unit, costs.seconds[device, np.arange(nodes)], devices + nodes).astype(np.float64)
        load[:host] += (costs.find_crossing(device) @ costs.transfer_seconds)[:host]
        pairs = np.unique(unit[costs.edges], axis=0)
        readers: dict[int, list[int]] = defaultdict(list)
        waiting = dict.fromkeys(np.unique(unit).tolist(), 0)
        for a, b in pairs[pairs[:, 0] != pairs[:, 1]].tolist():
            readers[a].append(b)
            waiting[b] += 1
        ready, start, latency, done = [u for u, count in waiting.items() if not count], np.zeros(len(load)), 0.0, 0
        while ready:
            u = ready.pop()
            done += 1
            finish = float(start[u] + load[u])
            latency = max(latency, finish)
            for reader in readers[u]:
                start[reader] = max(start[reader], finish)
                waiting[reader] -= 1
                if not waiting[reader]:
                    ready.append(reader)
        return latency if done == len(waiting) else np.inf


@dataclass(frozen=True)
class FirstInFirstOut:
    """The end of a run in which each device runs nodes in the order in which they become ready."""

    costs: Costs

    def __call__(self, device: Ints) -> float:
        costs, place = self.costs, device.tolist()
        readers: dict[int, list[int]] = defaultdict(list)
        waiting = [0] * len(place)
        for source, reader in costs.edges.tolist():
            readers[source].append(reader)
            waiting[reader] += 1
        # Events are (time, number, kind, node): what was announced first comes first among events of one time.
        events = [(0.0, node, "ready", node) for node, count in enumerate(waiting) if not count]
        queues: dict[int, deque[int]] = defaultdict(deque)
        busy, number, now = set[int](), len(place), 0.0
        while events:
            now, _, kind, node = heapq.heappop(events)
            home = place[node]
            if kind == "finished":
                busy.discard(home)
                for reader in readers[node]:
                    delay = 0.0 if place[reader] == home else float(costs.transfer_seconds[node])
                    number += 1
                    heapq.heappush(events, (now + delay, number, "arrived", reader))
            elif kind == "arrived":
                waiting[node] -= 1
            if kind == "ready" or (kind == "arrived" and not waiting[node]):
                queues[home].append(node)
            if queues[home] and home not in busy:
                first = queues[home].popleft()
                busy.add(home)
                number += 1
                heapq.heappush(events, (now + float(costs.seconds[home, first]), number, "finished", first))
        return now


def improve(score: Score, start: Ints, costs: Costs, groups: Ints, moves: int, seed: int) -> tuple[Ints, float]:
    """Anneal from an assignment by moves of one group; return the best one and its score, never worse than the start.

    Deterministic: `moves`, not the clock, end the search.
    """
    random = np.random.default_rng(seed)
    near: dict[int, list[int]] = defaultdict(list)
    for a, b in costs.edges.tolist():
        near[int(groups[a])].append(b)
        near[int(groups[b])].append(a)
    members = [np.flatnonzero(groups == group) for group in range(int(groups.max()) + 1)]
    device, value = start.copy(), score(start)
    best, least = device.copy(), value
    for move in range(moves):
        group = int(random.integers(len(members)))
        neighbours = near[group]
        if neighbours and random.random() < NEIGHBOUR_SHARE:
            target = int(device[neighbours[int(random.integers(len(neighbours)))]])
        else:
            target = int(random.integers(len(costs.seconds)))
        before = device[members[group]]
        if (before == target).all():
            continue
        device[members[group]] = target
        changed = score(device)
        allowed = -np.log(max(random.random(), 1e-12)) * START_TEMPERATURE * least * (1 - move / moves)
        if changed <= value + (allowed if np.isfinite(least) else 0.0):
            value = changed
            if value < least:
                best, least = device.copy(), value
        else:
            device[members[group]] = before
    return best, least
