"""The placement and scheduling of a small graph as a mixed-integer program, for HiGHS."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from onnxplace.graph import Csr, Floats, Ints
from onnxplace.passes.placement.exact.residency import held_bytes, reachable
from onnxplace.problem import PlacementProblem
from onnxplace.simulation import heads_and_tails, node_bytes

# Thresholds of heads and of tails for which the work between them is held against each device.
LEVELS = 6
# Beyond this, the order on devices is left out: the program has O(N^2) rows for it.
MAX_ORDERED = 120
# HiGHS takes seeds of 31 bits.
MAX_SEED = (1 << 31) - 1


@dataclass(frozen=True)
class Solved:
    """What the solver found: a bound in seconds, and a step as device and planned start per node, if any."""

    bound_seconds: float
    device: Ints | None
    start_seconds: Floats | None
    infeasible: bool
    """No placement keeps the weights within the devices."""


@dataclass
class _Rows:
    """Constraints `lower <= A v <= upper`, gathered row by row; v in columns with bounds."""

    lower: list[float] = field(default_factory=list)
    upper: list[float] = field(default_factory=list)
    starts: list[int] = field(default_factory=lambda: [0])
    index: list[int] = field(default_factory=list)
    value: list[float] = field(default_factory=list)
    column_lower: list[float] = field(default_factory=list)
    column_upper: list[float] = field(default_factory=list)
    whole: list[bool] = field(default_factory=list)

    def column(self, lower: float, upper: float, whole: bool = False) -> int:
        self.column_lower.append(lower)
        self.column_upper.append(upper)
        self.whole.append(whole)
        return len(self.whole) - 1

    def at_least(self, terms: list[tuple[int, float]], lower: float, upper: float = np.inf) -> None:
        self.index += [column for column, _ in terms]
        self.value += [factor for _, factor in terms]
        self.starts.append(len(self.index))
        self.lower.append(lower)
        self.upper.append(upper)


def solve_milp(asked: PlacementProblem, upper_seconds: float, gap: float, deadline: float, seed: int) -> Solved:
    """Solve the program until `gap` or the time `deadline` (of `time.perf_counter`) is reached.

    Columns: the device of each group (binary), the start of each node, for pairs of nodes that could run in either
    order which is first (binary), for each edge whether it is cut, for each value the devices that receive it, the
    makespan. Rows: a reader starts after what it reads is there; nodes of one device do not overlap (big M from heads,
    tails and `upper_seconds`); work between thresholds of heads and tails, and what a device receives, fit into the
    makespan; weights, what the running node needs and what groups surely hold meanwhile fit into memory. It relaxes
    the simulator (transfers queue only in total, few values take room while they wait), so its bound holds there.
    Steps longer than `upper_seconds` may be left out.
    """
    program = _Program(asked, upper_seconds)
    return program.solve(gap, deadline, seed)


class _Program:
    def __init__(self, asked: PlacementProblem, upper_seconds: float) -> None:
        self.asked, self.graph, self.devices = asked, asked.graph, len(asked.target.devices)
        self.around = heads_and_tails(asked.graph, asked.seconds, asked.target)
        self.before = reachable(self.graph.order, self.graph.predecessors)
        self.scale = upper_seconds
        self.rows = _Rows()
        self.makespan = self.rows.column(self.around.longest_seconds / self.scale, 1.0)
        self.home = np.array([[self._home(group, device) for device in range(self.devices)]
                              for group in range(len(asked.pinned))], dtype=np.int64)  # fmt: skip
        latest = 1 - (self.around.least + self.around.tail) / self.scale
        earliest = self.around.head / self.scale
        self.start = [self.rows.column(float(low), float(max(low, high))) for low, high in zip(earliest, latest)]
        for row in self.home:
            self.rows.at_least([(int(column), 1.0) for column in row], 1.0, 1.0)
        self._ends()
        self._transfers()
        self._capacity()
        self._memory()
        if len(self.graph) <= MAX_ORDERED:
            self._order(earliest, latest)

    def _home(self, group: int, device: int) -> int:
        pin = int(self.asked.pinned[group])
        return self.rows.column(float(pin == device), float(pin in (-1, device)), whole=True)

    def _busy(self, node: int, sign: float) -> list[tuple[int, float]]:
        """Return the terms of a node's own time."""
        row = self.home[self.asked.group[node]]
        return [(int(row[d]), sign * float(self.asked.seconds[d, node]) / self.scale) for d in range(self.devices)]

    def _ends(self) -> None:
        for node in range(len(self.graph)):
            tail = float(self.around.tail[node]) / self.scale
            self.rows.at_least([(self.makespan, 1.0), (self.start[node], -1.0), *self._busy(node, -1.0)], tail)

    def _transfers(self) -> None:
        """A reader starts after the producer, and after a transfer where the edge is cut."""
        graph, group, rows = self.graph, self.asked.group, self.rows
        received: dict[tuple[int, int], int] = {}
        for reader in range(len(graph)):
            for value in graph.inputs[reader].tolist():
                source = int(graph.producer[value])
                if source < 0:
                    continue
                send = float(self.around.send[value]) / self.scale
                apart = [(self.start[reader], 1.0), (self.start[source], -1.0), *self._busy(source, -1.0)]
                if group[source] == group[reader] or self.devices == 1:
                    rows.at_least(apart, 0.0)
                    continue
                cut = rows.column(0.0, 1.0)
                rows.at_least([*apart, (cut, -send)], 0.0)
                for device in range(self.devices):
                    here, there = int(self.home[group[source], device]), int(self.home[group[reader], device])
                    rows.at_least([(cut, 1.0), (here, 1.0), (there, -1.0)], 0.0)
                    if (value, device) not in received:
                        received[value, device] = rows.column(0.0, 1.0)
                    rows.at_least([(received[value, device], 1.0), (here, 1.0), (there, -1.0)], 0.0)
        if self.asked.target.link_model != "parallel" and received:
            self._channels(received)

    def _channels(self, received: dict[tuple[int, int], int]) -> None:
        """What a device receives goes through its channel one after the other, between the first end and the last."""
        around, producer = self.around, self.graph.producer
        values = np.array(sorted({value for value, _ in received}))
        before = float((around.head + around.least)[producer[values]].min()) / self.scale
        readers = np.unique(np.concatenate([self.graph.readers[value] for value in values.tolist()]))
        after = float((around.least + around.tail)[readers].min()) / self.scale
        for device in range(self.devices):
            terms = [(column, -float(around.send[value]) / self.scale)
                     for (value, there), column in received.items() if there == device]  # fmt: skip
            # Without a transfer nothing comes before or after; the first term of the bound is then not met anyhow.
            if terms and before + after <= around.longest_seconds / self.scale:
                self.rows.at_least([(self.makespan, 1.0), *terms], before + after)

    def _capacity(self) -> None:
        head, tail = self.around.head, self.around.tail
        levels = np.linspace(0, 1, LEVELS)
        for a in np.unique(np.quantile(head, levels, method="lower")):
            for b in np.unique(np.quantile(tail, levels, method="lower")):
                inside = np.flatnonzero((head >= a) & (tail >= b))
                # A device that does nothing in between needs the other side of the sum to hold by itself.
                if not len(inside) or a + b > self.around.longest_seconds:
                    continue
                for device in range(self.devices):
                    work = np.bincount(self.asked.group[inside], self.asked.seconds[device, inside], len(self.home))
                    terms = [(int(self.home[g, device]), -float(work[g]) / self.scale) for g in np.flatnonzero(work)]
                    self.rows.at_least([(self.makespan, 1.0), *terms], float(a + b) / self.scale)

    def _memory(self) -> None:
        """While a node runs, weights, what it needs itself and what groups surely hold then fit into each device."""
        graph, group = self.graph, self.asked.group
        needed, held = node_bytes(graph).astype(np.float64), held_bytes(graph, group, self.before)
        held[np.arange(len(graph)), group] += needed
        demands = np.unique(held, axis=0)
        everything = graph.total_weight_bytes + held.sum(axis=1).max(initial=0.0)
        for device in np.flatnonzero(self.asked.limit_bytes < everything).tolist():
            terms, per_group = self._weights(device, everything)
            room = float(self.asked.limit_bytes[device]) / everything
            for demand in [np.zeros(len(self.home)), *demands]:
                asked = (demand + per_group) / everything
                own = [(int(self.home[g, device]), float(asked[g])) for g in np.flatnonzero(asked)]
                if terms or own:
                    self.rows.at_least([*terms, *own], -np.inf, room)

    def _weights(self, device: int, everything: float) -> tuple[list[tuple[int, float]], Floats]:
        """Return the terms of weights that groups share, in parts of `everything`, and what each group reads alone."""
        graph, group = self.graph, self.asked.group
        users = Csr.grouped(graph.weights.items, group[graph.weights.rows].astype(np.int32), len(graph.weight_bytes))
        per_group = np.zeros(len(self.home))
        terms: list[tuple[int, float]] = []
        for weight, size in enumerate(graph.weight_bytes.tolist()):
            if len(users[weight]) == 1:
                per_group[users[weight][0]] += size
            elif len(users[weight]) and size:
                stored = self.rows.column(0.0, 1.0)
                terms.append((stored, size / everything))
                for user in users[weight].tolist():
                    self.rows.at_least([(stored, 1.0), (int(self.home[user, device]), -1.0)], 0.0)
        return terms, per_group

    def _order(self, earliest: Floats, latest: Floats) -> None:
        """Nodes that no path connects and that may share a device run one after the other there."""
        before = self.before
        least, tail = self.around.least / self.scale, self.around.tail / self.scale
        for i in range(len(self.graph)):
            for j in range(i):
                if before[i, j] or before[j, i]:
                    continue
                first = [earliest[a] + least[a] + least[b] + tail[b] <= 1 + 1e-9 for a, b in ((i, j), (j, i))]
                i_first, j_first = (self.rows.column(0.0, float(possible), whole=True) for possible in first)
                gi, gj = self.asked.group[i], self.asked.group[j]
                for device in range(self.devices):
                    together = [(int(self.home[gi, device]), -1.0), (int(self.home[gj, device]), -1.0)]
                    if gi == gj:
                        together = []
                    self.rows.at_least([(i_first, 1.0), (j_first, 1.0), *together], -1.0 if together else 1.0)
                for a, b, chosen in ((i, j, i_first), (j, i, j_first)):
                    # start[b] >= start[a] + own time of a - slack * (1 - chosen)
                    slack = max(0.0, float(latest[a] + least[a] - earliest[b]))
                    longest = float(self.asked.seconds[:, a].max() - self.asked.seconds[:, a].min()) / self.scale
                    slack += longest
                    self.rows.at_least(
                        [(self.start[b], 1.0), (self.start[a], -1.0), *self._busy(a, -1.0), (chosen, -slack)], -slack
                    )

    def solve(self, gap: float, deadline: float, seed: int) -> Solved:
        import highspy

        rows = self.rows
        program = highspy.HighsLp()
        program.num_col_, program.num_row_ = len(rows.whole), len(rows.lower)
        program.col_cost_ = np.eye(1, len(rows.whole)).ravel()
        program.col_lower_, program.col_upper_ = np.array(rows.column_lower), np.array(rows.column_upper)
        program.row_lower_, program.row_upper_ = np.array(rows.lower), np.array(rows.upper)
        program.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
        program.a_matrix_.start_ = np.array(rows.starts, dtype=np.int32)
        program.a_matrix_.index_ = np.array(rows.index, dtype=np.int32)
        program.a_matrix_.value_ = np.array(rows.value)
        kinds = highspy.HighsVarType
        program.integrality_ = [kinds.kInteger if whole else kinds.kContinuous for whole in rows.whole]
        solver: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        left = max(deadline - time.perf_counter(), 0.05)
        for option, value in (("output_flag", False), ("threads", 1), ("random_seed", seed & MAX_SEED),
                              ("time_limit", left), ("mip_rel_gap", gap), ("mip_feasibility_tolerance", 1e-9),
                              ("primal_feasibility_tolerance", 1e-9)):  # fmt: skip
            solver.setOptionValue(option, value)
        solver.passModel(program)
        solver.run()
        infeasible = solver.getModelStatus() == highspy.HighsModelStatus.kInfeasible
        info = solver.getInfo()
        # Feasibility holds to 1e-9 of the largest numbers only: the bound gives that much away.
        bound = (float(info.mip_dual_bound) - 1e-7) * self.scale if np.isfinite(info.mip_dual_bound) else 0.0
        solution = np.asarray(solver.getSolution().col_value, dtype=np.float64)
        if info.primal_solution_status != 2 or len(solution) != len(rows.whole):
            return Solved(self.scale if infeasible else bound, None, None, infeasible)
        device = solution[self.home].argmax(axis=1)[self.asked.group].astype(np.int32)
        return Solved(bound, device, solution[self.start] * self.scale, infeasible)
