"""Training of policies: torch computes what the compiled policy computes, and gradients point the right way."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed; .ci/training has it")

from learned_support.plain_policy import score
from onnxplace.driver.place import place_cost_graph
from onnxplace.problem import placement_problem
from onnxplace.testing.pass_contract import random_state
from onnxplace_learned.graphs.architectures import ARCHITECTURES
from onnxplace_learned.policies.environment import Environment
from onnxplace_learned.policies.placeto_gradients import PlacetoDecisions, policy_gradient, score_with_torch
from onnxplace_learned.policies.placeto_learning import Learner, Settings, compute_advantages, update_policy
from onnxplace_learned.policies.placeto_network import Policy, Shape, split_parameters

SHAPE = Shape(devices=4, width=4, rounds=3)


def make_decisions(seed, devices=3):
    environment = Environment(placement_problem(random_state(seed, nodes=25, devices=devices)))
    rng = np.random.default_rng(seed)
    # Biases are not zero, since rectifiers have no gradient at their kinks.
    theta = SHAPE.draw_parameters(seed) + 0.1 * rng.standard_normal(SHAPE.parameters).astype(np.float32)
    network = SHAPE.network(theta, 0.5)
    episode = environment.run(network, rng.random(len(environment.visits.group)))
    steps = np.arange(len(episode.trajectory.action))
    allowed = np.zeros((len(steps), SHAPE.devices), dtype=bool)
    allowed[:, :devices] = environment.visits.allowed[environment.visits.group[steps]]
    weight = np.zeros((len(steps), SHAPE.devices))
    weight[np.arange(len(steps)), episode.trajectory.action] = rng.standard_normal(len(steps))
    decisions = PlacetoDecisions(
        features=environment.step_features(network, episode, steps),
        speaker=environment.visits.speaker[steps],
        allowed=allowed,
        weight=weight,
    )
    return environment, network, decisions, episode


@pytest.mark.parametrize("seed", range(5))
def test_torch_scores_devices_as_the_plain_policy(seed):
    environment, network, decisions, _ = make_decisions(seed)
    scores = score_with_torch(
        network, torch.from_numpy(network.theta), environment.wires, decisions.features, decisions.speaker
    ).numpy()
    tensors = split_parameters(SHAPE, network.theta)
    for row, features, speaker in zip(scores, decisions.features, decisions.speaker):
        plain = score(tensors, SHAPE.rounds, environment.problem.graph, features.T, speaker)
        plain += 0.5 * features[-SHAPE.devices :, speaker]
        np.testing.assert_allclose(row, plain, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("seed", range(3))
def test_torch_has_the_entropy_of_the_compiled_policy(seed):
    environment, network, decisions, episode = make_decisions(seed)
    theta = torch.from_numpy(network.theta)
    scores = score_with_torch(network, theta, environment.wires, decisions.features, decisions.speaker)
    shares = torch.softmax(scores.masked_fill(~torch.from_numpy(decisions.allowed), -torch.inf), dim=1)
    entropy = -(shares * torch.log(shares.clamp(min=1e-30))).sum(dim=1).numpy()
    np.testing.assert_allclose(episode.trajectory.entropy, entropy, atol=2e-3)


def test_a_step_against_the_gradient_makes_good_choices_likelier():
    environment, network, decisions, _ = make_decisions(1)

    def loss(parameters):
        scores = score_with_torch(
            network, torch.from_numpy(parameters), environment.wires, decisions.features, decisions.speaker
        )
        shares = torch.log_softmax(scores.masked_fill(~torch.from_numpy(decisions.allowed), -torch.inf), dim=1)
        return -float((shares.masked_fill(shares == -torch.inf, 0.0).numpy() * decisions.weight).sum())

    theta, gradient = network.theta, policy_gradient(network, environment.wires, decisions, 0.0)
    step = 1e-3 / np.linalg.norm(gradient)
    slope = (loss(theta + np.float32(step) * gradient) - loss(theta - np.float32(step) * gradient)) / (2 * step)
    assert slope == pytest.approx(float((gradient**2).sum()), rel=0.05)
    assert len(gradient) == SHAPE.parameters
    assert np.count_nonzero(gradient) > SHAPE.parameters / 4


def test_the_entropy_bonus_alone_makes_choices_more_even():
    environment, network, decisions, _ = make_decisions(2)
    still = PlacetoDecisions(decisions.features, decisions.speaker, decisions.allowed, np.zeros_like(decisions.weight))
    gradient = policy_gradient(network, environment.wires, still, 1.0)
    before = environment.run(network).trajectory.entropy[0]
    changed = network._replace(theta=network.theta - np.float32(0.01) * gradient)
    assert environment.run(changed).trajectory.entropy[0] > before


def test_advantages_compare_an_episode_with_the_others_at_the_same_step():
    advantages = compute_advantages(np.array([[3.0, 0.0], [1.0, 0.0], [2.0, 0.0]]))
    assert advantages[:, 1].tolist() == [0, 0, 0]
    assert advantages[:, 0].sum() == pytest.approx(0)
    assert advantages.std() == pytest.approx(1)
    assert advantages[0, 0] > advantages[2, 0] > advantages[1, 0]
    assert compute_advantages(np.zeros((2, 3))).tolist() == [[0] * 3] * 2


def train(updates, seed=0, learner=None):
    """Train on two independent chains, for which two devices are twice as fast as one."""
    graph = ARCHITECTURES["two_towers"](40, 0)
    environment = Environment(placement_problem(graph.state()), start_from="first-device")
    shape = Shape(2, width=4, rounds=3)
    learner = learner or Learner.of(Policy(shape, shape.draw_parameters(seed), start="first-device"))
    costs = []
    for index in range(updates):
        update = update_policy(learner, environment, Settings(episodes=6, steps=8, seed=seed), index / updates)
        learner = update.learner
        costs.append(update.cost)
    return learner, costs


def test_training_is_deterministic_and_a_resumed_one_continues_the_random_numbers():
    first, costs = train(4)
    second, again = train(4)
    assert costs == again
    assert first.policy.theta.tolist() == second.policy.theta.tolist()
    assert first.policy.updates == 4
    assert train(4, seed=1)[1] != costs


def test_training_lowers_the_cost():
    _, costs = train(30)
    assert np.mean(costs[-5:]) < np.mean(costs[:5])


def test_a_graph_can_be_placed_by_training_on_it_alone():
    graph = ARCHITECTURES["two_towers"](40, 0)
    result = place_cost_graph(graph, "placeto{episodes=16,seed=3}")
    again = place_cost_graph(graph, "placeto{episodes=16,seed=3}")
    assert result.feasible
    assert result.placement == again.placement
