"""Weights that stream: where blocks lie in a pool, and how long a device waits for them.

A device reads the weights of its segments in the same order in every step. A *block* holds the streamed weights of one
segment. Blocks are read one after the other, in the order of the runs that need them, from the last one of a step on
with the first one of the next. The pool is a ring: a block is read as soon as the blocks that lay in its place are
released, after the runs that read them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.graph import Floats

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


def predict_arrivals(
    layout: PoolLayout, load_seconds: Floats, start_seconds: Floats, finish_seconds: Floats, step_seconds: float
) -> Floats:
    """Return when the blocks of a device have arrived, after the begin of a step that follows many others.

    Args:
        layout: Where blocks lie in the pool.
        load_seconds: Per block, the time to read it.
        start_seconds: Per block, when its run would start in a step without waiting for weights.
        finish_seconds: Per block, when that run would end.
        step_seconds: The time of such a step.
    """
    count = len(load_seconds)
    if not count:
        return np.zeros(0)
    released, arrived, delay = list[float](), 0.0, 0.0
    arrivals = np.zeros(count)
    for step in range(SETTLING_STEPS):
        begin = step * step_seconds + delay
        for block in range(count):
            index = step * count + block
            freed = released[index - layout.distances[block]] if index >= layout.distances[block] else 0.0
            arrived = max(arrived, freed) + float(load_seconds[block])
            arrivals[block] = arrived - begin
            start = step * step_seconds + float(start_seconds[block]) + delay
            delay += max(arrived - start, 0.0)
            released.append(step * step_seconds + float(finish_seconds[block]) + delay)
    return np.maximum(arrivals, 0.0)
