"""Throughput: split the graph into stages so that the busiest device or channel has as little to do as possible."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from onnxplace.errors import Diagnostic, InfeasibleError
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.graph import Ints, Longs
from onnxplace.passes.placement.stages import (
    DUPLEX,
    MAX_MOVES,
    PARALLEL,
    RESIDENT_SHARES,
    SEQUENTIAL,
    SUM,
    LocalSearch,
    least_held_bytes,
    prepare_cuts,
    split_into_stages,
    unit_seconds,
)
from onnxplace.problem import PlacementProblem, commit_placement, out_of_memory_error, placement_problem
from onnxplace.simulation import steady_state_loads
from onnxplace.state import Pass, State
from onnxplace.utils import budget_clock

RESTARTS = 4


@dataclass(frozen=True)
class Stages(Pass):
    """Minimise the time between two results when many requests are pipelined: the largest load
    (`onnxplace.simulation.loads`).

    Contiguous stages follow one another: values only run forward. They are found by dynamic programming over ideals
    (Tarnawski et al., NeurIPS 2020), and optimal where there are under 50 000 ideals, all links are alike, the time
    suffices and the first answer fits the memory; else they are the best of several topological orders, improved by
    local search. Receives are exact in the dynamic program; sends to several later stages are counted once there, so
    its optimum is a lower bound, and a branch and bound closes the gap where there is one.
    """

    name: ClassVar[str] = "stages"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    contiguous: bool = True
    """Values run from earlier to later stages only; without it, a device may hold any groups."""
    load: Literal["max", "sum"] = "max"
    """A device computes while it transfers (max), or one after the other (sum)."""
    seconds: Annotated[float, Ge(0)] = 10.0
    """Time to search; what is found within it depends on the machine only if the note does not say it is optimal."""
    seed: Annotated[int, Ge(0)] = 0
    """Of the topological orders and the local search."""

    def run(self, state: State) -> State:
        asked = placement_problem(state)
        if not len(asked.graph):
            nowhere = np.zeros(0, dtype=np.int32)
            return commit_placement(state, asked, nowhere, np.zeros(0), self.name)
        deadline = budget_clock() + self.seconds
        best = self._contiguous(state, asked, deadline)
        if not self.contiguous:
            best = self._free(state, asked, best, deadline)
        if best is None:
            raise out_of_memory_error(asked, self.name)
        return best.state.saying(self._note(asked, best))

    def _rule(self, asked: PlacementProblem) -> int:
        if self.load == "sum":
            return SUM
        return {"duplex": DUPLEX, "sequential": SEQUENTIAL, "parallel": PARALLEL}[asked.target.link_model]

    def _interval(self, asked: PlacementProblem, device: Ints) -> float:
        return steady_state_loads(asked.graph, asked.seconds, asked.target, device, self.load).interval_seconds

    def _contiguous(self, state: State, asked: PlacementProblem, deadline: float) -> _Answer | None:
        """Return the best contiguous split that fits: as planned, planned with tighter limits, or one device."""
        limit, devices = asked.limit_bytes, len(asked.target.devices)
        best: _Answer | None = None
        for attempt, resident in enumerate(RESIDENT_SHARES):
            cut = prepare_cuts(asked, self._rule(asked), limit, tuple(range(devices)), resident)
            found = split_into_stages(cut, asked, deadline, self.seed)
            if found is None:
                break
            device = found.device[cut.node]
            best = self._tried(state, asked, device, found.bound if attempt == 0 else 0.0)
            if best is not None:
                break
            if resident == 1.0:
                limit = _tightened(asked, limit, device, attempt)
        alone = [np.full(len(asked.graph), index, dtype=np.int32) for index in range(devices)]
        alone = [device for device in alone if np.isin(asked.pinned, (-1, device[0])).all()]
        for device in sorted(alone, key=lambda d: self._interval(asked, d)):
            if best is not None and self._interval(asked, device) >= best.interval_seconds:
                break
            better = self._tried(state, asked, device, 0.0)
            if better is not None:
                return better
        return best

    def _tried(self, state: State, asked: PlacementProblem, device: Ints, bound: float) -> _Answer | None:
        """Return the answer that is this placement, None if it does not fit."""
        device = device.astype(np.int32)
        start = asked.simulate(device, asked.graph.order).start_seconds
        try:
            after = commit_placement(state, asked, device, start, self.name)
        except InfeasibleError:
            return None
        return _Answer(after, device, self._interval(asked, device), bound)

    def _free(self, state: State, asked: PlacementProblem, best: _Answer | None, deadline: float) -> _Answer | None:
        """Move groups wherever that lowers the largest load; the contiguous answer is where this begins."""
        graph = asked.graph.contract(asked.group)
        seconds = unit_seconds(asked, asked.group)
        latency, per_byte = asked.target.link_arrays()
        home = seconds.argmin(axis=0).astype(np.int32)
        if best is not None:
            home[asked.group] = best.device
        limit = asked.limit_bytes
        for restart in range(RESTARTS):
            if restart and budget_clock() > deadline:
                break
            moving = LocalSearch(
                graph, seconds, latency, per_byte, limit, least_held_bytes(asked, asked.group), self._rule(asked)
            )
            found, _ = moving.improve(home, None, min(MAX_MOVES, 200 * len(graph)), self.seed + restart)
            if best is not None and self._interval(asked, found[asked.group]) >= best.interval_seconds:
                continue
            better = self._tried(state, asked, found[asked.group], 0.0)
            if better is None:
                limit = _tightened(asked, limit, found[asked.group], restart)
            else:
                best, home = better, found
        return None if best is None else _Answer(best.state, best.device, best.interval_seconds, 0.0)

    def _note(self, asked: PlacementProblem, best: _Answer) -> Diagnostic:
        found = steady_state_loads(asked.graph, asked.seconds, asked.target, best.device, self.load)
        index, what = found.largest
        kind = "contiguous" if self.contiguous else "not necessarily contiguous"
        if best.bound_seconds >= best.interval_seconds * (1 - 1e-9):
            proof = "optimal"
        elif best.bound_seconds > 0:
            proof = f"not proven optimal: no contiguous split takes less than {best.bound_seconds * 1e3:.4g} ms"
        else:
            proof = "not proven optimal"
        return Diagnostic(
            "P030",
            f"one result every {best.interval_seconds * 1e3:.4g} ms in steady state (largest load: "
            f"{asked.target.devices[index].id} {what} {best.interval_seconds * 1e3:.4g} ms); {kind}, {proof}",
            where=self.name,
        )


@dataclass(frozen=True)
class _Answer:
    state: State
    device: Ints
    """Per node of the problem's graph."""
    interval_seconds: float
    bound_seconds: float
    """No contiguous split that fits has a smaller interval."""


def _tightened(asked: PlacementProblem, limit: Longs, device: Ints, attempt: int) -> Longs:
    """Return smaller limits for the devices that this placement overfills."""
    excess = asked.excess_bytes(asked.simulate(device.astype(np.int32), asked.graph.order))
    less = np.where(excess > 0, np.maximum((attempt + 1) * excess, asked.limit_bytes // 64), 0)
    tightened: Longs = np.maximum(limit - less, 0)
    return tightened
