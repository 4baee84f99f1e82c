"""Train a policy with REINFORCE in simulated time, as Placeto does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from onnxplace.graph import Bools, Floats, Longs
from onnxplace_learned.policies.environment import Environment, Episode
from onnxplace_learned.policies.gradients import Decisions, policy_gradient
from onnxplace_learned.policies.networks import LearnFrom, Policy
from onnxplace_learned.policies.policy_kernels import Singles

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
    warm_up: int = 0
    """Updates in which the learning rate rises to that of the start."""
    entropy_bonus: float = 0.1
    """At the start; it falls to zero."""
    discount: float = 0.8
    """Of rewards for each later step. The paper has 1, with which the rewards of all later steps drown those of the
    step itself: with few episodes, the policy then learns to leave everything on one device."""
    max_gradient: float = 1.25
    """Norm at which gradients are clipped."""
    averaging: float = 1.0
    """Share of new parameters in their running mean, which is the policy that is kept."""
    learn_from: LearnFrom = "rewards"
    proposals: int = 5_000
    """Of each search for placements that complete the choices."""
    searches: int = 4
    """Of each graph, since there are many placements that are about as good."""
    temperature: float = 0.002
    """Difference of costs, as a share of one device, that makes a choice e times as likely a target."""
    small_difference: float = 0.003
    """Choices whose costs differ by this count half as much as those whose costs differ much."""
    seed: int = 0

    @staticmethod
    def for_completions(seed: int = 0) -> Settings:
        """Return settings to learn from completions: one episode for each update, with more of its steps."""
        return Settings(
            episodes=1,
            steps=48,
            learning_rate=1.5e-3,
            last_learning_rate=1.5e-4,
            warm_up=100,
            entropy_bonus=0.0,
            max_gradient=0.5,
            averaging=0.02,
            learn_from="completions",
            seed=seed,
        )


@dataclass(frozen=True)
class Learner:
    """A policy with the moments of its optimiser, and the running mean of its parameters."""

    policy: Policy
    first: Singles
    second: Singles
    average: Singles

    @staticmethod
    def of(policy: Policy) -> Learner:
        """Return a learner that starts from a policy."""
        return Learner(policy, np.zeros_like(policy.theta), np.zeros_like(policy.theta), policy.theta)

    @property
    def averaged_policy(self) -> Policy:
        """Return the policy with the running mean of its parameters."""
        return self.policy.with_parameters(self.average, self.policy.updates)


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
            chunk = drawn[first : first + CHUNK_STEPS]
            weight = np.zeros((len(chunk), policy.shape.devices))
            weight[np.arange(len(chunk)), episode.trajectory.action[chunk]] = advantage[chunk]
            decisions = collect_decisions(policy, environment, episode, weight, chunk)
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


def collect_decisions(
    policy: Policy, environment: Environment, episode: Episode, weight: Floats, steps: Longs
) -> Decisions:
    """Return some steps of an episode, which increase, with the weights [step, device] of their choices."""
    visits = environment.visits
    return Decisions(
        features=environment.step_features(policy.network, episode, steps),
        speaker=visits.speaker[steps],
        allowed=_pad_devices(visits.allowed[visits.group[steps]], policy.shape.devices),
        weight=weight,
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
    rate *= min(1.0, updates / max(settings.warm_up, 1))
    corrected = first / (1 - BETAS[0] ** updates), second / (1 - BETAS[1] ** updates)
    theta = learner.policy.theta - rate * corrected[0] / (np.sqrt(corrected[1]) + EPSILON)
    policy = learner.policy.with_parameters(theta.astype(np.float32), updates)
    average = learner.average + settings.averaging * (policy.theta - learner.average)
    return Learner(policy, *(item.astype(np.float32) for item in (first, second, average)))
