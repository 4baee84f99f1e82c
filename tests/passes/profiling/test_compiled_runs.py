"""Measuring in runs, as devices need whose providers compile: which nodes form runs, and who gets which time."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import parser

from onnxplace.errors import ModelError
from onnxplace.facts import REFUSED_SECONDS, is_refused
from onnxplace.graph.op_graph import Bools, OpGraph
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind, infer_static_shapes, value_bytes
from onnxplace.passes.profiling import compiled_runs
from onnxplace.passes.profiling.compiled_runs import RunMeasurer, list_runs
from onnxplace.passes.profiling.node_measurement import MeasurementOptions
from onnxplace.passes.profiling.profile_model import ModelStructure
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.target import Device
from onnxplace.testing.pass_contract import random_graph

TEXT = """<ir_version: 8, opset_import: ["": 17]>
g (float[N, 8] x, float[8, 8] w) => (float[N, 8] y, float[N, 8] z) {
    [first] a = MatMul(x, w)
    [erf] b = Erf(a)
    [second] c = MatMul(b, w)
    [relu] z = Relu(c)
    [third] d = MatMul(z, w)
    [last] e = Erf(d)
    [fourth] y = MatMul(e, w)
}"""
OPTIONS = MeasurementOptions(DeviceAddress("cpu", 0), (0,), repeat=3, seconds=0.1)
ON_NPU = replace(OPTIONS, device=DeviceAddress("qnn/npu", 0))


def reachable(graph: OpGraph, start: set[int], forward: bool) -> set[int]:
    """Return the nodes that paths from or to some nodes meet, with these nodes."""
    lists, seen, waiting = graph.successors if forward else graph.predecessors, set(start), list(start)
    while waiting:
        added = set(lists[waiting.pop()].tolist()) - seen
        seen |= added
        waiting += added
    return seen


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(0, 30), st.floats(0, 1))
def test_runs_are_convex_and_of_one_sort_and_partition_the_nodes(seed, nodes, share):
    graph = random_graph(seed, nodes, shuffled=seed % 2 > 0)
    taken: Bools = np.random.default_rng(seed).random(nodes) < share
    runs = [set(run.tolist()) for run in list_runs(graph, taken)]
    assert sorted(node for run in runs for node in run) == list(range(nodes))
    done: set[int] = set()
    for run in runs:
        assert len({bool(taken[node]) for node in run}) == 1
        assert reachable(graph, run, True) & reachable(graph, run, False) == run
        done |= run
        assert all(set(graph.predecessors[node].tolist()) <= done for node in run)  # runs can be computed in this order


def measurer(
    monkeypatch: pytest.MonkeyPatch, refused: set[str], fallback: bool = False, text: str = TEXT
) -> RunMeasurer:
    """Return the measurer of a model on a CPU whose provider refuses some nodes."""
    model = bind(load(parser.parse_model(text)), {"N": 4}, {})
    shapes = infer_static_shapes(model)
    structure = ModelStructure.of(model, shapes, value_bytes(model, {**shapes, **model.input_shapes()}))
    names = frozenset(node.name for node in model.nodes) - refused
    monkeypatch.setattr(compiled_runs, "list_taken_nodes", lambda session, device: names)
    device = Device("qnn/npu:0", 1 << 30, options={"fallback": "true"} if fallback else {}, segment_seconds=0.0)
    weights = np.array([1.0 if node.op_type == "MatMul" else 0.25 for node in model.nodes])
    return RunMeasurer(model, structure.graph, structure.kinds, device, OPTIONS, weights)


def test_nodes_of_a_run_share_its_time_and_refused_nodes_have_none(monkeypatch):
    measured = measurer(monkeypatch, {"erf", "last"})
    measurement, (note,) = measured.measure(measured.model.feeds())
    seconds = dict(zip(measured.graph.names, measurement.seconds.tolist()))
    assert {name for name, time in seconds.items() if time == REFUSED_SECONDS} == {"erf", "last"}
    assert 0 < seconds["relu"] < 1
    assert seconds["second"] == seconds["third"] == 4 * seconds["relu"]
    assert note.code == "C003"
    assert note.message.startswith("takes 5 of 7 nodes, not 2 Erf; measured in 3 runs of nodes; opening took ")


def test_equal_runs_are_opened_once_with_static_inputs(monkeypatch):
    opened = []

    def record(self, nodes, device, values, seconds):
        opened.append({name: np.shape(values[name]) for name in ("a", "x", "b", "e") if name in values})
        return 1.0, 0.0

    monkeypatch.setattr(RunMeasurer, "_time_run", record)
    measured = measurer(monkeypatch, {"erf", "relu", "last"})
    measurement, (note,) = measured.measure(measured.model.feeds())
    assert len(opened) == 1  # each run is a product of equal shapes
    assert opened[0] == {"x": (4, 8), "b": (4, 8), "e": (4, 8)}  # computed on the CPU
    assert "measured in 4 runs" in note.message
    assert measurement.seconds[~is_refused(measurement.seconds)].tolist() == [1.0] * 4


def test_the_call_that_each_segment_has_anyway_is_not_counted_twice(monkeypatch):
    monkeypatch.setattr(RunMeasurer, "_time_run", lambda self, nodes, *_: (len(nodes) * 0.25, 0.0))
    measured = measurer(monkeypatch, {"erf", "last"})
    device = Device("qnn/npu:0", 1 << 30, segment_seconds=0.125)
    measurement, _ = replace(measured, device=device).measure(measured.model.feeds())
    times = dict(zip(measured.graph.names, measurement.seconds.tolist()))
    assert times["first"] == times["fourth"] == 0.125
    assert times["second"] + times["relu"] + times["third"] == pytest.approx(0.625)


def test_with_fallback_refused_nodes_have_their_time_on_the_host(monkeypatch):
    devices = []

    def record(self, nodes, device, values, seconds):
        devices.append((self.graph.names[nodes[0]], device.kind))
        return 1.0, 0.0

    monkeypatch.setattr(RunMeasurer, "_time_run", record)
    monkeypatch.setattr(compiled_runs, "open_session", lambda source, options, *_: open_session(source, options))
    measured = measurer(monkeypatch, {"erf"}, fallback=True)
    measurement, (note,) = replace(measured, options=ON_NPU).measure(measured.model.feeds())
    assert devices == [("first", "qnn/npu"), ("erf", "cpu"), ("second", "qnn/npu")]
    assert not is_refused(measurement.seconds).any()
    assert note.message.startswith("takes 6 of 7 nodes, not 1 Erf")


def test_nodes_with_values_that_are_no_tensors_are_refused_and_those_around_them_are_measured(monkeypatch):
    text = """<ir_version: 8, opset_import: ["": 17]>
    g (float[N, 8] x) => (float[N, 8] y) <int64 zero = {0}> {
        [first] a = Relu(x) [pack] s = SequenceConstruct(a, x) [take] b = SequenceAt(s, zero) [last] y = Tanh(b) }"""
    ask = RunMeasurer._list_taken

    def take_all_of(self, nodes, values):
        return ask(self, nodes, values) & {self.graph.names[node] for node in nodes.tolist()}

    monkeypatch.setattr(RunMeasurer, "_list_taken", take_all_of)
    measured = measurer(monkeypatch, set(), text=text)
    measurement, (note,) = measured.measure(measured.model.feeds())
    is_left = dict(zip(measured.graph.names, is_refused(measurement.seconds).tolist()))
    assert is_left == {"first": False, "pack": True, "take": True, "last": False}
    assert note.message.startswith("takes 2 of 4 nodes, not 1 SequenceConstruct, 1 SequenceAt")


def test_a_run_that_fails_is_refused_and_the_note_says_why(monkeypatch):
    def fail(self, nodes, device, values, seconds):
        raise ModelError("M012", "no memory for the graph", where="npu")

    monkeypatch.setattr(RunMeasurer, "_time_run", fail)
    measured = measurer(monkeypatch, set())
    measurement, (note,) = measured.measure(measured.model.feeds())
    assert is_refused(measurement.seconds).all()
    assert "takes 0 of 7 nodes" in note.message
    assert note.message.endswith("1 could not be run, such as: no memory for the graph")


def test_a_device_that_cannot_open_the_model_gets_no_nodes_and_the_note_says_why(monkeypatch):
    def refuse(source, options, device, where):
        if device.kind == "cpu":
            return open_session(source, options)
        raise ModelError("M012", "the backend lacks an operator", where=where)

    monkeypatch.setattr(compiled_runs, "open_session", refuse)
    measured = measurer(monkeypatch, set())
    measurement, (note,) = replace(measured, options=ON_NPU).measure(measured.model.feeds())
    assert is_refused(measurement.seconds).all()
    assert "the backend lacks an operator" in note.message


@pytest.mark.parametrize("culprits", [{"Erf"}, {"MatMul", "Relu"}, {"Relu"}])
def test_nodes_with_which_a_provider_fails_to_open_are_found_and_refused_with_their_equals(monkeypatch, culprits):
    opened = []

    def list_taken(self, nodes, values):
        opened.append(len(nodes))
        if {self.graph.ops[node] for node in nodes} & culprits:
            raise ModelError("M012", "the backend cannot finalize the graph", where="npu", hint="update it")
        return frozenset(self.graph.names[node] for node in nodes)

    monkeypatch.setattr(RunMeasurer, "_list_taken", list_taken)
    measured = measurer(monkeypatch, set())
    measurement, (note,) = measured.measure(measured.model.feeds())
    assert is_refused(measurement.seconds).tolist() == [op in culprits for op in measured.graph.ops]
    assert "could not be run, such as: the backend cannot finalize the graph" in note.message
    assert len(opened) <= 13


def test_a_provider_that_refuses_a_whole_graph_for_one_node_takes_the_parts_without_it(monkeypatch):
    def list_whole(session, device):
        names = list_of_graph(session)
        return frozenset() if names & {"erf", "last"} else names

    def list_of_graph(session):
        return frozenset(
            item.name for group in session.get_provider_graph_assignment_info() for item in group.get_nodes()
        )

    measured = measurer(monkeypatch, set())
    monkeypatch.setattr(compiled_runs, "list_taken_nodes", list_whole)
    measurement, (note,) = measured.measure(measured.model.feeds())
    refused = {name for name, time in zip(measured.graph.names, measurement.seconds) if time == REFUSED_SECONDS}
    assert refused == {"erf", "last"}
    assert note.message.startswith("takes 5 of 7 nodes, not 2 Erf; measured in 3 runs of nodes; opening took ")
    assert "could not be run" not in note.message


def test_a_provider_that_takes_nothing_is_asked_once_for_each_sort_of_nodes_at_most(monkeypatch):
    asked = []
    monkeypatch.setattr(RunMeasurer, "_list_taken", lambda self, nodes, values: asked.append(len(nodes)) or frozenset())
    measured = measurer(monkeypatch, set())
    measurement, (note,) = measured.measure(measured.model.feeds())
    assert is_refused(measurement.seconds).all()
    assert note.message.startswith("takes 0 of 7 nodes, not 4 MatMul, 2 Erf, 1 Relu; measured in 0 runs of nodes")
    assert len(asked) <= 10
