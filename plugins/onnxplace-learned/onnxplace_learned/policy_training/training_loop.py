"""The common part of all trainings: limits, the loop over updates, checkpoints, learning curves, and files at the end.

A training is a `TrainingLoop`: it knows how to update its policy once, how to evaluate it on unseen graphs, and how to
write and read what it continues from. `run_training` does the rest. In most trainings, one graph after the other has a
turn, and a learner holds policy, moments and averages; these are a `TurnTraining`, which `learn_policy` begins. Random
numbers depend on the seed and the number of updates so far, so a training that is resumed continues as if it had not
been interrupted.
"""

from __future__ import annotations

import csv
import io
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import numpy as np

from onnxplace.errors import InputError, UsageError, format_count
from onnxplace.utils.files import format_path, read_text, require_writable, write_each, write_file
from onnxplace.utils.jit import budget_clock
from onnxplace.utils.progress import report_progress, report_time_limit
from onnxplace_learned.policy_training.learning_graphs import LearningGraph
from onnxplace_learned.pytorch import require_torch


@dataclass(frozen=True)
class Plotted:
    """A point of a learning curve; kinds of trainings add numbers of their own."""

    UNIT: ClassVar[str] = ""
    """What the vertical axis of the plot shows."""
    LINES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """The fields that are plotted, with their labels; the first one is the strongest line."""

    updates: int
    seconds: float
    """Seconds of training, evaluations included."""


@dataclass(frozen=True)
class CurvePoint(Plotted):
    """The state of a training after some updates."""

    UNIT: ClassVar[str] = "step, as a share of one device"
    LINES: ClassVar[Mapping[str, str]] = MappingProxyType(
        {
            "validation_cost": "unseen graphs",
            "start_cost": "unseen graphs, start",
            "train_cost": "training, at the end",
            "train_best_cost": "training, best",
        }
    )

    episodes: int
    train_cost: float
    """Mean cost at the ends of the episodes since the last point; 1 is all work on one device."""
    train_best_cost: float
    """Mean cost of the best placements that they visited."""
    entropy: float
    """Mean entropy of the choices."""
    validation_cost: float
    """Geometric mean cost of the best visited placement of graphs that are not trained on, without further episodes."""
    start_cost: float
    """The same of the placements that episodes start from."""


def write_curve(path: Path, points: Sequence[Plotted], kind: type[Plotted] = CurvePoint) -> None:
    """Write a learning curve as CSV, with the fields of `kind` as columns."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(item.name for item in fields(kind))
    writer.writerows(asdict(point).values() for point in points)
    write_file(path, lambda file: file.write(text.getvalue().encode()))


def read_curve(path: Path, kind: type[Any] = CurvePoint) -> list[Any]:
    """Read a learning curve of points of this kind.

    Raises InputError if it is not one.
    """
    where = format_path(path)
    rows = list(csv.reader(read_text(path, "H012", "a learning curve").splitlines()))
    try:
        if not rows or rows[0] != [item.name for item in fields(kind)]:
            raise ValueError("it has other columns")
        # Annotations are texts.
        types = [int if item.type == "int" else float for item in fields(kind)]
        return [kind(*(convert(text) for convert, text in zip(types, row, strict=True))) for row in rows[1:]]
    except (ValueError, TypeError) as problem:
        hint = "omit --resume to start anew"
        raise InputError("H012", f"not the learning curve of a policy ({problem})", where=where, hint=hint) from None


def plot_curve(path: Path, points: Sequence[Plotted], title: str) -> bool:
    """Write a learning curve as PNG; return False if matplotlib is not installed or there are no points."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    if not points:
        return False
    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot(title=title, xlabel="seconds of training", ylabel=points[0].UNIT)
    seconds = [point.seconds for point in points]
    for index, (name, label) in enumerate(points[0].LINES.items()):
        axes.plot(seconds, [getattr(point, name) for point in points], label=label, alpha=0.6 if index else 1.0)
    axes.legend()
    write_file(path, lambda stream: figure.savefig(stream, format="png", metadata={"Software": None}))
    return True


# Seconds between two checkpoints.
CHECKPOINT_SECONDS = 30.0

# Every sixth graph is held out to choose the best policy; with fewer graphs, all are for both.
VALIDATION_PERIOD = 6
Item = TypeVar("Item")


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


Observer = Callable[[float, Any], None]
"""Called with the progress from 0 to 1 at each point of the curve."""


def checkpoint_path(output: Path) -> Path:
    """Return the file from which the training of a policy is resumed."""
    return output.with_suffix(f".checkpoint{output.suffix}")


def require_limit(seconds: float, count: int, noun: str = "updates") -> None:
    """Raise UsageError unless a training has a time limit or a number of updates."""
    if seconds <= 0 and count <= 0:
        message = f"expected a time limit or a number of {noun}, got neither"
        raise UsageError("U042", message, hint=f"give --seconds or --{noun}")


@dataclass(frozen=True, kw_only=True)
class LearnOptions:
    """How to train a policy; kinds of policies add options of their own."""

    seconds: float = 0.0
    """Time limit, without the compilation of loops on first use; 0 for none."""
    updates: int = 0
    """Number of updates, for a result that does not depend on the clock; 0 for no limit."""
    threads: int = 1

    def __post_init__(self) -> None:
        require_limit(self.seconds, self.updates)


def prepare_training(graphs: Sequence[LearningGraph], output: Path, threads: int) -> None:
    """Check what every training needs, before any work, and set the threads of torch.

    Raises:
        UsageError: torch is missing, or the file cannot be written.
        InputError: There are no graphs.
    """
    torch = require_torch()
    require_writable(output)
    require_graphs(graphs)
    torch.set_num_threads(threads)


def require_graphs(graphs: Sequence[LearningGraph]) -> None:
    """Raise InputError unless there are graphs."""
    if not graphs:
        hint = "give a model or a cost graph with nodes"
        raise InputError("H011", "expected at least one graph to learn from, got none", hint=hint)


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


@dataclass
class TurnTraining(TrainingLoop):
    """A training in which one graph after the other has a turn."""

    environments: Sequence[Any]
    """The graphs to train on."""
    validation: Sequence[Any]
    """The graphs that tell which policy is best."""
    options: Any
    """Its `seconds` and `updates` limit the training; its `settings` have the seed."""
    learner: Any
    """The policy, with what continues its training."""

    @staticmethod
    @abstractmethod
    def start(graphs: Sequence[LearningGraph], options: Any, output: Path, family: str) -> TurnTraining:
        """Return a training at its beginning."""

    @classmethod
    @contextmanager
    def opened(cls, graphs: Sequence[LearningGraph], options: Any, output: Path, family: str) -> Iterator[TurnTraining]:
        """Yield a training at its beginning, with what exists as long as the training."""
        yield cls.start(graphs, options, output, family)

    @property
    @abstractmethod
    def name(self) -> str:
        """Return what the plot of the curve calls the policy."""

    def begin(self, *, resume: bool) -> None:
        """Do what precedes the first update of a run."""

    @property
    def measured_ratio(self) -> float | None:
        """Return that of `LearnResult`."""
        return None

    @abstractmethod
    def update(self, index: int, progress: float) -> Any:
        """Return the update of the policy from one graph: it has the next `learner`."""

    @abstractmethod
    def read_learner(self, path: Path) -> tuple[Any, Any]:
        """Return the policy in a file, and what continues its training, or None."""

    @abstractmethod
    def write_policy(self, path: Path, policy: Any, learner: Any = None) -> None:
        """Write a policy, with a learner also what continues its training."""

    @property
    def updates(self) -> int:
        return int(self.learner.policy.updates)

    @property
    def limits(self) -> tuple[float, int]:
        return self.options.seconds, self.options.updates

    def improve(self, progress: float) -> Any:
        """Update the policy from the next graph."""
        update = self.update(self._next_graph(), progress)
        self.learner = update.learner
        return update

    def _next_graph(self) -> int:
        """Return the graph of the next update: each once in a random order, then in another one."""
        count = len(self.environments)
        turn, position = divmod(self.updates, count)
        return int(np.random.default_rng([self.options.settings.seed, turn, 1]).permutation(count)[position])

    def restore(self) -> None:
        """Continue from the checkpoint; raises InputError if it is of another training."""
        policy, learner = self.read_learner(checkpoint_path(self.output))
        described = replace(policy, theta=self.best.theta, updates=0)
        self.require_same(learner is not None and repr(described) == repr(self.best))
        points, self.learner = self.read_points(), learner
        self.restore_points(points, policy.updates, lambda path: self.read_learner(path)[0])

    def write_learner(self, path: Path) -> None:
        """Write the policy, and what continues its training."""
        self.write_policy(path, self.learner.policy, self.learner)

    def write_best(self, path: Path) -> None:
        """Write the best policy so far."""
        self.write_policy(path, self.best)


def hold_out(items: Sequence[Item]) -> tuple[Sequence[Item], Sequence[Item]]:
    """Return what to train on, and what tells which policy is best: one in six, or all if there are fewer."""
    if len(items) < VALIDATION_PERIOD:
        return items, items
    validation = range(len(items))[::-VALIDATION_PERIOD]
    return [item for index, item in enumerate(items) if index not in validation], [items[index] for index in validation]


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


def learn_policy(
    kind: type[TurnTraining],
    graphs: Sequence[LearningGraph],
    options: LearnOptions,
    output: Path,
    *,
    family: str = "",
    resume: bool = False,
    observer: Observer | None = None,
) -> LearnResult:
    """Train a policy on graphs, and write it, its checkpoint and its learning curve (CSV, and PNG).

    Graphs take turns. Equal options, graphs and numbers of updates give equal policies, also if a training is
    interrupted and resumed, unless rewards are measured. An interruption writes a checkpoint.

    Args:
        kind: What is trained: `PlacetoTraining`, `MeasuredTraining` or `SequenceTraining`.
        graphs: One in six of them, if there are as many, only tells which policy is best. Rewards can be measured for
            ONNX models on devices of this machine; then all are for both.
        options: How to train, as the kind takes them.
        output: The file of the policy; the others are next to it.
        family: What to call the graphs.
        resume: Whether to continue from the checkpoint.
        observer: Called at each point of the learning curve.

    Raises:
        UsageError: torch is missing, a file cannot be written, or a measured graph is not a model that can be run here.
        InputError: There are no graphs, or the checkpoint does not belong to these options.
        InfeasibleError: A measured model does not fit the devices.
    """
    prepare_training(graphs, output, options.threads)
    with kind.opened(graphs, options, output, family) as training:
        if resume:
            training.restore()
        training.begin(resume=resume)
        title = f"{training.name}, {family or format_count(len(graphs), 'graph')}"
        files = run_training(training, observer, title)
    return LearnResult(training.best, training.points, files, training.measured_ratio)
