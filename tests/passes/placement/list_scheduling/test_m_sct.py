"""m-SCT's linear program, and what favourite children change."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.passes.m_sct import MSct
from onnxplace.passes.placement.list_scheduling.sct_favourites import Edges, favourite_children, solve_relaxation
from onnxplace.testing.pass_contract import check_pass


def edges(*pairs):
    source, destination, seconds = zip(*pairs)
    return Edges(np.array(source, np.int32), np.array(destination, np.int32), np.array(seconds, dtype=float))


def test_the_pass_keeps_the_contract_of_passes_on_random_states():
    check_pass(MSct)


def test_in_a_chain_each_node_is_the_favourite_child_of_its_only_parent():
    chain = edges((0, 1, 3.0), (1, 2, 3.0))
    assert favourite_children(np.ones(3), chain, 0.1).tolist() == [1, 2, -1]


def test_of_two_children_the_one_with_the_longer_way_to_go_is_the_favourite():
    tree = edges((0, 1, 1.0), (0, 2, 1.0), (1, 3, 1.0))
    assert favourite_children(np.array([1.0, 1, 1, 50]), tree, 0.1)[0] == 1


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 12), st.sampled_from([0.0, 0.1, 0.5, 1.0]))
def test_no_node_has_two_favourites_or_is_the_favourite_of_two(seed, count, threshold):
    random = np.random.default_rng(seed)
    pairs = [(i, j) for j in range(count) for i in range(j) if random.random() < 0.4] or [(0, 1)]
    problem = edges(*[(i, j, random.random()) for i, j in pairs])
    favourite = favourite_children(random.random(count), problem, threshold)
    chosen = favourite[favourite >= 0].tolist()
    assert len(chosen) == len(set(chosen))
    assert all((i, j) in set(pairs) for i, j in enumerate(favourite.tolist()) if j >= 0)


def test_the_program_reaches_the_optimum_that_can_be_worked_out_by_hand():
    # One source, two children of 10 s: one of them has to wait for a transfer of 4 s, or each for a part of it.
    share = solve_relaxation(np.array([1.0, 10, 10]), edges((0, 1, 4.0), (0, 2, 4.0)))
    assert share.sum() == pytest.approx(1.0)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 12))
def test_of_all_optima_a_maximal_one_is_chosen(seed, count):
    random = np.random.default_rng(seed)
    pairs = [(i, j) for j in range(count) for i in range(j) if random.random() < 0.4] or [(0, 1)]
    built = edges(*[(i, j, random.random()) for i, j in pairs])
    seconds = random.random(count)
    share = solve_relaxation(seconds, built)
    favourite = favourite_children(seconds, built, 0.1).tolist()
    fine = [all(share[k] > 1 - 1e-6 for k, pair in enumerate(pairs) if pair[0] == i) for i in range(count)]
    expected = [all(share[k] > 1 - 1e-6 for k, pair in enumerate(pairs) if pair[1] == j) for j in range(count)]
    assert not any(fine[i] and expected[j] and favourite[i] < 0 and j not in favourite for i, j in pairs)
