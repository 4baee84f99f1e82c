"""Compiled loops of merging segments: which neighbours on a device become one, by the length of the step.

A merge saves a call, but makes values leave later: a block sends nothing before its end. So each merge is judged by the
whole step. The greedy loop keeps a merge if the simulated step is not longer. A merge that makes devices wait for each
other forever has an infinite step, so it is never kept.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs
from onnxplace.simulation.channel_kernels import book_transfer, open_channels
from onnxplace.utils.jit import linear_in_place


class SegmentQueues(NamedTuple):
    """Segments on their devices in order, and what they send to other devices."""

    queue_starts: Longs
    """Where the segments of each device begin in `queue`."""
    queue: Ints
    """The segments of each device, in their order."""
    seconds: Floats
    """Per segment, with the cost of its call."""
    saved: Floats
    """Per device, the cost of a call."""
    send_starts: Longs
    """Where the values begin that each segment sends."""
    destination: Ints
    """Per value that is sent, the other device."""
    send_seconds: Floats
    """Per value that is sent."""
    need_starts: Longs
    """Where the needs of each segment begin."""
    needs: Ints
    """Values that are sent and that a segment reads."""
    conflicts: Bools
    """[device, device]: whether they have a processor in common."""
    link_model: int
    """Index into LINK_MODELS."""


@linear_in_place
def _run(work, joined, records, gaps, arrival, sequence):
    """Run blocks of segments in simulated time; return the length of the step, infinity where devices wait forever.

    A block is a segment and the segments behind it, on its device, that are `joined`. It starts once all values have
    arrived that a segment in it needs from other devices, and its values leave at its end. Processors and links are
    shared as in `onnxplace.simulation`. Fills `arrival` per value that is sent, and `sequence` with all segments, in an
    order in which their blocks can run.
    """
    devices = len(work.queue_starts) - 1
    for send in range(len(arrival)):
        arrival[send] = -1.0
    for d in range(devices):
        records[d].head, records[d].free, records[d].sending, records[d].receiving = work.queue_starts[d], 0.0, 0.0, 0.0
        records[d].asks, records[d].taken = records[d].shares, 0.0
    open_channels(gaps, devices)
    done, makespan = 0, 0.0
    while True:
        # Of the blocks that can run, the one that ends first, or asks first for processors that are shared.
        chosen, chosen_finish, chosen_turn, chosen_end, chosen_total = -1, np.inf, 0, 0, 0.0
        for d in range(devices):
            first = records[d].head
            if first == work.queue_starts[d + 1]:
                continue
            # A block pays for one call, its segments for the rest of their time.
            start, total, end = records[d].free, work.saved[d], first
            while end < work.queue_starts[d + 1] and (end == first or joined[work.queue[end]]) and start < np.inf:
                segment = work.queue[end]
                total += work.seconds[segment] - work.saved[d]
                for k in range(work.need_starts[segment], work.need_starts[segment + 1]):
                    # A value that nobody has sent yet keeps the block from running.
                    start = max(start, arrival[work.needs[k]] if arrival[work.needs[k]] >= 0.0 else np.inf)
                end += 1
            # At one instant, blocks end first, then they ask by their index.
            finish, turn = start if records[d].asks > 0 else start + total, records[d].asks * (work.queue[first] + 1)
            if (finish, turn) < (chosen_finish, chosen_turn):
                chosen, chosen_finish, chosen_turn, chosen_end, chosen_total = d, finish, turn, end, total
        if chosen < 0:
            break
        if records[chosen].asks > 0:
            # From now on its device is free when its processors are.
            records[chosen].asks, records[chosen].free = 0, max(chosen_finish, records[chosen].taken)
            for d in range(devices):
                if work.conflicts[chosen, d]:
                    records[d].taken = max(records[d].taken, records[chosen].free + chosen_total)
            continue
        # Send the block's values at its end, segment by segment, as links become free.
        for position in range(records[chosen].head, chosen_end):
            segment = work.queue[position]
            sequence[done] = segment
            done += 1
            for send in range(work.send_starts[segment], work.send_starts[segment + 1]):
                other, seconds = work.destination[send], work.send_seconds[send]
                begin = book_transfer(records, gaps, work.link_model, chosen, other, chosen_finish, seconds)
                arrival[send] = begin + seconds
                makespan = max(makespan, arrival[send])
        records[chosen].free, records[chosen].head = chosen_finish, chosen_end
        records[chosen].asks = records[chosen].shares
        makespan = max(makespan, chosen_finish)
    return makespan if done == len(work.queue) else np.inf


def merge_neighbours(work: SegmentQueues, attempts: Ints, records: Any, gaps: Any) -> tuple[Bools, Longs]:
    """Return which segments are joined to the one before them on their device, and an order in which blocks can run.

    Each row of `attempts`, segments that are not the first of their device, joins them to the ones before them, and
    stays if the step is not longer. `records` are those of `DEVICE`, `gaps` those of `GAP`. O(attempts * (D S + E)).
    """
    joined = np.zeros(len(work.queue), np.bool_)
    arrival = np.zeros(len(work.destination))
    sequence = np.zeros(len(work.queue), np.int64)
    best = _run(work, joined, records, gaps, arrival, sequence)
    # Ties are merged as well: fewer segments, with the same step.
    for row in attempts:
        for segment in row:
            joined[segment] = True
        makespan = _run(work, joined, records, gaps, arrival, sequence)
        if makespan <= best:
            best = makespan
        else:
            for segment in row:
                joined[segment] = False
    _run(work, joined, records, gaps, arrival, sequence)
    return joined, sequence
