"""Hold more than fits: weights come in time for the runs that read them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np

from onnxplace.facts import (
    Clusters,
    DeviceStream,
    Groups,
    Home,
    Placement,
    Profile,
    Schedule,
    Streaming,
)
from onnxplace.graph import Csr, OpGraph
from onnxplace.model import Model
from onnxplace.passes.segments import PAGE_BYTES
from onnxplace.problem import commit_placement, out_of_memory_error, placement_problem
from onnxplace.state import Pass, State
from onnxplace.target import parse_bytes

# Smaller weights always stay.
MIN_STREAMED_BYTES = 1 << 20
# Share of a device's memory for the pool, unless the user says how much.
POOL_SHARE = 0.125
# Assumed where nothing is known.
DISK_BYTES_PER_SECOND = 1.5e9


@dataclass(frozen=True)
class Stream(Pass):
    """Put every node on the fastest device, and let weights stream that it has no room for."""

    name: ClassVar[str] = "stream"
    requires: ClassVar[tuple[type, ...]] = (Model, Profile)
    provides: ClassVar[tuple[type, ...]] = (Profile, Placement, Schedule, Streaming)
    preserves: ClassVar[tuple[type, ...]] = (Groups, Clusters)

    pool: str = ""
    """Memory of each device for weights that have arrived or are on their way; by default an eighth of its memory."""

    def run(self, state: State) -> State:
        model, profile, problem = state[Model], state[Profile], placement_problem(state)
        graph = profile.graph
        device = int(problem.seconds.sum(axis=1).argmin())
        limit = int(problem.limit_bytes[device])
        pool = parse_bytes(self.pool) if self.pool else int(POOL_SHARE * limit)
        room = limit - pool - int(problem.alone_bytes()[device] - graph.total_weight_bytes)
        candidates = [
            index
            for index, (name, size) in enumerate(zip(graph.weight_names, graph.weight_bytes.tolist()))
            if size >= MIN_STREAMED_BYTES and name in model.initializers and not model.overridable(name)
        ]
        total, streamable = graph.total_weight_bytes, int(graph.weight_bytes[candidates].sum())
        excess = total - room
        if excess > streamable or (candidates and pool < int(graph.weight_bytes[candidates].max()) + PAGE_BYTES):
            raise out_of_memory_error(problem, self.name)
        # The weights that stream are spread evenly over the step.
        first_reader = np.full(len(graph.weight_names), len(graph), dtype=np.int64)
        np.minimum.at(first_reader, graph.weights.items, graph.positions[graph.weights.rows])
        chosen, debt = list[int](), 0.0
        for weight in sorted(candidates, key=lambda item: int(first_reader[item])):
            debt += int(graph.weight_bytes[weight]) * excess / max(streamable, 1)
            if debt > 0:
                chosen.append(weight)
                debt -= int(graph.weight_bytes[weight])
        homes: dict[str, Home] = {graph.weight_names[weight]: "disk" for weight in chosen}
        sizes = {graph.weight_names[weight]: int(graph.weight_bytes[weight]) for weight in chosen}
        streams = {device: DeviceStream(pool, {"disk": DISK_BYTES_PER_SECOND})} if chosen else {}
        thinner = replace(profile, graph=without_streamed(graph, chosen, pool)) if chosen else profile
        state = state.with_facts(thinner)
        problem = placement_problem(state)
        devices = np.full(len(problem.graph), device, dtype=np.int32)
        start = problem.simulate(devices, problem.graph.order).start_seconds
        state = commit_placement(state, problem, devices, start, self.name)
        return state.with_facts(Streaming(homes, sizes, streams, profile))


def without_streamed(graph: OpGraph, weights: list[int], pool_bytes: int) -> OpGraph:
    """Return a graph in which weights have no bytes, and the first node that reads one reads the pool as a weight."""
    size = graph.weight_bytes.copy()
    size[weights] = 0
    lists = [graph.weights[node].tolist() for node in range(len(graph))]
    first = next(node for node in graph.order.tolist() if not {*lists[node]}.isdisjoint(weights))
    lists[first].append(len(size))
    return replace(
        graph,
        weight_names=(*graph.weight_names, "pool"),
        weight_bytes=np.append(size, pool_bytes),
        weights=Csr.of(lists),
    )
