"""Segments are merged where no device waits longer for that, and never such that devices wait for each other."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.passes.segments import merge_kernels
from onnxplace.passes.segments.cut_segments import cut_into_segments, merge_segments
from onnxplace.passes.segments.memory_limits import simulate_segments
from onnxplace.state import State
from onnxplace.testing.pass_contract import random_state
from onnxplace.utils.jit import _copy_with_plain_callees
from tests.passes.placement.test_placers import state_of
from tests.passes.segments.test_memory_limits import commit_by_hand
from tests.support.reference_simulator import even_target, graph_of, share_at_random


def with_call_seconds(state: State, seconds: float) -> State:
    """Return a state whose devices take some seconds for each call of a segment."""
    devices = tuple(replace(device, segment_seconds=seconds) for device in state.target.devices)
    return State(replace(state.target, devices=devices), state.facts)


def cut(state: State) -> list[np.ndarray]:
    """Return the segments of a placed state before they are merged."""
    return cut_into_segments(state)


def names(state: State, segments) -> list[list[str]]:
    return [[state[Profile].graph.names[node] for node in nodes.tolist()] for nodes in segments]


def late_reader(early_seconds: float) -> State:
    """Return nodes a, b, c on one device, and d and e on the other, where e reads a, and d takes so long before it."""
    graph = graph_of({"a": [], "b": ["a"], "c": ["b"], "d": [], "e": ["d", "a"]}, sizes={"a": 1})
    state = state_of(graph, [1, 1, 1, early_seconds, 1], even_target(2))
    return with_call_seconds(commit_by_hand(state, [0, 0, 0, 1, 1], [0, 1, 2, 0, early_seconds]), 0.125)


def test_a_value_that_is_read_much_later_does_not_end_a_segment():
    state = late_reader(early_seconds=8)
    assert names(state, cut(state)) == [["a"], ["d"], ["b", "c"], ["e"]]
    # Joined with d, e would let d wait for a.
    assert sorted(names(state, merge_segments(state, cut(state)))) == [["a", "b", "c"], ["d"], ["e"]]


def test_a_value_that_another_device_waits_for_ends_a_segment():
    state = late_reader(early_seconds=0.5)
    assert ["a"] in names(state, merge_segments(state, cut(state)))


@pytest.mark.parametrize("count", [2, 3, 6])
def test_segments_that_take_turns_stay_apart(count):
    reads = {"n0": [], **{f"n{index}": [f"n{index - 1}"] for index in range(1, count)}}
    state = state_of(graph_of(reads), [1] * count, even_target(2))
    state = commit_by_hand(state, [index % 2 for index in range(count)], list(range(count)))
    assert names(state, merge_segments(state, cut(state))) == [[f"n{index}"] for index in range(count)]


def test_one_device_has_one_segment():
    state = commit_by_hand(state_of(graph_of({"a": [], "b": ["a"]}), [1, 1], even_target(1)), [0, 0], [0, 1])
    assert names(state, merge_segments(state, cut(state))) == [["a", "b"]]


@settings(deadline=None, derandomize=True, max_examples=200)
@given(
    st.integers(0, 1 << 30), st.integers(1, 60), st.integers(2, 4), st.sampled_from([0.0, 1e-6, 1e-3]), st.booleans()
)
def test_merged_segments_can_run_in_their_order_and_take_no_longer(seed, nodes, devices, call_seconds, shared):
    state = with_call_seconds(random_state(seed, nodes, devices, facts=(Profile, Placement, Schedule)), call_seconds)
    if shared:
        state = replace(state, target=share_at_random(state.target, np.random.default_rng(seed)))
    graph, before = state[Profile].graph, cut(state)
    after = merge_segments(state, before)
    assert len(after) <= len(before)
    assert sorted(np.concatenate(after).tolist()) == list(range(nodes))
    plan = simulate_segments(state, after)
    assert plan.simulation.makespan_seconds <= simulate_segments(state, before).simulation.makespan_seconds
    # Each device keeps its sequence, and each segment comes after all that it reads: so none waits forever.
    device = state[Placement].device
    for home in range(devices):
        sequences = [np.concatenate(part)[device[np.concatenate(part)] == home].tolist() for part in (before, after)]
        assert sequences[0] == sequences[1]
    number = {node: index for index, members in enumerate(after) for node in members.tolist()}
    for node in range(nodes):
        assert all(number[other] <= number[node] for other in graph.predecessors[node].tolist())


def test_merges_are_judged_by_the_step_that_the_simulator_says(monkeypatch):
    judged, plainly = [], _copy_with_plain_callees(merge_kernels._run.py_func)

    def run_unmerged(work, attempts, records, gaps):
        arrival, sequence = np.zeros(len(work.destination)), np.zeros(len(work.queue), dtype=np.int64)
        apart = np.zeros(len(work.queue), dtype=bool)
        views = records.view(np.recarray), gaps.view(np.recarray)  # as compiled loops read them
        judged.append(plainly(work, apart, *views, arrival, sequence))
        return apart, sequence

    monkeypatch.setattr(merge_kernels, "merge_neighbours", run_unmerged)
    for seed in range(60):
        state = random_state(seed, 40, 3, facts=(Profile, Placement, Schedule))
        if seed % 3:
            state = replace(state, target=share_at_random(state.target, np.random.default_rng(seed)))
        before = cut(state)
        merge_segments(state, before)
        assert judged.pop() == pytest.approx(simulate_segments(state, before).simulation.makespan_seconds)
