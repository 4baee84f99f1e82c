"""The best placement for one session of ONNX Runtime, in which nodes run one after the other."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from time import monotonic
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge, Gt

from onnxplace.errors import Diagnostic, InfeasibleError
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.graph.op_graph import Bools, Csr, Floats, Ints, Longs, sum_by
from onnxplace.pipeline.pipeline import make_pass
from onnxplace.problem import (
    PlacementProblem,
    commit_placement,
    interchangeable_devices,
    out_of_memory_error,
    placement_problem,
    tighten_limits,
)
from onnxplace.state import Pass, State
from onnxplace.target.target import Target
from onnxplace.utils.linear_programs import LinearProgram
from onnxplace.utils.quantities import format_milliseconds
from onnxplace_formats.ort_providers import explain_conflict, name_provider

# How often limits of memory are changed: each time is a program.
_ATTEMPTS = 10
# How many times `seconds` are spent on them while no placement fits.
_PATIENCE = 4
# The sum of all times in the program: HiGHS has absolute tolerances, and seconds would be below them.
_SCALED_TOTAL = 1e5


@dataclass(frozen=True)
class SessionPlacement:
    """A placement for one session."""

    device: Ints
    """Per node, its device."""
    step_seconds: float
    """What a step takes."""
    bound_seconds: float = 0.0
    """No placement takes less."""

    def describe_proof(self) -> str:
        """Say how far another placement could be faster."""
        if self.bound_seconds >= self.step_seconds * (1 - 1e-9):
            return "no other placement is faster"
        if self.bound_seconds > 0:
            return f"none in these limits takes less than {format_milliseconds(self.bound_seconds)}"
        return "better ones were not ruled out in this time"


@dataclass(frozen=True)
class OneSession(Pass):
    """Place nodes for one session of ONNX Runtime, as `export --to ort-layers` writes it.

    Such a session has one device of each execution provider, and runs one node at a time: a step takes the sum of the
    times of all nodes, and of the copies of values between devices. A value is copied once to each device that reads
    it. Between two accelerators it goes through the host. What is least is an integer program: a device for each
    group, and for each value and accelerator whether it enters and whether it leaves. With two devices the program is
    a minimum cut, whose linear relaxation has integral solutions; so it is solved at once, and exactly.

    Not all providers share a session: one that compiles its nodes has only the CPU next to it (docs/export.md). The
    best of the sets that do is taken.

    The memory of weights is a part of the program once a placement exceeds a limit. That of values is known when a
    step is simulated: then the limits become smaller by what is missing, and the program is solved again, until a
    placement fits; then they grow again as long as one does. The least time with weights alone is a bound. Where it is
    not reached, the placement of m-ETF is a candidate, too.

    Where a takes 1 ms on both devices, b 5 ms and 1 ms, c 1 ms and 3 ms, and a copy 1 ms:

        before   a -> b -> c     no devices
        after    a b | c         4 ms: 1 + 1 ms on the second device, a copy, 1 ms on the first one

    Raises:
        InfeasibleError: Nodes are pinned to devices that do not share a session, three devices have no CPU among them,
            or no placement was found that fits.
    """

    name: ClassVar[str] = "one-session"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    seconds: Annotated[float, Gt(0)] = 30.0
    """When to stop with the best placement so far, for each choice of devices and each limit of memory."""
    gap: Annotated[float, Ge(0)] = 0.0
    """Stop once the placement is known to be within this part of the best."""

    def run(self, state: State) -> State:
        problem = placement_problem(state)
        best = self.find_best(state, problem)
        message = f"one session takes {format_milliseconds(best.step_seconds)} by these costs; {best.describe_proof()}"
        order = problem.graph.positions.astype(np.float64)
        after = commit_placement(state, problem, best.device, order, self.name)
        return after.with_notes(Diagnostic("P021", message, where=self.name))

    def find_best(self, state: State, problem: PlacementProblem) -> SessionPlacement:
        """Return the best placement that was found; raises InfeasibleError if there is none."""
        found = [self._place_within_memory(problem, chosen) for chosen in list_device_choices(problem)]
        placements = [placement for placement, _ in found if placement is not None]
        bound = min(bound for _, bound in found)
        if not any(placement.step_seconds <= bound for placement in placements):
            placements += self._schedule_list(state, problem)
        if not placements:
            raise out_of_memory_error(problem, self.name)
        return replace(min(placements, key=lambda placement: placement.step_seconds), bound_seconds=bound)

    def _schedule_list(self, state: State, problem: PlacementProblem) -> Iterator[SessionPlacement]:
        """Yield the placement of a list scheduler, which watches the memory of values, if one session can have it."""
        try:
            home = make_pass("m-etf", {}).run(state)[Placement].device
        except InfeasibleError:
            return
        device = np.zeros(len(problem.graph), dtype=np.int32)
        device[problem.members] = home  # the members of a node have one device
        devices = problem.target.devices
        used = [devices[index] for index in np.unique(device)]
        shares = len({name_provider(item) for item in used}) == len(used) and not explain_conflict(used)
        if not shares or problem.excess_bytes(problem.simulate(device, problem.graph.order)).any():
            return
        hosts = [index for index, item in enumerate(devices) if item.is_host and item in used]
        hosts = hosts or [index for index, item in enumerate(devices) if item.is_host][:1]
        hub = find_hub(problem.target, np.unique([*device, *hosts]).astype(np.int32))
        yield SessionPlacement(device, session_seconds(problem, device, hub))

    def _place_within_memory(self, problem: PlacementProblem, chosen: Ints) -> tuple[SessionPlacement | None, float]:
        """Return the best placement on some devices, None if none was found, and seconds of which none takes less."""
        program, allowed, start = SessionProgram(problem, chosen), problem.limit_bytes, monotonic()
        best: SessionPlacement | None = None
        bound = 0.0
        limit: Longs | None = None
        enough: Longs | None = None  # the largest limits of weights that leave room for values, or for no placement
        excessive = allowed  # the smallest ones that do not
        for attempt in range(_ATTEMPTS):
            device, is_proven = program.solve(limit, self.seconds, self.gap)
            step_seconds = np.inf if device is None else session_seconds(problem, device, program.hub)
            # Weights alone within the true limits: this leaves out nothing that fits.
            if is_proven and attempt <= 1:
                bound = step_seconds
            simulation = None if device is None else problem.simulate(device, problem.graph.order)
            excess = None if simulation is None else problem.excess_bytes(simulation)
            exceeds = excess is not None and bool(excess.any())
            if device is not None and not exceeds and (best is None or step_seconds < best.step_seconds):
                best = SessionPlacement(device, step_seconds)
            if attempt <= 1 and not exceeds:
                break
            if limit is None:
                limit = allowed
                continue
            if excess is not None and simulation is not None and exceeds:
                # Of a pool that lacks memory, a device may be far from its own limit.
                excessive = np.where(excess > 0, np.minimum(limit, simulation.peak_bytes), limit)
            else:
                enough = limit
            is_close = enough is not None and bool((excessive - enough <= excessive // 64).all())
            patience = self.seconds if best is not None else _PATIENCE * self.seconds
            if is_close or monotonic() - start > patience:
                break
            if enough is not None:
                limit = enough + (excessive - enough) // 2
            elif simulation is not None:
                limit = tighten_limits(problem, excessive, allowed, simulation, attempt)
        return best, bound


def list_device_choices(problem: PlacementProblem) -> list[Ints]:
    """Return the largest sets of devices that one session can have, by index; equal devices of a provider count once.

    Raises InfeasibleError if nodes are pinned to devices that do not share a session.
    """
    devices, equal = problem.target.devices, interchangeable_devices(problem)
    pins = set(problem.pinned[problem.pinned >= 0].tolist())
    by_provider: dict[str, list[int]] = {}
    for index, device in enumerate(devices):
        indices = by_provider.setdefault(name_provider(device), [])
        if equal[index] not in indices or index in pins:
            indices.append(index)
    choices = (
        filter(lambda index: index >= 0, choice) for choice in product(*([*row, -1] for row in by_provider.values()))
    )
    possible = [
        chosen
        for chosen in map(set, choices)
        if chosen >= pins and not explain_conflict([devices[index] for index in sorted(chosen)])
    ]
    if not possible:
        pinned = [devices[index] for index in sorted(pins)]
        reason = explain_conflict(pinned) or "CPU devices are one in a session"
        message = f"nodes are pinned to {' and '.join(device.id for device in pinned)}: {reason}"
        raise InfeasibleError(
            "P003", message, where=OneSession.name, hint="choose another --placer, or change the device map"
        )
    largest = [chosen for chosen in possible if not any(chosen < other for other in possible)]
    return [np.array(sorted(chosen), dtype=np.int32) for chosen in largest]


def find_hub(target: Target, chosen: Ints) -> int:
    """Return the device through which values go: the CPU; of two devices without one, the first.

    Raises InfeasibleError for more devices without a CPU.
    """
    hosts = [int(index) for index in chosen if target.devices[index].is_host]
    if not hosts and len(chosen) > 2:
        names = ", ".join(target.devices[index].id for index in chosen)
        message = f"values between {names} go through the CPU in one session, which is not among the devices"
        raise InfeasibleError("P003", message, where=OneSession.name, hint="add cpu:0 to --devices")
    return (hosts or [int(chosen[0])])[0]


def session_seconds(problem: PlacementProblem, device: Ints, hub: int) -> float:
    """Return the time of a step in one session: all nodes, and each copy of a value to and from the hub.

    Args:
        problem: The problem, whose graph is placed.
        device: Per node, its device.
        hub: The device through which values go.
    """
    graph, costs = problem.graph, CopySeconds(problem, hub)
    read = graph.readers
    crosses = (graph.producer[read.rows] >= 0) & (device[graph.producer[read.rows]] != device[read.items])
    value, source, destination = (
        read.rows[crosses],
        device[graph.producer[read.rows[crosses]]],
        device[read.items[crosses]],
    )
    left = np.unique(np.stack([value, source])[:, source != hub], axis=1)
    entered = np.unique(np.stack([value, destination])[:, destination != hub], axis=1)
    copies = costs.leaving[left[1], left[0]].sum() + costs.entering[entered[1], entered[0]].sum()
    return float(problem.seconds[device, np.arange(len(graph))].sum() + copies)


class CopySeconds:
    """Seconds to copy each value between each device and the hub: [device, value]."""

    def __init__(self, problem: PlacementProblem, hub: int) -> None:
        latency, per_byte = problem.target.link_arrays()
        size = problem.graph.value_bytes
        self.entering: Floats = latency[hub][:, None] + per_byte[hub][:, None] * size
        self.leaving: Floats = latency[:, hub][:, None] + per_byte[:, hub][:, None] * size


class SessionProgram:
    """The integer program of a problem on some of its devices, one of each provider."""

    def __init__(self, problem: PlacementProblem, chosen: Ints) -> None:
        self.problem, self.chosen = problem, chosen
        self.hub = find_hub(problem.target, chosen)
        self.groups, self.copies = len(problem.pinned), CopySeconds(problem, self.hub)
        graph, group = problem.graph, problem.group
        # Values that leave the group of their producer, and for each the groups that read it.
        read = graph.readers
        producer = graph.producer[read.rows]
        is_outer = (producer >= 0) & (group[np.maximum(producer, 0)] != group[read.items])
        readers = Csr.grouped(read.rows[is_outer], group[read.items[is_outer]], len(graph.value_names))
        self.value: Ints = np.flatnonzero(np.diff(readers.starts)).astype(np.int32)
        self.reader: Ints = readers.items
        self.row: Ints = np.searchsorted(self.value, readers.rows).astype(np.int32)
        self.source: Ints = group[graph.producer[self.value]]

    def solve(self, limit: Longs | None, seconds: float, gap: float) -> tuple[Ints | None, bool]:
        """Return the device of each node, None if there is none, and whether it is sure that nothing takes less.

        Args:
            limit: Per device, the bytes of its weights; None for no limit.
            seconds: When to stop.
            gap: The part of the least time by which the placement may exceed it.
        """
        problem, chosen = self.problem, self.chosen
        if not self.groups:
            return np.zeros(0, dtype=np.int32), True
        times = np.stack([sum_by(problem.group, problem.seconds[index], self.groups) for index in chosen])
        allowed = self._list_allowed()
        if not allowed.any(axis=0).all():
            return None, True
        copies = (self.copies.entering + self.copies.leaving)[:, self.value].sum()
        scale = _SCALED_TOTAL / max(float(np.where(allowed, times, 0.0).sum() + copies), 1e-12)
        program = LinearProgram()
        on = program.add_columns(
            times.shape, cost=np.where(allowed, times, 0.0) * scale, upper=allowed.astype(float), is_integral=True
        )
        program.add_rows(on.T, 1.0, lower=1.0, upper=1.0)
        self._add_copies(program, on, scale)
        if limit is not None:
            self._add_weights(program, on, limit)
        solver = program.solve({"time_limit": seconds, "mip_rel_gap": gap, "mip_abs_gap": 0.0})
        solution, status = solver.getSolution(), solver.modelStatusToString(solver.getModelStatus())
        if not solution.value_valid or status == "Infeasible":
            return None, status == "Infeasible"
        home = np.array(solution.col_value)[on].argmax(axis=0)
        is_proven = status == "Optimal" and gap == 0
        return chosen[home][problem.group].astype(np.int32), is_proven

    def _list_allowed(self) -> Bools:
        """Return [chosen device, group]: whether it takes the group, and the group is not pinned elsewhere."""
        pinned = self.problem.pinned
        allowed: Bools = ~self.problem.refused_groups[self.chosen]
        allowed &= (pinned < 0) | (pinned == self.chosen[:, None])
        return allowed

    def _add_copies(self, program: LinearProgram, on: Ints, scale: float) -> None:
        """Add whether each value enters and leaves each device other than the hub."""
        if not len(self.value):
            return
        costs = self.copies
        for position, index in enumerate(self.chosen.tolist()):
            if index == self.hub:
                continue
            home = on[position]
            entering = program.add_columns(len(self.value), cost=costs.entering[index][self.value] * scale, upper=1.0)
            leaving = program.add_columns(len(self.value), cost=costs.leaving[index][self.value] * scale, upper=1.0)
            for columns, near, far in (
                (entering, home[self.reader], home[self.source[self.row]]),
                (leaving, home[self.source[self.row]], home[self.reader]),
            ):
                # A value enters where a reader is and its producer is not; it leaves where the producer alone is.
                table = np.stack([columns[self.row], near, far], axis=1)
                program.add_rows(table, np.array([1.0, -1.0, 1.0]), lower=0.0)

    def _add_weights(self, program: LinearProgram, on: Ints, limit: Longs) -> None:
        """Add whether each weight is on each device, and the limits of their bytes."""
        graph = self.problem.graph
        reads = Csr.grouped(graph.weights.items, self.problem.group[graph.weights.rows], len(graph.weight_names))
        if not len(reads.items):
            return
        for position, index in enumerate(self.chosen.tolist()):
            held = program.add_columns(len(graph.weight_names), upper=1.0)
            table = np.stack([held[reads.rows], on[position][reads.items]], axis=1)
            program.add_rows(table, np.array([1.0, -1.0]), lower=0.0)
            program.add_rows(held, graph.weight_bytes / max(limit[index], 1), upper=1.0)
