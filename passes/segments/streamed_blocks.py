"""Blocks: the weights of one segment that stream, which must be in the pool of its device while it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.facts import DeviceStream, Placement, Profile, Streaming
from onnxplace.graph import Csr, Floats, Ints, Longs
from onnxplace.simulation import PoolLayout, Simulation, predict_arrivals
from onnxplace.state import State

# So many blocks fit into a pool: while one is read by a run, the next ones arrive.
BLOCKS_IN_POOL = 4
# Weights are aligned to pages within the pool.
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Blocks:
    """The block of each segment."""

    size: Longs
    """Per segment, in bytes; 0 for segments without weights that stream."""
    load_seconds: Floats
    """Per segment, the time in which its block comes from the homes of its weights."""


def list_blocks(state: State, segment_of: Ints, count: int) -> Blocks:
    """Return the blocks of `count` segments, to which nodes belong as `segment_of` says."""
    graph, streaming, device = state[Profile].graph, state[Streaming], state[Placement].device
    names = graph.weight_names
    size = np.array([_align(streaming.weight_bytes.get(name, 0)) for name in names], dtype=np.int64)
    reads = Csr.grouped(segment_of[graph.weights.rows].astype(np.int32), graph.weights.items, count)
    home_of = np.full(count, -1)
    home_of[segment_of] = device
    load = np.zeros(count)
    for segment, weight in zip(reads.rows.tolist(), reads.items.tolist()):
        if size[weight]:
            rate = streaming.streams[int(home_of[segment])].bytes_per_second[streaming.homes[names[weight]]]
            load[segment] += size[weight] / rate
    return Blocks(np.bincount(reads.rows, size[reads.items], count).astype(np.int64), load)


def find_arrivals(blocks: Blocks, streams: Mapping[int, DeviceStream], device: Ints, simulation: Simulation) -> Floats:
    """Return the time in a step before which no segment can start, as its block has not arrived.

    `simulation` is a step of the segments that waits for no weights; `device` is per segment.
    """
    arrivals = np.zeros(len(device))
    for index, stream in streams.items():
        own = np.flatnonzero((device == index) & (blocks.size > 0))
        own = own[np.argsort(simulation.start_seconds[own], kind="stable")]
        layout = PoolLayout.of(blocks.size[own].tolist(), stream.pool_bytes)
        start, finish = simulation.start_seconds[own], simulation.finish_seconds[own]
        arrivals[own] = predict_arrivals(layout, blocks.load_seconds[own], start, finish, simulation.makespan_seconds)
    return arrivals


def cut_blocks(state: State, nodes: Sequence[Ints]) -> list[Ints]:
    """Cut segments whose weights that stream would fill the pool, so that further ones can arrive while they run.

    A segment is cut between kernels where its block would take more than a share of the pool, `1 / BLOCKS_IN_POOL`.
    """
    if Streaming not in state:
        return list(nodes)
    graph, unit, streaming = state[Profile].graph, state[Profile].unit, state[Streaming]
    size = np.array([_align(streaming.weight_bytes.get(name, 0)) for name in graph.weight_names], dtype=np.int64)
    parts: list[Ints] = []
    for members in nodes:
        stream = streaming.streams.get(int(state[Placement].device[members[0]]))
        room = stream.pool_bytes // BLOCKS_IN_POOL if stream else 0
        begin, held, filled = 0, set[int](), 0
        for position, node in enumerate(members.tolist() if room else ()):
            new = {weight for weight in graph.weights[node].tolist() if size[weight]} - held
            added = int(size[list(new)].sum()) if new else 0
            is_border = position > begin and unit[node] != unit[members[position - 1]]
            if added and filled and filled + added > room and is_border:
                parts.append(members[begin:position])
                begin, held, filled = position, set(), 0
                new = {weight for weight in graph.weights[node].tolist() if size[weight]}
                added = int(size[list(new)].sum())
            held |= new
            filled += added
        parts.append(members[begin:])
    return parts


def _align(size: int) -> int:
    return -(-size // PAGE_BYTES) * PAGE_BYTES
