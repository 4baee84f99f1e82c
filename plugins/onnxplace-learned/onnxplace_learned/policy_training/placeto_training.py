"""Train a policy on graphs, with checkpoints, and keep the one that places unseen graphs best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from onnxplace.graph.op_graph import Ints
from onnxplace_learned.policies.environment import Environment, Order, Start
from onnxplace_learned.policies.placeto_learning import (
    Learner,
    Settings,
    Update,
    find_completions,
    read_learner,
    update_from_completions,
    update_policy,
    write_policy,
)
from onnxplace_learned.policies.placeto_network import COMPLETION_ROUNDS, ROUNDS, Policy, Shape
from onnxplace_learned.policy_training.learning_graphs import LearningGraph
from onnxplace_learned.policy_training.training_loop import (
    CurvePoint,
    LearnOptions,
    Plotted,
    TurnTraining,
    geometric_mean,
    hold_out,
)

# Updates between two points of the curve.
POINT_UPDATES = 32
# Of two policies whose costs differ by this share of the lower one, the later one is kept: a few graphs cannot tell
# which one is better, but the later one has learned more.
SIMILAR_COST = 0.002


@dataclass(frozen=True, kw_only=True)
class PlacetoOptions(LearnOptions):
    """How to train a policy of `placeto`."""

    devices: int
    """The most devices that the policy has to know."""
    order: Order = "topological"
    start: Start = "m-etf"
    settings: Settings = field(default_factory=Settings)
    max_groups: int = 40
    """With measured rewards, models are coarsened to so many nodes."""


@dataclass
class PlacetoTraining(TurnTraining):
    """A training of Placeto's policy in progress."""

    point_kind: ClassVar[type[Plotted]] = CurvePoint
    point_updates: ClassVar[int] = POINT_UPDATES

    environments: Sequence[Environment]
    validation: Sequence[Environment]
    options: PlacetoOptions
    learner: Learner
    completions: dict[int, Ints] = field(default_factory=dict)
    """Good placements of the graphs that had a turn."""

    @staticmethod
    def start(graphs: Sequence[LearningGraph], options: PlacetoOptions, output: Path, family: str) -> PlacetoTraining:
        """Return a training at its beginning."""
        seed = options.settings.seed
        environments = [Environment(graph.problem, options.order, seed, options.start) for graph in graphs]
        trained, held_out = hold_out(environments)
        learns_from_completions = options.settings.learn_from == "completions"
        shape = Shape(options.devices, rounds=COMPLETION_ROUNDS if learns_from_completions else ROUNDS)
        policy = Policy(
            shape=shape,
            theta=shape.draw_parameters(seed),
            order=options.order,
            start=options.start,
            family=family,
            graphs=len(trained),
            seed=seed,
            learned_from=options.settings.learn_from,
        )
        return PlacetoTraining(output, policy, trained, held_out, options, Learner.of(policy))

    @property
    def name(self) -> str:
        return "placeto"

    def read_learner(self, path: Path) -> tuple[Any, Any]:
        """Return the policy in a file, and what continues its training, or None."""
        return read_learner(path)

    def write_policy(self, path: Path, policy: Policy, learner: Learner | None = None) -> None:
        """Write a policy, with a learner also what continues its training."""
        write_policy(path, policy, learner)

    def update(self, index: int, progress: float) -> Update:
        """Return the update of the policy from one graph; its first turn includes the search for completions."""
        environment, settings = self.environments[index], self.options.settings
        if settings.learn_from == "rewards":
            return update_policy(self.learner, environment, settings, progress)
        if index not in self.completions:
            self.completions[index] = find_completions(environment, settings)
        return update_from_completions(self.learner, environment, self.completions[index], settings, progress)

    def evaluate(self, recent: Sequence[Update], seconds: float) -> Any:
        """Evaluate the policy on unseen graphs; keep it if it is about the best so far."""
        policy = self.learner.averaged_policy
        episodes = [environment.run_best(policy.network) for environment in self.validation]
        starts = [first.trajectory.cost[0] for first, *_ in episodes]
        bests = [[best[0] for item in several if (best := item.best())] for several in episodes]
        costs = [min(several, default=start) for several, start in zip(bests, starts)]
        cost = geometric_mean(costs)
        if cost <= self.best_cost * (1 + SIMILAR_COST):
            self.best = policy
        self.best_cost = min(self.best_cost, cost)
        return CurvePoint(
            updates=self.learner.policy.updates,
            seconds=round(seconds, 3),
            episodes=self.learner.policy.updates * self.options.settings.episodes,
            train_cost=float(np.mean([update.cost for update in recent])),
            train_best_cost=float(np.mean([update.best_cost for update in recent])),
            entropy=float(np.mean([update.entropy for update in recent])),
            validation_cost=cost,
            start_cost=geometric_mean(starts),
        )
