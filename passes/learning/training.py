"""Train a policy with REINFORCE in simulated time, as Placeto does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from onnxplace.graph import Bools, Floats, Longs
from onnxplace.passes.learning.environment import Environment, Episode
from onnxplace.passes.learning.gradients import Decisions, policy_gradient
from onnxplace.passes.learning.networks import Policy
from onnxplace.passes.learning.policy_kernels import Singles

# Adam (Kingma and Ba 2015).
BETAS, EPSILON = (0.9, 0.999), 1e-8
# Steps whose gradient is computed together: their activations fit into the cache.
CHUNK_STEPS = 32


@dataclass(frozen=True)
class Settings:
    """How to train; as published where the paper or its code says."""

    episodes: int = 8
    """Of one graph, for each update."""
    steps: int = 16
    """Of each episode, drawn at random, that the gradient is computed from."""
    learning_rate: float = 1e-3
    """At the start."""
    last_learning_rate: float = 1e-4
    entropy_bonus: float = 0.1
    """At the start; it falls to zero."""
    discount: float = 0.8
    """Of rewards for each later step. The paper has 1, with which the rewards of all later steps drown those of the
    step itself: with few episodes, the policy then learns to leave everything on one device."""
    max_gradient: float = 1.25
    """Norm at which gradients are clipped."""
    seed: int = 0


@dataclass(frozen=True)
class Learner:
    """A policy with the moments of its optimiser."""

    policy: Policy
    first: Singles
    second: Singles

    @staticmethod
    def of(policy: Policy) -> Learner:
        """Return a learner that starts from a policy."""
        return Learner(policy, np.zeros_like(policy.theta), np.zeros_like(policy.theta))


@dataclass(frozen=True)
class Update:
    """One update of a policy."""

    learner: Learner
    cost: float
    """Mean of the placements at the ends of the episodes; 1 is all work on one device."""
    best_cost: float
    """Mean of the best placements that the episodes visited."""
    entropy: float
    """Mean, of the choices."""
    episodes: Sequence[Episode] = field(repr=False)


def update_policy(learner: Learner, environment: Environment, settings: Settings, progress: float) -> Update:
    """Run episodes in one environment, and update the policy from them.

    `progress` from 0 to 1 sets learning rate and entropy bonus. Random numbers depend on `settings.seed` and the number
    of updates so far, so that a training that is resumed continues as if it had not been interrupted.
    """
    policy = learner.policy
    rng = np.random.default_rng([settings.seed, policy.updates])
    steps = len(environment.visits.group)
    episodes = [environment.run(policy.network, rng.random(steps)) for _ in range(settings.episodes)]
    if steps and settings.episodes > 1:
        advantages = compute_advantages(np.stack([episode.returns(settings.discount) for episode in episodes]))
        gradient = estimate_gradient(policy, environment, settings, progress, episodes, advantages, rng)
        learner = apply_gradient(learner, gradient, settings, progress)
    else:
        learner = replace(learner, policy=policy.with_parameters(policy.theta, policy.updates + 1))
    bests = [best[0] for episode in episodes if (best := episode.best())]
    return Update(
        learner=learner,
        cost=float(np.mean([episode.trajectory.cost[-1] for episode in episodes])),
        best_cost=float(np.mean(bests)) if bests else float("nan"),
        entropy=float(np.mean([episode.trajectory.entropy.mean() for episode in episodes])) if steps else 0.0,
        episodes=episodes,
    )


def estimate_gradient(
    policy: Policy,
    environment: Environment,
    settings: Settings,
    progress: float,
    episodes: Sequence[Episode],
    advantages: Floats,
    rng: np.random.Generator,
) -> Singles:
    """Return the mean gradient of some steps of the episodes, with their advantages: [episode, step]."""
    steps, count = advantages.shape[1], min(settings.steps, advantages.shape[1])
    gradient = np.zeros_like(policy.theta)
    bonus = settings.entropy_bonus * (1 - progress)
    for episode, advantage in zip(episodes, advantages):
        drawn = np.sort(rng.choice(steps, count, replace=False))
        for first in range(0, count, CHUNK_STEPS):
            decisions = _collect_decisions(policy, environment, episode, advantage, drawn[first : first + CHUNK_STEPS])
            gradient += policy_gradient(policy.network, environment.wires, decisions, bonus)
    gradient /= count * len(episodes)
    return gradient


def compute_advantages(returns: Floats) -> Floats:
    """Return how much better each episode fares from each step on than the others do: [episode, step].

    The baseline is the mean return of the other episodes at the same step. Advantages are divided by their standard
    deviation, so that graphs with small and with large differences count alike.
    """
    count = len(returns)
    baseline = (returns.sum(axis=0) - returns) / (count - 1)
    advantages: Floats = returns - baseline
    deviation = float(advantages.std())
    if deviation > 0:
        advantages /= deviation
    return advantages


def _collect_decisions(
    policy: Policy, environment: Environment, episode: Episode, advantage: Floats, steps: Longs
) -> Decisions:
    visits = environment.visits
    return Decisions(
        features=environment.step_features(policy.network, episode, steps),
        speaker=visits.speaker[steps],
        action=episode.trajectory.action[steps],
        allowed=_pad_devices(visits.allowed[visits.group[steps]], policy.shape.devices),
        advantage=advantage[steps],
    )


def _pad_devices(allowed: Bools, devices: int) -> Bools:
    """Add devices that the policy knows and the target lacks."""
    padded = np.zeros((len(allowed), devices), dtype=bool)
    padded[:, : allowed.shape[1]] = allowed
    return padded


def apply_gradient(learner: Learner, gradient: Singles, settings: Settings, progress: float) -> Learner:
    """Return the learner after a step of Adam with a clipped gradient."""
    norm = float(np.linalg.norm(gradient))
    gradient = gradient * min(1.0, settings.max_gradient / max(norm, 1e-30))
    updates = learner.policy.updates + 1
    first = BETAS[0] * learner.first + (1 - BETAS[0]) * gradient
    second = BETAS[1] * learner.second + (1 - BETAS[1]) * gradient**2
    rate = settings.learning_rate + progress * (settings.last_learning_rate - settings.learning_rate)
    corrected = first / (1 - BETAS[0] ** updates), second / (1 - BETAS[1] ** updates)
    theta = learner.policy.theta - rate * corrected[0] / (np.sqrt(corrected[1]) + EPSILON)
    policy = learner.policy.with_parameters(theta.astype(np.float32), updates)
    return Learner(policy, first.astype(np.float32), second.astype(np.float32))
