"""Blocks in a row: their sum bounds every step, and their steps make one of the whole."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.facts import Groups, Profile, Schedule
from onnxplace.passes.placement.exact.branch_and_bound import branch_and_bound_search, build_tables
from onnxplace.passes.placement.search import Budget, compose_blocks, decompose_series
from onnxplace.passes.placement.search.portfolio import plan_of_blocks
from onnxplace.passes.placement.search.search import on_one
from onnxplace.passes.placement.search.series_blocks import alone
from onnxplace.pipeline import make_pass, run_pass
from onnxplace.problem import placement_problem
from onnxplace.target import LINK_MODELS
from onnxplace.testing import random_state
from tests.passes.placement.exact.test_exact import brute_force, gap_said
from tests.passes.placement.test_placers import state_of
from tests.support.reference_simulator import even_target, graph_of

seeds = st.integers(0, 2**32 - 1)


@st.composite
def states(draw, most=6):
    facts = (Profile, Groups) if draw(st.booleans()) else (Profile,)
    devices = draw(st.integers(1, 3))
    nodes = draw(st.integers(1, most - (devices == 3)))
    state = random_state(draw(seeds), nodes, devices, facts=facts, pinned=True)
    return replace(state, target=replace(state.target, link_model=draw(st.sampled_from(LINK_MODELS))))


def whole(block):
    """Return the bound and the step of a search that leaves nothing out."""
    known = build_tables(block)
    found = [branch_and_bound_search(block, each, np.inf, 1e-9, 1000, np.inf)
             for each in (known, known._replace(receives=True, delays=True))]  # fmt: skip
    return max(one.bound_seconds for one in found), (found[0].device, found[0].order)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(states(), st.integers(2, 6))
def test_no_step_is_shorter_than_its_blocks_in_sum(state, most):
    asked = placement_problem(state)
    row = decompose_series(asked, most)
    bounds = [whole(part)[0] for part in row.problems]
    assert sum(bounds[index] for index in row.which) <= brute_force(asked) * (1 + 1e-9)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(states(most=40), st.integers(2, 20))
def test_blocks_cut_the_path_and_hold_what_is_between(state, most):
    asked = placement_problem(state)
    row, least = decompose_series(asked, most), asked.seconds.min(axis=0)
    reached = np.zeros(len(asked.graph), dtype=bool)
    for block in row.blocks:
        own = block.nodes[block.enters :]
        assert (np.diff(asked.graph.positions[block.nodes]) > 0).all()
        assert len(block.nodes) <= most or not block.forks
        assert not reached[own].any()
        reached[own] = True
        assert block.path_seconds <= least[own].sum() * (1 + 1e-12)
        assert block.forks or block.path_seconds == pytest.approx(least[own].sum())
    longest = np.zeros(len(asked.graph))
    for node in asked.graph.order.tolist():
        longest[node] = least[node] + longest[asked.graph.predecessors[node]].max(initial=0.0)
    assert sum(block.path_seconds for block in row.blocks) == pytest.approx(longest.max(initial=0.0))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(states(most=40), st.integers(2, 20), st.integers(0, 5))
def test_steps_of_blocks_make_a_step_that_keeps_groups_and_pins(state, most, seed):
    asked, random = placement_problem(state), np.random.default_rng(seed)

    def anywhere(part):
        home = np.where(part.pinned >= 0, part.pinned, random.integers(0, len(part.target.devices), len(part.pinned)))
        return home[part.group].astype(np.int32), part.graph.order

    row = decompose_series(asked, most)
    device, order = compose_blocks(asked, row, [anywhere(part) for part in row.problems], anywhere)
    assert asked.simulate(device, order).makespan_seconds > 0 or not asked.seconds.any()
    home = np.full(len(asked.pinned), -1)
    home[asked.group] = device
    assert (home[asked.group] == device).all()
    assert (home == asked.pinned)[asked.pinned >= 0].all()


def forks(count, groups=None):
    """Return `count` equal forks in a row: two branches of 4 seconds, and what joins them."""
    reads = {"j0": []}
    for index in range(count):
        reads |= {f"{branch}{index}": [f"j{index}"] for branch in "ab"}
        reads[f"j{index + 1}"] = [f"a{index}", f"b{index}"]
    state = state_of(graph_of(reads, sizes=dict.fromkeys(reads, 1)), [1, *[4, 4, 1] * count], even_target())
    if groups is None:
        return state
    group = np.array([groups.get(name, -1 - index) for index, name in enumerate(reads)])
    group = np.unique(group, return_inverse=True)[1].astype(np.int32)
    count = int(group.max()) + 1
    return state.having(Groups(group, np.full(count, -1, dtype=np.int32), ("",) * count))


def test_equal_blocks_are_one_problem():
    row = decompose_series(placement_problem(forks(30)), 10)
    assert len(row.blocks) == 31  # the first node, then the forks
    assert len(row.problems) == 2
    assert row.which == (0, *[1] * 30)
    assert row.forks == [1]


def test_what_has_nothing_beside_it_is_one_block():
    chain = graph_of({"a": [], "b": ["a"], "c": ["b"], "side": [], "d": ["c", "side"]})
    row = decompose_series(placement_problem(state_of(chain, [1, 1, 1, 1, 1], even_target())), 2)
    (block,) = row.blocks
    assert [chain.names[node] for node in block.nodes] == ["a", "b", "c", "d"]
    assert not block.forks
    assert not block.enters


def test_an_empty_graph_has_no_blocks():
    asked = placement_problem(state_of(graph_of({}), [], even_target()))
    assert decompose_series(asked, 10).blocks == ()
    assert plan_of_blocks(asked, Budget(0, 100), 0) == []


def test_what_spans_too_much_is_left_out():
    reads = {"a": [], "b": ["a"], "c": ["b"], "d": ["c"], "wide": ["a"], "near": ["b"], "e": ["d", "wide", "near"]}
    asked = placement_problem(state_of(graph_of(reads), [1] * 7, even_target()))
    names = [[asked.graph.names[node] for node in block.nodes] for block in decompose_series(asked, 5).blocks]
    assert names == [["a", "b"], ["b", "c", "d", "near", "e"]]


def test_groups_within_a_block_are_kept():
    asked = placement_problem(forks(2, groups={"a0": 1, "b0": 1, "a1": 1}))
    first, second = (alone(asked, block) for block in decompose_series(asked, 5).blocks[1:])
    assert np.bincount(first.group).tolist() == [1, 2, 1]
    assert len(second.pinned) == 4
    assert whole(first)[0] == 9
    assert whole(second)[0] == 6


def test_a_graph_of_many_forks_is_proven_by_its_blocks():
    # One branch stays for 4 and sends for 1, to where the other one is and the next fork begins.
    done = run_pass(make_pass("exact", {"gap": "0", "seconds": "20"}), forks(30))
    assert done[Schedule].simulation.makespan_seconds == done[Schedule].lower_bound_seconds == 1 + 30 * 6
    assert gap_said(done).startswith("optimal:")


def test_groups_across_blocks_hold_where_the_bound_leaves_them_out():
    state = forks(30, groups={name: 1 for index in range(30) for name in (f"a{index}", f"b{(index + 1) % 30}")})
    done = run_pass(make_pass("exact", {"gap": "0", "seconds": "2"}), state)
    assert done[Schedule].lower_bound_seconds <= done[Schedule].simulation.makespan_seconds <= 1 + 30 * 9


def test_a_conflict_between_blocks_is_solved_again():
    asked = placement_problem(forks(2, groups={"a0": 1, "b1": 1}))
    row = decompose_series(asked, 5)
    told = []

    def again(part):
        told.append(part.pinned.tolist())
        return on_one(part, 0), part.graph.order

    chain, fork = np.zeros(1, dtype=np.int32), np.array([0, 1, 0, 0], dtype=np.int32)
    nodes = np.arange(4, dtype=np.int32)
    steps = [(chain, nodes[:1]) if index not in row.forks else (fork, nodes) for index in range(len(row.problems))]
    device, _ = compose_blocks(asked, row, steps, again)
    assert told == [[0, -1, 1, -1]]
    assert device.tolist() == [0, 1, 0, 0, 0, 1, 0]


def test_weights_and_values_from_elsewhere_are_left_out():
    graph = graph_of({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}, weights={"b": ["w"]}, sizes={"w": 10})
    asked = placement_problem(state_of(graph, [1, 2, 2, 1], even_target()))
    part = alone(asked, decompose_series(asked, 4).blocks[-1])
    assert part.graph.names == graph.names
    assert len(part.graph.weights.items) == 0
    assert part.seconds[:, 0].tolist() == [0, 0]


def test_auto_begins_with_what_searching_blocks_comes_to():
    asked = placement_problem(forks(30))
    (plan,) = plan_of_blocks(asked, Budget(0, 100), 0)
    assert asked.simulate(plan.device, plan.order).makespan_seconds == 1 + 30 * 6
    (said,) = run_pass(make_pass("auto", {"seconds": "0", "proposals": "10"}), forks(30)).diagnostics
    assert "blocks" in said.message


def test_auto_does_not_look_for_blocks_where_one_is_most_of_the_graph():
    assert plan_of_blocks(placement_problem(forks(1)), Budget(0, 100), 0) == []
    wide = graph_of({"a": [], **{name: ["a"] for name in "bcdefgh"}})
    assert plan_of_blocks(placement_problem(state_of(wide, [1] * 8, even_target())), Budget(0, 100), 0) == []
