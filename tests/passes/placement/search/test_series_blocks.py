"""Blocks in a row: their sum bounds every step, and their steps make one of the whole."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.facts import Groups, Profile, Schedule
from onnxplace.passes.placement.exact.branch_and_bound import branch_and_bound_search, build_tables
from onnxplace.passes.placement.search.placement_search import Budget, place_on_one_device
from onnxplace.passes.placement.search.portfolio import plan_blocks
from onnxplace.passes.placement.search.series_blocks import compose_blocks, decompose_series, isolate_block
from onnxplace.pipeline.pipeline import make_pass, run_pass
from onnxplace.problem import placement_problem
from onnxplace.target.target import LINK_MODELS
from onnxplace.testing.pass_contract import random_state
from tests.passes.placement.exact.test_exact import brute_force, gap_said
from tests.passes.placement.test_placers import state_of
from tests.support.reference_simulator import even_target, graph_of

seeds = st.integers(0, 2**32 - 1)


@st.composite
def states(draw, max_nodes=6):
    facts = (Profile, Groups) if draw(st.booleans()) else (Profile,)
    devices = draw(st.integers(1, 3))
    nodes = draw(st.integers(1, max_nodes - (devices == 3)))
    state = random_state(draw(seeds), nodes, devices, facts=facts, pinned=True)
    return replace(state, target=replace(state.target, link_model=draw(st.sampled_from(LINK_MODELS))))


def search_block(block):
    """Return the bound and the step of a search that leaves nothing out."""
    tables = build_tables(block)
    results = [branch_and_bound_search(block, variant, np.inf, 1e-9, 1000, np.inf)
             for variant in (tables, tables._replace(receives=True, delays=True))]  # fmt: skip
    return max(result.bound_seconds for result in results), (results[0].device, results[0].order)


@settings(deadline=None, derandomize=True, max_examples=40)
@given(states(), st.integers(2, 6))
def test_the_sum_of_blocks_bounds_every_step(state, max_nodes):
    problem = placement_problem(state)
    blocks_in_series = decompose_series(problem, max_nodes)
    bounds = [search_block(block)[0] for block in blocks_in_series.problems]
    assert sum(bounds[index] for index in blocks_in_series.problem_indices) <= brute_force(problem) * (1 + 1e-9)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(states(max_nodes=40), st.integers(2, 20))
def test_blocks_cut_the_path_and_hold_what_is_between(state, max_nodes):
    problem = placement_problem(state)
    blocks_in_series, least = decompose_series(problem, max_nodes), problem.seconds.min(axis=0)
    reached = np.zeros(len(problem.graph), dtype=bool)
    for block in blocks_in_series.blocks:
        own = block.nodes[block.enters :]
        assert (np.diff(problem.graph.positions[block.nodes]) > 0).all()
        assert len(block.nodes) <= max_nodes or not block.forks
        assert not reached[own].any()
        reached[own] = True
        assert block.path_seconds <= least[own].sum() * (1 + 1e-12)
        assert block.forks or block.path_seconds == pytest.approx(least[own].sum())
    longest = np.zeros(len(problem.graph))
    for node in problem.graph.order.tolist():
        longest[node] = least[node] + longest[problem.graph.predecessors[node]].max(initial=0.0)
    assert sum(block.path_seconds for block in blocks_in_series.blocks) == pytest.approx(longest.max(initial=0.0))


@settings(deadline=None, derandomize=True, max_examples=60)
@given(states(max_nodes=40), st.integers(2, 20), st.integers(0, 5))
def test_steps_of_blocks_make_a_step_that_keeps_groups_and_pins(state, max_nodes, seed):
    problem, random = placement_problem(state), np.random.default_rng(seed)

    def place_anywhere(block):
        home = np.where(
            block.pinned >= 0, block.pinned, random.integers(0, len(block.target.devices), len(block.pinned))
        )
        return home[block.group].astype(np.int32), block.graph.order

    blocks_in_series = decompose_series(problem, max_nodes)
    device, order = compose_blocks(
        problem, blocks_in_series, [place_anywhere(block) for block in blocks_in_series.problems], place_anywhere
    )
    assert problem.simulate(device, order).makespan_seconds > 0 or not problem.seconds.any()
    home = np.full(len(problem.pinned), -1)
    home[problem.group] = device
    assert (home[problem.group] == device).all()
    assert (home == problem.pinned)[problem.pinned >= 0].all()


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
    return state.with_facts(Groups(group, np.full(count, -1, dtype=np.int32), ("",) * count))


def test_equal_blocks_are_one_problem():
    blocks_in_series = decompose_series(placement_problem(forks(30)), 10)
    assert len(blocks_in_series.blocks) == 31  # the first node, then the forks
    assert len(blocks_in_series.problems) == 2
    assert blocks_in_series.problem_indices == (0, *[1] * 30)
    assert blocks_in_series.fork_indices == [1]


def test_a_path_without_parallel_nodes_is_one_block():
    chain = graph_of({"a": [], "b": ["a"], "c": ["b"], "side": [], "d": ["c", "side"]})
    blocks_in_series = decompose_series(placement_problem(state_of(chain, [1, 1, 1, 1, 1], even_target())), 2)
    (block,) = blocks_in_series.blocks
    assert [chain.names[node] for node in block.nodes] == ["a", "b", "c", "d"]
    assert not block.forks
    assert not block.enters


def test_an_empty_graph_has_no_blocks():
    problem = placement_problem(state_of(graph_of({}), [], even_target()))
    assert decompose_series(problem, 10).blocks == ()
    assert plan_blocks(problem, Budget(0, 100), 0) == []


def test_nodes_with_too_long_a_span_are_in_no_block():
    reads = {"a": [], "b": ["a"], "c": ["b"], "d": ["c"], "wide": ["a"], "near": ["b"], "e": ["d", "wide", "near"]}
    problem = placement_problem(state_of(graph_of(reads), [1] * 7, even_target()))
    names = [[problem.graph.names[node] for node in block.nodes] for block in decompose_series(problem, 5).blocks]
    assert names == [["a", "b"], ["b", "c", "d", "near", "e"]]


def test_groups_within_a_block_are_kept():
    problem = placement_problem(forks(2, groups={"a0": 1, "b0": 1, "a1": 1}))
    first, second = (isolate_block(problem, block) for block in decompose_series(problem, 5).blocks[1:])
    assert np.bincount(first.group).tolist() == [1, 2, 1]
    assert len(second.pinned) == 4
    assert search_block(first)[0] == 9
    assert search_block(second)[0] == 6


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
    problem = placement_problem(forks(2, groups={"a0": 1, "b1": 1}))
    blocks_in_series = decompose_series(problem, 5)
    pinned_groups = []

    def solve_again(block):
        pinned_groups.append(block.pinned.tolist())
        return place_on_one_device(block, 0), block.graph.order

    first_plan, fork_plan = np.zeros(1, dtype=np.int32), np.array([0, 1, 0, 0], dtype=np.int32)
    nodes = np.arange(4, dtype=np.int32)
    plans = [
        (first_plan, nodes[:1]) if index not in blocks_in_series.fork_indices else (fork_plan, nodes)
        for index in range(len(blocks_in_series.problems))
    ]
    device, _ = compose_blocks(problem, blocks_in_series, plans, solve_again)
    assert pinned_groups == [[0, -1, 1, -1]]
    assert device.tolist() == [0, 1, 0, 0, 0, 1, 0]


def test_weights_and_outside_values_are_left_out():
    graph = graph_of({"a": [], "b": ["a"], "c": ["a"], "d": ["b", "c"]}, weights={"b": ["w"]}, sizes={"w": 10})
    problem = placement_problem(state_of(graph, [1, 2, 2, 1], even_target()))
    block = isolate_block(problem, decompose_series(problem, 4).blocks[-1])
    assert block.graph.names == graph.names
    assert len(block.graph.weights.items) == 0
    assert block.seconds[:, 0].tolist() == [0, 0]


def test_auto_starts_from_the_plan_of_searched_blocks():
    problem = placement_problem(forks(30))
    (plan,) = plan_blocks(problem, Budget(0, 100), 0)
    assert problem.simulate(plan.device, plan.order).makespan_seconds == 1 + 30 * 6
    (note,) = run_pass(make_pass("auto", {"seconds": "0", "proposals": "10"}), forks(30)).diagnostics
    assert "blocks" in note.message


def test_auto_searches_no_blocks_where_one_is_most_of_the_graph():
    assert plan_blocks(placement_problem(forks(1)), Budget(0, 100), 0) == []
    wide = graph_of({"a": [], **{name: ["a"] for name in "bcdefgh"}})
    assert plan_blocks(placement_problem(state_of(wide, [1] * 8, even_target())), Budget(0, 100), 0) == []
