"""Fit: hold the model with as little traffic between devices as possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar

import numpy as np
from annotated_types import Ge

from onnxplace.errors import Diagnostic, format_count
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.graph.op_graph import Ints, Longs
from onnxplace.passes.placement.list_scheduling.list_planner import place_by_list_schedule
from onnxplace.passes.placement.stages.contiguous_split import MAX_MOVES, build_group_search, generate_splits
from onnxplace.passes.placement.stages.stage_kernels import TRAFFIC
from onnxplace.problem import PlacementProblem, commit_if_fitting, placement_problem
from onnxplace.simulation.steady_state import list_transfers
from onnxplace.state import Pass, State
from onnxplace.utils.jit import budget_clock

# A device that takes over this many times as long as the fastest one is a last resort.
SLOW_FACTOR = 4.0
# Runs of the local search, each with its own seed.
RESTARTS = 3
# Bisections of the share of memory that slow devices may use.
HALVINGS = 5


@dataclass(frozen=True)
class Fit(Pass):
    """Make it fit with the least traffic.

    Traffic is compared by bytes that cross, each value once per device, then by the number of values. The fastest
    single device that holds everything is taken; if there is none, as few devices as possible, fast ones first. A
    device that takes over four times as long as the fastest is a last resort: it gets only what fits nowhere else.
    Splits are found by dynamic programming over ideals or topological orders, as for `stages`, and improved by moving
    groups.
    """

    name: ClassVar[str] = "fit"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    seconds: Annotated[float, Ge(0)] = 5.0
    """Time to search for less traffic."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the topological orders and the local search."""

    def run(self, state: State) -> State:
        problem = placement_problem(state)
        deadline = budget_clock() + self.seconds
        tiers = _speed_tiers(problem)
        for count in range(1, len(tiers) + 1):
            fast = [device for tier in tiers[: count - 1] for device in tier]
            placed = self._place_on_tiers(state, problem, fast, tiers[count - 1], deadline)
            if placed is not None:
                return placed.with_notes(self._describe_result(placed))
        after = place_by_list_schedule(state, problem, None, self.name, False)
        return after.with_notes(self._describe_result(after))

    def _place_on_tiers(
        self, state: State, problem: PlacementProblem, fast: list[int], slow: list[int], deadline: float
    ) -> State | None:
        """Place nodes on all `fast` and as few `slow` devices as possible."""
        for count in range(1, len(slow) + 1):
            chosen = fast + slow[:count]
            limit = np.where(np.isin(np.arange(len(problem.limit_bytes)), chosen), problem.limit_bytes, 0)
            after = self._place_on_devices(state, problem, chosen, limit, deadline, alone=not fast)
            if after is not None:
                return self._use_slow_less(state, problem, chosen, slow, limit, deadline) or after if fast else after
        return None

    def _use_slow_less(
        self, state: State, problem: PlacementProblem, chosen: list[int], slow: list[int], limit: Longs, deadline: float
    ) -> State | None:
        """Return a placement that leaves little to `slow` devices, if found."""
        smallest: State | None = None
        graph = problem.graph
        total_bytes = int(graph.total_weight_bytes + graph.value_bytes.sum() + graph.workspace_bytes.sum())
        low, high = 0.0, 1.0
        for _ in range(HALVINGS):
            share = (low + high) / 2
            limit[slow] = np.minimum(problem.limit_bytes[slow], total_bytes) * share
            smaller = self._place_on_devices(state, problem, chosen, limit, deadline, alone=False)
            low, high = (share, high) if smaller is None else (low, share)
            smallest = smaller or smallest
        return smallest

    def _place_on_devices(
        self, state: State, problem: PlacementProblem, chosen: list[int], limit: Longs, deadline: float, alone: bool
    ) -> State | None:
        """Return a placement on `chosen` devices within these limits, if found.

        With `alone`, a single one of them that holds everything is taken.
        """
        pins = {int(pin) for pin in problem.pinned if pin >= 0}
        devices = sorted({*chosen, *pins})
        limit = np.where(np.isin(np.arange(len(limit)), sorted(pins - set(chosen))), problem.limit_bytes, limit)
        if alone:
            for index in chosen if not pins else sorted(pins & set(chosen)) if len(pins) == 1 else []:
                device = np.full(len(problem.graph), index, dtype=np.int32)
                after = self._commit_if_fitting(state, problem, device, limit)
                if after is not None:
                    return after
        if len(devices) == 1 or not len(problem.graph) or problem.graph.total_weight_bytes > limit[devices].sum():
            return None
        return self._split_between_devices(state, problem, devices, limit, deadline)

    def _split_between_devices(
        self, state: State, problem: PlacementProblem, devices: list[int], allowed: Longs, deadline: float
    ) -> State | None:
        """Return a split between devices within the `allowed` bytes, if found."""
        for start, _, limit in generate_splits(problem, TRAFFIC, allowed, devices, deadline, self.seed):
            for device in (self._lower_traffic(problem, start, limit, deadline), start):
                after = self._commit_if_fitting(state, problem, device, allowed)
                if after is not None:
                    return after
        return None

    def _lower_traffic(self, problem: PlacementProblem, start: Ints, limit: Longs, deadline: float) -> Ints:
        """Move groups between devices to lower the traffic; stages may become non-contiguous."""
        local_search = build_group_search(problem, TRAFFIC, limit)
        home = np.zeros(len(local_search.graph), dtype=np.int32)
        home[problem.group] = start
        best, least_traffic = home, np.inf
        for restart in range(RESTARTS):
            if restart and budget_clock() > deadline:
                break
            candidate, traffic = local_search.improve(home, None, min(MAX_MOVES, 200 * len(home)), self.seed + restart)
            if traffic < least_traffic:
                best, least_traffic = candidate, traffic
        return best[problem.group]

    def _commit_if_fitting(self, state: State, problem: PlacementProblem, device: Ints, limit: Longs) -> State | None:
        """Return the state with this placement; None if it exceeds the limits."""
        simulation = problem.simulate(device, problem.graph.order)
        after = commit_if_fitting(state, problem, device, simulation.start_seconds, self.name)
        return after if after and (after[Schedule].simulation.peak_bytes <= limit).all() else None

    def _describe_result(self, state: State) -> Diagnostic:
        device, graph = state[Placement].device, state[Profile].graph
        value, _, _ = list_transfers(graph, device, len(state.target.devices))
        used = ", ".join(state.target.devices[index].id for index in np.unique(device))
        values, size = format_count(len(value), "value"), format_count(int(graph.value_bytes[value].sum()), "byte")
        crossing = (
            f"{values} with {size} {'crosses' if len(value) == 1 else 'cross'}" if len(value) else "nothing crosses"
        )
        return Diagnostic("P021", f"fits on {used or 'nothing, being empty'}; {crossing}", where=self.name)


def _speed_tiers(problem: PlacementProblem) -> list[list[int]]:
    """Group devices by speed, fastest first.

    Within a tier they are sorted by the time for all nodes, then by memory, largest first.
    """
    total = problem.seconds.sum(axis=1)
    ranked = sorted(range(len(total)), key=lambda d: (total[d], -problem.limit_bytes[d], d))
    tiers: list[list[int]] = []
    for device in ranked:
        if tiers and total[device] <= SLOW_FACTOR * total[tiers[-1][0]]:
            tiers[-1].append(device)
        else:
            tiers.append([device])
    return tiers
