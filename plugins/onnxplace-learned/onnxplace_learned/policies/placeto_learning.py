"""Train Placeto's policy: a learner, its updates in three ways, and its files.

One update runs episodes in one graph and takes a step of Adam. What the choices of an episode are worth differs:

- rewards: REINFORCE (Williams 1992) with the changes of the simulated step, as Placeto does (`update_policy`);
- ends: the cost of the last placement alone, where only that is known, as when bundles are run (`update_from_ends`);
- completions: the cost of each device if a good placement, which a search found, decides the rest
  (`update_from_completions`), after Ross and Bagnell (arXiv 1406.5979). The choice becomes a target, so the gradient is
  that of a cross-entropy and not of a reward, and an update needs one episode instead of eight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice, permutations
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.errors import UsageError
from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs
from onnxplace.problem import PlacementProblem
from onnxplace_learned.policies.environment import Environment, Episode
from onnxplace_learned.policies.placeto_gradients import PlacetoDecisions, policy_gradient
from onnxplace_learned.policies.placeto_kernels import CompletionWork, Singles, score_completions
from onnxplace_learned.policies.placeto_network import LearnFrom, Policy, Shape, join_parameters, split_parameters
from onnxplace_learned.policies.teacher import search_lesson
from onnxplace_learned.policy_files import MAX_SIZES, PolicyFile, write_policy_file

# Adam (Kingma and Ba 2015).
BETAS, EPSILON = (0.9, 0.999), 1e-8
# Steps whose gradient is computed together: their activations fit into the cache.
CHUNK_STEPS = 32


@dataclass(frozen=True)
class Settings:
    """How to train; as published where the paper or its code says."""

    episodes: int = 8
    """Episodes of one graph, for each update."""
    steps: int = 16
    """Steps of each episode, drawn at random, that the gradient is computed from."""
    learning_rate: float = 1e-3
    """Learning rate at the start."""
    last_learning_rate: float = 1e-4
    warm_up: int = 0
    """Updates in which the learning rate rises to that of the start."""
    entropy_bonus: float = 0.1
    """Weight of the entropy at the start; it falls to zero."""
    discount: float = 0.8
    """Factor of rewards for each later step. The paper has 1, with which the rewards of all later steps drown those of
    the step itself: with few episodes, the policy then learns to leave everything on one device."""
    max_gradient: float = 1.25
    """Norm at which gradients are clipped."""
    averaging: float = 1.0
    """Share of new parameters in their running mean, which is the policy that is kept."""
    learn_from: LearnFrom = "rewards"
    proposals: int = 5_000
    """Moves of each search for placements that complete the choices."""
    searches: int = 4
    """Searches for each graph, since there are many placements that are about as good."""
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
    """Mean entropy of the choices."""
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
) -> PlacetoDecisions:
    """Return some steps of an episode, which increase, with the weights [step, device] of their choices."""
    visits = environment.visits
    return PlacetoDecisions(
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
    updates = learner.policy.updates + 1
    rate = settings.learning_rate + progress * (settings.last_learning_rate - settings.learning_rate)
    rate *= min(1.0, updates / max(settings.warm_up, 1))
    theta, first, second = take_adam_step(learner, gradient, settings.max_gradient, rate, updates)
    average = learner.average + settings.averaging * (theta - learner.average)
    return Learner(learner.policy.with_parameters(theta, updates), first, second, average.astype(np.float32))


def take_adam_step(
    learner: Any, gradient: Singles, max_gradient: float, rate: float, step: int
) -> tuple[Singles, Singles, Singles]:
    """Return parameters and moments after a step of Adam (Kingma and Ba 2015), the `step`-th, with a clipped gradient.

    `learner` has the moments `first` and `second`, and a `policy` with its parameters `theta`.
    """
    norm = float(np.linalg.norm(gradient))
    gradient = gradient * min(1.0, max_gradient / max(norm, 1e-30))
    first = BETAS[0] * learner.first + (1 - BETAS[0]) * gradient
    second = BETAS[1] * learner.second + (1 - BETAS[1]) * gradient**2
    # The moments start at zero, which is corrected for.
    corrected = first / (1 - BETAS[0] ** step), second / (1 - BETAS[1] ** step)
    theta = learner.policy.theta - rate * corrected[0] / (np.sqrt(corrected[1]) + EPSILON)
    return theta.astype(np.float32), first.astype(np.float32), second.astype(np.float32)


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


KIND = "placeto"
# Names of the moments of the optimiser and of the mean of the parameters in a checkpoint.
MOMENTS = ("adam.first", "adam.second", "average")
# Prefix of the names of kept placements, which are written as numbers of devices.
KEPT = "kept."


def write_policy(path: Path, policy: Policy, learner: Learner | None = None) -> None:
    """Write a policy; with a learner, also what its training can be resumed from.

    Raises UsageError or ExecutionError if the file cannot be written.
    """
    tensors = split_parameters(policy.shape, policy.theta)
    tensors |= {f"{KEPT}{key}": device.astype(np.float32) for key, device in policy.kept.items()}
    if learner:
        tensors |= dict(zip(MOMENTS, (learner.first, learner.second, learner.average)))
    write_policy_file(path, KIND, (policy.shape, policy), tensors)


def read_policy(path: Path) -> Policy:
    """Return the policy in a file.

    Raises:
        InputError: The file cannot be read, is damaged, is not a policy, or is of a newer version.
    """
    return read_learner(path)[0]


def read_learner(path: Path) -> tuple[Policy, Learner | None]:
    """Return the policy in a file, and the learner if it is a checkpoint."""
    file = PolicyFile(path, KIND)
    shape = Shape(**file.read_fields(Shape, MAX_SIZES))
    names = list(split_parameters(shape, np.zeros(shape.parameters, dtype=np.float32)).items())
    rows = {name: (array.size,) for name, array in file.arrays.items() if name.startswith(KEPT)}
    moments = {name: (shape.parameters,) for name in MOMENTS if name in file.arrays}
    tensors = file.read_tensors({**{name: tensor.shape for name, tensor in names}, **rows, **moments})
    kept = {name: tensors[name].astype(np.int32) for name in rows}
    for name, device in kept.items():
        if (device != tensors[name]).any() or (device < 0).any() or (device >= shape.devices).any():
            raise file.damage(f"a kept placement has numbers that are none of {shape.devices} devices")
    policy = Policy(
        shape=shape,
        theta=join_parameters([tensors[name] for name, _ in names]),
        kept={name.removeprefix(KEPT): device for name, device in kept.items()},
        **file.read_fields(Policy),
    )
    if len(moments) < len(MOMENTS):
        return policy, None
    return policy, Learner(policy, *(tensors[name] for name in MOMENTS))


def require_devices(policy: Policy, devices: int, where: str) -> None:
    """Raise UsageError if there are more devices than a policy knows."""
    if devices > policy.shape.devices:
        message = f"the policy knows at most {policy.shape.devices} devices, expected {devices}"
        hint = f"use fewer devices, or `onnxplace learn placeto --devices {devices}`"
        raise UsageError("H003", message, where=where, hint=hint)
