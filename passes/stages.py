"""Throughput: split the graph into stages with the smallest largest load."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import Annotated, ClassVar, Literal

import numpy as np
from annotated_types import Ge

from onnxplace.errors import Diagnostic, InfeasibleError, UsageError
from onnxplace.facts import REFUSED_SECONDS, Placement, Profile, Schedule, Shards
from onnxplace.graph.op_graph import Ints
from onnxplace.passes.placement.stages.contiguous_split import MAX_MOVES, build_group_search, generate_splits
from onnxplace.passes.placement.stages.stage_kernels import DUPLEX, PARALLEL, SEQUENTIAL, SUM
from onnxplace.problem import (
    PlacementProblem,
    commit_if_fitting,
    commit_placement,
    out_of_memory_error,
    placement_problem,
    tighten_limits,
)
from onnxplace.simulation.steady_state import steady_state_loads
from onnxplace.state import Pass, State
from onnxplace.target.target import Link
from onnxplace.utils.jit import budget_clock

# Runs of the local search, each with its own seed.
RESTARTS = 4


@dataclass(frozen=True)
class Stages(Pass):
    """Minimise the time between two results when many requests are pipelined.

    That time is the largest load of a device or channel, or what devices wait for within a request, where values come
    back to them (`onnxplace.simulation.steady_state`).

    Contiguous stages follow one another: values only run forward. They are found by dynamic programming over ideals
    (Tarnawski et al., NeurIPS 2020). They are optimal where there are under 50 000 ideals, all links are alike, the
    time suffices and the first answer fits the memory; otherwise they are the best of several topological orders,
    improved by local search. Receives are exact in the dynamic program. It counts sends to several later stages once,
    so its optimum is a lower bound; a branch and bound closes the gap where there is one. Of devices that share a
    processor, one gets a stage.

    A chain with 2, 3 and 4 ms on two devices, where a transfer takes 1 ms at the same time:

        before   a -> b -> c       one device: a result every 9 ms
        after    a b | c           a result every 5 ms, the load of the first device
    """

    name: ClassVar[str] = "stages"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    contiguous: bool = True
    """Values run from earlier to later stages only; without it, or if parts of split operators do not allow
    it, a device may hold any groups."""
    load: Literal["max", "sum"] = "max"
    """A device computes while it transfers (max), or one after the other (sum)."""
    seconds: Annotated[float, Ge(0)] = 10.0
    """Time to search; the result depends on the machine only if the note does not call it optimal."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the topological orders and the local search."""
    replicas: tuple[Annotated[int, Ge(1)], ...] = ()
    """Numbers of consecutive devices that share a stage, as in 1;3; empty for a stage on each device.

    A stage is placed on the first of its devices; the pass `replicate` copies it to the others.
    """

    def run(self, state: State) -> State:
        problem = placement_problem(state)
        if self.replicas:
            problem = _merge_devices(problem, self.replicas)
            if (untaken := problem.refused.all(axis=0)).any():
                node, counts = int(untaken.argmax()), " + ".join(map(str, self.replicas))
                message = (
                    f"no stage on {counts} devices can hold {problem.graph.ops[node]} {problem.graph.names[node]!r}"
                )
                hint = "all devices of a stage have to take its nodes: name devices of one kind next to each other"
                raise InfeasibleError("P004", message, where=self.name, hint=hint)
        if not len(problem.graph):
            no_devices = np.zeros(0, dtype=np.int32)
            return commit_placement(state, problem, no_devices, np.zeros(0), self.name)
        deadline = budget_clock() + self.seconds
        best = self._split_contiguously(state, problem, deadline)
        # Parts of split operators have their devices, between which values may run back and forth.
        is_contiguous = self.contiguous and (best is not None or Shards not in state)
        if not is_contiguous:
            best = self._move_groups(state, problem, best, deadline)
        if best is None:
            raise out_of_memory_error(problem, self.name)
        return best.state.with_notes(self._describe_result(problem, best, is_contiguous))

    def _transfer_rule(self, problem: PlacementProblem) -> int:
        if self.load == "sum":
            return SUM
        return {"duplex": DUPLEX, "sequential": SEQUENTIAL, "parallel": PARALLEL}[problem.target.link_model]

    def _interval_seconds(self, problem: PlacementProblem, device: Ints) -> float:
        return steady_state_loads(problem.graph, problem.seconds, problem.target, device, self.load).interval_seconds

    def _split_contiguously(self, state: State, problem: PlacementProblem, deadline: float) -> _StagePlan | None:
        """Return the best contiguous split that fits.

        Limits are tightened if needed; one device is tried as well.
        """
        rule, devices = self._transfer_rule(problem), range(len(problem.target.devices))
        parallel = _list_parallel_devices(problem)
        splits = generate_splits(problem, rule, problem.limit_bytes, parallel, deadline, self.seed)
        plans = (self._commit_if_fitting(state, problem, device, bound) for device, bound, _ in splits)
        best = next((plan for plan in plans if plan is not None), None)
        allowed = [index for index in devices if np.isin(problem.pinned, (-1, index)).all()]
        single_devices = [np.full(len(problem.graph), index, dtype=np.int32) for index in allowed]
        for device in sorted(single_devices, key=lambda device: self._interval_seconds(problem, device)):
            if best is not None and self._interval_seconds(problem, device) >= best.interval_seconds:
                break
            better = self._commit_if_fitting(state, problem, device, 0.0)
            if better is not None:
                return better
        return best

    def _commit_if_fitting(
        self, state: State, problem: PlacementProblem, device: Ints, bound: float
    ) -> _StagePlan | None:
        """Return the plan with this placement; None if it does not fit."""
        device = device.astype(np.int32)
        start = problem.simulate(device, problem.graph.order).start_seconds
        home = _find_first_devices(self.replicas)[device] if self.replicas else device
        after = commit_if_fitting(state, problem, home, start, self.name)
        # Values of contiguous stages run forward, so no device waits within a request.
        order = np.lexsort((problem.graph.positions, start)).astype(np.int32)
        loads = steady_state_loads(problem.graph, problem.seconds, problem.target, device, self.load, order)
        return None if after is None else _StagePlan(after, device, loads.interval_seconds, bound)

    def _move_groups(
        self, state: State, problem: PlacementProblem, best: _StagePlan | None, deadline: float
    ) -> _StagePlan | None:
        """Move groups to lower the largest load, from the contiguous plan on."""
        limit = problem.limit_bytes
        local_search = build_group_search(problem, self._transfer_rule(problem), limit)
        is_parallel = np.isin(np.arange(len(limit)), _list_parallel_devices(problem))
        local_search.costs.seconds[~is_parallel] = np.inf
        home = local_search.costs.seconds.argmin(axis=0).astype(np.int32)
        if best is not None and is_parallel[best.device].all():
            home[problem.group] = best.device
        moves = min(MAX_MOVES, 200 * len(local_search.graph))
        for restart in range(RESTARTS):
            if restart and budget_clock() > deadline:
                break
            limited = replace(local_search, costs=local_search.costs._replace(limit_bytes=limit))
            candidate, _ = limited.improve(home, None, moves, self.seed + restart)
            if best is not None and self._interval_seconds(problem, candidate[problem.group]) >= best.interval_seconds:
                continue
            better = self._commit_if_fitting(state, problem, candidate[problem.group], 0.0)
            if better is None:
                step = problem.simulate(candidate[problem.group], problem.graph.order)
                limit = tighten_limits(problem, limit, problem.limit_bytes, step, restart + 1)
            elif best is None or better.interval_seconds < best.interval_seconds:  # with waits within a request
                best, home = better, candidate
        return None if best is None else _StagePlan(best.state, best.device, best.interval_seconds, 0.0)

    def _describe_result(self, problem: PlacementProblem, best: _StagePlan, is_contiguous: bool) -> Diagnostic:
        loads = steady_state_loads(problem.graph, problem.seconds, problem.target, best.device, self.load)
        index, what = loads.largest
        kind = "contiguous" if is_contiguous else "not necessarily contiguous"
        if best.bound_seconds >= best.interval_seconds * (1 - 1e-9):
            proof = "optimal"
        elif best.bound_seconds > 0:
            proof = f"not proven optimal: no contiguous split takes less than {best.bound_seconds * 1e3:.4g} ms"
        else:
            proof = "not proven optimal"
        return Diagnostic(
            "P021",
            f"one result every {best.interval_seconds * 1e3:.4g} ms in steady state (largest load: "
            f"{problem.target.devices[index].id} {what} {loads.interval_seconds * 1e3:.4g} ms); {kind}, {proof}",
            where=self.name,
        )


@dataclass(frozen=True)
class _StagePlan:
    """A placement that fits, with its interval."""

    state: State
    device: Ints
    """Per node of the problem's graph, an index into the problem's target."""
    interval_seconds: float
    bound_seconds: float
    """No contiguous split that fits has a smaller interval."""


def _list_parallel_devices(problem: PlacementProblem) -> list[int]:
    """Return the devices for stages: those that share no processor, and those that groups are pinned to."""
    return sorted({*problem.target.independent_devices, *problem.pinned[problem.pinned >= 0].tolist()})


def _find_first_devices(replicas: Sequence[int]) -> Ints:
    """Return the first device of each group of consecutive devices."""
    return np.concatenate([[0], np.cumsum(replicas)[:-1]]).astype(np.int32)


def _merge_devices(problem: PlacementProblem, replicas: Sequence[int]) -> PlacementProblem:
    """Return a problem whose devices are groups of consecutive devices, which share the requests.

    A group of r equal devices takes 1 / r of the time for a request, and so do its channels. Its memory is that of the
    smallest one, since each holds the whole stage. Nodes that are pinned to a device outside of all groups fit nowhere.
    A group refuses what one of its devices refuses.

    Raises UsageError if there are fewer devices than the groups need, or if two of them share a processor.
    """
    target, count = problem.target, sum(replicas)
    if target.conflicts[:count, :count].sum() > count:
        message = f"stages on {' + '.join(map(str, replicas))} devices need devices that share no processor"
        raise UsageError("U075", message, where="stages", hint="name such devices first, or use fewer")
    if count > len(target.devices):
        message = f"stages on {' + '.join(map(str, replicas))} devices need {sum(replicas)}, there are"
        hint = "name more devices with --devices"
        raise UsageError("U075", f"{message} {len(target.devices)}", where="stages", hint=hint)
    firsts = _find_first_devices(replicas).tolist()
    groups = [list(range(first, first + count)) for first, count in zip(firsts, replicas)]
    with np.errstate(divide="ignore"):
        seconds = np.stack([1.0 / (1.0 / problem.seconds[group]).sum(axis=0) for group in groups])
    seconds[np.stack([problem.refused[group].any(axis=0) for group in groups])] = REFUSED_SECONDS
    limits = [int(problem.limit_bytes[group].min()) for group in groups]
    devices = tuple(replace(target.devices[first], memory_bytes=limit) for first, limit in zip(firsts, limits))
    latency, per_byte = target.link_arrays()
    links = []
    for i, j in permutations(range(len(firsts)), 2):
        ways = min(replicas[i], replicas[j])
        rate = per_byte[firsts[i], firsts[j]] / ways
        bytes_per_second = 1.0 / rate if rate > 0 else np.inf
        links.append(Link(devices[i].id, devices[j].id, latency[firsts[i], firsts[j]] / ways, bytes_per_second))
    group_of = np.full(len(target.devices), len(groups), dtype=np.int32)
    group_of[: sum(replicas)] = np.repeat(np.arange(len(groups)), replicas)
    return replace(
        problem,
        seconds=seconds,
        target=replace(target.choose_devices([d.id for d in devices]), devices=devices, links=tuple(links), shared=()),
        limit_bytes=np.array(limits, dtype=np.int64),
        pinned=np.where(problem.pinned >= 0, group_of[problem.pinned], -1).astype(problem.pinned.dtype),
    )
