"""Segments keep within the memory of their devices: cut further where that helps, refused where it does not."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import TensorProto, helper, save

import onnxplace
from onnxplace.errors import InfeasibleError
from onnxplace.facts import Placement, Profile, Schedule, Segments
from onnxplace.passes.segments.cut_segments import cut_into_segments
from onnxplace.passes.segments.memory_limits import cut_within_limits, simulate_segments
from onnxplace.passes.split import Split
from onnxplace.pipeline.pipeline import run_pass
from onnxplace.problem import commit_placement, placement_problem
from onnxplace.state import State
from onnxplace.target.target import Target
from onnxplace.testing.pass_contract import random_state
from tests.passes.placement.test_placers import state_of
from tests.support.reference_simulator import even_target, graph_of

AMPLE_BYTES = 1 << 50


def commit_by_hand(state: State, device: list[int] | np.ndarray, start: list[float] | np.ndarray) -> State:
    """Return a state with this placement, ordered by the planned starts."""
    device, start = np.array(device, dtype=np.int32), np.array(start, dtype=np.float64)
    return commit_placement(state, placement_problem(state), device, start, "by hand")


def with_limits(state: State, limits: list[int] | np.ndarray) -> State:
    """Return a placed state with other memory limits."""
    devices = tuple(replace(device, memory_bytes=int(limit)) for device, limit in zip(state.target.devices, limits))
    return State(replace(state.target, devices=devices), state.facts)


def cache_state(count: int, unit: list[int] | None = None) -> State:
    """Return `count` nodes on one device that each turn a cache of 10 bytes into a new one, which is an output."""
    reads = {f"new{index}": [f"old{index}"] for index in range(count)}
    fed = [f"old{index}" for index in range(count)]
    graph = graph_of(reads, fed=fed, outputs=list(reads), sizes=dict.fromkeys([*fed, *reads], 10))
    return commit_by_hand(state_of(graph, [1] * count, even_target(1), unit=unit), [0] * count, list(range(count)))


def segments_of(state: State) -> list[list[int]]:
    return [segment.nodes.tolist() for segment in run_pass(Split(), state)[Segments].segments]


@pytest.mark.parametrize(
    ("limit", "expected"),
    [(80, [[0, 1, 2, 3]]), (79, [[0, 1, 2], [3]]), (60, [[0, 1], [2, 3]]), (50, [[0], [1], [2], [3]])],
)
def test_a_segment_takes_as_many_nodes_as_fit_with_inputs_and_outputs(limit, expected):
    assert segments_of(with_limits(cache_state(4), [limit])) == expected


def test_cuts_are_between_kernels_where_kernels_fit():
    assert segments_of(with_limits(cache_state(4, unit=[0, 1, 1, 2]), [70])) == [[0, 1, 2], [3]]
    assert segments_of(with_limits(cache_state(4, unit=[0, 1, 1, 2]), [60])) == [[0], [1, 2], [3]]
    assert segments_of(with_limits(cache_state(4, unit=[0, 1, 1, 2]), [50])) == [[0], [1], [2], [3]]


def test_only_the_device_that_holds_too_much_is_cut():
    reads = {f"{side}{i}": [f"{side}_old{i}"] for side in "ab" for i in range(3)}
    graph = graph_of(reads, fed=[row[0] for row in reads.values()], outputs=list(reads))
    state = commit_by_hand(state_of(graph, [1] * 6, even_target(2)), [0] * 3 + [1] * 3, [0, 1, 2] * 2)
    assert sorted(segments_of(with_limits(state, [4, 6]))) == [[0], [1], [2], [3, 4, 5]]


def test_further_cuts_are_reported():
    (note,) = run_pass(Split(), with_limits(cache_state(4), [60])).diagnostics
    assert note.code == "P012"
    assert "2 segments instead of 1" in note.message
    assert run_pass(Split(), with_limits(cache_state(4), [80])).diagnostics == ()


def test_single_nodes_that_do_not_fit_are_refused_with_device_shortage_and_node():
    state = with_limits(cache_state(4), [45])
    with pytest.raises(InfeasibleError, match=r"cpu:0 lacks 5 bytes \(needs 50, may use 45\).* node 'new0'") as caught:
        Split().run(state)
    assert (caught.value.code, caught.value.exit_code) == ("P001", 3)


def test_segments_that_hold_too_much_fail_their_check():
    state = run_pass(Split(), with_limits(cache_state(4), [80]))
    with pytest.raises(ValueError, match="cpu:0 needs 80 bytes of 79"):
        with_limits(state, [79])[Segments].check(with_limits(state, [79]))


@st.composite
def placed_states(draw, overhead: float) -> tuple[State, list[np.ndarray]]:
    """Return a random placed state and its segments.

    Its limits are between the needs of single nodes and those of the segments.
    """
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    nodes, devices = draw(st.integers(1, 40)), draw(st.integers(1, 3))
    state = random_state(int(random.integers(1 << 30)), nodes, devices, shuffled=draw(st.booleans()))
    roomy = tuple(replace(d, memory_bytes=AMPLE_BYTES, segment_seconds=overhead) for d in state.target.devices)
    state = State(Target(roomy, state.target.links, state.target.link_model), state.facts)
    graph, start = state[Profile].graph, random.uniform(0, 3, nodes)
    for node in graph.order:
        start[node] += start[graph.predecessors[node]].max(initial=0)
    pattern = random.integers(0, devices, draw(st.integers(1, 8)))
    state = commit_by_hand(state, np.resize(pattern, nodes), start)
    schedule = state[Schedule]
    segments = cut_into_segments(state)
    need = schedule.simulation.peak_bytes
    free = np.maximum(simulate_segments(state, segments).simulation.peak_bytes - need, 0)
    share = draw(st.sampled_from((0.0, 0.1, 0.5, 1.0)))
    return with_limits(state, np.maximum(need + np.floor(share * free), 1)), segments


def device_orders(state: State, nodes) -> list[list[int]]:
    device = state[Placement].device
    sequence = np.concatenate(nodes)
    return [sequence[device[sequence] == index].tolist() for index in range(len(state.target.devices))]


@settings(deadline=None, derandomize=True, max_examples=150)
@given(placed_states(overhead=0.0))
def test_nodes_that_fit_one_by_one_fit_in_segments_too(decision):
    state, segments = decision
    plan = cut_within_limits(state, segments)
    limits = [device.memory_bytes for device in state.target.devices]
    assert (plan.simulation.peak_bytes <= limits).all()
    given = {node: index for index, nodes in enumerate(segments) for node in nodes.tolist()}
    assert all(len({given[node] for node in nodes.tolist()}) == 1 for nodes in plan.nodes)
    assert device_orders(state, plan.nodes) == device_orders(state, segments)
    again = cut_within_limits(state, segments)
    assert [nodes.tolist() for nodes in again.nodes] == [nodes.tolist() for nodes in plan.nodes]
    if (simulate_segments(state, segments).simulation.peak_bytes <= limits).all():
        assert len(plan.nodes) == len(segments)


@settings(deadline=None, derandomize=True, max_examples=150)
@given(placed_states(overhead=1e-5))
def test_segments_fit_or_are_refused_where_each_call_takes_time(decision):
    state, segments = decision
    limits = np.array([device.memory_bytes for device in state.target.devices])
    try:
        plan = cut_within_limits(state, segments)
    except InfeasibleError as refusal:
        message = str(refusal)
    else:
        assert (plan.simulation.peak_bytes <= limits).all()
        return
    alone = simulate_segments(state, list(state[Schedule].order[:, None])).simulation.peak_bytes
    short = [device.id for device, much in zip(state.target.devices, alone > limits) if much]
    assert short
    assert all(f"{name} lacks" in message for name in short)


def test_compile_keeps_carried_caches_within_the_limit(run_cli, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    kib256 = [256, 256]
    old, new = ([f"{name}{i}" for i in range(4)] for name in ("old", "new"))
    values = {name: helper.make_tensor_value_info(name, TensorProto.FLOAT, kib256) for name in (*old, *new)}
    nodes = [helper.make_node("Neg", [a], [b], name=b) for a, b in zip(old, new)]
    graph = helper.make_graph(nodes, "caches", [values[name] for name in old], [values[name] for name in new])
    save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), "model.onnx")
    pipeline = "optimize,profile{estimate=true},coplace,single,split,emit"
    segments = []
    for limit in ("2MiB", "1600KiB", "1280KiB"):
        options = ("--devices", "cpu:0", "--max-memory", limit, "--pipeline", pipeline, "-o", limit, "--json")
        ran = run_cli("compile", "model.onnx", *options)
        assert ran.code == 0
        (device,) = json.loads(ran.out)["devices"]
        assert device["peak_bytes"] <= device["limit_bytes"]
        segments.append(len(onnxplace.load(limit).manifest.segments))
        assert run_cli("verify", limit, "--against", "model.onnx").code == 0
    assert segments == [1, 2, 4]
