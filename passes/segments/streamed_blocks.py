"""Blocks: the weights of one segment that stream, which must be in the pool of its device while it runs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxplace.facts import Placement, Profile, Streaming
from onnxplace.graph.op_graph import Csr, Ints
from onnxplace.simulation.weight_streams import WeightStream, find_distances, measure_block
from onnxplace.state import State

# So many blocks fit into a pool: while one is read by a run, the next ones arrive.
BLOCKS_IN_POOL = 4


def find_stream(state: State, segment_of: Ints, device: Ints) -> WeightStream:
    """Return the weights that segments wait for, given the segment of each node and the device of each segment."""
    if Streaming not in state:
        return WeightStream.none()
    graph, streaming, count = state[Profile].graph, state[Streaming], len(device)
    reads = Csr.grouped(segment_of[graph.weights.rows].astype(np.int32), graph.weights.items, count)
    sizes, load = np.zeros(count, dtype=np.int64), np.zeros(count)
    for segment, weight in zip(reads.rows.tolist(), reads.items.tolist()):
        if (name := graph.weight_names[weight]) in streaming.sources:
            size = measure_block([streaming.weight_bytes[name]])
            rates = streaming.streams[int(device[segment])].bytes_per_second
            sizes[segment] += size
            load[segment] += size / rates[streaming.sources[name]]
    pools = {index: stream.pool_bytes for index, stream in streaming.streams.items()}
    order = np.arange(count, dtype=np.int32)
    distances = find_distances(sizes, pools, device, order)
    return WeightStream.of(load, distances, device, order, len(state.target.devices))


def cut_blocks(state: State, nodes: Sequence[Ints]) -> list[Ints]:
    """Cut segments whose weights that stream would fill the pool, so that further ones can arrive while they run.

    A segment is cut between kernels where its block would take more than a share of the pool, `1 / BLOCKS_IN_POOL`.
    """
    if Streaming not in state:
        return list(nodes)
    graph, unit, streaming = state[Profile].graph, state[Profile].unit, state[Streaming]
    sizes = [measure_block([streaming.weight_bytes.get(name, 0)]) for name in graph.weight_names]
    size = np.array(sizes, dtype=np.int64)
    parts: list[Ints] = []
    for members in nodes:
        stream = streaming.streams.get(int(state[Placement].device[members[0]]))
        room = stream.pool_bytes // BLOCKS_IN_POOL if stream else 0
        begin, block = 0, set[int]()
        borders = np.flatnonzero(np.diff(unit[members])) + 1
        for start, kernel in zip((0, *borders.tolist()), np.split(members, borders) if room else ()):
            # Any node of a kernel may read its weights, such as the second one, after a normalisation.
            read = {weight for node in kernel.tolist() for weight in graph.weights[node].tolist() if size[weight]}
            if block and not read <= block and size[list(block | read)].sum() > room:
                parts.append(members[begin:start])
                begin, block = start, set()
            block |= read
        parts.append(members[begin:])
    return parts
