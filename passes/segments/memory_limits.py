"""Keep segments within the memory of their devices: cut those finer that hold too much while they run.

A session holds its inputs until its end, and its outputs with them. Node by node a device holds less: a segment of one
node is what the schedule counts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.graph import Bools, Ints, Longs, OpGraph, sum_by
from onnxplace.problem import describe_shortage, device_seconds
from onnxplace.simulation import Simulation, simulate_with_contention
from onnxplace.state import State
from onnxplace.target import Target

# Each round cuts every segment that holds too much, at least in two.
ROUNDS = 16


@dataclass(frozen=True)
class Pieces:
    """The nodes of each segment, and the step that they make."""

    nodes: tuple[Ints, ...]
    """Per segment, in schedule order; segments in the order of their first nodes."""
    segment_of: Ints
    """Per node."""
    graph: OpGraph
    """Its nodes are segments."""
    device: Ints
    """Per segment."""
    simulation: Simulation
    """Of `graph`, each segment paying for its call, and for others that share what its device has."""


def simulated(state: State, nodes: Sequence[Ints]) -> Pieces:
    """Return the predicted step of segments, given the nodes of each in schedule order."""
    graph, target, device = state[Profile].graph, state.target, state[Placement].device
    segment_of = np.zeros(len(graph), dtype=np.int32)
    for index, piece in enumerate(nodes):
        segment_of[piece] = index
    coarse = graph.contract(segment_of)
    takes = np.bincount(coarse.inputs.rows, minlength=len(nodes))
    gives = np.bincount(coarse.outputs.rows, minlength=len(nodes))
    seconds = np.stack(
        [
            sum_by(segment_of, row, len(nodes))
            + there.segment_seconds
            + there.input_seconds * takes
            + there.output_seconds * gives
            for row, there in zip(device_seconds(state[Profile], target), target.devices)
        ]
    )
    placed = np.array([device[piece[0]] for piece in nodes], dtype=np.int32)
    order = np.arange(len(nodes), dtype=np.int32)
    return Pieces(
        tuple(nodes), segment_of, coarse, placed, simulate_with_contention(coarse, seconds, target, placed, order)
    )


def cut_within_limits(state: State, nodes: Sequence[Ints]) -> Pieces:
    """Return segments of which no device holds more than its limit: the given ones, where needed in several pieces.

    A segment that runs while its device holds too much is filled anew, node after node, as far as the memory allows;
    what stays too much by the simulation is cut further. Raises InfeasibleError, naming a node, if single nodes do
    not fit either. About O((N + E) log N).
    """
    pieces = simulated(state, nodes)
    limits = np.array([device.memory_bytes for device in state.target.devices], dtype=np.int64)
    spare: dict[int, int] = {}
    for _ in range(ROUNDS):
        excess = pieces.simulation.peak_bytes - limits
        finer: dict[int, list[Ints]] = {}
        for there in np.flatnonzero(excess > 0).tolist():
            # What the account node by node did not foresee is left free the next time.
            spare[there] = spare[there] + int(excess[there]) if there in spare else 0
            finer |= _refilled(state, pieces, there, int(limits[there]) - spare[there])
        if not finer:
            break
        pieces = simulated(state, _replaced(state, pieces, finer))
    return pieces if (pieces.simulation.peak_bytes <= limits).all() else _single_nodes(state, limits)


def _refilled(state: State, pieces: Pieces, there: int, limit: int) -> dict[int, list[Ints]]:
    """Return, for each segment of a device that runs while it holds too much, the pieces that take its place.

    Segments of one node are left out: they cannot be cut.
    """
    schedule, unit = state[Schedule], state[Profile].unit
    order = np.arange(len(pieces.nodes), dtype=np.int32)
    coarse = Held.on(pieces.graph, pieces.simulation, order, pieces.device, there)
    room = limit - int(pieces.simulation.weights_bytes[there])
    needs = coarse.bytes_each()
    over = np.flatnonzero(needs > room)
    over = over if len(over) else np.array([needs.argmax()])
    fine = Held.on(state[Profile].graph, schedule.simulation, schedule.order, state[Placement].device, there)
    starts = np.concatenate([[0], np.cumsum([len(pieces.nodes[s]) for s in coarse.nodes])])
    found: dict[int, list[Ints]] = {}
    for at in over.tolist():
        first, last = int(starts[at]), int(starts[at + 1]) - 1
        if first < last:
            ends = fine.filled(first, last, room, unit[fine.nodes])
            ends = ends if len(ends) > 1 else [(first + last) // 2, last]
            found[int(coarse.nodes[at])] = np.split(fine.nodes[first : last + 1], np.array(ends[:-1]) + 1 - first)
    return found


def _replaced(state: State, pieces: Pieces, finer: dict[int, list[Ints]]) -> list[Ints]:
    """Return all segments, some in several pieces, in the order of their first nodes."""
    rank = np.empty(len(pieces.segment_of), dtype=np.int64)
    rank[state[Schedule].order] = np.arange(len(rank))
    every = [part for index, nodes in enumerate(pieces.nodes) for part in finer.get(index, [nodes])]
    return sorted(every, key=lambda part: int(rank[part[0]]))


def _single_nodes(state: State, limits: Longs) -> Pieces:
    """Return each node as a segment of its own; raises InfeasibleError if these do not fit either."""
    pieces = simulated(state, list(state[Schedule].order[:, None]))
    peaks = pieces.simulation.peak_bytes
    if (peaks <= limits).all():
        return pieces
    raise _too_much(state.target, pieces, peaks, int(np.argmax(peaks - limits)))


def _too_much(target: Target, pieces: Pieces, peaks: Longs, there: int) -> InfeasibleError:
    order = np.arange(len(pieces.nodes), dtype=np.int32)
    held = Held.on(pieces.graph, pieces.simulation, order, pieces.device, there)
    name = pieces.graph.names[int(held.nodes[held.bytes_each().argmax()])] if len(held.nodes) else ""
    return InfeasibleError(
        "P005",
        f"{describe_shortage(target, peaks)}; most while {target.devices[there].id} runs node {name!r}, "
        "each node a segment",
        where="split",
        hint="add devices, raise --max-memory, or try another --placer",
    )


@dataclass(frozen=True)
class Held:
    """What a device holds while it runs its nodes one after the other; times are positions in that sequence."""

    nodes: Ints
    """In the order in which the device runs them."""
    first: Longs
    """Per buffer: while which node it comes into being; sorted."""
    last: Longs
    """While which node it is needed last."""
    size: Longs
    stays: Bools
    """Whether no other device reads it, nor the caller: a segment that spans it holds it only as long as needed."""
    workspace: Longs
    """Per position."""

    @staticmethod
    def on(graph: OpGraph, simulation: Simulation, order: Ints, device: Ints, there: int) -> Held:
        """Return what the device of index `there` holds in a simulated step; O(N + E), weights left out."""
        nodes = order[device[order] == there]
        at = np.full(len(graph) + 1, -1, dtype=np.int64)  # of a producer -1: nowhere
        at[nodes] = np.arange(len(nodes))
        first = at[graph.producer]
        made = first >= 0
        last = first.copy()
        reads = at[graph.inputs.rows]
        np.maximum.at(last, graph.inputs.items, reads)
        stays = made & ~graph.is_output
        last[made & graph.is_output] = len(nodes) - 1
        sent = simulation.transfers
        leaves, comes = sent.source == there, sent.destination == there
        start, finish = simulation.start_seconds[nodes], simulation.finish_seconds[nodes]
        np.maximum.at(last, sent.value[leaves], np.searchsorted(start, sent.finish_seconds[leaves], "left") - 1)
        stays[sent.value[leaves]] = False
        first[sent.value[comes]] = np.searchsorted(finish, sent.start_seconds[comes], "right")
        first[(graph.producer < 0) & (last >= 0)] = 0
        kept = last >= 0
        for view in np.flatnonzero((graph.alias >= 0) & made)[::-1].tolist():
            looked_at = graph.alias[view]
            last[looked_at] = max(last[looked_at], last[view])
            stays[looked_at] &= stays[view]
            kept[view] = False
        index = np.flatnonzero(kept)
        index = index[np.argsort(first[index], kind="stable")]
        return Held(
            nodes, first[index], last[index], graph.value_bytes[index], stays[index], graph.workspace_bytes[nodes]
        )

    def _around(self) -> tuple[Longs, Longs]:
        """Return the bytes of all that came before the end of each position, and of all that went before its start."""
        count = len(self.nodes)
        came = np.cumsum(np.bincount(self.first, self.size, count))
        went = np.concatenate([[0.0], np.cumsum(np.bincount(self.last, self.size, count))[:-1]])
        return np.rint(came).astype(np.int64), np.rint(went).astype(np.int64)

    def bytes_each(self) -> Longs:
        """Return the bytes held while each node runs as a segment of its own."""
        came, went = self._around()
        return came - went + self.workspace

    def filled(self, begin: int, end: int, room: int, unit: Ints) -> list[int]:
        """Return the last positions of the segments into which positions `begin` to `end` (inclusive) are cut.

        From the front, each takes as many nodes as fit into `room` bytes, but at least one; nodes of one unit are
        parted only where they do not fit together.
        """
        came, went = self._around()

        def fits(start: int, stop: int) -> bool:
            inner = slice(*np.searchsorted(self.first, (start, stop + 1)))
            inside = self.stays[inner] & (self.last[inner] <= stop)
            size, count = self.size[inner][inside], stop - start + 2
            change = np.bincount(self.first[inner][inside] - start, size, count)
            change -= np.bincount(self.last[inner][inside] + 1 - start, size, count)
            peak = (np.cumsum(change)[:-1] + self.workspace[start : stop + 1]).max()
            return bool(came[stop] - went[start] - size.sum() + peak <= room)

        units = np.append(begin + np.flatnonzero(unit[begin + 1 : end + 1] != unit[begin:end]), end)
        ends: list[int] = []
        while begin <= end:
            whole = units[np.searchsorted(units, begin) :]
            stop = _furthest(begin, whole, fits)
            if stop < begin:
                stop = max(_furthest(begin, np.arange(begin, whole[0]), fits), begin)
            ends.append(stop)
            begin = stop + 1
        return ends


def _furthest(begin: int, ends: Longs, fits: Callable[[int, int], bool]) -> int:
    """Return the furthest of `ends` up to which all fits from `begin` on, -1 if none; asks O(log) times, near first."""
    found, step = -1, 1
    while found + step < len(ends) and fits(begin, int(ends[found + step])):
        found, step = found + step, 2 * step
    while step > 1:
        step //= 2
        if found + step < len(ends) and fits(begin, int(ends[found + step])):
            found += step
    return int(ends[found]) if found >= 0 else -1
