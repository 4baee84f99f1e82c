"""The order of micro-batches on each device: list scheduling of cells, each a stage's pass over one part of the batch.

`gpipe` runs all forward cells before the backward ones (Huang et al., NeurIPS 2019). `1f1b` runs a backward cell as
soon as it can, and limits how many parts are on their way (Narayanan et al., SOSP 2019): fewer activations are kept.
With several stages on a device, that is the interleaved schedule (Narayanan et al., SC 2021).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Literal

import numpy as np

from onnxplace.graph.op_graph import Bools, Floats, Ints, OpGraph

PartSchedule = Literal["gpipe", "1f1b"]
_SHARED, _FORWARD, _BACKWARD, _UPDATE = range(4)
Cell = tuple[int, int, int]
"""Kind, part, stage."""


@dataclass(frozen=True)
class Cells:
    """Which cell each node belongs to, and where it runs."""

    stage: Ints
    """Per node."""
    part: Ints
    """Per node; -1 for nodes that are computed once."""
    is_backward: Bools
    """Per node: part of the backward pass or the update."""
    device: Ints
    """Per node."""
    stages: int
    parts: int


def order_parts(
    graph: OpGraph, cells: Cells, seconds: Floats, latency: Floats, per_byte: Floats, schedule: PartSchedule
) -> Floats:
    """Return when each node starts, by a simulation without contention of channels.

    A device goes on with the cell that it is in as long as that has a node that can run. O(N log N + E).

    Args:
        graph: The step.
        cells: The cell and device of each node.
        seconds: [device, node].
        latency: [source device, destination device], seconds.
        per_byte: [source device, destination device], seconds per byte.
        schedule: The order of the parts.
    """
    return _Ordering(graph, cells, seconds, latency, per_byte, schedule).run()


@dataclass
class _Queue:
    """What one device can run."""

    free_at: float = 0.0
    arriving: list[tuple[float, int]] = field(default_factory=list)
    """Nodes whose inputs arrive then."""
    ready: dict[Cell, list[tuple[float, int]]] = field(default_factory=dict)
    """Cell -> its nodes that can run, by priority."""
    current: Cell | None = None
    started: dict[int, set[int]] = field(default_factory=dict)
    """Stage -> parts whose forward cell began and whose backward cell did not."""


# A list scheduler for cells: a device stays in its cell while that has a node to run, then enters the best cell that
# may begin. The state is a queue per device, with nodes by arrival until they can run, then by cell. A node is taken
# from the device that can start one first, so that simulated time mostly moves forward.
class _Ordering:
    def __init__(
        self,
        graph: OpGraph,
        cells: Cells,
        seconds: Floats,
        latency: Floats,
        per_byte: Floats,
        schedule: PartSchedule,
    ) -> None:
        self._graph, self._cells, self._schedule = graph, cells, schedule
        self._device = cells.device.tolist()
        self._seconds = seconds[cells.device, np.arange(len(graph))].tolist()
        self._latency, self._per_byte = latency.tolist(), per_byte.tolist()
        in_parts = np.where(cells.is_backward, _BACKWARD, _FORWARD)
        kinds = np.where(cells.part >= 0, in_parts, np.where(cells.is_backward, _UPDATE, _SHARED))
        self._cell: list[Cell] = list(zip(kinds.tolist(), cells.part.tolist(), cells.stage.tolist()))
        self._priority = self._find_priorities()
        self._missing = np.diff(graph.predecessors.starts).tolist()
        self._arrival = [0.0] * len(graph)
        self._queues = [_Queue() for _ in range(len(seconds))]
        # Nodes of forward cells that a device has to run before its first backward cell.
        self._forward_left = [0] * len(self._queues)
        self._limits = [cells.parts] * cells.stages
        # Stage s of S stages has at most S - s parts on their way: its own, and one in each of the S - s - 1 stages
        # behind it, which a part passes before its backward cell comes back.
        if schedule == "1f1b":
            self._limits = [min(cells.stages - stage, cells.parts) for stage in range(cells.stages)]
        else:
            for device, (kind, _, _) in zip(self._device, self._cell):
                self._forward_left[device] += kind == _FORWARD

    def _find_priorities(self) -> list[float]:
        """Return the order within a cell: topological, with sums of gradients right behind their last summand."""
        positions: list[float] = self._graph.positions.astype(np.float64).tolist()
        predecessors = self._graph.predecessors
        part = self._cells.part.tolist()
        for node in self._graph.order.tolist():
            if self._graph.ops[node] in ("Add", "Sum") and part[node] >= 0 and self._cells.is_backward[node]:
                own = [positions[item] for item in predecessors[node].tolist() if part[item] == part[node]]
                if own:
                    positions[node] = min(positions[node], max(own) + 0.5)
        return positions

    def run(self) -> Floats:
        count, starts = len(self._graph), np.zeros(len(self._graph))
        for node in range(count):
            if self._missing[node] == 0:
                heappush(self._queues[self._device[node]].arriving, (0.0, node))
        done = 0
        while done < count:
            picked = self._pick()
            if picked is None:  # parts wait for one another: more of them have to be on their way
                self._limits = [limit + 1 for limit in self._limits]
                self._forward_left = [0] * len(self._queues)
                continue
            device, start, node = picked
            starts[node] = start
            self._finish(device, node, start + self._seconds[node])
            done += 1
        return starts

    def _pick(self) -> tuple[int, float, int] | None:
        """Return the device, start and node that is next; None if all that is ready exceeds the limits."""
        # Devices in the order in which they could start something; the first that may start wins.
        order = sorted(range(len(self._queues)), key=self._next_start)
        for device in order:
            queue = self._queues[device]
            start = self._next_start(device)
            if start == float("inf"):
                break
            while True:
                # What has arrived by then can run.
                while queue.arriving and queue.arriving[0][0] <= start:
                    _, node = heappop(queue.arriving)
                    heappush(queue.ready.setdefault(self._cell[node], []), (self._priority[node], node))
                cell = self._choose(device)
                if cell is not None:
                    _, node = heappop(queue.ready[cell])
                    if not queue.ready[cell]:
                        del queue.ready[cell]
                    self._enter(queue, cell)
                    # It may have been seen while the device waited for what may begin: its inputs can come later.
                    return device, max(start, self._arrival[node]), node
                if not queue.arriving:
                    break
                # Nothing that is ready may begin: wait for what arrives next.
                start = max(start, queue.arriving[0][0])
        return None

    def _next_start(self, device: int) -> float:
        queue = self._queues[device]
        if queue.ready:
            return queue.free_at
        return max(queue.free_at, queue.arriving[0][0]) if queue.arriving else float("inf")

    def _choose(self, device: int) -> Cell | None:
        """Return the cell that a device goes on with."""
        queue = self._queues[device]
        if queue.current in queue.ready:
            return queue.current
        allowed = [cell for cell in queue.ready if self._may_enter(device, cell)]
        return min(allowed, key=self._rank, default=None)

    def _may_enter(self, device: int, cell: Cell) -> bool:
        kind, part, stage = cell
        if kind == _BACKWARD:
            return self._forward_left[device] <= 0
        if kind != _FORWARD:
            return True
        waiting = self._queues[device].started.get(stage, set())
        return part in waiting or len(waiting) < self._limits[stage]

    def _rank(self, cell: Cell) -> tuple[int, ...]:
        kind, part, stage = cell
        if kind in (_SHARED, _UPDATE):
            return (0 if kind == _SHARED else 9, stage)
        first = _FORWARD if self._schedule == "gpipe" else _BACKWARD
        # Among cells of a kind, the earlier part; with several stages on a device, groups of as many parts as there are
        # devices pass through one stage after the other.
        devices = len(self._queues)
        depth = stage if kind == _FORWARD else -stage
        return (1 if kind == first else 2, part // devices, depth, part)

    def _enter(self, queue: _Queue, cell: Cell) -> None:
        kind, part, stage = cell
        if kind == _FORWARD:
            queue.started.setdefault(stage, set()).add(part)
        elif kind == _BACKWARD:
            queue.started.get(stage, set()).discard(part)
        queue.current = cell if kind != _UPDATE else None

    def _finish(self, device: int, node: int, finish: float) -> None:
        """Book a node, and let its readers know when its values arrive."""
        self._queues[device].free_at = finish
        self._forward_left[device] -= self._cell[node][0] == _FORWARD
        graph = self._graph
        for value in graph.outputs[node].tolist():
            for reader in graph.readers[value].tolist():
                home = self._device[reader]
                arrival = finish
                if home != device:
                    size = float(graph.value_bytes[value])
                    arrival += self._latency[device][home] + size * self._per_byte[device][home]
                self._arrival[reader] = max(self._arrival[reader], arrival)
        for reader in graph.successors[node].tolist():
            self._missing[reader] -= 1
            if self._missing[reader] == 0:
                heappush(self._queues[self._device[reader]].arriving, (self._arrival[reader], reader))
