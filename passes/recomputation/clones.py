"""A schedule of one device in which some nodes run a second time, and the memory that it takes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxplace.graph import Bools, Ints, Longs, OpGraph
from onnxplace.passes.recomputation.kernels import buffer_spans, place_clones


@dataclass(frozen=True)
class ClonedSchedule:
    """The sequence of a device with clones of nodes, and the bytes that it holds."""

    held_bytes: Longs
    """Per number in the sequence: values and workspace while that node or clone runs, without weights."""
    node_number: Longs
    """Per node, its number in the sequence."""
    clone_number: Longs
    """Per node, the number of its clone; -1 without one."""
    last_number: Longs
    """Per value, the last number that needs its buffer; -1 for views, whose source has the buffer."""

    @property
    def peak_bytes(self) -> int:
        """Return the most bytes held at one time."""
        return int(self.held_bytes.max(initial=0))


@dataclass(frozen=True)
class TurnProblem:
    """Which nodes before a position of a schedule run again behind it, so that their values need not stay.

    Every choice of nodes is valid: a clone reads clones of cloned nodes, and else values, which stay until then.
    """

    graph: OpGraph
    order: Ints
    """Each node once, topological."""
    turn: int
    """Readers behind this position read clones."""

    def apply(self, is_cloned: Bools) -> ClonedSchedule:
        """Return the schedule with clones of these nodes, each directly before its first reader; O(N + E).

        Nodes behind the turn must not be cloned.
        """
        graph, count = self.graph, len(self.graph)
        position = self.position
        slots, clone_slot = np.zeros(count + 1, dtype=np.int64), np.full(count, count, dtype=np.int64)
        sequence, spans = np.full((2, count), -1, dtype=np.int64), np.full((4, len(graph.producer)), -1, dtype=np.int64)
        outputs, readers, inputs = graph.outputs, graph.readers, graph.inputs
        length = place_clones(
            self.order,
            position,
            self.turn,
            is_cloned,
            outputs.items,
            outputs.starts,
            readers.items,
            readers.starts,
            clone_slot,
            slots,
            sequence,
        )
        buffer_spans(
            graph.producer,
            graph.alias,
            graph.is_output,
            position,
            self.turn,
            is_cloned,
            inputs.items,
            inputs.starts,
            readers.items,
            readers.starts,
            sequence,
            length,
            spans,
        )
        return ClonedSchedule(self._sum_bytes(sequence, spans, length), sequence[0], sequence[1], spans[1])

    @property
    def position(self) -> Longs:
        """Return the position of each node in the order."""
        position = np.empty(len(self.order), dtype=np.int64)
        position[self.order] = np.arange(len(self.order))
        return position

    def _sum_bytes(self, sequence: Longs, spans: Longs, length: int) -> Longs:
        """Return the bytes held at each number of a sequence."""
        change = np.zeros(length + 1, dtype=np.int64)
        size, read = self.graph.value_bytes, np.diff(self.graph.readers.starts) > 0
        for first, last in ((spans[0], spans[1]), (spans[2], spans[3])):
            # An input that nothing reads is on no device.
            held = (first >= 0) & ((self.graph.producer >= 0) | read)
            np.add.at(change, first[held], size[held])
            np.subtract.at(change, last[held] + 1, size[held])
        work = np.zeros(length, dtype=np.int64)
        work[sequence[0]] = self.graph.workspace_bytes
        cloned = sequence[1] >= 0
        work[sequence[1][cloned]] = self.graph.workspace_bytes[cloned]
        held_bytes: Longs = np.cumsum(change)[:-1] + work
        return held_bytes


def held_bytes(graph: OpGraph, order: Ints) -> Longs:
    """Return the bytes of values and workspace that one device holds at each position of an order; O(N + E)."""
    return TurnProblem(graph, order, -1).apply(np.zeros(len(graph), dtype=np.bool_)).held_bytes
