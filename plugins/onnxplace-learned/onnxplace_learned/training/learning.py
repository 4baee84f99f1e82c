"""Train a policy on graphs, with checkpoints, and keep the one that places unseen graphs best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from onnxplace.errors import format_count
from onnxplace.graph import Ints
from onnxplace_learned.policies.completions import find_completions, update_from_completions
from onnxplace_learned.policies.environment import Environment
from onnxplace_learned.policies.networks import COMPLETION_ROUNDS, ROUNDS, Policy, Shape
from onnxplace_learned.policies.placeto_files import read_learner, write_policy
from onnxplace_learned.policies.training import Learner, Settings, Update, update_policy
from onnxplace_learned.policies.visiting_orders import Order, Start
from onnxplace_learned.training.curves import CurvePoint, Plotted
from onnxplace_learned.training.problems import LearningGraph
from onnxplace_learned.training.training_loop import (
    Observer,
    TrainingLoop,
    checkpoint_path,
    geometric_mean,
    prepare_training,
    require_limit,
    run_training,
)

# One graph of so many is not trained on: it tells which policy is best. With fewer graphs, all are for both.
VALIDATION_PERIOD = 6
# Updates between two points of the curve.
POINT_UPDATES = 32
# Of two policies whose costs differ by this share of the lower one, the later one is kept: a few graphs cannot tell
# which one is better, but the later one has learned more.
SIMILAR_COST = 0.002
Item = TypeVar("Item")


@dataclass(frozen=True)
class LearnOptions:
    """How to train a policy."""

    devices: int
    """The most devices that the policy has to know."""
    seconds: float = 0.0
    """Time limit, without the compilation of loops on first use; 0 for none."""
    updates: int = 0
    """Number of updates, for a result that does not depend on the clock; 0 for no limit."""
    order: Order = "topological"
    start: Start = "m-etf"
    settings: Settings = field(default_factory=Settings)
    threads: int = 1
    max_groups: int = 40
    """With measured rewards, models are coarsened to so many nodes."""

    def __post_init__(self) -> None:
        require_limit(self.seconds, self.updates)


@dataclass(frozen=True)
class LearnResult:
    """A trained policy."""

    policy: Any
    """The one that placed unseen graphs best."""
    points: Sequence[Any]
    files: Sequence[Path]
    """All that were written."""
    measured_ratio: float | None = None
    """With measured rewards, the step of the kept placement relative to that of a search, in turns; else None."""


def learn_placeto(
    graphs: Sequence[LearningGraph],
    options: LearnOptions,
    output: Path,
    *,
    family: str = "",
    resume: bool = False,
    observer: Observer | None = None,
) -> LearnResult:
    """Train Placeto's policy on graphs, and write it, its checkpoint and its learning curve (CSV, and PNG).

    Graphs take turns. Equal options, graphs and numbers of updates give equal policies, also if a training is
    interrupted and resumed. An interruption writes a checkpoint.

    Args:
        graphs: One in six of them, if there are as many, only tells which policy is best.
        options: How to train.
        output: The file of the policy; the others are next to it.
        family: What to call the graphs.
        resume: Whether to continue from the checkpoint.
        observer: Called after some updates.

    Raises:
        UsageError: torch is missing, or a file cannot be written.
        InputError: There are no graphs, or the checkpoint does not belong to these options.
    """
    prepare_training(graphs, output, options.threads)
    training = Training.of(graphs, options, output, family)
    if resume:
        training.restore()
    files = run_training(training, observer, f"placeto, {family or format_count(len(graphs), 'graph')}")
    return LearnResult(training.best, training.points, files)


def hold_out(items: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
    """Return what to train on, and what tells which policy is best: one in six, or all if there are fewer."""
    if len(items) < VALIDATION_PERIOD:
        return items, items
    validation = range(len(items))[::-VALIDATION_PERIOD]
    return [item for index, item in enumerate(items) if index not in validation], [items[index] for index in validation]


@dataclass
class Training(TrainingLoop):
    """A training of Placeto's policy in progress."""

    point_kind: ClassVar[type[Plotted]] = CurvePoint
    point_updates: ClassVar[int] = POINT_UPDATES

    environments: Sequence[Environment]
    validation: Sequence[Environment]
    options: LearnOptions
    learner: Learner
    completions: dict[int, Ints] = field(default_factory=dict)
    """Good placements of the graphs that had a turn."""

    @staticmethod
    def of(graphs: Sequence[LearningGraph], options: LearnOptions, output: Path, family: str) -> Training:
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
        return Training(output, policy, trained, held_out, options, Learner.of(policy))

    def restore(self) -> None:
        """Continue from the checkpoint; raises InputError if it is of another training."""
        policy, learner = self.read_learner(checkpoint_path(self.output))
        described = replace(policy, theta=self.best.theta, updates=0)
        self.require_same(learner is not None and repr(described) == repr(self.best))
        points, self.learner = self.read_points(), learner
        self.restore_points(points, policy.updates, lambda path: self.read_learner(path)[0])

    def read_learner(self, path: Path) -> tuple[Any, Any]:
        """Return the policy in a file, and what continues its training, or None."""
        return read_learner(path)

    @property
    def updates(self) -> int:
        return int(self.learner.policy.updates)

    @property
    def limits(self) -> tuple[float, int]:
        return self.options.seconds, self.options.updates

    def improve(self, progress: float) -> Update:
        """Update the policy from the next graph."""
        update = self.update(self._next_graph(), progress)
        self.learner = update.learner
        return update

    def _next_graph(self) -> int:
        """Return the graph of the next update: each once in a random order, then in another one."""
        count = len(self.environments)
        turn, position = divmod(self.updates, count)
        return int(np.random.default_rng([self.options.settings.seed, turn, 1]).permutation(count)[position])

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

    def write_learner(self, path: Path) -> None:
        """Write the policy, and what continues its training."""
        write_policy(path, self.learner.policy, self.learner)

    def write_best(self, path: Path) -> None:
        """Write the best policy so far."""
        write_policy(path, self.best)
