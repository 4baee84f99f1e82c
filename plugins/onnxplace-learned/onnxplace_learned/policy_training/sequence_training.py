"""Train a policy of `hierarchical` or `go` on graphs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from onnxplace_learned.policies.sequence_graph import SequenceGraph
from onnxplace_learned.policies.sequence_learning import (
    SequenceLearner,
    SequenceSettings,
    SequenceUpdate,
    read_sequence_learner,
    sample_policy,
    update_sequence_policy,
    write_sequence_policy,
)
from onnxplace_learned.policies.sequence_networks import SequenceInputs
from onnxplace_learned.policies.sequence_policy import SequencePolicy, SequenceShape
from onnxplace_learned.policy_training.learning_graphs import LearningGraph
from onnxplace_learned.policy_training.training_loop import (
    LearnOptions,
    Plotted,
    TurnTraining,
    geometric_mean,
    hold_out,
    require_graphs,
)

# Placements of each unseen graph next to the likeliest one, as many as the placers sample.
VALIDATION_SAMPLES = 16


@dataclass(frozen=True, kw_only=True)
class SequenceLearnOptions(LearnOptions):
    """How to train a policy of `hierarchical` or `go`."""

    shape: SequenceShape
    settings: SequenceSettings
    max_nodes: int = 1_000
    """Graphs with more nodes are coarsened."""


@dataclass(frozen=True)
class SequencePoint(Plotted):
    """The state of a training after some updates."""

    UNIT: ClassVar[str] = "step, as a share of one device"
    LINES: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "validation_cost": "unseen graphs",
            "fallback_cost": "unseen graphs, m-ETF or one device",
            "train_cost": "training, sampled",
            "train_best_cost": "training, best",
        }
    )

    placements: int
    """Placements that were sampled and simulated."""
    train_cost: float
    """Mean cost of those since the last point; 1 is all work on one device, 10 what does not fit."""
    train_best_cost: float
    """Mean cost of the best of each update."""
    entropy: float
    """Mean entropy of the choices of devices."""
    validation_cost: float
    """Geometric mean cost of graphs that are not trained on: of the best of the likeliest and 16 sampled placements."""
    fallback_cost: float
    """The same of the better of m-ETF's placement and one device."""


@dataclass
class SequenceTraining(TurnTraining):
    """A training in progress."""

    point_kind: ClassVar[type[Plotted]] = SequencePoint
    point_updates: ClassVar[int] = 8

    @staticmethod
    def start(
        graphs: Sequence[LearningGraph], options: SequenceLearnOptions, output: Path, family: str
    ) -> SequenceTraining:
        """Return a training at its beginning."""
        graphs = [graph for graph in graphs if len(graph.problem.graph)]
        require_graphs(graphs)
        shape, seed = options.shape, options.settings.seed
        inputs = [
            SequenceInputs(SequenceGraph.of(graph.problem, options.max_nodes, shape.max_items), shape)
            for graph in graphs
        ]
        trained, held_out = hold_out(inputs)
        policy = SequencePolicy(shape, shape.draw_parameters(seed), family, len(trained), 0, seed)
        learner = SequenceLearner.of(policy, len(trained))
        return SequenceTraining(output, policy, trained, held_out, options, learner)

    @property
    def name(self) -> str:
        return str(self.options.shape.kind)

    def read_learner(self, path: Path) -> tuple[Any, Any]:
        """Return the policy in a file, and what continues its training, or None."""
        return read_sequence_learner(path, self.options.shape.kind)

    def write_policy(self, path: Path, policy: SequencePolicy, learner: SequenceLearner | None = None) -> None:
        """Write a policy, with a learner also what continues its training."""
        write_sequence_policy(path, policy, learner)

    def update(self, index: int, progress: float) -> Any:
        """Sample placements of one graph; return the update of the policy."""
        return update_sequence_policy(self.learner, self.environments[index], index, self.options.settings, progress)

    def evaluate(self, recent: Sequence[Any], seconds: float) -> SequencePoint:
        """Evaluate the policy on unseen graphs; keep it if it is the best so far."""
        updates: Sequence[SequenceUpdate] = recent
        policy = self.learner.policy
        seed = self.options.settings.seed
        samples = [sample_policy(policy, inputs, VALIDATION_SAMPLES, seed) for inputs in self.validation]
        cost = geometric_mean([float(sampled.scores.cost.min()) for sampled in samples])
        self.keep_if_better(policy, cost)
        bests = [update.best_cost for update in updates if np.isfinite(update.best_cost)]
        return SequencePoint(
            updates=policy.updates,
            seconds=round(seconds, 3),
            placements=policy.updates * self.options.settings.placements,
            train_cost=float(np.mean([update.cost for update in updates])),
            train_best_cost=float(np.mean(bests)) if bests else float("nan"),
            entropy=float(np.mean([update.entropy for update in updates])),
            validation_cost=cost,
            fallback_cost=geometric_mean([inputs.graph.fallback_cost for inputs in self.validation]),
        )
