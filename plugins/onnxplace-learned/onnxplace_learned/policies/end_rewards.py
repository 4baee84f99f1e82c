"""Train a policy from costs of whole placements, which are known at the ends of episodes only."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from onnxplace.graph import Ints
from onnxplace_learned.policies.environment import Environment
from onnxplace_learned.policies.training import (
    Learner,
    Settings,
    Update,
    apply_gradient,
    compute_advantages,
    estimate_gradient,
)


def update_from_ends(
    learner: Learner,
    environment: Environment,
    settings: Settings,
    progress: float,
    measure: Callable[[Ints], float],
) -> Update:
    """Run episodes in one environment, reward only their ends, and update the policy.

    The reward of an episode is the negative logarithm of the cost of its last placement, and counts for all of its
    steps, as in the training of Placeto and ColocRL on real machines. The baseline is the mean of the other episodes.

    Args:
        learner: The policy so far.
        environment: The graph.
        settings: As for `update_policy`.
        progress: From 0 to 1; sets learning rate and entropy bonus.
        measure: Returns the cost of a placement, more than 0: devices per node of the environment's graph.
    """
    policy = learner.policy
    rng = np.random.default_rng([settings.seed, policy.updates])
    steps = len(environment.visits.group)
    episodes = [environment.run(policy.network, rng.random(steps)) for _ in range(settings.episodes)]
    costs = np.array([measure(episode.final) for episode in episodes])
    advantages = compute_advantages(np.repeat(-np.log(costs)[:, None], steps, axis=1))
    if steps and len(costs) > 1 and advantages.any():
        gradient = estimate_gradient(policy, environment, settings, progress, episodes, advantages, rng)
        learner = apply_gradient(learner, gradient, settings, progress)
    else:
        learner = replace(learner, policy=policy.with_parameters(policy.theta, policy.updates + 1))
    return Update(
        learner=learner,
        cost=float(costs.mean()),
        best_cost=float(costs.min()),
        entropy=float(np.mean([episode.trajectory.entropy.mean() for episode in episodes])) if steps else 0.0,
        episodes=episodes,
    )
