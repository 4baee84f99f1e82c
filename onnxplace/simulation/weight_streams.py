"""Weights that stream: where blocks lie in a pool, and how long a device waits for them.

A device reads the weights of its segments in the same order in every step. A *block* holds the streamed weights of one
segment. Blocks are read one after the other, in the order of the runs that need them, from the last one of a step on
with the first one of the next. The pool is a ring: a block is read as soon as the blocks that lay in its place are
released, after the runs that read them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph.op_graph import Floats, Ints, Longs

# Weights are aligned to pages within a pool.
PAGE_BYTES = 4096
# The weights of a node that stream, in `run_events`.
BLOCK = np.dtype(
    [
        ("load", np.float64),  # seconds to read them; 0 for nodes without such weights
        ("keeper", np.int64),  # the node after whose run there is room for them, or -1: it ran in an earlier step
        ("freed", np.float64),  # when that run ended; for keepers in earlier steps
        ("arrival", np.float64),  # filled by the loop
    ],
    align=True,
)
# Steps after which the waits of a stream are taken as those of all later steps.
SETTLING_STEPS = 4


@dataclass(frozen=True)
class PoolLayout:
    """Where the blocks of a step lie in the pool."""

    offsets: tuple[int, ...]
    """Per block, in bytes."""
    distances: tuple[int, ...]
    """Per block, how many blocks before it, counted over steps, must be released before it may be read."""

    @staticmethod
    def of(sizes: Sequence[int], pool_bytes: int) -> PoolLayout:
        """Lay out blocks one after the other, from the start again where the next one does not fit.

        Raises ValueError for a block that is larger than the pool.

        >>> PoolLayout.of([3, 3, 3], 7)
        PoolLayout(offsets=(0, 3, 0), distances=(1, 3, 2))
        """
        offsets, offset = list[int](), 0
        for size in sizes:
            if size > pool_bytes:
                raise ValueError(f"a block of {size} bytes does not fit into a pool of {pool_bytes}")
            offset = offset if offset + size <= pool_bytes else 0
            offsets.append(offset)
            offset += size
        count = len(sizes)
        distances = []
        for block in range(count):
            begin, end = offsets[block], offsets[block] + sizes[block]
            for distance in range(1, count + 1):
                other = (block - distance) % count
                if offsets[other] < end and begin < offsets[other] + sizes[other]:
                    break
            distances.append(distance)
        return PoolLayout(tuple(offsets), tuple(distances))


def measure_block(sizes: Iterable[int]) -> int:
    """Return the bytes that weights take in a pool, given the bytes of each."""
    return sum(-(-size // PAGE_BYTES) * PAGE_BYTES for size in sizes)


def find_distances(sizes: Longs, pools: Mapping[int, int], device: Ints, order: Ints) -> Longs:
    """Return, per node, how many blocks before its own must be released before it may be read; 0 without a block.

    Args:
        sizes: Per node, the bytes of its block; 0 without one.
        pools: Index of each device with blocks -> the bytes of its pool.
        device: Per node.
        order: Each node once, in the order in which devices run them.
    """
    distances = np.zeros(len(sizes), dtype=np.int64)
    for index, pool_bytes in pools.items():
        own = order[(device[order] == index) & (sizes[order] > 0)]
        distances[own] = PoolLayout.of(sizes[own].tolist(), pool_bytes).distances
    return distances


@dataclass(frozen=True)
class WeightStream:
    """The weights of nodes that stream, for `simulate`, and what earlier steps left in the pools."""

    blocks: NDArray[Any]
    """Per node a record of `BLOCK`; empty if all weights stay on their devices."""
    loaded_seconds: Floats
    """Per device, when the last block of the step before had arrived."""
    earlier_keepers: Ints
    """Per node, the node that ran in the step before, and whose room its block takes; -1 if it is in this step."""

    @staticmethod
    def none() -> WeightStream:
        """Return that of nodes whose weights all stay on their devices."""
        return WeightStream(np.zeros(0, BLOCK), np.zeros(1), np.zeros(0, dtype=np.int32))

    @staticmethod
    def of(load_seconds: Floats, distances: Longs, device: Ints, order: Ints, device_count: int) -> WeightStream:
        """Return the stream of a step before which nothing ran for long, so that all pools are full.

        Args:
            load_seconds: Per node, the time to read its block.
            distances: As `find_distances` returns them.
            device: Per node.
            order: Each node once, in the order in which devices run them.
            device_count: Number of devices of the target.
        """
        blocks = np.zeros(len(device), BLOCK)
        blocks["load"] = np.where(distances > 0, load_seconds, 0.0)
        blocks["keeper"], blocks["freed"], blocks["arrival"] = -1, -np.inf, -np.inf
        earlier = np.full(len(device), -1, dtype=np.int32)
        for index in range(device_count):
            own = order[(device[order] == index) & (distances[order] > 0)]
            before = np.arange(len(own)) - distances[own]
            blocks["keeper"][own] = np.where(before >= 0, own[before], -1)
            earlier[own] = np.where(before < 0, own[before], -1)
        return WeightStream(blocks, np.full(device_count, -np.inf), earlier)
