"""The common part of all trainings: limits, the loop over updates, checkpoints, and the files at the end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from onnxplace.errors import InputError, UsageError
from onnxplace.utils import budget_clock, format_path, report_progress, report_time_limit, require_writable, write_each
from onnxplace_learned.policies.gradients import require_torch
from onnxplace_learned.training.curves import Plotted, plot_curve, read_curve, write_curve
from onnxplace_learned.training.problems import LearningGraph

# Seconds between two checkpoints.
CHECKPOINT_SECONDS = 30.0

Observer = Callable[[float, Any], None]
"""Called with the progress from 0 to 1 at each point of the curve."""


def checkpoint_path(output: Path) -> Path:
    """Return the file from which the training of a policy is resumed."""
    return output.with_suffix(f".checkpoint{output.suffix}")


def require_limit(seconds: float, count: int, noun: str = "updates") -> None:
    """Raise UsageError unless a training has a time limit or a number of updates."""
    if seconds <= 0 and count <= 0:
        message = f"expected a time limit or a number of {noun}, got neither"
        raise UsageError("H008", message, hint=f"give --seconds or --{noun}")


def prepare_training(graphs: Sequence[LearningGraph], output: Path, threads: int) -> None:
    """Check what every training needs, before any work, and set the threads of torch.

    Raises:
        UsageError: torch is missing, or the file cannot be written.
        InputError: There are no graphs.
    """
    torch = require_torch()
    require_writable(output)
    if not graphs:
        hint = "give a model or a cost graph with nodes"
        raise InputError("H011", "expected at least one graph to learn from, got none", hint=hint)
    torch.set_num_threads(threads)


def geometric_mean(costs: Sequence[float]) -> float:
    """Return the geometric mean of costs, of which none counts as less than 1e-12.

    >>> round(geometric_mean([0.5, 2.0]), 9)
    1.0
    """
    return float(np.exp(np.mean(np.log(np.maximum(costs, 1e-12)))))


@dataclass
class TrainingLoop(ABC):
    """A training in progress: updates until a limit is reached, with points of a curve and checkpoints."""

    point_kind: ClassVar[type[Plotted]]
    point_updates: ClassVar[int]
    """Updates between two points of the curve."""

    output: Path
    best: Any
    """The policy that placed unseen graphs best."""
    best_cost: float = field(default=float("inf"), kw_only=True)
    points: list[Any] = field(default_factory=list, kw_only=True)
    recent: list[Any] = field(default_factory=list, kw_only=True)
    """Results of the updates since the last point."""

    @property
    @abstractmethod
    def updates(self) -> int:
        """Return the number of updates so far."""

    @property
    @abstractmethod
    def limits(self) -> tuple[float, int]:
        """Return the time limit in seconds and the number of updates; 0 for none."""

    @abstractmethod
    def improve(self, progress: float) -> Any:
        """Update the policy once, and return the result for the next point."""

    @abstractmethod
    def evaluate(self, recent: Sequence[Any], seconds: float) -> Any:
        """Evaluate the policy; keep it if it is the best so far; return the next point of the curve."""

    @abstractmethod
    def restore(self) -> None:
        """Continue from the checkpoint; raises InputError if it is of another training."""

    @abstractmethod
    def write_learner(self, path: Path) -> None:
        """Write what a training is resumed from."""

    @abstractmethod
    def write_best(self, path: Path) -> None:
        """Write the best policy so far."""

    def write_checkpoint(self) -> None:
        """Write the best policy so far, what a training is resumed from, and the curve."""
        write_each(
            *([lambda: self.write_best(self.output)] if self.points else []),
            lambda: self.write_learner(checkpoint_path(self.output)),
            lambda: write_curve(self.output.with_suffix(".csv"), self.points, self.point_kind),
        )

    def keep_if_better(self, policy: Any, cost: float) -> None:
        """Keep a policy if it costs less than the best so far."""
        if cost < self.best_cost:
            self.best, self.best_cost = policy, cost

    def finish(self) -> Sequence[Path]:
        """Do what follows the last update; return the files besides policy, checkpoint and curve."""
        return ()

    def run(self) -> Iterator[tuple[float, Any]]:
        """Update the policy until a limit is reached; yield the finished share of this run and a point now and then."""
        start, before = budget_clock(), self.points[-1].seconds if self.points else 0.0
        last_checkpoint, progress = start, self._progress(before, 0.0)
        first = progress
        report_progress(0)
        if self.limits[0] > 0:
            report_time_limit(self.limits[0])
        while progress < 1.0:
            self.recent.append(self.improve(progress))
            elapsed = budget_clock() - start
            progress = self._progress(before, elapsed)
            if self.updates % self.point_updates == 0 or progress >= 1.0:
                recent, self.recent = self.recent, []
                self.points.append(self.evaluate(recent, before + elapsed))
                yield (progress - first) / (1 - first), self.points[-1]
            if budget_clock() - last_checkpoint > CHECKPOINT_SECONDS:
                self.write_checkpoint()
                last_checkpoint = budget_clock()

    def _progress(self, before: float, elapsed: float) -> float:
        seconds, updates = self.limits
        by_time = (before + elapsed) / (before + seconds) if seconds > 0 else 0.0
        by_count = self.updates / updates if updates > 0 else 0.0
        return min(1.0, max(by_time, by_count))

    def require_same(self, is_same: bool, what: str = "options, graphs and seed") -> None:
        """Raise InputError unless the checkpoint is of a training with the same inputs."""
        if not is_same:
            message = f"the checkpoint belongs to another training: {what} must be equal"
            hint = "repeat the options of that training, or omit --resume to start anew"
            raise InputError("H012", message, where=format_path(checkpoint_path(self.output)), hint=hint)

    def restore_points(self, points: Sequence[Any], updates: int, read_best: Callable[[Path], Any]) -> None:
        """Continue the curve after some updates, and with the best policy on disk."""
        self.points = [point for point in points if point.updates <= updates]
        if self.output.exists() and self.points:
            self.best = read_best(self.output)
            self.best_cost = min(point.validation_cost for point in self.points)

    def read_points(self) -> Sequence[Any]:
        """Return the points on disk; raises InputError if they are not of such a training."""
        return read_curve(self.output.with_suffix(".csv"), self.point_kind)


def run_training(training: TrainingLoop, observer: Observer | None, title: str) -> list[Path]:
    """Train until a limit is reached; write policy, checkpoint and curve, with a title, and return the files."""
    output = training.output
    try:
        for progress, point in training.run():
            if observer:
                observer(progress, point)
        further_files = training.finish()
    finally:
        training.write_checkpoint()
    files = [output, checkpoint_path(output), output.with_suffix(".csv"), *further_files]
    image = output.with_suffix(".png")
    return [*files, image] if plot_curve(image, training.points, title) else files
