"""Choose where slots of a schedule run, and whether their weights stay there, by an integer program.

A *slot* is a run of neighbours in the schedule, of which at most one reads weights that may stream. A choice for a slot
is a device and a home: its weights stay on the device, or stream to it from the host's memory or from disk. Slots run
one after the other, and streams work all the time. So a step takes at least the sum of all slots, and as long as any of
the streams. The program minimises the larger one. Memory of devices and host bounds what stays. Where the next slot is
on another device, values cross, so that runs of slots stay together.

Beyond `MAX_BINARIES` choices, the program is solved with fractions. Then each slot goes where most of it is, and on
each device the weights stay whose nodes lose most per byte.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph import Floats, Ints, Longs
from onnxplace.utils import make_program, run_highs

HELD, HOST, DISK = range(3)
"""Where the weights of a slot are: on its device, in the host's memory, or on disk."""
MAX_BINARIES = 1500
# Choices that differ by less than this share of a step are equally good. The search ends after so many subproblems, not
# after a time, so that results are the same everywhere.
MIP_OPTIONS = {"mip_rel_gap": 2e-3, "mip_max_nodes": 100, "random_seed": 0}
# What else a shorter computation and fewer streamed bytes are worth, where they do not decide about the step.
TIE_WEIGHT = 1e-3
# The solver's tolerance is 1e-6 of a device's memory.
MEMORY_MARGIN = 1e-5


@dataclass(frozen=True)
class HomesProblem:
    """Slots, and what each choice for them takes."""

    seconds: Floats
    """[device, slot] with weights held; infinite where the device does not take it, or the weights have to stream."""
    streaming_seconds: Floats
    """[device, slot] with weights that stream; infinite where they cannot."""
    held_bytes: Longs
    """[device, slot]: weights that always stay."""
    streamed_bytes: Longs
    """[device, slot]: weights that may stream."""
    crossing_seconds: Floats
    """[device, slot]: the time for values to come to the device before the slot, if the slot before is elsewhere."""
    room_bytes: Longs
    """Per device, for weights and the pool."""
    pool_bytes: Longs
    """Per device, if weights stream to it."""
    host_bytes: float
    """Room for weights in the host's memory; may be infinite."""
    rates: Floats
    """[home, device] in bytes per second: infinite for weights that are held, 0 where none can come from a home."""
    group: Ints
    """Per slot; those of one group run on one device."""
    kind: Ints
    """Per slot; those of one kind are alike, so that their choices may be exchanged."""


@dataclass(frozen=True)
class Choice:
    """Device and home of each slot."""

    device: Ints
    home: Ints
    gap: float
    """Distance of the step from a lower bound of the program, as a share of it."""


@dataclass
class _Rows:
    """The rows of a sparse matrix, with their bounds."""

    starts: list[int] = field(default_factory=lambda: [0])
    columns: list[int] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)
    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)

    def add(self, entries: Any, lower: float, upper: float) -> None:
        """Add a row, given pairs of a column and its factor."""
        for column, factor in entries:
            self.columns.append(int(column))
            self.factors.append(float(factor))
        self.starts.append(len(self.columns))
        self.lower.append(lower)
        self.upper.append(upper)


def choose_homes(problem: HomesProblem) -> Choice | None:
    """Return the choice with the shortest step; None if nothing fits."""
    program = _HomesProgram(problem)
    if len(program.slot) > MAX_BINARIES:
        solution = program.solve({}, is_integral=False)
        choice = None if solution is None else _round(problem, program, solution)
    else:
        solution = program.solve(MIP_OPTIONS, is_integral=True)
        choice = None if solution is None else program.read(solution)
    return None if choice is None else _spread(problem, choice)


class _HomesProgram:
    """The program: a column per choice, then the step, the use of each pool, and the crossings."""

    def __init__(self, problem: HomesProblem) -> None:
        self.problem = problem
        streams = np.isfinite(problem.streaming_seconds) & (problem.streamed_bytes > 0)
        bytes_held = problem.held_bytes + problem.streamed_bytes
        room = problem.room_bytes[:, None]
        allowed = np.stack(
            [
                np.isfinite(problem.seconds) & (bytes_held <= room),
                streams & (problem.held_bytes <= room) & (problem.rates[HOST] > 0)[:, None],
                streams & (problem.held_bytes <= room) & (problem.rates[DISK] > 0)[:, None],
            ]
        )
        # Sorted by slot, so that the columns of a slot are neighbours.
        self.slot, self.device, self.home = (part.astype(np.int64) for part in np.nonzero(allowed.transpose(2, 1, 0)))
        at = self.device, self.slot
        is_held = self.home == HELD
        self.seconds = np.where(is_held, problem.seconds[at], problem.streaming_seconds[at])
        self.stream_bytes = np.where(is_held, 0, problem.streamed_bytes[at])
        self.stream_seconds = self.stream_bytes / problem.rates[self.home, self.device]
        self.device_bytes = np.where(is_held, bytes_held[at], problem.held_bytes[at])

    def solve(self, options: dict[str, Any], *, is_integral: bool) -> tuple[Floats, float] | None:
        """Return the part of each choice and the distance from the bound; None if nothing fits."""
        import highspy

        problem, count = self.problem, len(self.slot)
        devices, slots = problem.seconds.shape
        scale = max(float(np.where(np.isfinite(problem.seconds), problem.seconds, 0.0).sum(axis=1).max()), 1e-9)
        step, pool, crossing = count, count + 1, count + 1 + devices
        crossings = devices * (slots - 1) if devices > 1 else 0
        rows = self._build_rows(scale, step, pool, crossing if crossings else None)
        seconds = (self.seconds + self.stream_seconds) / scale
        cost = np.r_[TIE_WEIGHT * seconds, 1.0, np.zeros(devices), np.zeros(crossings)]
        upper = np.r_[np.ones(count), np.inf, np.ones(devices), np.ones(crossings)]
        program = make_program(
            cost,
            (np.zeros(len(cost)), upper),
            (rows.lower, rows.upper),
            (rows.starts, rows.columns, rows.factors),
        )
        if is_integral:
            kinds = np.full(len(cost), highspy.HighsVarType.kContinuous, dtype=object)
            kinds[:count] = kinds[pool : pool + devices] = highspy.HighsVarType.kInteger
            program.integrality_ = kinds.tolist()
        solver = run_highs(program, options)
        values = np.asarray(solver.getSolution().col_value, dtype=np.float64)
        info = solver.getInfo()
        if info.primal_solution_status != highspy.SolutionStatus.kSolutionStatusFeasible:
            return None
        bound = info.mip_dual_bound if is_integral else info.objective_function_value
        self.bound_seconds = float(bound) * scale
        return values[:count], max(1 - bound / max(info.objective_function_value, 1e-12), 0.0)

    def _build_rows(self, scale: float, step: int, pool: int, crossing: int | None) -> _Rows:
        problem, rows = self.problem, _Rows()
        devices, slots = problem.seconds.shape
        columns, infinite = np.arange(len(self.slot)), np.inf
        borders = np.searchsorted(self.slot, np.arange(slots + 1))
        of_slot = [columns[begin:end] for begin, end in pairwise(borders)]
        for own in of_slot:
            rows.add(((column, 1) for column in own), 1, 1)
        # The step takes as long as all slots, as the stream of each device, and as what the disk reads for all of them.
        entries = [(step, 1.0), *zip(columns, -self.seconds / scale)]
        if crossing is not None:
            cost = problem.crossing_seconds[:, 1:] / scale
            entries += zip(range(crossing, crossing + cost.size), -cost.ravel())
        rows.add(entries, 0, infinite)
        limits = [(self.device == device, self.stream_seconds) for device in range(devices)]
        limits.append((self.home == DISK, self.stream_bytes / max(float(problem.rates[DISK].max()), 1.0)))
        for chosen, seconds in limits:
            chosen = chosen & (self.home != HELD)
            rows.add([(step, 1.0), *zip(columns[chosen], -seconds[chosen] / scale)], 0, infinite)
        for device, room in enumerate(problem.room_bytes.tolist()):
            own = columns[self.device == device]
            room = max(room, 1)
            need = [(column, self.device_bytes[column] / room) for column in own]
            rows.add([*need, (pool + device, problem.pool_bytes[device] / room)], -infinite, 1 - MEMORY_MARGIN)
        for column in columns[self.home != HELD]:
            rows.add([(column, 1), (pool + self.device[column], -1)], -infinite, 0)
        if np.isfinite(problem.host_bytes):
            own, room = columns[self.home == HOST], max(problem.host_bytes, 1.0)
            rows.add(zip(own, self.stream_bytes[own] / room), -infinite, 1)
        on = [[own[self.device[own] == device] for own in of_slot] for device in range(devices)]
        head = {int(group): slot for slot, group in reversed(list(enumerate(problem.group.tolist())))}
        for device in range(devices if devices > 1 else 0):
            for slot in range(slots):
                first = head[int(problem.group[slot])]
                if first != slot:
                    rows.add([*((c, 1) for c in on[device][slot]), *((c, -1) for c in on[device][first])], 0, 0)
                if slot and crossing is not None:
                    start = crossing + device * (slots - 1) + slot - 1
                    leaving = [(c, 1) for c in on[device][slot - 1]]
                    rows.add([(start, 1), *((c, -1) for c in on[device][slot]), *leaving], 0, infinite)
        return rows

    def read(self, solution: tuple[Floats, float]) -> Choice:
        """Return the choice that has most of each slot."""
        values, gap = solution
        order = np.lexsort((values, self.slot))
        last = order[np.searchsorted(self.slot, np.arange(self.problem.seconds.shape[1]), "right") - 1]
        return Choice(self.device[last].astype(np.int32), self.home[last].astype(np.int32), gap)


def _round(problem: HomesProblem, program: _HomesProgram, solution: tuple[Floats, float]) -> Choice | None:
    """Return each slot where most of it is, with weights held in the order of what their nodes lose per byte."""
    devices, slots = problem.seconds.shape
    part = np.zeros((devices, slots))
    np.add.at(part, (program.device, program.slot), solution[0])
    together = np.zeros((devices, int(problem.group.max()) + 1))
    np.add.at(together.T, problem.group, part.T)
    device = together.argmax(axis=0)[problem.group]
    at = device, np.arange(slots)
    streamed, must_hold = problem.streamed_bytes[at], ~np.isfinite(problem.streaming_seconds[at])
    loss = np.where(must_hold, np.inf, problem.streaming_seconds[at] - problem.seconds[at])
    may_hold = np.isfinite(problem.seconds[at]) & ((streamed > 0) | must_hold)
    home = np.where(streamed > 0, DISK, HELD)
    host_room = problem.host_bytes
    for index in range(devices):
        own = np.flatnonzero(device == index)
        room = int(problem.room_bytes[index] - problem.held_bytes[index, own].sum())
        if streamed[own].sum() > room or not may_hold[own].all():
            room -= int(problem.pool_bytes[index])
        if room < 0:
            return None
        ranked = own[np.lexsort((own, -loss[own] / np.maximum(streamed[own], 1)))]
        for slot in ranked.tolist():
            if may_hold[slot] and streamed[slot] <= room:
                home[slot], room = HELD, room - int(streamed[slot])
            elif must_hold[slot]:
                return None
            elif streamed[slot] and problem.rates[HOST, index] > 0 and streamed[slot] <= host_room:
                home[slot], host_room = HOST, host_room - int(streamed[slot])
            elif streamed[slot] and not problem.rates[DISK, index]:
                return None
    step = _predict(problem, device, home)
    return Choice(
        device.astype(np.int32), home.astype(np.int32), max(1 - program.bound_seconds / max(step, 1e-12), 0.0)
    )


def _predict(problem: HomesProblem, device: NDArray[Any], home: NDArray[Any]) -> float:
    """Return the step of a choice, as the program counts it."""
    at = device, np.arange(len(device))
    seconds = np.where(home == HELD, problem.seconds[at], problem.streaming_seconds[at]).sum()
    seconds += problem.crossing_seconds[at][1:][device[1:] != device[:-1]].sum()
    size = np.where(home == HELD, 0, problem.streamed_bytes[at])
    streams = np.bincount(device, size / problem.rates[home, device])
    disk = size[home == DISK].sum() / max(float(problem.rates[DISK].max()), 1.0)
    return float(max(seconds, streams.max(), disk))


def _spread(problem: HomesProblem, choice: Choice) -> Choice:
    """Return the choice with the homes of equal slots spread evenly over the step.

    A small pool then smooths what streams.
    """
    home = choice.home.copy()
    kinds = np.unique(problem.kind)
    for index, kind in enumerate(kinds.tolist()):
        for device in np.unique(choice.device).tolist():
            own = np.flatnonzero((problem.kind == kind) & (choice.device == device))
            ranked = np.sort(choice.home[own])[::-1]  # from disk, from the host, held
            # Places are a fraction of the kind's slots apart, and kinds begin at different ones.
            place = np.zeros(len(own))
            for value in np.unique(ranked):
                chosen = np.flatnonzero(ranked == value)
                shift = (0.5 + index / len(kinds)) % 1
                place[chosen] = (np.arange(len(chosen)) + shift) / len(chosen)
            home[own] = ranked[np.lexsort((ranked, place))]
    return Choice(choice.device, home, choice.gap)
