"""Train a policy on graphs, with checkpoints, and keep the one that places unseen graphs best."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import numpy as np

from onnxplace.errors import InputError, UsageError, format_count
from onnxplace.graph import Ints
from onnxplace.learn.curves import CurvePoint, Plotted, plot_curve, read_curve, write_curve
from onnxplace.learn.problems import LearningGraph
from onnxplace.passes.learning import (
    COMPLETION_ROUNDS,
    ROUNDS,
    Environment,
    Learner,
    Order,
    Policy,
    Settings,
    Shape,
    Start,
    Update,
    find_completions,
    read_learner,
    require_torch,
    update_from_completions,
    update_policy,
    write_policy,
)
from onnxplace.utils import budget_clock, format_path, require_writable

# One graph of so many is not trained on: it tells which policy is best. With fewer graphs, all are for both.
VALIDATION_PERIOD = 6
# Updates between two points of the curve.
POINT_UPDATES = 32
# Of two policies whose costs differ by this share of the lower one, the later one is kept: a few graphs cannot tell
# which one is better, but the later one has learned more.
SIMILAR_COST = 0.002
# Seconds between two checkpoints.
CHECKPOINT_SECONDS = 30.0

Item = TypeVar("Item")
Observer = Callable[[float, Any], None]
"""Called with the progress from 0 to 1 at each point of the curve."""


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
        if self.seconds <= 0 and self.updates <= 0:
            message, hint = "expected a time limit or a number of updates, got neither", "give --seconds or --updates"
            raise UsageError("H008", message, hint=hint)


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


def checkpoint_path(output: Path) -> Path:
    """Return the file from which the training of a policy is resumed."""
    return output.with_suffix(f".checkpoint{output.suffix}")


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
        InputError: The checkpoint does not belong to these options.
    """
    torch = require_torch()
    require_writable(output)
    if not graphs:
        raise InputError("H011", "expected at least one graph to learn from, got none")
    torch.set_num_threads(options.threads)
    training = Training.of(graphs, options, output, family, resume)
    return run_training(training, observer, f"placeto, {family or format_count(len(graphs), 'graph')}")


def run_training(training: Training, observer: Observer | None, title: str) -> LearnResult:
    """Train until a limit is reached; write the policy, its checkpoint and its learning curve with a title."""
    output = training.output
    try:
        for progress, point in training.run():
            if observer:
                observer(progress, point)
    finally:
        training.write_checkpoint()
    files = [output, checkpoint_path(output), output.with_suffix(".csv")]
    image = output.with_suffix(".png")
    if plot_curve(image, training.points, title):
        files.append(image)
    return LearnResult(training.best, training.points, files)


def hold_out(items: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
    """Return what to train on, and what tells which policy is best: one in six, or all if there are fewer."""
    if len(items) < VALIDATION_PERIOD:
        return items, items
    validation = range(len(items))[::-VALIDATION_PERIOD]
    return [item for index, item in enumerate(items) if index not in validation], [items[index] for index in validation]


@dataclass
class Training:
    """A training in progress."""

    point_kind: ClassVar[type[Plotted]] = CurvePoint
    point_updates: ClassVar[int] = POINT_UPDATES

    environments: Sequence[Environment]
    validation: Sequence[Environment]
    options: LearnOptions
    output: Path
    learner: Learner
    best: Policy
    best_cost: float
    points: list[Any]
    completions: dict[int, Ints] = field(default_factory=dict)
    """Good placements of the graphs that had a turn."""

    @staticmethod
    def of(graphs: Sequence[LearningGraph], options: LearnOptions, output: Path, family: str, resume: bool) -> Training:
        """Return a training at its beginning, or where its checkpoint is."""
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
        training = Training(trained, held_out, options, output, Learner.of(policy), policy, np.inf, [])
        if resume:
            training.restore(policy)
        return training

    def restore(self, expected: Policy) -> None:
        """Continue from the checkpoint; raises InputError if it is of another training."""
        path = checkpoint_path(self.output)
        policy, learner = read_learner(path)
        described = replace(policy, theta=expected.theta, updates=0)
        if learner is None or repr(described) != repr(expected):
            message = "the checkpoint belongs to another training: options, graphs and seed must be equal"
            hint = "repeat the options of that training, or omit --resume to start anew"
            raise InputError("H012", message, where=format_path(path), hint=hint)
        points = read_curve(self.output.with_suffix(".csv"), self.point_kind)
        self.learner = learner
        self.points = [point for point in points if point.updates <= policy.updates]
        if self.output.exists() and self.points:
            self.best, _ = read_learner(self.output)
            self.best_cost = min(point.validation_cost for point in self.points)

    def run(self) -> Iterator[tuple[float, Any]]:
        """Update the policy until a limit is reached; yield the progress and a point now and then."""
        start = budget_clock()
        before = self.points[-1].seconds if self.points else 0.0
        last_checkpoint, recent = start, list[Update]()
        while True:
            elapsed = budget_clock() - start
            progress = self._progress(before, elapsed)
            if recent and (progress >= 1 or self.learner.policy.updates % self.point_updates == 0):
                yield progress, self.add_point(recent, before + elapsed)
                recent = []
            if progress >= 1:
                return
            if budget_clock() - last_checkpoint > CHECKPOINT_SECONDS:
                self.write_checkpoint()
                last_checkpoint = budget_clock()
            update = self.update(self._next_graph(), progress)
            self.learner = update.learner
            recent.append(update)

    def _progress(self, before: float, elapsed: float) -> float:
        options = self.options
        by_time = (before + elapsed) / (before + options.seconds) if options.seconds > 0 else 0.0
        by_count = self.learner.policy.updates / options.updates if options.updates > 0 else 0.0
        return min(1.0, max(by_time, by_count))

    def _next_graph(self) -> int:
        """Return the graph of the next update: each once in a random order, then in another one."""
        count = len(self.environments)
        turn, position = divmod(self.learner.policy.updates, count)
        return int(np.random.default_rng([self.options.settings.seed, turn, 1]).permutation(count)[position])

    def update(self, index: int, progress: float) -> Update:
        """Return the update of the policy from one graph; its first turn includes the search for completions."""
        environment, settings = self.environments[index], self.options.settings
        if settings.learn_from == "rewards":
            return update_policy(self.learner, environment, settings, progress)
        if index not in self.completions:
            self.completions[index] = find_completions(environment, settings)
        return update_from_completions(self.learner, environment, self.completions[index], settings, progress)

    def add_point(self, recent: Sequence[Update], seconds: float) -> Any:
        """Evaluate the policy on unseen graphs; keep it if it is the best so far."""
        policy = self.learner.averaged_policy
        episodes = [environment.run_best(policy.network) for environment in self.validation]
        starts = [first.trajectory.cost[0] for first, *_ in episodes]
        bests = [[best[0] for item in several if (best := item.best())] for several in episodes]
        costs = [min(found, default=start) for found, start in zip(bests, starts)]
        cost = float(np.exp(np.mean(np.log(np.maximum(costs, 1e-12)))))
        if cost <= self.best_cost * (1 + SIMILAR_COST):
            self.best = policy
        self.best_cost = min(self.best_cost, cost)
        self.points.append(
            CurvePoint(
                updates=self.learner.policy.updates,
                seconds=round(seconds, 3),
                episodes=self.learner.policy.updates * self.options.settings.episodes,
                train_cost=float(np.mean([update.cost for update in recent])),
                train_best_cost=float(np.mean([update.best_cost for update in recent])),
                entropy=float(np.mean([update.entropy for update in recent])),
                validation_cost=cost,
                start_cost=float(np.exp(np.mean(np.log(np.maximum(starts, 1e-12))))),
            )
        )
        return self.points[-1]

    def write_checkpoint(self) -> None:
        """Write what a training is resumed from, and the best policy so far."""
        write_policy(checkpoint_path(self.output), self.learner.policy, self.learner)
        write_curve(self.output.with_suffix(".csv"), self.points, self.point_kind)
        if self.points:
            write_policy(self.output, self.best)
