"""Choose where slots of a schedule run, and whether their weights stay there, by an integer program.

A *slot* is a run of neighbours in the schedule, of which at most one reads weights that may stream. A choice for a slot
is a device and a home: its weights stay on the device, or stream to it from the host's memory or from disk. Slots run
one after the other; where the next one is on another device, values cross. Streams work all the time: a stream fills
its pool while slots run, and slots take from it, so what streams is spread over the step. Where a pool is empty, slots
wait. The program minimises the sum of all slots, crossings and waits. Memory of devices and host bounds what stays.

Beyond `MAX_BINARIES` choices, neighbours are joined until there are fewer: that gives the devices, and the homes follow
slot by slot. The program with fractions then gives the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np

from onnxplace.graph import Floats, Ints, Longs
from onnxplace.utils import make_program, run_highs

HELD, HOST, DISK = range(3)
"""Where the weights of a slot are: on its device, in the host's memory, or on disk."""
MAX_BINARIES = 1500
# Choices that differ by less than this share of a step are equally good. The search ends after so many subproblems, not
# after a time, so that results are the same everywhere.
MIP_OPTIONS = {"mip_rel_gap": 2e-3, "mip_max_nodes": 20, "random_seed": 0}
# What else a shorter computation and fewer streamed bytes are worth, where they do not decide about the step.
TIE_WEIGHT = 1e-4
# A step is divided into so many parts, after each of which the pools hold no more than this share of their size: blocks
# come and go as a whole, and leave gaps.
MAX_PARTS, POOL_USE = 32, 0.5
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


@dataclass(frozen=True)
class Choice:
    """Device and home of each slot."""

    device: Ints
    home: Ints
    gap: float
    """Distance of the step from a lower bound, as a share of it."""
    bound_seconds: float = 0.0
    """The lower bound, by the program."""


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
    if (parts := -(-len(program.slot) // MAX_BINARIES)) <= 1:
        choice = program.solve()
    elif (rough := _HomesProgram(_join_neighbours(problem, parts)).solve()) is not None:
        elsewhere = np.arange(len(problem.seconds))[:, None] != np.repeat(rough.device, parts)[: len(problem.group)]
        seconds, streaming = (
            np.where(elsewhere, np.inf, times) for times in (problem.seconds, problem.streaming_seconds)
        )
        placed = _HomesProgram(replace(problem, seconds=seconds, streaming_seconds=streaming))
        choice = placed.solve(program.solve(is_integral=False))
    else:
        choice = None
    return choice


def _join_neighbours(problem: HomesProblem, count: int) -> HomesProblem:
    """Return the problem with `count` neighbours joined to one slot each."""
    part = np.arange(len(problem.group)) // count
    first = np.unique(part, return_index=True)[1]
    seconds, streaming, held, streamed = (
        np.add.reduceat(table, first, axis=1)
        for table in (
            problem.seconds,
            np.minimum(problem.streaming_seconds, problem.seconds),
            problem.held_bytes,
            problem.streamed_bytes,
        )
    )
    # Groups that share a joined slot are one.
    group = part.copy()
    for _ in range(len(first)):
        least = np.full(int(problem.group.max()) + 1, len(part))
        np.minimum.at(least, problem.group, group)
        joined = np.minimum.reduceat(least[problem.group], first)[part]
        if (joined == group).all():
            break
        group = joined
    return replace(
        problem,
        seconds=seconds,
        streaming_seconds=streaming,
        held_bytes=held,
        streamed_bytes=streamed,
        crossing_seconds=problem.crossing_seconds[:, first],
        group=group[first].astype(np.int32),
    )


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

    def solve(self, bound: Choice | None = None, *, is_integral: bool = True) -> Choice | None:
        """Return the best choice; None if nothing fits.

        With fractions, only its bound counts, which another choice can be compared with.
        """
        import highspy

        def is_feasible(solver: Any) -> bool:
            return bool(solver.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible)

        problem, count = self.problem, len(self.slot)
        devices, slots = problem.seconds.shape
        scale = max(float(np.where(np.isfinite(problem.seconds), problem.seconds, 0.0).sum(axis=1).max()), 1e-9)
        parts = min(slots, MAX_PARTS)
        step, pool, wait = count, count + 1, count + 1 + devices
        level = wait + parts
        crossing = level + parts * devices
        crossings = devices * (slots - 1) if devices > 1 else 0
        rows = self._build_rows(scale, step, pool, crossing if crossings else None)
        self._add_levels(rows, scale, step, wait, crossing if crossings else None)
        seconds = (self.seconds + self.stream_seconds) / scale
        cost = np.r_[TIE_WEIGHT * seconds, 1.0, np.zeros(crossing + crossings - pool)]
        depth = POOL_USE * problem.pool_bytes / np.maximum(problem.rates[[HOST, DISK]].max(axis=0), 1.0) / scale
        upper = np.r_[np.ones(count), np.inf, np.ones(devices), np.full(parts, np.inf), np.tile(depth, parts)]
        upper = np.r_[upper, np.ones(crossings)]
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
        solver = run_highs(program, MIP_OPTIONS)
        if solver.getModelStatus() == highspy.HighsModelStatus.kSolutionLimit and not is_feasible(solver):
            solver = run_highs(program, {"random_seed": 0, "mip_max_improving_sols": 1})
        values, info = np.asarray(solver.getSolution().col_value, dtype=np.float64), solver.getInfo()
        if not is_feasible(solver):
            return None
        least = info.mip_dual_bound if is_integral else info.objective_function_value
        # Ties add at most this share, since neither computing nor a stream takes longer than a step.
        least_seconds = bound.bound_seconds if bound else float(least) * scale / (1 + TIE_WEIGHT * (1 + devices))
        order = np.lexsort((values[:count], self.slot))
        last = order[np.searchsorted(self.slot, np.arange(slots), "right") - 1]
        device, home = (column[last].astype(np.int32) for column in (self.device, self.home))
        gap = 1 - least_seconds / max(float(values[step]) * scale, 1e-12)
        return Choice(device, home, max(gap, 0.0), least_seconds)

    def _build_rows(self, scale: float, step: int, pool: int, crossing: int | None) -> _Rows:
        problem, rows = self.problem, _Rows()
        devices, slots = problem.seconds.shape
        columns, infinite = np.arange(len(self.slot)), np.inf
        borders = np.searchsorted(self.slot, np.arange(slots + 1))
        of_slot = [columns[begin:end] for begin, end in pairwise(borders)]
        for own in of_slot:
            rows.add(((column, 1) for column in own), 1, 1)
        own, read_seconds = columns[self.home == DISK], self.stream_bytes / max(float(problem.rates[DISK].max()), 1.0)
        rows.add([(step, 1.0), *zip(own, -read_seconds[own] / scale)], 0, infinite)
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

    def _add_levels(self, rows: _Rows, scale: float, step: int, wait: int, crossing: int | None) -> None:
        """Add rows for the time of each part of a step, and for what each pool holds after it.

        That is in seconds of its stream. A part takes as long as its slots, crossings and a wait. Meanwhile the stream
        fills the pool, and the slots take from it. A step ends with what it began with.
        """
        problem, columns = self.problem, np.arange(len(self.slot))
        devices, slots = problem.seconds.shape
        parts = min(slots, MAX_PARTS)
        part, level = np.arange(slots) * parts // slots, wait + parts
        total: list[tuple[int, float]] = [(step, 1.0)]
        for number in range(parts):
            own = columns[part[self.slot] == number]
            times = [(wait + number, -1.0), *zip(own, -self.seconds[own] / scale)]
            for slot in np.flatnonzero(part[1:] == number).tolist() if crossing is not None else ():
                starts = [crossing + device * (slots - 1) + slot for device in range(devices)]
                times += zip(starts, -problem.crossing_seconds[:, slot + 1] / scale)
            total += times
            for device in range(devices):
                taken = dict(times)
                for column in own[(self.device[own] == device) & (self.home[own] != HELD)].tolist():
                    taken[column] += self.stream_seconds[column] / scale
                before = level + (number - 1) % parts * devices + device
                levels = [(level + number * devices + device, 1.0), (before, -1.0)] if parts > 1 else []
                rows.add([*taken.items(), *levels], -np.inf, 0)
        rows.add(total, 0, np.inf)
