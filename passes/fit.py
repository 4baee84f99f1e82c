"""Fit: whatever holds the model, with as little crossing between devices as possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from onnxplace.errors import Diagnostic, InfeasibleError, counted
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.graph import Ints, Longs
from onnxplace.passes.placement.list_scheduling import place_by_list_schedule
from onnxplace.passes.placement.stages import (
    CROSSING_BYTES,
    MAX_MOVES,
    RESIDENT_SHARES,
    TRAFFIC,
    LocalSearch,
    least_held_bytes,
    prepare_cuts,
    split_into_stages,
    unit_seconds,
)
from onnxplace.problem import PlacementProblem, commit_placement, placement_problem, sort_by_start
from onnxplace.simulation import list_transfers
from onnxplace.state import Pass, State
from onnxplace.utils import budget_clock

# A device that takes this many times as long as the fastest one is a last resort.
SLOW = 4.0
RESTARTS = 3
# Halvings of what slow devices may hold, to leave them only what fits nowhere else.
HALVINGS = 5


@dataclass(frozen=True)
class Fit(Pass):
    """Make it fit with the least traffic: fewest bytes crossing, each value once per device, then fewest values.

    One device where that holds everything, the fastest such; else as few as possible, fast ones first. A device that
    takes over four times as long as the fastest is a last resort: it gets only what fits nowhere else. Splits are
    found by dynamic programming over ideals or topological orders, as for `stages`, and improved by moving groups.
    """

    name: ClassVar[str] = "fit"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    seconds: Annotated[float, Ge(0)] = 5.0
    """Time to search for less traffic."""
    seed: Annotated[int, Ge(0)] = 0
    """Of the topological orders and the local search."""

    def run(self, state: State) -> State:
        asked = placement_problem(state)
        deadline = budget_clock() + self.seconds
        tiers = _tiers(asked)
        for count in range(1, len(tiers) + 1):
            fast = [device for tier in tiers[: count - 1] for device in tier]
            found = self._spread(state, asked, fast, tiers[count - 1], deadline)
            if found is not None:
                return found.saying(self._note(found))
        nobody = np.full(len(asked.graph), -1, dtype=np.int32)
        after = place_by_list_schedule(state, asked, nobody, self.name, False)
        return after.saying(self._note(after))

    def _spread(
        self, state: State, asked: PlacementProblem, fast: list[int], slow: list[int], deadline: float
    ) -> State | None:
        """Return a placement on `fast` devices, which do not hold everything, and as little as possible on `slow`."""
        for used in range(1, len(slow) + 1):
            chosen = fast + slow[:used]
            limit = np.where(np.isin(np.arange(len(asked.limit_bytes)), chosen), asked.limit_bytes, 0)
            found = self._within(state, asked, chosen, limit, deadline, alone=not fast)
            if found is None or not fast:
                if found is not None:
                    return found
                continue
            everything = _all_bytes(asked)
            least, most = 0.0, 1.0
            for _ in range(HALVINGS):
                share = (least + most) / 2
                limit[slow] = np.minimum(asked.limit_bytes[slow], everything) * share
                better = self._within(state, asked, chosen, limit, deadline, alone=False)
                least, most = (share, most) if better is None else (least, share)
                found = better or found
            return found
        return None

    def _within(
        self, state: State, asked: PlacementProblem, chosen: list[int], limit: Longs, deadline: float, alone: bool
    ) -> State | None:
        """Return a placement on the `chosen` devices within these limits, None if none was found."""
        pins = {int(pin) for pin in asked.pinned if pin >= 0}
        devices = sorted({*chosen, *pins})
        limit = np.where(np.isin(np.arange(len(limit)), sorted(pins - set(chosen))), asked.limit_bytes, limit)
        if alone:
            for index in chosen if not pins else sorted(pins & set(chosen)) if len(pins) == 1 else []:
                found = self._tried(state, asked, np.full(len(asked.graph), index, dtype=np.int32), limit)
                if found is not None:
                    return found
        if len(devices) == 1 or not len(asked.graph) or asked.graph.total_weight_bytes > limit[devices].sum():
            return None
        allowed = limit
        for attempt, resident in enumerate(RESIDENT_SHARES):
            cut = prepare_cuts(asked, TRAFFIC, limit, tuple(devices), resident)
            whole = (
                split_into_stages(cut, asked, deadline, self.seed)
                if np.isfinite(cut.seconds.min(axis=0)).all()
                else None
            )
            if whole is None:
                return None
            start = whole.device[cut.node]
            for device in (self._moved(asked, start, limit, deadline), start):
                found = self._tried(state, asked, device, allowed)
                if found is not None:
                    return found
            if resident == 1.0:
                limit = _tightened(asked, limit, allowed, start, attempt)
        return None

    def _moved(self, asked: PlacementProblem, start: Ints, limit: Longs, deadline: float) -> Ints:
        """Move groups between devices to lower the traffic; stages need not stay contiguous."""
        graph, seconds = asked.graph.contract(asked.group), unit_seconds(asked, asked.group)
        seconds = np.where(np.isfinite(seconds), 0.0, np.inf)
        seconds[limit <= 0] = np.inf
        latency, per_byte = asked.target.link_arrays()
        latency, per_byte = np.full_like(latency, CROSSING_BYTES), np.ones_like(per_byte)
        moving = LocalSearch(graph, seconds, latency, per_byte, limit, least_held_bytes(asked, asked.group), TRAFFIC)
        home = np.zeros(len(graph), dtype=np.int32)
        home[asked.group] = start
        best, least = home, np.inf
        for restart in range(RESTARTS):
            if restart and budget_clock() > deadline:
                break
            found, traffic = moving.improve(home, None, min(MAX_MOVES, 200 * len(graph)), self.seed + restart)
            if traffic < least:
                best, least = found, traffic
        return best[asked.group]

    def _tried(self, state: State, asked: PlacementProblem, device: Ints, limit: Longs) -> State | None:
        """Return the state with this placement, None if it does not fit the limits."""
        simulation = asked.simulate(device, asked.graph.order)
        try:
            after = commit_placement(state, asked, device, simulation.start_seconds, self.name)
        except InfeasibleError:
            return None
        return after if (after[Schedule].simulation.peak_bytes <= limit).all() else None

    def _note(self, state: State) -> Diagnostic:
        device, graph = state[Placement].device, state[Profile].graph
        value, _, _ = list_transfers(graph, device, len(state.target.devices))
        used = ", ".join(state.target.devices[index].id for index in np.unique(device))
        values, size = counted(len(value), "value"), counted(int(graph.value_bytes[value].sum()), "byte")
        crossing = (
            f"{values} with {size} {'crosses' if len(value) == 1 else 'cross'}" if len(value) else "nothing crosses"
        )
        return Diagnostic("P031", f"fits on {used or 'nothing, being empty'}; {crossing}", where=self.name)


def _tiers(asked: PlacementProblem) -> list[list[int]]:
    """Group devices by speed, fastest first; within a tier by time for everything, then by memory, roomiest first."""
    total = asked.seconds.sum(axis=1)
    ranked = sorted(range(len(total)), key=lambda d: (total[d], -asked.limit_bytes[d], d))
    tiers: list[list[int]] = []
    for device in ranked:
        if tiers and total[device] <= SLOW * total[tiers[-1][0]]:
            tiers[-1].append(device)
        else:
            tiers.append([device])
    return tiers


def _all_bytes(asked: PlacementProblem) -> int:
    """Return the most that any device can hold of this model."""
    graph = asked.graph
    return int(graph.total_weight_bytes + graph.value_bytes.sum() + graph.workspace_bytes.sum())


def _tightened(asked: PlacementProblem, limit: Longs, allowed: Longs, device: Ints, attempt: int) -> Longs:
    """Return smaller limits for the devices that this placement overfills."""
    start = asked.simulate(device, asked.graph.order).start_seconds
    peak = asked.simulate(device, sort_by_start(asked.graph, start)).peak_bytes
    excess = np.maximum(peak - allowed, 0)
    less = np.where(excess > 0, np.maximum((attempt + 1) * excess, allowed // 64), 0)
    tightened: Longs = np.maximum(limit - less, 0).astype(np.int64)
    return tightened
