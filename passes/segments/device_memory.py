"""The buffers that a device holds while it runs nodes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from onnxplace.graph import Bools, Ints, Longs, OpGraph
from onnxplace.simulation import Simulation


@dataclass(frozen=True)
class DeviceMemory:
    """The lifetime of each buffer on a device.

    Times are positions in the sequence of its nodes.
    """

    nodes: Ints
    """In the order in which the device runs them."""
    first: Longs
    """Per buffer, the position from which it exists; sorted."""
    last: Longs
    """Per buffer, the last position that needs it."""
    size: Longs
    """Per buffer, in bytes."""
    is_local: Bools
    """Per buffer: neither other devices nor the caller read it, so a segment around it holds it no longer than needed.
    """
    workspace: Longs
    """Per position, in bytes."""

    @staticmethod
    def simulated(graph: OpGraph, simulation: Simulation, order: Ints, device: Ints, index: int) -> DeviceMemory:
        """Return the buffers on a device in a simulated step.

        `index` is that of the device. O(N + E); weights are left out.
        """
        nodes = order[device[order] == index]
        position = np.full(len(graph) + 1, -1, dtype=np.int64)  # the last entry is for values without a producer (-1)
        position[nodes] = np.arange(len(nodes))
        first = position[graph.producer]
        produced = first >= 0
        last = first.copy()
        np.maximum.at(last, graph.inputs.items, position[graph.inputs.rows])
        is_local = produced & ~graph.is_output
        last[produced & graph.is_output] = len(nodes) - 1
        # A sent buffer lives until its transfer ends; a received one lives from the start of its transfer.
        transfers = simulation.transfers
        outgoing, incoming = transfers.source == index, transfers.destination == index
        start, finish = simulation.start_seconds[nodes], simulation.finish_seconds[nodes]
        last_sending = np.searchsorted(start, transfers.finish_seconds[outgoing], "left") - 1
        np.maximum.at(last, transfers.value[outgoing], last_sending)
        is_local[transfers.value[outgoing]] = False
        first[transfers.value[incoming]] = np.searchsorted(finish, transfers.start_seconds[incoming], "right")
        first[(graph.producer < 0) & (last >= 0)] = 0
        is_buffer = last >= 0
        # A view lives in the buffer that it looks at, which must live as long; from the last view to the first.
        for view in np.flatnonzero((graph.alias >= 0) & produced)[::-1].tolist():
            base = graph.alias[view]
            last[base] = max(last[base], last[view])
            is_local[base] &= is_local[view]
            is_buffer[view] = False
        buffers = np.flatnonzero(is_buffer)
        buffers = buffers[np.argsort(first[buffers], kind="stable")]
        return DeviceMemory(
            nodes=nodes,
            first=first[buffers],
            last=last[buffers],
            size=graph.value_bytes[buffers],
            is_local=is_local[buffers],
            workspace=graph.workspace_bytes[nodes],
        )

    def _cumulated_bytes(self) -> tuple[Longs, Longs]:
        """Return bytes allocated up to, and freed before, each position."""
        count = len(self.nodes)
        allocated = np.cumsum(np.bincount(self.first, self.size, count))
        freed = np.concatenate([[0.0], np.cumsum(np.bincount(self.last, self.size, count))[:-1]])
        return np.rint(allocated).astype(np.int64), np.rint(freed).astype(np.int64)

    def bytes_by_position(self) -> Longs:
        """Return the bytes held with each node in its own segment."""
        allocated, freed = self._cumulated_bytes()
        return allocated - freed + self.workspace

    def fill_segments(self, begin: int, end: int, room: int, unit: Ints) -> list[int]:
        """Cut positions `begin` to `end` (inclusive); return last positions.

        From the front, each segment takes as many nodes as fit into `room` bytes, but at least one. Nodes of one unit
        are parted only where they do not fit together.
        """
        allocated, freed = self._cumulated_bytes()

        def fits(start: int, stop: int) -> bool:
            near = slice(*np.searchsorted(self.first, (start, stop + 1)))
            inside = self.is_local[near] & (self.last[near] <= stop)
            size, count = self.size[near][inside], stop - start + 2
            change = np.bincount(self.first[near][inside] - start, size, count)
            change -= np.bincount(self.last[near][inside] + 1 - start, size, count)
            peak = (np.cumsum(change)[:-1] + self.workspace[start : stop + 1]).max()
            return bool(allocated[stop] - freed[start] - size.sum() + peak <= room)

        unit_ends = np.append(begin + np.flatnonzero(unit[begin + 1 : end + 1] != unit[begin:end]), end)
        ends: list[int] = []
        while begin <= end:
            following = unit_ends[np.searchsorted(unit_ends, begin) :]
            stop = _find_furthest(begin, following, fits)
            if stop < begin:
                stop = max(_find_furthest(begin, np.arange(begin, following[0]), fits), begin)
            ends.append(stop)
            begin = stop + 1
        return ends


def _find_furthest(begin: int, ends: Longs, fits: Callable[[int, int], bool]) -> int:
    """Return the furthest of `ends` that fits, -1 if none.

    Gallops forward, then halves the step, so that near ends are tried first; O(log) calls of `fits`.
    """
    index, step = -1, 1
    while index + step < len(ends) and fits(begin, int(ends[index + step])):
        index, step = index + step, 2 * step
    while step > 1:
        step //= 2
        if index + step < len(ends) and fits(begin, int(ends[index + step])):
            index += step
    return int(ends[index]) if index >= 0 else -1
