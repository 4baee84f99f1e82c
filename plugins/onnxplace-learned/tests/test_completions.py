"""What choices cost if good placements complete them, and which choices that makes the policy prefer."""

from itertools import permutations

import numpy as np
import pytest
from hypothesis import assume, given, settings, strategies as st

from learned_support.environments import environments
from onnxplace.passes.placement.search.placement_search import decode_candidate
from onnxplace.problem import placement_problem
from onnxplace.testing.pass_contract import random_state
from onnxplace_learned.policies.environment import Environment
from onnxplace_learned.policies.placeto_kernels import EXCESS_PENALTY, MAX_COST
from onnxplace_learned.policies.placeto_learning import (
    MAX_TRIED,
    Settings,
    complete_steps,
    find_completions,
    permute_placement,
    weigh_devices,
)
from onnxplace_learned.policies.placeto_network import Shape

SHAPE = Shape(devices=4, width=4, rounds=2)


def cost_of(environment, device):
    """Return the cost of a placement, from the simulator of single placements."""
    problem = environment.problem
    candidate = decode_candidate(environment.space, "", device, np.zeros(len(device)), 1.0)
    excess = problem.excess_bytes(problem.simulate(device, candidate.order))
    penalty = EXCESS_PENALTY * float((excess / np.maximum(problem.limit_bytes, 1)).sum())
    return min(candidate.seconds / environment.rules.scale_seconds + penalty, MAX_COST)


def plain_costs(environment, episode, step, completions):
    """Return the cost of each device at a step, one placement after the other."""
    problem, visits = environment.problem, environment.visits
    present, is_visited = episode.trajectory.device[step], np.isin(problem.group, visits.group[:step])
    weight = problem.seconds.mean(axis=0)
    agreement = [weight[is_visited & (completion == present)].sum() for completion in completions]
    tried = np.argsort(-np.round(agreement, 15), kind="stable")[:MAX_TRIED]
    costs = []
    for device in range(len(problem.target.devices)):
        whole = [np.where(is_visited, present, other) for other in (*completions[tried], present)]
        moved = [np.where(problem.group == visits.group[step], device, item).astype(np.int32) for item in whole]
        is_allowed = visits.allowed[visits.group[step], device]
        costs.append(min(cost_of(environment, item) for item in moved) if is_allowed else np.inf)
    return costs


@settings(deadline=None, derandomize=True, max_examples=25)
@given(environments(min_nodes=2), st.integers(0, 1000))
def test_a_choice_costs_what_the_best_completion_makes_of_it(environment, seed):
    rng = np.random.default_rng(seed)
    problem, steps = environment.problem, len(environment.visits.group)
    assume(steps > 0)
    episode = environment.run(SHAPE.network(SHAPE.draw_parameters(seed)), rng.random(steps))
    # Few completions, so that sums of equal weights cannot decide differently which ones are tried.
    groups = rng.integers(0, len(problem.target.devices), (MAX_TRIED, len(problem.pinned)))
    completions = groups[:, problem.group].astype(np.int32)
    drawn = np.unique(rng.integers(0, steps, 3)).astype(np.int64)
    costs = complete_steps(environment, episode, drawn, completions)
    for step, row in zip(drawn, costs):
        np.testing.assert_allclose(row, plain_costs(environment, episode, step, completions), rtol=1e-12)


@settings(deadline=None, derandomize=True, max_examples=30)
@given(seed=st.integers(0, 1000), devices=st.integers(1, 4), pinned=st.booleans())
def test_permutations_exchange_alike_devices_only_and_leave_pins(seed, devices, pinned):
    problem = placement_problem(random_state(seed, 12, devices, pinned=pinned))
    device = np.random.default_rng(seed).integers(0, devices, len(problem.pinned))[problem.group].astype(np.int32)
    fixed = problem.pinned[problem.group]
    device = np.where(fixed >= 0, fixed, device).astype(np.int32)
    placements = permute_placement(problem, device)
    assert placements[0].tolist() == device.tolist()
    assert len({row.tobytes() for row in placements}) == len(placements)
    free = fixed < 0
    for row in placements:
        assert (row[~free] == fixed[~free]).all()
        for node in np.flatnonzero(free):
            assert problem.seconds[row[node], node] == pytest.approx(problem.seconds[device[node], node])
            assert (row[free] == row[node]).tolist() == (device[free] == device[node]).tolist()


def test_all_orders_of_alike_devices_are_permutations():
    problem = placement_problem(random_state(0, 12, 3))
    is_alike = np.ptp(problem.seconds, axis=0).max() == 0 and len(set(problem.limit_bytes)) == 1
    device = np.array([0, 1, 2] * 4, dtype=np.int32)[problem.group]
    count = len(permute_placement(problem, device))
    assert count == (6 if is_alike else count) >= 1
    assert count <= len(list(permutations(range(3))))


@pytest.mark.slow
def test_the_first_choice_is_free_if_devices_are_alike_and_the_second_is_not():
    from onnxplace_learned.graphs.architectures import ARCHITECTURES

    environment = Environment(placement_problem(ARCHITECTURES["two_towers"](40, 0).state()), start_from="first-device")
    completions = find_completions(environment, Settings(proposals=500, searches=1))
    assert len(completions) == 2
    episode = environment.run(SHAPE.network(SHAPE.draw_parameters(0)))
    costs = complete_steps(environment, episode, np.arange(len(environment.visits.group)), completions)
    assert costs[0, 0] == pytest.approx(costs[0, 1])
    assert costs.min() == pytest.approx(cost_of(environment, completions[0]))
    assert np.ptp(costs, axis=1).max() > 0.05


def test_targets_prefer_cheap_choices_and_choices_that_matter_count_more():
    costs = np.array([[1.0, 1.0], [1.0, 1.002], [1.5, 1.0], [1.0, np.inf]])
    weights = weigh_devices(costs, Settings())
    assert weights[0].tolist() == [0, 0]
    assert weights[1, 0] / weights[1, 1] == pytest.approx(np.e)
    assert weights[2, 1] > weights[1].sum() > 0
    assert weights[2, 0] == pytest.approx(0)
    assert weights[3].tolist() == [0, 0]
    assert weights.sum() == pytest.approx(len(costs))
    assert weigh_devices(np.ones((2, 3)), Settings()).tolist() == [[0] * 3] * 2
