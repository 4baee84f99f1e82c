"""Train sequence policies by policy gradient: REINFORCE for `hierarchical`, PPO for `go`; and their files."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from onnxplace.errors import format_value
from onnxplace.graph.op_graph import Floats, Longs
from onnxplace_learned.policies.placeto_kernels import Singles
from onnxplace_learned.policies.placeto_learning import take_adam_step
from onnxplace_learned.policies.sequence_graph import Scores
from onnxplace_learned.policies.sequence_networks import (
    SequenceInputs,
    sample_decisions,
    sample_placements,
    score_decisions,
)
from onnxplace_learned.policies.sequence_policy import ATTENTION_HEADS, VARIANTS, Kind, SequencePolicy, SequenceShape
from onnxplace_learned.policy_files import MAX_SIZES, PolicyFile, write_policy_file
from onnxplace_learned.pytorch import require_torch

if TYPE_CHECKING:
    from torch import Tensor


# How slowly the baseline follows their mean reward.
BASELINE_INERTIA = 0.9
# How far the share of a choice may move in one update, and how often its placements are learnt from (PPO).
CLIP, EPOCHS = 0.2, 3


@dataclass(frozen=True)
class SequenceSettings:
    """How to train; as published where the papers or their code say."""

    placements: int
    """Placements sampled of one graph, for each update."""
    learning_rate: float
    """Learning rate at the start; it falls to a tenth."""
    entropy_bonus: float
    max_gradient: float = 1.0
    """Norm at which gradients are clipped."""
    noise_updates: int = 20
    """Of `hierarchical`: the first updates, in which noise is added to the scores. Afterwards, only placements that
    fit are learnt from."""
    noise: float = 0.5
    """Its deviation."""
    seed: int = 0

    @staticmethod
    def of(kind: Kind, seed: int = 0, placements: int = 0) -> SequenceSettings:
        """Return the settings of a kind of policy; 0 placements for its usual number."""
        usual = {"hierarchical": SequenceSettings(16, 1e-2, 0.01), "go": SequenceSettings(8, 3e-3, 0.01)}[kind]
        return replace(usual, seed=seed, placements=placements or usual.placements)


@dataclass(frozen=True)
class SequenceLearner:
    """A policy with the moments of its optimiser and its baselines."""

    policy: SequencePolicy
    first: Singles
    second: Singles
    baseline: Singles
    """Per graph: the moving average of rewards; 0 before the first one."""

    @staticmethod
    def of(policy: SequencePolicy, graphs: int) -> SequenceLearner:
        """Return a learner that starts from a policy."""
        return SequenceLearner(
            policy, np.zeros_like(policy.theta), np.zeros_like(policy.theta), np.zeros(graphs, np.float32)
        )


@dataclass(frozen=True)
class Sampled:
    """Placements of a policy, scored."""

    device: Longs
    """[placement, item]."""
    scores: Scores = field(repr=False)

    def best(self) -> int | None:
        """Return the placement that costs the least of those that fit; None if none does."""
        best = int(np.where(self.scores.fits, self.scores.cost, np.inf).argmin())
        return best if self.scores.fits[best] else None


@dataclass(frozen=True)
class SequenceUpdate:
    """One update of a policy."""

    learner: SequenceLearner
    cost: float
    """Mean of the sampled placements; 1 is all work on one device."""
    best_cost: float
    entropy: float
    """Mean entropy of the choices of devices."""
    sampled: Sampled = field(repr=False)


def sample_policy(policy: SequencePolicy, inputs: SequenceInputs, samples: int, seed: int) -> Sampled:
    """Return the placement of the likeliest choices, and so many that are sampled, scored."""
    torch = require_torch()
    tensors = policy.shape.split(torch.from_numpy(policy.theta))
    draws = [(1, None)] + [(samples, torch.Generator().manual_seed(seed))] * (samples > 0)
    with torch.no_grad():
        if policy.shape.kind == "hierarchical":
            placements = [sample_placements(tensors, inputs, *draw).device for draw in draws]
            return _score(inputs, torch.cat(placements), None)
        decisions = [sample_decisions(tensors, inputs, *draw) for draw in draws]
    priorities = [item.priority for item in decisions if item.priority is not None]
    devices = torch.cat([item.device[-1] for item in decisions])
    return _score(inputs, devices, torch.cat(priorities) if priorities else None)


def update_sequence_policy(
    learner: SequenceLearner, inputs: SequenceInputs, index: int, settings: SequenceSettings, progress: float
) -> SequenceUpdate:
    """Sample placements of the graph with an index, and update the policy from them.

    `progress` from 0 to 1 sets the learning rate. Random numbers depend on `settings.seed` and the number of updates so
    far, so that a training that is resumed continues as if it had not been interrupted.
    """
    torch = require_torch()
    seeds = np.random.SeedSequence([settings.seed, learner.policy.updates]).generate_state(1)
    generator = torch.Generator().manual_seed(int(seeds[0]))
    reinforce = _reinforce if learner.policy.shape.kind == "hierarchical" else _update_proximally
    return reinforce(learner, inputs, index, settings, progress, generator)


def _reinforce(
    learner: SequenceLearner,
    inputs: SequenceInputs,
    index: int,
    settings: SequenceSettings,
    progress: float,
    generator: Any,
) -> SequenceUpdate:
    """Update by REINFORCE with a moving average of rewards as baseline (Williams 1992)."""
    torch, policy = require_torch(), learner.policy
    theta = torch.from_numpy(policy.theta.copy()).requires_grad_()
    is_exploring = policy.updates < settings.noise_updates
    placements = sample_placements(
        policy.shape.split(theta), inputs, settings.placements, generator, settings.noise if is_exploring else 0.0
    )
    sampled = _score(inputs, placements.device, None)
    learner, advantage = _compare_rewards(learner, index, sampled.scores.cost)
    if not is_exploring and sampled.scores.fits.any():
        advantage = np.where(sampled.scores.fits, advantage, 0.0)
    loss = -(placements.log_share * torch.from_numpy(advantage.astype(np.float32))).mean()
    # Of all groups, so that devices stay open while groups are learned; it falls to zero.
    bonus = settings.entropy_bonus * (1 - progress) * placements.steps
    (loss - bonus * placements.entropy).backward()
    learner = _apply_gradient(learner, theta.grad.numpy(), settings, progress, policy.updates + 1)
    return _finish_update(learner, sampled, float(placements.entropy.detach()))


def _update_proximally(
    learner: SequenceLearner,
    inputs: SequenceInputs,
    index: int,
    settings: SequenceSettings,
    progress: float,
    generator: Any,
) -> SequenceUpdate:
    """Update by proximal policy optimisation (Schulman et al. 2017), with the ratio of each choice clipped."""
    torch, policy = require_torch(), learner.policy
    with torch.no_grad():
        tensors = policy.shape.split(torch.from_numpy(policy.theta))
        decisions = sample_decisions(tensors, inputs, settings.placements, generator)
        before = score_decisions(tensors, inputs, decisions)
    sampled = _score(inputs, decisions.device[-1], decisions.priority)
    learner, advantages = _compare_rewards(learner, index, sampled.scores.cost)
    advantage = torch.from_numpy(advantages.astype(np.float32))[:, None]
    for epoch in range(EPOCHS):
        theta = torch.from_numpy(learner.policy.theta.copy()).requires_grad_()
        after = score_decisions(policy.shape.split(theta), inputs, decisions)
        loss = torch.zeros(())
        for new, old in zip(after.log_shares, before.log_shares):
            ratio = (new - old).exp()
            clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
            loss = loss - torch.minimum(ratio * advantage, clipped * advantage).mean()
        (loss - settings.entropy_bonus * after.entropy).backward()
        steps = policy.updates * EPOCHS + epoch + 1
        learner = _apply_gradient(learner, theta.grad.numpy(), settings, progress, steps)
    return _finish_update(learner, sampled, float(before.device_entropy))


def _score(inputs: SequenceInputs, device: Tensor, priority: Tensor | None) -> Sampled:
    levels = None if priority is None else priority.numpy()
    devices: Longs = device.numpy()
    return Sampled(devices, inputs.graph.score(devices, levels, inputs.shape.order))


def _compare_rewards(learner: SequenceLearner, index: int, cost: Floats) -> tuple[SequenceLearner, Floats]:
    """Return by how much each reward exceeds the baseline, divided by its deviation; and follow with the baseline.

    The reward is minus the square root of the cost, as published.
    """
    reward = -np.sqrt(cost)
    old = float(learner.baseline[index]) or float(reward.mean())
    advantage = reward - old
    deviation = float(np.sqrt((advantage**2).mean()))
    baseline = learner.baseline.copy()
    baseline[index] = BASELINE_INERTIA * old + (1 - BASELINE_INERTIA) * float(reward.mean())
    return replace(learner, baseline=baseline), advantage / deviation if deviation > 1e-9 else 0 * advantage


def _apply_gradient(
    learner: SequenceLearner, gradient: Singles, settings: SequenceSettings, progress: float, steps: int
) -> SequenceLearner:
    """Return the learner after a step of Adam, its `steps`-th."""
    rate = settings.learning_rate * (1 - 0.9 * progress)
    theta, first, second = take_adam_step(learner, gradient, settings.max_gradient, rate, steps)
    policy = learner.policy.with_parameters(theta, learner.policy.updates)
    return replace(learner, policy=policy, first=first, second=second)


def _finish_update(learner: SequenceLearner, sampled: Sampled, entropy: float) -> SequenceUpdate:
    policy, best = learner.policy, sampled.best()
    return SequenceUpdate(
        learner=replace(learner, policy=policy.with_parameters(policy.theta, policy.updates + 1)),
        cost=float(sampled.scores.cost.mean()),
        best_cost=float("nan") if best is None else float(sampled.scores.cost[best]),
        entropy=entropy,
        sampled=sampled,
    )


# Names of the moments of the optimiser and of the baselines in a checkpoint.
MOMENTS, BASELINES = ("adam.first", "adam.second"), "baselines"


def write_sequence_policy(path: Path, policy: SequencePolicy, learner: SequenceLearner | None = None) -> None:
    """Write a policy; with a learner, also what its training can be resumed from.

    Raises UsageError or ExecutionError if the file cannot be written.
    """
    shape, tensors = policy.shape, policy.shape.split(policy.theta)
    if learner:
        tensors |= dict(zip((*MOMENTS, BASELINES), (learner.first, learner.second, learner.baseline)))
    write_policy_file(path, shape.kind, (shape, policy), tensors)


def read_sequence_policy(path: Path, kind: Kind) -> SequencePolicy:
    """Return the policy of a kind in a file.

    Raises:
        InputError: The file cannot be read, is damaged, is not such a policy, or is of a newer version.
    """
    return read_sequence_learner(path, kind)[0]


def read_sequence_learner(path: Path, kind: Kind) -> tuple[SequencePolicy, SequenceLearner | None]:
    """Return the policy in a file, and the learner if it is a checkpoint."""
    file = PolicyFile(path, kind)
    shape = SequenceShape(**file.read_fields(SequenceShape, MAX_SIZES))
    described = file.read_fields(SequencePolicy)
    if shape.variant not in VARIANTS[kind]:
        raise file.damage(f"its metadata cannot be read (its variant is {format_value(shape.variant)})")
    if shape.width % ATTENTION_HEADS:
        raise file.damage(f"its metadata cannot be read (its sizes are not multiples of {ATTENTION_HEADS})")
    shapes, parameters = shape.sizes, (shape.parameters,)
    if BASELINES in file.arrays:
        shapes |= {**dict.fromkeys(MOMENTS, parameters), BASELINES: (described["graphs"],)}
    tensors = file.read_tensors(shapes)
    policy = SequencePolicy(shape, np.concatenate([tensors[name].ravel() for name in shape.sizes]), **described)
    if BASELINES not in tensors:
        return policy, None
    return policy, SequenceLearner(policy, *(tensors[name] for name in (*MOMENTS, BASELINES)))
