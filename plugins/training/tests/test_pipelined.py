"""The placer of micro-batched training steps: stages, co-placement, order of parts, memory."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.errors import InfeasibleError
from onnxplace.facts import MicroBatches, Placement, Profile, Schedule
from onnxplace.model.model import Model
from onnxplace.model_metadata import PHASE_KEY
from onnxplace.pipeline.pipeline import make_pass
from onnxplace.state import State
from onnxplace.testing.pass_contract import check_pass, random_state
from onnxplace_training.part_order import Cells, order_parts
from onnxplace_training.step_stages import find_backward_nodes
from tests.support.reference_simulator import graph_of
from tests.support.step_checks import compile_state
from tests.support.training_models import make_mlp, make_transformer

WIDE = {"layers": 2, "width": 64, "tokens": 32, "batch": 16}


@cache
def place(
    optimizer: str = "adamw", count: int = 4, options: str = "schedule=1f1b", devices: str = "cpu:0,cpu:1"
) -> State:
    proto = make_transformer(optimizer, **WIDE)  # type: ignore[arg-type]
    pipeline = (
        f"optimize,profile{{estimate=true}},microbatch{{count={count}}},coplace{{join=never}},pipelined{{{options}}}"
    )
    return compile_state(proto, f"{pipeline},split", devices)


def phases(state: State) -> list[str]:
    return [{e.key: e.value for e in node.metadata_props}[PHASE_KEY] for node in state[Model].nodes]


def test_a_parameter_its_moments_and_its_gradient_are_on_one_device() -> None:
    state = place()
    graph, device = state[Profile].graph, state[Placement].device
    producer = {graph.value_names[value]: graph.producer[value] for value in range(len(graph.value_names))}
    for node, name in enumerate(graph.names):
        if ".exp_avg.new" in name:
            parameter = graph.value_names[graph.outputs[node][0]].removesuffix(".exp_avg.new")
            assert device[producer[f"{parameter}.new"]] == device[node]


def test_the_parts_of_a_node_are_on_one_device() -> None:
    state = place()
    source, device = state[MicroBatches].source, state[Placement].device
    for index in range(int(source.max()) + 1):
        assert len(set(device[source == index].tolist())) <= 1


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_two_devices_share_the_time_and_overlap(schedule: str) -> None:
    state = place(count=8, options=f"schedule={schedule}")
    (seconds,) = state[Profile].seconds.values()
    loads = np.bincount(state[Placement].device, seconds)
    assert loads.max() < 0.65 * loads.sum()
    assert state[Schedule].simulation.makespan_seconds < 0.75 * loads.sum()


def test_gpipe_runs_all_forward_parts_before_the_backward_ones_and_1f1b_does_not() -> None:
    def last_forward_before_first_backward(schedule: str) -> bool:
        state = place(count=8, options=f"schedule={schedule}")
        rank = np.empty(len(state[Schedule].order))
        rank[state[Schedule].order] = np.arange(len(rank))
        own = state[Placement].device == 1
        part = state[MicroBatches].part >= 0
        phase = np.array(phases(state))
        return bool(rank[own & part & (phase == "forward")].max() < rank[own & part & (phase == "backward")].min())

    assert last_forward_before_first_backward("gpipe")
    assert not last_forward_before_first_backward("1f1b")


def test_1f1b_keeps_fewer_activations_than_gpipe() -> None:
    peaks = {
        name: place(count=8, options=f"schedule={name}")[Schedule].simulation.peak_bytes for name in ("1f1b", "gpipe")
    }
    assert peaks["1f1b"].max() < peaks["gpipe"].max()


def test_more_stages_than_devices_are_interleaved() -> None:
    state = place(count=8, options="stages=4")
    (note,) = (item for item in state.diagnostics if item.code == "P021")
    assert "4 stages, 8 micro-batches, 1f1b" in note.message
    assert set(state[Placement].device.tolist()) == {0, 1}


def test_three_devices_are_faster_than_two() -> None:
    two, three = place(count=8), place(count=8, devices="cpu:0,cpu:1,cpu:2")
    assert three[Schedule].simulation.makespan_seconds < two[Schedule].simulation.makespan_seconds


def test_the_result_does_not_change_between_runs() -> None:
    one, other = place(), place.__wrapped__()
    assert one[Placement].device.tolist() == other[Placement].device.tolist()
    assert one[Schedule].order.tolist() == other[Schedule].order.tolist()


def test_a_step_without_micro_batches_and_without_metadata_is_placed_in_stages_too() -> None:
    proto = make_mlp("adamw", widths=(64, 64, 64, 64), has_metadata=False)
    state = compile_state(proto, "optimize,profile{estimate=true},coplace{join=never},pipelined,split")
    assert set(state[Placement].device.tolist()) == {0, 1}


def test_a_cost_graph_says_which_nodes_are_backward_and_those_of_an_unmarked_one_are_forward() -> None:
    state = random_state(3)
    profile = state[Profile]
    marked = np.arange(len(profile.graph)) % 2 == 1
    for backward, expected in ((marked, marked), (None, np.zeros_like(marked))):
        found = find_backward_nodes(state.with_facts(replace(profile, backward=backward)))
        assert found.tolist() == expected.tolist()


def test_updates_count_as_backward_nodes() -> None:
    state = place()
    expected = np.array(phases(state)) != "forward"
    is_copied = state[MicroBatches].source >= 0
    assert find_backward_nodes(state)[is_copied].tolist() == expected[is_copied].tolist()


def test_pins_are_kept(tmp_path: Path) -> None:
    proto = make_mlp("sgd")
    pins = tmp_path / "pins.json"
    pins.write_text('{"layers.0/.*": "cpu:1"}')
    state = compile_state(
        proto,
        f"optimize,profile{{estimate=true}},microbatch{{count=2}},coplace{{join=never,device_map={pins}}},pipelined,split",
    )
    names = state[Profile].graph.names
    assert all(state[Placement].device[i] == 1 for i, name in enumerate(names) if name.startswith("layers.0/"))


def test_a_step_that_does_not_fit_is_refused_with_the_missing_bytes() -> None:
    proto = make_transformer("adamw", **WIDE)
    with pytest.raises(InfeasibleError, match=r"P002.*lacks \d+ bytes"):
        compile_limited(proto)


def compile_limited(proto):
    from onnxplace.model.loading import load
    from onnxplace.model.lowering import bind
    from onnxplace.model.state_binding import bind_states
    from onnxplace.pipeline.pipeline import Pipeline
    from onnxplace.target.target import Device, Target

    target = Target((Device("cpu:0", 1 << 20), Device("cpu:1", 1 << 20)))
    model = bind_states(bind(load(proto), {}, {}), ("*.new=*",))
    text = "optimize,profile{estimate=true},microbatch{count=4},coplace{join=never},pipelined"
    return Pipeline.parse(text).run(State(target).with_facts(model))


def test_it_keeps_the_contract_of_passes() -> None:
    check_pass(lambda: make_pass("pipelined"))


def test_it_may_follow_a_pass_that_fuses_nodes() -> None:
    proto = make_transformer("adamw", **WIDE)  # type: ignore[arg-type]
    pipeline = "optimize,profile{estimate=true},coplace{join=never},fuse,pipelined,split"
    assert len(set(compile_state(proto, pipeline)[Placement].device.tolist())) == 2


@given(st.integers(0, 2**32), st.integers(1, 30), st.sampled_from(["1f1b", "gpipe"]))
@settings(max_examples=300, deadline=None)
def test_no_node_starts_before_its_inputs_are_there(seed: int, nodes: int, schedule: str) -> None:
    random = np.random.default_rng(seed)
    reads = {f"n{node}": [f"n{item}" for item in range(node) if random.random() < 0.15] for node in range(nodes)}
    graph, stages, parts = graph_of(reads), int(random.integers(1, 4)), int(random.integers(1, 5))
    device = random.integers(0, 2, nodes).astype(np.int32)
    cells = Cells(
        stage=random.integers(0, stages, nodes).astype(np.int32),
        part=random.integers(-1, parts, nodes).astype(np.int32),
        is_backward=random.random(nodes) < 0.5,
        device=device,
        stages=stages,
        parts=parts,
    )
    seconds = random.integers(0, 4, (2, nodes)).astype(np.float64)
    latency = np.array([[0.0, 0.5], [0.5, 0.0]])
    start = order_parts(graph, cells, seconds, latency, np.zeros((2, 2)), schedule)  # type: ignore[arg-type]
    for node in range(nodes):
        for before in graph.predecessors[node].tolist():
            arrival = start[before] + seconds[device[before], before] + latency[device[before], device[node]]
            assert start[node] >= arrival


def test_stages_are_on_devices_that_share_no_processor() -> None:
    state = place(devices="cpu:0,cpu:1,cpu:0-1")
    assert set(state[Placement].device.tolist()) == {0, 1}
