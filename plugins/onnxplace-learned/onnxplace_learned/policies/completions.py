"""What each choice of an episode is worth if good placements complete it: the lessons of Placeto's policy."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice, permutations

import numpy as np

from onnxplace.graph import Floats, Ints, Longs
from onnxplace.problem import PlacementProblem
from onnxplace_learned.policies.environment import Environment, Episode
from onnxplace_learned.policies.episode_kernels import CompletionWork, score_completions
from onnxplace_learned.policies.gradients import policy_gradient
from onnxplace_learned.policies.networks import Policy
from onnxplace_learned.policies.policy_kernels import Singles
from onnxplace_learned.policies.teacher import search_lesson
from onnxplace_learned.policies.training import (
    CHUNK_STEPS,
    Learner,
    Settings,
    Update,
    apply_gradient,
    collect_decisions,
)

# Permutations of alike devices that a placement is completed with, and how many are tried at a step.
MAX_PERMUTATIONS, MAX_TRIED = 24, 4
# Orders of devices that are looked at, since few of them may exchange alike ones only.
MAX_ORDERS = 2_400
# Shares of the episodes that start from the best placement of another one, and that take the likeliest devices.
AGAIN_SHARE, LIKELIEST_SHARE = 0.3, 0.5


def find_completions(environment: Environment, settings: Settings) -> Ints:
    """Search for good placements of a graph; return them with their permutations: [placement, node].

    Where no placement fits, that is the one that episodes start from.
    """
    problem = environment.problem
    seeds = range(settings.searches * settings.seed, settings.searches * (settings.seed + 1))
    lessons = [search_lesson(problem, settings.proposals, seed) for seed in seeds]
    devices = [lesson.device for lesson in lessons if lesson] or [environment.start]
    placements = np.concatenate([permute_placement(problem, device) for device in devices])
    return np.stack(list({placement.tobytes(): placement for placement in placements}.values()))


def permute_placement(problem: PlacementProblem, device: Ints) -> Ints:
    """Return a placement and those that differ from it only by an exchange of alike devices: [placement, node].

    Pinned nodes stay. At most `MAX_PERMUTATIONS` are returned, each once.
    """
    latency, per_byte = problem.target.link_arrays()
    limit, seconds = np.asarray(problem.limit_bytes), problem.seconds
    pinned = problem.pinned[problem.group]
    placements: dict[bytes, Ints] = {}
    for order in islice(permutations(range(len(limit))), MAX_ORDERS):
        to = np.array(order, dtype=np.int32)
        is_alike = (
            (limit[to] == limit).all()
            and np.allclose(seconds[to], seconds)
            and np.allclose(latency[np.ix_(to, to)], latency)
            and np.allclose(per_byte[np.ix_(to, to)], per_byte)
        )
        if is_alike:
            placement = np.where(pinned >= 0, pinned, to[device]).astype(np.int32)
            placements.setdefault(placement.tobytes(), placement)
        if len(placements) == MAX_PERMUTATIONS:
            break
    return np.stack(list(placements.values()))


def complete_steps(environment: Environment, episode: Episode, steps: Longs, completions: Ints) -> Floats:
    """Return the cost of each device at some steps of an episode, which increase: [step, device].

    That is the least cost if one of the completions or the present placement gives the devices of all groups that are
    not visited yet; infinite if the device has no room for the weights of the group.
    """
    problem = environment.problem
    count, devices = len(problem.graph), len(problem.target.devices)
    work = CompletionWork(
        agreement=np.zeros(len(completions)),
        tried=np.zeros(min(len(completions), MAX_TRIED), dtype=np.int32),
        visited=np.zeros(count, dtype=np.uint8),
        device=np.zeros(count, dtype=np.int32),
    )
    costs = np.zeros((len(steps), devices))
    score_completions(
        environment.visits,
        environment.rules,
        episode.trajectory,
        steps,
        completions,
        problem.seconds.mean(axis=0),
        environment.new_simulators(),
        work,
        costs,
    )
    return costs


def update_from_completions(
    learner: Learner, environment: Environment, completions: Ints, settings: Settings, progress: float
) -> Update:
    """Run an episode in one environment, and update the policy towards the choices that cost least when completed.

    Random numbers depend on `settings.seed` and the number of updates so far, so that a training that is resumed
    continues as if it had not been interrupted.
    """
    policy = learner.policy
    rng = np.random.default_rng([settings.seed, policy.updates])
    episode = _run_episode(policy, environment, rng)
    steps = len(environment.visits.group)
    if steps:
        drawn = np.sort(rng.choice(steps, min(settings.steps, steps), replace=False)).astype(np.int64)
        gradient = _estimate_gradient(policy, environment, settings, episode, drawn, completions)
        learner = apply_gradient(learner, gradient, settings, progress)
    else:
        learner = replace(learner, policy=policy.with_parameters(policy.theta, policy.updates + 1))
    best = episode.best()
    return Update(
        learner=learner,
        cost=float(episode.trajectory.cost[-1]),
        best_cost=best[0] if best else float("nan"),
        entropy=float(episode.trajectory.entropy.mean()) if steps else 0.0,
        episodes=[episode],
    )


def _run_episode(policy: Policy, environment: Environment, rng: np.random.Generator) -> Episode:
    """Run an episode from one of the starts, or from the best placement of an episode that began there."""
    start = environment.starts[int(rng.integers(len(environment.starts)))]
    if environment.start_from == "several" and rng.random() < AGAIN_SHARE:
        best = environment.run(policy.network, start=start).best()
        start = best[1] if best else start
    takes_likeliest = rng.random() < LIKELIEST_SHARE
    return environment.run(
        policy.network, None if takes_likeliest else rng.random(len(environment.visits.group)), start
    )


def _estimate_gradient(
    policy: Policy, environment: Environment, settings: Settings, episode: Episode, steps: Longs, completions: Ints
) -> Singles:
    """Return the mean gradient of the cross-entropy with shares of devices that fall with their costs."""
    costs = complete_steps(environment, episode, steps, completions)
    weight = np.zeros((len(steps), policy.shape.devices))
    weight[:, : costs.shape[1]] = weigh_devices(costs, settings)
    gradient = np.zeros_like(policy.theta)
    for first in range(0, len(steps), CHUNK_STEPS):
        chunk = slice(first, first + CHUNK_STEPS)
        decisions = collect_decisions(policy, environment, episode, weight[chunk], steps[chunk])
        gradient += policy_gradient(policy.network, environment.wires, decisions, settings.entropy_bonus)
    gradient /= len(steps)
    return gradient


def weigh_devices(costs: Floats, settings: Settings) -> Floats:
    """Return the targets of choices from the costs of devices, times the importance of the choice: [step, device].

    Targets of a step are shares that fall exponentially with the cost. Importance grows with the difference between the
    best and the worst device, up to a bound; it is 1 on average.
    """
    above = costs - costs.min(axis=1, keepdims=True)
    shares = np.exp(-above / settings.temperature)
    shares /= shares.sum(axis=1, keepdims=True)
    difference = np.where(np.isfinite(above), above, 0.0).max(axis=1)
    importance = difference / (difference + settings.small_difference)
    mean = float(importance.mean())
    weights: Floats = shares * (importance / mean if mean > 0 else importance)[:, None]
    return weights
