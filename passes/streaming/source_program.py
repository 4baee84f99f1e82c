"""Choose where slots of a schedule run, and whether their weights stay there, by an integer program.

A *slot* is an interval of the schedule, of which at most one node reads weights that may stream. A choice for a slot
is a device and a weight source: its weights are resident on the device, or stream to it from the host's memory or from
disk. Slots run one after the other; where the next one is on another device, values cross. Streams work all the time:
a stream fills its pool while slots run, and slots take from it, so what streams is spread over the step. Where a pool
is empty, slots wait. The program minimises the sum of all slots, crossings and waits. Memory of devices and host bounds
what stays.

Beyond `MAX_BINARIES` choices, neighbours are joined until there are fewer: that gives the devices, and the sources
follow slot by slot. The program with fractions then gives the bound.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from onnxplace.graph.op_graph import Floats, Ints, Longs
from onnxplace.utils.linear_programs import LinearProgram

RESIDENT, HOST, DISK = range(3)
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
class SourceProblem:
    """Slots, and what each choice for them takes."""

    seconds: Floats
    """[device, slot] with resident weights; infinite where the device does not take it, or they have to stream."""
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
    """[source, device] in bytes per second: infinite for resident weights, 0 where none can come from a source."""
    group: Ints
    """Per slot; those of one group run on one device."""


@dataclass(frozen=True)
class Choice:
    """Device and source of each slot."""

    device: Ints
    source: Ints
    gap: float
    """Distance of the step from a lower bound, as a share of it."""
    bound_seconds: float = 0.0
    """The lower bound, by the program."""


def choose_sources(problem: SourceProblem) -> Choice | None:
    """Return the choice with the shortest step; None if nothing fits."""
    program = _SourceProgram(problem)
    if (parts := -(-len(program.slot) // MAX_BINARIES)) <= 1:
        return program.solve()
    rough = _SourceProgram(_join_neighbours(problem, parts)).solve()
    if rough is None:
        return None
    elsewhere = np.arange(len(problem.seconds))[:, None] != np.repeat(rough.device, parts)[: len(problem.group)]
    seconds, streaming = (np.where(elsewhere, np.inf, times) for times in (problem.seconds, problem.streaming_seconds))
    placed = _SourceProgram(replace(problem, seconds=seconds, streaming_seconds=streaming))
    return placed.solve(program.solve(is_integral=False))


def _join_neighbours(problem: SourceProblem, count: int) -> SourceProblem:
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


class _SourceProgram:
    """The program: a column per choice, then the step, the use of each pool, its levels, waits, and crossings."""

    def __init__(self, problem: SourceProblem) -> None:
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
        self.slot, self.device, self.source = (part.astype(np.int64) for part in np.nonzero(allowed.transpose(2, 1, 0)))
        at = self.device, self.slot
        self.moves = self.source != RESIDENT
        self.stream_bytes = np.where(self.moves, problem.streamed_bytes[at], 0)
        self.device_bytes = np.where(self.moves, problem.held_bytes[at], bytes_held[at])
        # All times are shares of this one: times near 1 suit the solver's tolerances, which are absolute.
        self.scale = max(float(np.where(np.isfinite(problem.seconds), problem.seconds, 0.0).sum(axis=1).max()), 1e-9)
        self.seconds = np.where(self.moves, problem.streaming_seconds[at], problem.seconds[at])
        self.stream_seconds = self.stream_bytes / problem.rates[self.source, self.device]

    def solve(self, bound: Choice | None = None, *, is_integral: bool = True) -> Choice | None:
        """Return the best choice; None if nothing fits.

        With fractions, only its bound counts, which another choice can be compared with.
        """
        import highspy

        def is_feasible(solver: Any) -> bool:
            return bool(solver.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible)

        problem, program, scale = self.problem, LinearProgram(), self.scale
        devices, slots = problem.seconds.shape
        parts = min(slots, MAX_PARTS)
        depth = POOL_USE * problem.pool_bytes / np.maximum(problem.rates[[HOST, DISK]].max(axis=0), 1.0) / scale
        tie_cost = TIE_WEIGHT * ((self.seconds + self.stream_seconds) / scale)
        chosen = program.add_columns(len(self.slot), cost=tie_cost, upper=1.0, is_integral=is_integral)
        (step,) = program.add_columns(1, cost=1.0)
        has_pool = program.add_columns(devices, upper=1.0, is_integral=is_integral)
        wait = program.add_columns(parts)
        level = program.add_columns((parts, devices), upper=depth)
        crosses = program.add_columns((devices, slots - 1 if devices > 1 else 0), upper=1.0)
        self._add_limits(program, chosen, step, has_pool)
        self._add_crossings(program, chosen, crosses)
        self._add_levels(program, chosen, step, wait, level, crosses)
        solver = program.solve(MIP_OPTIONS)
        if solver.getModelStatus() == highspy.HighsModelStatus.kSolutionLimit and not is_feasible(solver):
            solver = program.solve({"random_seed": 0, "mip_max_improving_sols": 1})
        if not is_feasible(solver):
            return None
        values, info = np.asarray(solver.getSolution().col_value, dtype=np.float64), solver.getInfo()
        least = info.mip_dual_bound if is_integral else info.objective_function_value
        # Ties add at most this share, since neither computing nor a stream takes longer than a step.
        least_seconds = bound.bound_seconds if bound else float(least) * scale / (1 + TIE_WEIGHT * (1 + devices))
        order = np.lexsort((values[chosen], self.slot))
        last = order[np.searchsorted(self.slot, np.arange(slots), "right") - 1]
        device, source = (column[last].astype(np.int32) for column in (self.device, self.source))
        gap = 1 - least_seconds / max(float(values[step]) * scale, 1e-12)
        return Choice(device, source, max(gap, 0.0), least_seconds)

    def _list_columns(self, chosen: Ints) -> list[Ints]:
        """Return the columns of each slot."""
        return np.split(chosen, np.searchsorted(self.slot, np.arange(1, self.problem.seconds.shape[1])))

    def _add_limits(self, program: LinearProgram, chosen: Ints, step: int, has_pool: Ints) -> None:
        """Add rows for one choice per slot, the memory of devices and host, and the disk, which devices share."""
        problem = self.problem
        for own in self._list_columns(chosen):
            program.add_rows(own, 1.0, lower=1.0, upper=1.0)
        own, read_seconds = self.source == DISK, self.stream_bytes / max(float(problem.rates[DISK].max()), 1.0)
        program.add_rows(np.r_[step, chosen[own]], np.r_[1.0, -read_seconds[own] / self.scale], lower=0.0)
        for device, room in enumerate(np.maximum(problem.room_bytes, 1).tolist()):
            own = self.device == device
            need = np.r_[self.device_bytes[own], problem.pool_bytes[device]] / room
            program.add_rows(np.r_[chosen[own], has_pool[device]], need, upper=1 - MEMORY_MARGIN)
        pairs = np.stack([chosen[self.moves], has_pool[self.device[self.moves]]], axis=1)
        program.add_rows(pairs, [1.0, -1.0], upper=0.0)
        if np.isfinite(problem.host_bytes):
            own = self.source == HOST
            program.add_rows(chosen[own], self.stream_bytes[own] / max(problem.host_bytes, 1.0), upper=1.0)

    def _add_crossings(self, program: LinearProgram, chosen: Ints, crosses: Ints) -> None:
        """Add rows that keep groups on one device, and that mark where the slot before is on another device."""
        columns, group = self._list_columns(chosen), self.problem.group
        first = np.unique(group, return_index=True)[1][np.unique(group, return_inverse=True)[1]]
        for device in range(len(crosses) if len(crosses) > 1 else 0):
            on = [own[self.device[own] == device] for own in columns]
            for slot, own in enumerate(on):
                if (other := first[slot]) != slot:
                    signs = np.r_[np.ones(len(own)), -np.ones(len(on[other]))]
                    program.add_rows(np.r_[own, on[other]], signs, lower=0.0, upper=0.0)
                if slot:
                    signs = np.r_[1.0, -np.ones(len(own)), np.ones(len(on[slot - 1]))]
                    program.add_rows(np.r_[crosses[device, slot - 1], own, on[slot - 1]], signs, lower=0.0)

    def _add_levels(
        self, program: LinearProgram, chosen: Ints, step: int, wait: Ints, level: Ints, crosses: Ints
    ) -> None:
        """Add rows for the time of each part of a step, and for what each pool holds after it.

        That is in seconds of its stream. A part takes as long as its slots, crossings and a wait. Meanwhile the stream
        fills the pool, and the slots take from it. A step ends with what it began with.
        """
        problem, (parts, devices) = self.problem, level.shape
        slots = problem.seconds.shape[1]
        part = np.arange(slots) * parts // slots
        columns, factors = [np.array([step])], [np.ones(1)]
        for number in range(parts):
            own = part[self.slot] == number
            later = np.flatnonzero(part[1:] == number) if devices > 1 else np.zeros(0, dtype=np.int64)
            used = np.r_[wait[number], chosen[own], crosses[:, later].T.ravel()]
            crossing_seconds = problem.crossing_seconds[:, later + 1].T.ravel()
            times = np.r_[-1.0, -self.seconds[own] / self.scale, -crossing_seconds / self.scale]
            columns.append(used)
            factors.append(times)
            for device in range(devices):
                comes = own & self.moves & (self.device == device)
                taken = times.copy()
                taken[1 : 1 + own.sum()] += np.where(comes, self.stream_seconds / self.scale, 0.0)[own]
                # Where a step is one part, its pool holds the same before and after.
                levels = [level[number, device], level[number - 1, device]] if parts > 1 else []
                program.add_rows(np.r_[used, levels], np.r_[taken, [1.0, -1.0][: len(levels)]], upper=0.0)
        program.add_rows(np.concatenate(columns), np.concatenate(factors), lower=0.0)
