"""Placement and scheduling of a small graph as a mixed-integer program, solved by HiGHS."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import numpy as np

from onnxplace.graph import Csr, Floats, Ints
from onnxplace.passes.placement.exact.branch_and_bound import held_bytes, reachable
from onnxplace.problem import PlacementProblem
from onnxplace.simulation import heads_and_tails, node_bytes
from onnxplace.utils import make_program, run_highs

# Thresholds of heads, and of tails; the work between two of them bounds the load of each device.
MAX_THRESHOLDS = 6
# In larger graphs, the order on devices is left out: it needs O(N^2) rows.
MAX_ORDERED_NODES = 120
# HiGHS takes seeds of 31 bits.
MAX_SEED = (1 << 31) - 1


@dataclass(frozen=True)
class MilpSolution:
    """The solver's bound in seconds, and its best step as device and planned start per node, if any."""

    bound_seconds: float
    device: Ints | None
    start_seconds: Floats | None
    infeasible: bool
    """Whether the program has no solution: the weights do not fit."""


@dataclass
class _ProgramRows:
    """Constraints `lower <= A v <= upper` on columns with bounds, added row by row."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    index: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    column_lower: list[float] = field(default_factory=list)
    column_upper: list[float] = field(default_factory=list)
    is_integer: list[bool] = field(default_factory=list)

    def add_column(self, lower: float, upper: float, is_integer: bool = False) -> int:
        self.column_lower.append(lower)
        self.column_upper.append(upper)
        self.is_integer.append(is_integer)
        return len(self.is_integer) - 1

    def add_row(self, terms: list[tuple[int, float]], lower: float, upper: float = np.inf) -> None:
        self.index += [column for column, _ in terms]
        self.value += [factor for _, factor in terms]
        self.starts.append(len(self.index))
        self.lower.append(lower)
        self.upper.append(upper)


def solve_milp(problem: PlacementProblem, upper_seconds: float, gap: float, deadline: float, seed: int) -> MilpSolution:
    """Solve the program until `gap` or the time `deadline` (of `time.perf_counter`) is reached.

    Columns: the device of each group (binary), the start of each node, for pairs of nodes that could run in either
    order which is first (binary), for each edge whether it is cut, for each value the devices that receive it, the
    makespan. Rows: a reader starts after what it reads is there; nodes of one device do not overlap (big M from heads,
    tails and `upper_seconds`); work between thresholds of heads and tails, and what a device receives, fit into the
    makespan; weights, the needs of the running node and the values that groups certainly hold meanwhile fit into
    memory. It relaxes the simulator (transfers queue only in total, few waiting values take memory), so its bound holds
    there. Steps longer than `upper_seconds` may be left out.
    """
    program = _Program(problem, upper_seconds)
    return program.solve(gap, deadline, seed)


class _Program:
    def __init__(self, problem: PlacementProblem, upper_seconds: float) -> None:
        self.problem, self.graph, self.devices = problem, problem.graph, len(problem.target.devices)
        self.reach = heads_and_tails(problem.graph, problem.seconds, problem.target)
        self.is_before = reachable(self.graph.order, self.graph.predecessors)
        # All times are shares of `upper_seconds`: columns lie between 0 and 1, and big M stays small.
        self.scale = upper_seconds
        self.rows = _ProgramRows()
        self.makespan = self.rows.add_column(self.reach.longest_seconds / self.scale, 1.0)
        self.home = np.array([[self._add_home(group, device) for device in range(self.devices)]
                              for group in range(len(problem.pinned))], dtype=np.int64)  # fmt: skip
        latest = 1 - (self.reach.least + self.reach.tail) / self.scale
        earliest = self.reach.head / self.scale
        self.start = [self.rows.add_column(float(low), float(max(low, high))) for low, high in zip(earliest, latest)]
        for home_columns in self.home:
            self.rows.add_row([(int(column), 1.0) for column in home_columns], 1.0, 1.0)
        self._constrain_ends()
        self._constrain_transfers()
        self._constrain_work()
        self._constrain_memory()
        if len(self.graph) <= MAX_ORDERED_NODES:
            self._constrain_order(earliest, latest)

    def _add_home(self, group: int, device: int) -> int:
        pin = int(self.problem.pinned[group])
        return self.rows.add_column(float(pin == device), float(pin in (-1, device)), is_integer=True)

    def _own_time(self, node: int, sign: float) -> list[tuple[int, float]]:
        """Return the terms of a node's own seconds."""
        row = self.home[self.problem.group[node]]
        return [(int(row[d]), sign * float(self.problem.seconds[d, node]) / self.scale) for d in range(self.devices)]

    def _constrain_ends(self) -> None:
        for node in range(len(self.graph)):
            # makespan >= start + own time + tail
            tail = float(self.reach.tail[node]) / self.scale
            self.rows.add_row([(self.makespan, 1.0), (self.start[node], -1.0), *self._own_time(node, -1.0)], tail)

    def _constrain_transfers(self) -> None:
        """Constrain readers to start after their producers, and after a transfer where the edge is cut."""
        graph, group, rows = self.graph, self.problem.group, self.rows
        received: dict[tuple[int, int], int] = {}
        for reader in range(len(graph)):
            for value in graph.inputs[reader].tolist():
                source = int(graph.producer[value])
                if source < 0:
                    continue
                send = float(self.reach.send[value]) / self.scale
                order_terms = [(self.start[reader], 1.0), (self.start[source], -1.0), *self._own_time(source, -1.0)]
                if group[source] == group[reader] or self.devices == 1:
                    rows.add_row(order_terms, 0.0)
                    continue
                # start[reader] >= end[source] + send * cut, with cut >= home[reader, d] - home[source, d] for each
                # device d. Cuts need not be integers: homes are, and each cut takes the least value that they allow.
                cut = rows.add_column(0.0, 1.0)
                rows.add_row([*order_terms, (cut, -send)], 0.0)
                for device in range(self.devices):
                    source_home, reader_home = (
                        int(self.home[group[source], device]),
                        int(self.home[group[reader], device]),
                    )
                    rows.add_row([(cut, 1.0), (source_home, 1.0), (reader_home, -1.0)], 0.0)
                    # One column per value and device: a value is sent there once, however many nodes read it.
                    if (value, device) not in received:
                        received[value, device] = rows.add_column(0.0, 1.0)
                    rows.add_row([(received[value, device], 1.0), (source_home, 1.0), (reader_home, -1.0)], 0.0)
        if self.problem.target.link_model != "parallel" and received:
            self._constrain_channels(received)

    def _constrain_channels(self, received: dict[tuple[int, int], int]) -> None:
        """Constrain the transfers to a device to fit between the first end of a producer and the last reader."""
        reach, producer = self.reach, self.graph.producer
        values = np.array(sorted({value for value, _ in received}))
        before = float((reach.head + reach.least)[producer[values]].min()) / self.scale
        readers = np.unique(np.concatenate([self.graph.readers[value] for value in values.tolist()]))
        after = float((reach.least + reach.tail)[readers].min()) / self.scale
        for device in range(self.devices):
            terms = [(column, -float(reach.send[value]) / self.scale)
                     for (value, destination), column in received.items() if destination == device]  # fmt: skip
            # Without a transfer nothing comes before or after; the row then holds by the bound on the makespan.
            if terms and before + after <= reach.longest_seconds / self.scale:
                self.rows.add_row([(self.makespan, 1.0), *terms], before + after)

    def _constrain_work(self) -> None:
        head, tail = self.reach.head, self.reach.tail
        # What starts after `a` and has `b` to come is computed in between: a + work of the device + b <= makespan.
        # Of all pairs of heads and tails, some quantiles are enough.
        levels = np.linspace(0, 1, MAX_THRESHOLDS)
        for a in np.unique(np.quantile(head, levels, method="lower")):
            for b in np.unique(np.quantile(tail, levels, method="lower")):
                chosen = np.flatnonzero((head >= a) & (tail >= b))
                # The row must also hold for a device without work in between.
                if not len(chosen) or a + b > self.reach.longest_seconds:
                    continue
                for device in range(self.devices):
                    work = np.bincount(self.problem.group[chosen], self.problem.seconds[device, chosen], len(self.home))
                    terms = [(int(self.home[g, device]), -float(work[g]) / self.scale) for g in np.flatnonzero(work)]
                    self.rows.add_row([(self.makespan, 1.0), *terms], float(a + b) / self.scale)

    def _constrain_memory(self) -> None:
        """Constrain weights, needs of the running node and values held by groups to fit into each device."""
        graph, group = self.graph, self.problem.group
        needed, held = node_bytes(graph).astype(np.float64), held_bytes(graph, group, self.is_before)
        # One row per distinct demand: what a node needs on its device, and what each group holds meanwhile on its own.
        # Bytes are shares of `everything`, so that the factors of all rows are of one size.
        held[np.arange(len(graph)), group] += needed
        demands = np.unique(held, axis=0)
        everything = graph.total_weight_bytes + held.sum(axis=1).max(initial=0.0)
        for device in np.flatnonzero(self.problem.limit_bytes < everything).tolist():
            terms, per_group = self._add_weights(device, everything)
            room = float(self.problem.limit_bytes[device]) / everything
            for demand in [np.zeros(len(self.home)), *demands]:
                need = (demand + per_group) / everything
                group_terms = [(int(self.home[g, device]), float(need[g])) for g in np.flatnonzero(need)]
                if terms or group_terms:
                    self.rows.add_row([*terms, *group_terms], -np.inf, room)

    def _add_weights(self, device: int, everything: float) -> tuple[list[tuple[int, float]], Floats]:
        """Return the terms of shared weights, as shares of `everything`, and the bytes that each group reads alone."""
        graph, group = self.graph, self.problem.group
        reading_groups = Csr.grouped(
            graph.weights.items, group[graph.weights.rows].astype(np.int32), len(graph.weight_bytes)
        )
        per_group = np.zeros(len(self.home))
        terms: list[tuple[int, float]] = []
        for weight, size in enumerate(graph.weight_bytes.tolist()):
            if len(reading_groups[weight]) == 1:
                per_group[reading_groups[weight][0]] += size
            elif len(reading_groups[weight]) and size:
                # A weight that several groups read is stored if any of them is here: stored >= home[group, device].
                stored = self.rows.add_column(0.0, 1.0)
                terms.append((stored, size / everything))
                for user in reading_groups[weight].tolist():
                    self.rows.add_row([(stored, 1.0), (int(self.home[user, device]), -1.0)], 0.0)
        return terms, per_group

    def _constrain_order(self, earliest: Floats, latest: Floats) -> None:
        """Constrain unordered nodes that share a device to run one after the other."""
        is_before = self.is_before
        least, tail = self.reach.least / self.scale, self.reach.tail / self.scale
        for i in range(len(self.graph)):
            for j in range(i):
                if is_before[i, j] or is_before[j, i]:
                    continue
                # An order that would exceed the upper bound is ruled out beforehand.
                may_precede = [earliest[a] + least[a] + least[b] + tail[b] <= 1 + 1e-9 for a, b in ((i, j), (j, i))]
                i_first, j_first = (
                    self.rows.add_column(0.0, float(possible), is_integer=True) for possible in may_precede
                )
                gi, gj = self.problem.group[i], self.problem.group[j]
                for device in range(self.devices):
                    # i_first + j_first >= home[i, d] + home[j, d] - 1: on one device, one of them comes first
                    sharing = [(int(self.home[gi, device]), -1.0), (int(self.home[gj, device]), -1.0)]
                    if gi == gj:
                        sharing = []
                    self.rows.add_row([(i_first, 1.0), (j_first, 1.0), *sharing], -1.0 if sharing else 1.0)
                for a, b, precedes in ((i, j, i_first), (j, i, j_first)):
                    # start[b] >= start[a] + own time of a - slack * (1 - chosen)
                    slack = max(0.0, float(latest[a] + least[a] - earliest[b]))
                    longest = float(self.problem.seconds[:, a].max() - self.problem.seconds[:, a].min()) / self.scale
                    slack += longest
                    self.rows.add_row(
                        [(self.start[b], 1.0), (self.start[a], -1.0), *self._own_time(a, -1.0), (precedes, -slack)],
                        -slack,
                    )

    def solve(self, gap: float, deadline: float, seed: int) -> MilpSolution:
        import highspy

        rows = self.rows
        program = make_program(
            cost=np.eye(1, len(rows.is_integer)).ravel(),
            column_bounds=(rows.column_lower, rows.column_upper),
            row_bounds=(rows.lower, rows.upper),
            rows=(rows.starts, rows.index, rows.value),
        )
        kinds = highspy.HighsVarType
        program.integrality_ = [kinds.kInteger if is_integer else kinds.kContinuous for is_integer in rows.is_integer]
        options = {
            "random_seed": seed & MAX_SEED,
            "time_limit": max(deadline - time.perf_counter(), 0.05),
            "mip_rel_gap": gap,
        }
        solver = run_highs(program, options | {"mip_feasibility_tolerance": 1e-9, "primal_feasibility_tolerance": 1e-9})
        infeasible = solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible
        info = solver.getInfo()
        # Feasibility holds to 1e-9 of the largest numbers only, so the bound is lowered by more than that.
        bound = (float(info.mip_dual_bound) - 1e-7) * self.scale if np.isfinite(info.mip_dual_bound) else 0.0
        solution = np.asarray(solver.getSolution().col_value, dtype=np.float64)
        if info.primal_solution_status != 2 or len(solution) != len(rows.is_integer):
            return MilpSolution(self.scale if infeasible else bound, None, None, infeasible)
        device = solution[self.home].argmax(axis=1)[self.problem.group].astype(np.int32)
        return MilpSolution(bound, device, solution[self.start] * self.scale, infeasible)
