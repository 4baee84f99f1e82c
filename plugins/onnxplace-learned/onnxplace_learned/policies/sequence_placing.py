"""Place a problem with a sequence policy: the likeliest placement, samples, and training on the problem itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from onnxplace.errors import InputError, UsageError
from onnxplace.graph.op_graph import Ints
from onnxplace.problem import PlacementProblem
from onnxplace_learned.policies.placing import MAX_KEPT, PolicyResult, Visited
from onnxplace_learned.policies.sequence_graph import SequenceGraph
from onnxplace_learned.policies.sequence_learning import (
    Sampled,
    SequenceLearner,
    SequenceSettings,
    read_sequence_policy,
    sample_policy,
    update_sequence_policy,
)
from onnxplace_learned.policies.sequence_networks import SequenceInputs
from onnxplace_learned.policies.sequence_policy import SequencePolicy, SequenceShape, require_known_devices
from onnxplace_learned.pytorch import require_torch


@dataclass(frozen=True)
class SequenceOptions:
    """How a placer applies a sequence policy."""

    episodes: int
    """Placements to sample and learn from on the problem itself."""
    samples: int
    """Placements to sample without learning, next to the likeliest one."""
    max_nodes: int
    """Problems with more nodes are coarsened first."""
    seed: int


def load_policy(file: str, shape: SequenceShape, episodes: int, seed: int, *, is_any_variant: bool) -> SequencePolicy:
    """Return the policy in a file, or an untrained one of a shape if there is none.

    With `is_any_variant`, the one in the file may be of another variant.

    Raises:
        UsageError: torch is missing, the policy knows fewer devices, or there is neither a file nor a training.
        InputError: The file is not a policy of this kind, or of another variant.
    """
    require_torch()
    if file:
        policy = read_sequence_policy(Path(file), shape.kind)
        require_known_devices(policy, shape.devices, file)
        if policy.shape.variant != shape.variant and not is_any_variant:
            option = "groups" if shape.kind == "hierarchical" else "heads"
            message = f"the policy was trained with {option}={policy.shape.variant}, expected {shape.variant}"
            hint = f"omit {option}, or `onnxplace learn {shape.kind} --{option} {shape.variant}`"
            raise InputError("H003", message, where=file, hint=hint)
        return policy
    if not episodes:
        hint = f"{shape.kind}{{policy=F.safetensors}} applies one, {shape.kind}{{episodes=N}} trains one on this graph"
        raise UsageError("U042", "expected a policy or episodes to train one, got neither", where=shape.kind, hint=hint)
    return SequencePolicy(shape, shape.draw_parameters(seed), seed=seed)


def place_with_sequence(problem: PlacementProblem, policy: SequencePolicy, options: SequenceOptions) -> PolicyResult:
    """Take the best of the likeliest and of sampled placements; sample `episodes` more and learn from them, if any."""
    graph = SequenceGraph.of(problem, options.max_nodes, policy.shape.max_items)
    inputs = SequenceInputs(graph, policy.shape)
    alone = graph.environment.evaluate(graph.environment.place_on_one_device(0))
    visited = list[Visited]()
    if len(graph):
        visited = _collect_best(visited, problem, graph, sample_policy(policy, inputs, options.samples, options.seed))
        settings = SequenceSettings.of(policy.shape.kind, options.seed)
        # A policy that was trained before does not explore anew.
        settings = replace(settings, noise_updates=0 if policy.updates else settings.noise_updates)
        learner, done = SequenceLearner.of(replace(policy, updates=0), 1), 0
        while done < options.episodes:
            count = min(settings.placements, options.episodes - done)
            progress = done / options.episodes
            update = update_sequence_policy(learner, inputs, 0, replace(settings, placements=count), progress)
            learner, done = update.learner, done + count
            visited = _collect_best(visited, problem, graph, update.sampled)
        if options.episodes:
            visited = _collect_best(
                visited, problem, graph, sample_policy(learner.policy, inputs, options.samples, options.seed)
            )
    scale = graph.environment.rules.scale_seconds
    return PolicyResult(
        visited=visited,
        episodes=options.episodes,
        start_cost=alone.seconds / scale if alone else 1.0,
        seconds_per_cost=scale,
        start_name="one device",
    )


def _collect_best(
    visited: list[Visited], problem: PlacementProblem, graph: SequenceGraph, sampled: Sampled
) -> list[Visited]:
    """Add the best of sampled placements that fits, and return the best of all."""
    best = sampled.best()
    if best is None:
        # It may fit in another order of nodes.
        best = int(sampled.scores.cost.argmin())
    device = graph.expand(sampled.device[best])[graph.cluster]
    found = Visited(float(sampled.scores.cost[best]), device, _refine_order(problem, graph, sampled, best))
    return sorted([*visited, found], key=lambda item: item.cost)[:MAX_KEPT]


def _refine_order(problem: PlacementProblem, graph: SequenceGraph, sampled: Sampled, index: int) -> Ints:
    """Return the nodes of the problem in the simulated order of their coarse nodes."""
    rank = np.empty(len(graph.problem.graph), dtype=np.int64)
    rank[sampled.scores.order[index]] = np.arange(len(rank))
    return np.lexsort((problem.graph.positions, rank[graph.cluster])).astype(np.int32)
