"""Measure a model on a device whose provider compiles: in the runs of nodes that it takes.

Such a provider refuses some nodes, and makes one kernel of neighbours that it takes. So a session of the whole model
says which nodes it takes, and each run of them is measured in its own session, as a segment would be. Inputs come
from a run on the CPU, equal runs are measured once, and the nodes of a run share its time as estimates say. The trial
of a bundle corrects that.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from onnxplace.errors import Diagnostic, OnnxplaceError, format_count
from onnxplace.facts import REFUSED_SECONDS, is_refused
from onnxplace.graph.op_graph import Bools, Floats, Ints, OpGraph
from onnxplace.machine.isolated_sessions import list_taken_nodes, open_session
from onnxplace.machine.ort_sessions import make_session_options, pin_thread
from onnxplace.machine.ort_values import make_runner
from onnxplace.machine.repeated_runs import RepeatPolicy
from onnxplace.model.cut_constraints import join_quantised_units, list_uncompilable
from onnxplace.model.model import Model, store_for_session
from onnxplace.passes.profiling.chunks import extract_nodes, list_outputs, name_outputs
from onnxplace.passes.profiling.node_measurement import Measurement, MeasurementOptions, run_repeatedly
from onnxplace.target.device_kinds import ISOLATE, DeviceAddress
from onnxplace.target.kind_table import find_kind, is_isolated
from onnxplace.target.target import SEGMENT_SECONDS, Device
from onnxplace.utils.file_locks import temporary_folder
from onnxplace.utils.progress import progress_part

# Operators that a note lists at most.
MAX_LISTED_OPERATORS = 5


@dataclass(frozen=True)
class RunMeasurer:
    """Measures a model on a device that compiles runs of nodes."""

    model: Model
    graph: OpGraph
    kinds: Ints
    """Per node, the same for nodes that do the same."""
    device: Device
    options: MeasurementOptions
    weights: Floats
    """Per node, its part of the time of its run: its estimated seconds."""
    _kept: list[Any] = field(default_factory=list)
    """The last session, which keeps the device's process from ending before the next one is open."""

    def measure(self, feeds: Mapping[str, Any]) -> tuple[Measurement, list[Diagnostic]]:
        """Return the time of each node, `REFUSED_SECONDS` where the device does not take it, with a note.

        With the device option `fallback=true`, refused nodes have the time that they take on the host.
        """
        began, seconds = time.perf_counter(), np.full(len(self.graph), REFUSED_SECONDS)
        taken, problems = self._find_taken(feeds)
        opening = time.perf_counter() - began
        has_fallback = self.device.options.get("fallback") == "true"
        runs = [nodes for nodes in list_runs(self.graph, taken) if has_fallback or taken[nodes[0]]]
        values, times = self._compute_inputs(runs, feeds), dict[object, float]()
        keys = [describe_run(self.graph, self.kinds.tolist(), nodes) for nodes in runs]
        for number, (key, nodes) in enumerate(zip(keys, runs)):
            if key in times:
                continue
            device = self.options.device if taken[nodes[0]] else DeviceAddress.of("cpu:0")
            try:
                with progress_part(number, len(runs)):
                    times[key], opened = self._time_run(nodes, device, values, self.options.seconds / len(set(keys)))
                opening += opened
            except OnnxplaceError as problem:
                times[key] = REFUSED_SECONDS
                problems.append(problem.message)
        # Each segment has the cost of its call from its device: here, it would count twice.
        # The way to another process was not measured here.
        own = SEGMENT_SECONDS if is_isolated(self.device.address) else self.device.segment_seconds
        call_seconds = min([own, *times.values()])
        for key, nodes in zip(keys, runs):
            share = self.weights[nodes] / max(float(self.weights[nodes].sum()), 1e-30)
            computing = (times[key] - call_seconds) * share
            seconds[nodes] = REFUSED_SECONDS if times[key] == REFUSED_SECONDS else computing
        return _build(seconds), [self._report(taken & ~is_refused(seconds), len(runs), opening, problems)]

    def _find_taken(self, feeds: Mapping[str, Any]) -> tuple[Bools, list[str]]:
        """Return, per node, whether the device takes it, with all of its quantised unit; and problems of opening.

        The whole model says so. If a provider fails to open it, there is a first node in the order with which it fails,
        alone or in one kernel with nodes before: it is found by bisection, and refused with its equals. The rest is
        tried again, until it opens. So every part of what is taken opens, too. A provider that takes none of the nodes
        may do so for one of them, which is found in the same way.
        """
        unit = join_quantised_units(self.model, np.arange(len(self.graph), dtype=np.int32))
        barred = set(unit[list_uncompilable(self.model)].tolist())
        units = [name for name in dict.fromkeys(unit[self.graph.order].tolist()) if name not in barred]
        kind = {name: self.kinds[unit == name].tobytes() for name in units}
        names, problems, values, openable = frozenset[str](), list[str](), feeds, 0
        every = list(np.arange(len(self.graph), dtype=np.int32)[:, None])
        if barred:  # the others read their values
            values = self._compute_inputs(every, feeds)
        count = len(units)
        while units:
            # The first `openable` units open together, the first `failing` do not.
            try:
                taken = self._list_taken(np.flatnonzero(np.isin(unit, units[:count])).astype(np.int32), values)
                messages = []
            except OnnxplaceError as problem:
                taken, messages = frozenset(), [problem.message]
            if taken and count == len(units):
                names = taken
                break
            if taken:
                openable = count
            else:
                failing = count
                if values is feeds:
                    values = self._compute_inputs(every, feeds)
            if failing - openable == 1:
                problems += messages
                culprit = kind[units[failing - 1]]
                openable = sum(kind[name] != culprit for name in units[:openable])
                units = [name for name in units if kind[name] != culprit]
                count = len(units)
            else:
                count = (openable + failing) // 2
        refused = np.bincount(unit, [name not in names for name in self.graph.names]) > 0
        return ~refused[unit], problems

    def _list_taken(self, nodes: Ints, values: Mapping[str, Any]) -> frozenset[str]:
        outputs = name_outputs(self.graph, nodes.tolist())
        part, _ = extract_nodes(self.model, nodes.tolist(), outputs, values, is_static=True)
        with self._open(part, self.options.device, "none") as session:
            return list_taken_nodes(session, self.options.device)

    @contextmanager
    def _open(self, part: Model, device: DeviceAddress, level: Any) -> Iterator[Any]:
        """Open a session while inside, which records which nodes its provider takes.

        Those of the device are in their own process, since compilers may crash on nodes that they claim.
        """
        if not find_kind(device.kind).is_host:
            device = replace(device, options={**device.options, ISOLATE: "true"})
        with temporary_folder() as folder, pin_thread(self.options.cores):
            source, entries = store_for_session(part, folder)
            entries = {**entries, "session.record_ep_graph_assignment_info": "1"}
            options = make_session_options(self.options.cores, level, entries)
            session = open_session(source, options, device, self.model.name)
            if is_isolated(device):
                self._kept[:] = [session]
            yield session

    def _compute_inputs(self, runs: Sequence[Ints], feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return the values that enter runs, computed on the CPU, and the inputs of the model."""
        run_of = np.full(len(self.graph) + 1, -1)  # the last entry is for values without a producer (-1)
        for index, nodes in enumerate(runs):
            run_of[nodes] = index
        reads = self.graph.inputs
        source, reader = self.graph.producer[reads.items], reads.rows
        enters = (source >= 0) & (run_of[reader] >= 0) & (run_of[source] != run_of[reader])
        names = [self.graph.value_names[value] for value in np.unique(reads.items[enters])]
        if not names:
            return dict(feeds)
        part, inputs = extract_nodes(self.model, range(len(self.graph)), names, feeds, is_static=True)
        with self._open(part, DeviceAddress.of("cpu:0"), "basic") as session:
            return {**feeds, **dict(zip(names, make_runner(session, self.model.name)(inputs)))}

    def _time_run(
        self, nodes: Ints, device: DeviceAddress, values: Mapping[str, Any], seconds: float
    ) -> tuple[float, float]:
        """Return the seconds of a run, and of opening its session."""
        outputs = name_outputs(self.graph, nodes.tolist())
        part, inputs = extract_nodes(self.model, nodes.tolist(), outputs, values, is_static=True)
        began = time.perf_counter()
        with self._open(part, device, "all") as session:
            opened = time.perf_counter() - began
            policy = RepeatPolicy(self.options.repeat, seconds, self.options.tolerance)
            return run_repeatedly(session, self.model.name, inputs, self.options.cores, policy)[0].seconds, opened

    def _report(self, taken: Bools, runs: int, opening: float, problems: Sequence[str]) -> Diagnostic:
        """Return the note that says what the device takes, and how long its sessions took to open."""
        message = f"takes {int(taken.sum())} of {format_count(len(taken), 'node')}"
        if not taken.all():
            operators = Counter(self.graph.ops[node] for node in np.flatnonzero(~taken))
            counts = operators.most_common(MAX_LISTED_OPERATORS)
            message += f", not {', '.join(f'{number} {op}' for op, number in counts)}"
        message += f"; measured in {format_count(runs, 'run')} of nodes; opening took {opening:.1f} s"
        if problems:
            message += f"; {len(problems)} could not be run, such as: {problems[0]}"
        return Diagnostic("C003", message, where=self.device.id)


def describe_run(graph: OpGraph, kinds: Sequence[Hashable], nodes: Ints) -> tuple[Hashable, ...]:
    """Return what equal runs share: kinds of nodes, who reads what, and what leaves."""
    made, leaving = list_outputs(graph, nodes.tolist())
    number = {value: index for index, value in enumerate(made)}
    reads = tuple(number.get(value, -1) for node in nodes for value in graph.inputs[node].tolist())
    return tuple(kinds[node] for node in nodes.tolist()), reads, tuple(number[value] for value in leaving)


def list_runs(graph: OpGraph, taken: Bools) -> list[Ints]:
    """Return the runs: linked nodes that are all taken, or all refused, in the order in which they can be computed.

    Runs are convex: no path between two of their nodes leaves them. A node's depth is how often a path to it changes
    between taken and refused nodes at most; runs are linked nodes of one depth. O(N + E).
    """
    import networkx

    depth = np.where(taken, 0, 1)
    links = networkx.Graph()
    links.add_nodes_from(graph.order.tolist())
    for node in graph.order.tolist():
        sources = graph.predecessors[node]
        depth[node] = np.max(depth[sources] + (taken[sources] != taken[node]), initial=depth[node])
        links.add_edges_from((node, source) for source in sources[depth[sources] == depth[node]].tolist())
    runs = [np.array(sorted(nodes), dtype=np.int32) for nodes in networkx.connected_components(links)]
    return sorted(runs, key=lambda nodes: (depth[nodes[0]], nodes[0]))


def _build(seconds: Floats) -> Measurement:
    """Return a measurement of all nodes, each its own kernel as long as runs may be cut."""
    count = len(seconds)
    return Measurement(
        seconds=seconds,
        unit=np.arange(count, dtype=np.int32),
        ran=np.ones(count, dtype=bool),
        measured=np.ones(count, dtype=bool),
        spread=np.zeros(count),
    )
