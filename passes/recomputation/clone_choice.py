"""Choose the nodes that run again, such that the memory keeps a limit for the least time.

A schedule of one device turns at the position where it holds most: readers behind the turn read clones of the chosen
nodes, so that the originals' values need not stay. Every choice is valid, and its exact memory is computed in linear
time.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from onnxplace.graph.lifetimes import sum_alive
from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs, OpGraph
from onnxplace.passes.recomputation.clone_kernels import buffer_spans, place_clones

# Nodes that one step of the search adds together. Each step is rated by a pass over the whole graph.
MAX_STEP_NODES = 256
# Passes over all candidates; each starts from what the last one left.
MAX_PASSES = 24
# Time of a node that takes none, so that fewer nodes are better.
NODE_SECONDS = 1e-7
# Nodes with a share of at least this much of all cloned time are reconsidered at the end, at most this many.
MAX_DROPPED = 2000


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
        graph, count, position = self.graph, len(self.graph), self.position
        slots, clone_slot = np.zeros(count + 1, dtype=np.int64), np.full(count, count, dtype=np.int64)
        sequence, spans = np.full((2, count), -1, dtype=np.int64), np.full((4, len(graph.producer)), -1, dtype=np.int64)
        readers, clones = graph.readers.arrays, (position, self.turn, is_cloned)
        length = place_clones(self.order, *clones, *graph.outputs.arrays, *readers, clone_slot, slots, sequence)
        values = graph.producer, graph.alias, graph.is_output
        buffer_spans(*values, *clones, *graph.inputs.arrays, *readers, sequence, length, spans)
        return ClonedSchedule(self._sum_bytes(sequence, spans, length), sequence[0], sequence[1], spans[1])

    @cached_property
    def position(self) -> Longs:
        """Return the position of each node in the order."""
        return np.argsort(self.order)

    def _sum_bytes(self, sequence: Longs, spans: Longs, length: int) -> Longs:
        """Return the bytes held at each number of a sequence."""
        held_bytes = np.zeros(length)
        size, read = self.graph.value_bytes, np.diff(self.graph.readers.starts) > 0
        for first, last in ((spans[0], spans[1]), (spans[2], spans[3])):
            # An input that nothing reads is on no device.
            held = (first >= 0) & ((self.graph.producer >= 0) | read)
            held_bytes += sum_alive(first[held], last[held] + 1, size[held], length)
        cloned = sequence[1] >= 0
        held_bytes[sequence[0]] += self.graph.workspace_bytes
        held_bytes[sequence[1][cloned]] += self.graph.workspace_bytes[cloned]
        return held_bytes.astype(np.int64)


def held_bytes(graph: OpGraph, order: Ints) -> Longs:
    """Return the bytes of values and workspace that one device holds at each position of an order; O(N + E)."""
    return TurnProblem(graph, order, -1).apply(np.zeros(len(graph), dtype=np.bool_)).held_bytes


@dataclass(frozen=True)
class CloneChoice:
    """Nodes that run again."""

    is_cloned: Bools
    seconds: float
    """Time that the clones take."""
    peak_bytes: int
    """With them, of one device, without weights."""


def choose_clones(problem: TurnProblem, seconds: Floats, may_clone: Bools, limit_bytes: int) -> CloneChoice:
    """Return nodes whose second run keeps `limit_bytes`, for little time; if none do, those that exceed it least.

    Greedy, after the idea of Checkmate (MLSys 2020) that a schedule is judged by its exact memory: candidates are the
    values that stay from before the turn to behind it. Each step clones the producer of one, perhaps with those
    ancestors whose values would have to stay for it, and takes the step that lowers the bytes above the limit, summed
    over the schedule, most per second. In the end, nodes that are no longer needed are dropped, most expensive first.

    Args:
        problem: The schedule, and where its readers turn to clones.
        seconds: Per node.
        may_clone: Per node; nodes behind the turn are never cloned.
        limit_bytes: For values and workspace.
    """
    search = _Search(problem, seconds, may_clone, limit_bytes)
    for _ in range(MAX_PASSES):
        if not search.excess or not search.improve():
            break
    search.drop_needless()
    return search.result()


class _Search:
    def __init__(self, problem: TurnProblem, seconds: Floats, may_clone: Bools, limit_bytes: int) -> None:
        self.problem, self.graph, self.limit_bytes = problem, problem.graph, limit_bytes
        self.position = problem.position
        self.seconds = np.maximum(seconds, NODE_SECONDS)
        self.may_clone = may_clone & (self.position <= problem.turn)
        self.roots = self.graph.alias_roots
        self.accept(np.zeros(len(self.graph), dtype=np.bool_))

    def accept(self, is_cloned: Bools) -> None:
        """Continue from these clones."""
        self.is_cloned = is_cloned
        self.schedule = self.problem.apply(is_cloned)
        self.excess = self._excess(self.schedule)

    def _excess(self, schedule: ClonedSchedule) -> float:
        """Return the bytes above the limit, summed over the nodes of the original schedule."""
        # The sum, unlike the peak, also rewards steps that lower one of several equal peaks.
        above = np.maximum(schedule.held_bytes - self.limit_bytes, 0)
        # Clones lengthen the sequence: each counts with the node before which it runs, by the most of them.
        starts = np.concatenate([[0], np.sort(schedule.node_number)[:-1] + 1])
        return float(np.maximum.reduceat(above, starts).sum())

    def improve(self) -> bool:
        """Take steps until no candidate helps; return whether some did."""
        begin = self.excess
        # Steps are rated again when they come first: ratings mostly fall as more is cloned (lazy evaluation).
        heap = [(-np.inf, node) for node in self._candidates()]
        heapq.heapify(heap)
        while heap and self.excess > 0:
            _, node = heapq.heappop(heap)
            if self.is_cloned[node]:
                continue
            rating, added = self._rate(node)
            if rating <= 0:
                continue
            # Another one has a better rating from earlier: put this one back, and rate that one next.
            if heap and -heap[0][0] > rating:
                heapq.heappush(heap, (-rating, node))
                continue
            self.accept(self.is_cloned | added)
        return self.excess < begin * (1 - 1e-9)

    def _candidates(self) -> list[int]:
        """Return the nodes whose values stay over the turn."""
        graph, schedule = self.graph, self.schedule
        turn_number = int(schedule.node_number[self.problem.order[self.problem.turn]])
        stays = (schedule.last_number > turn_number) & (graph.value_bytes > 0)
        produced = graph.producer >= 0
        # A view is a candidate if its source stays.
        nodes = np.unique(graph.producer[produced & stays[self.roots]])
        free: list[int] = nodes[self.may_clone[nodes] & ~self.is_cloned[nodes]].tolist()
        return free

    def _rate(self, node: int) -> tuple[float, Bools]:
        """Return the bytes times nodes above the limit that the best step for a node saves per second, and its nodes.

        0 if none helps.
        """
        best, chosen = 0.0, self.is_cloned
        options = [np.arange(len(self.graph)) == node]
        for is_deep in (False, True):
            added = self._with_ancestors(node, is_deep)
            if not any((added == option).all() for option in options):
                options.append(added)
        # Alone; with ancestors that are as cheap; with all whose values would have to stay.
        for added in options:
            schedule = self.problem.apply(self.is_cloned | added)
            saved = self.excess - self._excess(schedule)
            rating = saved / float(self.seconds[added].sum())
            if saved > 0 and rating > best:
                best, chosen = rating, added
        return best, chosen

    def _with_ancestors(self, node: int, is_deep: bool) -> Bools:
        """Return a node and those ancestors that read values which would otherwise have to stay for it.

        Unless `is_deep`, ancestors more expensive than the node are left out: their values stay.
        """
        graph, reach = self.graph, [node]
        added: Bools = np.arange(len(graph)) == node
        turn_number = int(self.schedule.node_number[self.problem.order[self.problem.turn]])
        limit = np.inf if is_deep else 1.01 * float(self.seconds[node])
        while reach and added.sum() < MAX_STEP_NODES:
            for value in graph.inputs[reach.pop()].tolist():
                source = int(graph.producer[value])
                if source < 0 or added[source] or self.is_cloned[source] or not self.may_clone[source]:
                    continue
                root = int(self.roots[value])
                is_view = root != value
                stays = self.schedule.last_number[root] > turn_number
                # Values that stay anyway, or take no memory, need no clone.
                if graph.value_bytes[root] == 0 or (stays and not is_view):
                    continue
                if is_view or self.seconds[source] <= limit:
                    added[source] = True
                    reach.append(source)
        return added

    def drop_needless(self) -> None:
        """Drop nodes, most expensive first, whose clones no longer help."""
        nodes = np.flatnonzero(self.is_cloned)
        nodes = nodes[np.lexsort((nodes, -self.seconds[nodes]))][:MAX_DROPPED]
        for node in nodes.tolist():
            fewer = self.is_cloned & (np.arange(len(self.graph)) != node)
            # Later clones may have made an earlier one superfluous.
            if self._excess(self.problem.apply(fewer)) <= self.excess:
                self.accept(fewer)
        self.accept(self.is_cloned & (self.schedule.clone_number >= 0))

    def result(self) -> CloneChoice:
        """Return the current clones."""
        return CloneChoice(self.is_cloned, float(self.seconds[self.is_cloned].sum()), self.schedule.peak_bytes)
