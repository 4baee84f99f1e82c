"""Episodes of a policy: what it sees, what it chooses, and what its choices cost."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from learned_support.environments import environments
from learned_support.plain_policy import reach, score
from onnxplace.passes.placement.search.placement_search import decode_candidate
from onnxplace.problem import placement_problem
from onnxplace.testing.pass_contract import random_state
from onnxplace_learned.policies.environment import Environment
from onnxplace_learned.policies.placeto_kernels import EXCESS_PENALTY, MAX_COST
from onnxplace_learned.policies.placeto_network import Shape, split_parameters

thorough = settings(deadline=None, derandomize=True, max_examples=60)
SHAPE = Shape(devices=4, width=4, rounds=3)


def run(environment, seed, *, shape=SHAPE, greedy=False):
    """Run an episode of a random policy."""
    rng = np.random.default_rng(seed)
    network = shape.network(3 * shape.draw_parameters(seed), seed % 3)
    draws = None if greedy else rng.random(len(environment.visits.group))
    return network, environment.run(network, draws)


def list_schedule(environment, device):
    """Return a placement whose devices run the ready node with the longest path to the end first."""
    return decode_candidate(environment.space, "", device, np.zeros(len(device)), 1.0)


# ---------------------------------------------------------------------------------------------- what an episode does


@thorough
@given(environments(), st.integers(0, 1000), st.booleans())
def test_each_free_group_moves_once_as_a_whole_and_pinned_ones_never(environment, seed, greedy):
    problem = environment.problem
    _, episode = run(environment, seed, greedy=greedy)
    placements = [*episode.trajectory.device.astype(int), episode.final]
    for step, (before, after) in enumerate(pairwise(placements)):
        moved = set(problem.group[before != after].tolist())
        assert moved <= {int(environment.visits.group[step])}
    free = np.flatnonzero(problem.pinned < 0)
    assert sorted(environment.visits.group.tolist()) == sorted(set(problem.group.tolist()) & set(free.tolist()))
    for group, device in zip(environment.visits.group, episode.trajectory.action):
        assert (episode.final[problem.group == group] == device).all()
    pinned = problem.pinned[problem.group]
    assert (episode.final[pinned >= 0] == pinned[pinned >= 0]).all()


@thorough
@given(environments(), st.integers(0, 1000))
def test_the_cost_of_each_placement_is_its_simulated_step_with_a_penalty_for_memory(environment, seed):
    problem = environment.problem
    _, episode = run(environment, seed)
    placements = [*episode.trajectory.device.astype(np.int32), episode.final]
    for device, cost, fits in zip(placements, episode.trajectory.cost, episode.trajectory.fits):
        candidate = list_schedule(environment, device)
        excess = problem.excess_bytes(problem.simulate(device, candidate.order))
        penalty = EXCESS_PENALTY * float((excess / np.maximum(problem.limit_bytes, 1)).sum())
        step = candidate.seconds / environment.rules.scale_seconds
        assert cost == pytest.approx(min(step + penalty, MAX_COST), rel=1e-12)
        assert fits == (not excess.any())


@thorough
@given(environments(), st.integers(0, 1000))
def test_the_best_placement_is_the_cheapest_that_fits(environment, seed):
    _, episode = run(environment, seed)
    costs = episode.trajectory.cost[episode.trajectory.fits]
    best = episode.best()
    if best is None:
        assert len(costs) == 0
        return
    assert best[0] == costs.min()
    candidate = list_schedule(environment, best[1])
    simulation = environment.problem.simulate(best[1], candidate.order)
    assert not environment.problem.excess_bytes(simulation).any()
    assert candidate.seconds / environment.rules.scale_seconds == pytest.approx(best[0])


@given(environments(), st.integers(0, 1000), st.sampled_from([0.0, 0.5, 1.0]))
def test_a_return_is_the_discounted_sum_of_later_falls_of_the_cost(environment, seed, discount):
    _, episode = run(environment, seed)
    falls = -np.diff(episode.trajectory.cost)
    returns = episode.returns(discount)
    for step in range(len(falls)):
        later = falls[step:]
        assert returns[step] == pytest.approx(float((later * discount ** np.arange(len(later))).sum()), abs=1e-9)


@given(environments(), st.integers(0, 1000))
def test_one_seed_is_one_episode(environment, seed):
    (_, first), (_, second) = run(environment, seed), run(replace(environment), seed)
    assert first.trajectory.cost.tolist() == second.trajectory.cost.tolist()
    assert first.final.tolist() == second.final.tolist()


@given(environments())
def test_groups_go_only_where_their_weights_have_room_if_they_have_it_anywhere(environment):
    problem = environment.problem
    allowed = environment.visits.allowed
    for group in range(len(problem.pinned)):
        nodes = np.flatnonzero(problem.group == group)
        weights = sorted({int(w) for node in nodes for w in problem.graph.weights[node]})
        needed = problem.graph.weight_bytes[weights].sum()
        has_room = needed <= problem.limit_bytes
        assert allowed[group].tolist() == (has_room | (not has_room.any())).tolist()


# ---------------------------------------------------------------------------------------------- what the policy sees


@thorough
@given(environments(), st.integers(0, 1000))
def test_relations_are_ancestors_descendants_and_parallel_nodes(environment, seed):
    graph, relation = environment.problem.graph, environment.wires.relation
    before = [graph.predecessors[node].tolist() for node in range(len(graph))]
    after = [graph.successors[node].tolist() for node in range(len(graph))]
    for node in range(len(graph)):
        ancestors, descendants = reach(before, node), reach(after, node)
        expected = [
            0 if other == node else 1 if other in ancestors else 2 if other in descendants else 3
            for other in range(len(graph))
        ]
        assert relation[node].tolist() == expected


@thorough
@given(environments(), st.integers(0, 1000))
def test_features_are_costs_transfer_visited_current_start_and_device(environment, seed):
    network, episode = run(environment, seed)
    count, known = len(episode.trajectory.action), SHAPE.devices
    steps = np.arange(0, count, 2)
    features = environment.step_features(network, episode, steps)
    seconds = environment.problem.seconds
    squashed = seconds / (seconds + seconds.mean()) if seconds.mean() > 0 else np.zeros_like(seconds)
    for step, rows in zip(steps, features):
        device, start = episode.trajectory.device[step], episode.trajectory.start[step]
        current = environment.visits.speaker[step]
        np.testing.assert_allclose(rows[: len(seconds)], squashed, rtol=1e-6)
        assert not rows[len(seconds) : known].any()
        done = np.isin(environment.problem.group, environment.visits.group[:step])
        assert rows[known + 1].tolist() == done.tolist()
        assert np.flatnonzero(rows[known + 2]).tolist() == [current]
        shift = start.astype(float) - float(start[current])
        np.testing.assert_allclose(rows[known + 3], shift / max(np.abs(shift).max(), 1e-300), rtol=1e-5, atol=1e-6)
        assert rows[known + 4 :].argmax(axis=0).tolist() == device.tolist()
        assert (rows[known + 4 :].sum(axis=0) == 1).all()


@thorough
@given(environments(min_nodes=2), st.integers(0, 1000))
def test_the_likeliest_device_has_the_highest_score_of_the_plain_policy(environment, seed):
    network, episode = run(environment, seed, greedy=True)
    tensors = split_parameters(SHAPE, network.theta)
    steps = np.arange(len(episode.trajectory.action))[:3]
    features = environment.step_features(network, episode, steps)
    for step, rows in zip(steps, features):
        scores = score(tensors, SHAPE.rounds, environment.problem.graph, rows.T, environment.visits.speaker[step])
        scores += network.stay * rows[-SHAPE.devices :, environment.visits.speaker[step]]
        allowed = environment.visits.allowed[environment.visits.group[step]]
        possible = np.where(allowed, scores[: len(allowed)], -np.inf)
        tolerance = 1e-4 * max(1.0, float(np.abs(scores).max()))
        assert possible[episode.trajectory.action[step]] >= possible.max() - tolerance
        shares = np.exp(possible - possible.max()) / np.exp(possible - possible.max()).sum()
        entropy = -float((shares[shares > 0] * np.log(shares[shares > 0])).sum())
        assert episode.trajectory.entropy[step] == pytest.approx(entropy, abs=20 * tolerance)


def test_sampled_devices_follow_the_scores():
    """With a zeroed network, all devices are equally likely."""
    environment = Environment(placement_problem(random_state(3, nodes=30, devices=4)))
    network = SHAPE.network(np.zeros(SHAPE.parameters, dtype=np.float32))
    draws = np.linspace(0, 1, 30, endpoint=False)
    episode = environment.run(network, draws)
    assert episode.trajectory.action.tolist() == [int(4 * draw) for draw in draws]
    assert episode.trajectory.entropy == pytest.approx(np.log(4))
