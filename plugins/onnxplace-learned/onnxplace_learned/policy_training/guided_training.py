"""Train the policy of `guided`: first by imitation of searched placements, then by policy gradient."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import ClassVar

import numpy as np

from onnxplace.errors import InputError
from onnxplace.utils.files import require_writable
from onnxplace_learned.policies.guided_gradients import Example, imitation_loss, make_example
from onnxplace_learned.policies.guided_policy import (
    MOMENTS,
    GuidedCheckpoint,
    GuidedGraph,
    GuidedPolicy,
    GuidedShape,
    evaluate_schedule,
    read_guided_checkpoint,
    read_guided_policy,
    run_schedule,
    write_guided_policy,
)
from onnxplace_learned.policies.teacher import Lesson, search_lesson
from onnxplace_learned.policy_training.learning_graphs import LearningGraph, vary_problem
from onnxplace_learned.policy_training.training_loop import (
    LearnResult,
    Observer,
    Plotted,
    TrainingLoop,
    checkpoint_path,
    geometric_mean,
    require_limit,
    run_training,
)
from onnxplace_learned.pytorch import require_torch

# Every seventh graph is held out to choose the best policy; with fewer graphs, all are for both. No divisor
# of the counts in use, and not of 3 either, or all of them would be variants of one kind.
VALIDATION_PERIOD = 7
# Steps between two points of the curve.
POINT_STEPS = 50
# Graphs of a step, and schedules that are sampled of each in the second part of the training.
BATCH_GRAPHS, SCHEDULES = 6, 4
# Share of the training after which schedules of its own are reinforced, and what imitation still counts then.
IMITATION_SHARE, LATE_IMITATION = 0.8, 0.3
# Adam's rate, from the first to the last step, and the largest norm of a gradient.
FIRST_RATE, LAST_RATE, MAX_NORM = 3e-3, 1e-4, 1.0


@dataclass(frozen=True)
class GuidedOptions:
    """How to train a policy."""

    seconds: float = 0.0
    """Time limit of the training, without searching for placements to imitate; 0 for none."""
    steps: int = 0
    """Number of steps, for a result that does not depend on the clock; 0 for no limit."""
    proposals: int = 5_000
    """Moves of each search for a placement to imitate."""
    seed: int = 0
    threads: int = 1

    def __post_init__(self) -> None:
        require_limit(self.seconds, self.steps, "steps")


@dataclass(frozen=True)
class GuidedPoint(Plotted):
    """The state of a training after some steps. Costs are geometric means of steps of unseen graphs."""

    UNIT: ClassVar[str] = "step, as a share of the best of one device, m-TOPO, m-ETF and m-SCT"
    LINES: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"validation_cost": "unseen graphs", "teacher_cost": "unseen graphs, imitated placements"}
    )

    loss: float
    right: float
    """Share of decisions as in the imitated placements."""
    validation_cost: float
    """Cost of the policy's best devices, relative to the best of one device, m-TOPO, m-ETF and m-SCT."""
    teacher_cost: float
    """Cost of the imitated placements, relative to the same."""


def learn_guided(
    graphs: Sequence[LearningGraph],
    options: GuidedOptions,
    output: Path,
    *,
    families: str = "",
    resume: bool = False,
    observer: Observer | None = None,
) -> LearnResult:
    """Train the policy of `guided` on graphs, and write it, its checkpoint and its learning curve (CSV, and PNG).

    Equal options, graphs and numbers of steps give equal policies, also if a training is interrupted and resumed. An
    interruption writes a checkpoint. The searches for placements to imitate are not in it: they are repeated.

    Args:
        graphs: One in seven of them, if there are as many, only tells which policy is best.
        options: How to train.
        output: The file of the policy; the others are next to it.
        families: What to call the graphs.
        resume: Whether to continue from the checkpoint.
        observer: Called after some steps.

    Raises:
        UsageError: torch is missing, or a file cannot be written.
        InputError: There is no graph with a placement that fits, or the checkpoint does not belong to these options.
    """
    require_torch()
    require_writable(output)
    if resume:
        read_guided_checkpoint(checkpoint_path(output))  # a missing one is reported before the searches
    problems = (vary_problem(graph.problem, index) for index, graph in enumerate(graphs))
    lessons = [search_lesson(problem, options.proposals, options.seed) for problem in problems]
    fitting = [item for item in lessons if item]
    return learn_from_lessons(fitting, options, output, families, resume=resume, observer=observer)


def learn_from_lessons(
    lessons: Sequence[Lesson],
    options: GuidedOptions,
    output: Path,
    families: str = "",
    *,
    resume: bool = False,
    observer: Observer | None = None,
) -> LearnResult:
    """Train the policy of `guided` to imitate placements; see `learn_guided`."""
    if not lessons:
        hint = "give graphs with nodes, on devices with enough memory"
        raise InputError("H011", "expected at least one graph that fits its devices, got none", hint=hint)
    training = GuidedTraining(lessons, options, families, output)
    if resume:
        training.restore()
    files = run_training(training, observer, f"guided, {families}" if families else "guided")
    return LearnResult(training.best, training.points, files)


class GuidedTraining(TrainingLoop):
    """A training in progress."""

    point_kind = GuidedPoint
    point_updates = POINT_STEPS

    best: GuidedPolicy

    def __init__(self, lessons: Sequence[Lesson], options: GuidedOptions, families: str, output: Path) -> None:
        torch = require_torch()
        torch.set_num_threads(options.threads)
        self.options = options
        is_held_out = np.zeros(len(lessons), dtype=bool)
        if len(lessons) >= VALIDATION_PERIOD:
            is_held_out[VALIDATION_PERIOD - 1 :: VALIDATION_PERIOD] = True
        self.graphs = [GuidedGraph(lesson.problem) for lesson in lessons]
        self.lessons = lessons
        self.trained = np.flatnonzero(~is_held_out)
        self.validation = np.flatnonzero(is_held_out) if is_held_out.any() else self.trained
        shape = GuidedShape()
        devices = max(len(lesson.problem.target.devices) for lesson in lessons)
        best = GuidedPolicy(
            shape=shape,
            tensors=shape.draw_tensors(options.seed),
            families=families,
            graphs=len(self.trained),
            devices=devices,
            steps=0,
            seed=options.seed,
        )
        super().__init__(output, best)
        self.parameters = {
            name: torch.from_numpy(tensor.copy()).requires_grad_() for name, tensor in best.tensors.items()
        }
        self.optimizer = torch.optim.Adam(list(self.parameters.values()), lr=FIRST_RATE)
        self.lesson_examples: dict[int, Example | None] = {}
        self.steps = 0
        self.rng = np.random.default_rng([options.seed, 3])

    @property
    def updates(self) -> int:
        return self.steps

    @property
    def limits(self) -> tuple[float, int]:
        return self.options.seconds, self.options.steps

    def improve(self, progress: float) -> tuple[float, float]:
        """Take a step; return its loss and its share of right decisions."""
        return self.step(self.rng, progress)

    def write_learner(self, path: Path) -> None:
        """Write the policy, and what continues its training."""
        moments = self.optimizer.state_dict()["state"]
        arrays = {
            f"{moment}.{name}": moments[index][moment].numpy()
            for index, name in enumerate(self.parameters if moments else ())
            for moment in MOMENTS
        }
        updates = int(moments[0]["step"]) if moments else 0
        checkpoint = GuidedCheckpoint(updates, self.rng.bit_generator.state, self.recent, arrays)
        write_guided_policy(path, self.policy(), checkpoint)

    def write_best(self, path: Path) -> None:
        """Write the best policy so far."""
        write_guided_policy(path, self.best)

    def restore(self) -> None:
        """Continue from the checkpoint; raises InputError if it is of another training."""
        torch = require_torch()
        policy, checkpoint = read_guided_checkpoint(checkpoint_path(self.output))
        is_same = repr(replace(policy, tensors={}, steps=0)) == repr(replace(self.best, tensors={}, steps=0))
        self.require_same(is_same, "families, graphs, devices and seed")
        points = self.read_points()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(torch.from_numpy(policy.tensors[name]))
        if checkpoint.updates:
            state = self.optimizer.state_dict()
            state["state"] = {
                index: {
                    "step": torch.tensor(float(checkpoint.updates)),
                    **{moment: torch.from_numpy(checkpoint.moments[f"{moment}.{name}"]) for moment in MOMENTS},
                }
                for index, name in enumerate(self.parameters)
            }
            self.optimizer.load_state_dict(state)
        self.rng.bit_generator.state = checkpoint.random_state
        self.recent = list(checkpoint.recent)
        self.steps = policy.steps
        self.restore_points(points, policy.steps, read_guided_policy)

    def step(self, rng: np.random.Generator, progress: float) -> tuple[float, float]:
        """Improve the parameters by some graphs; return the loss of imitation and the share of right decisions."""
        torch = require_torch()
        chosen = rng.choice(self.trained, min(BATCH_GRAPHS, len(self.trained)), replace=False).tolist()
        examples = [example for index in chosen if (example := self._lesson_example(index))]
        self.steps += 1
        if not examples:
            return 0.0, 1.0
        for group in self.optimizer.param_groups:
            group["lr"] = LAST_RATE + (FIRST_RATE - LAST_RATE) * (1 + np.cos(np.pi * progress)) / 2
        self.optimizer.zero_grad()
        imitation, right = imitation_loss(self.parameters, self.best.shape.rounds, examples)
        loss = imitation
        if progress >= IMITATION_SHARE and (sampled := self._sample_examples(chosen, rng)):
            reinforced, _ = imitation_loss(self.parameters, self.best.shape.rounds, sampled)
            loss = reinforced + LATE_IMITATION * imitation
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(list(self.parameters.values()), MAX_NORM)
        self.optimizer.step()
        return float(imitation.detach()), right

    def policy(self) -> GuidedPolicy:
        """Return the policy with its present parameters."""
        tensors = {name: tensor.detach().numpy().copy() for name, tensor in self.parameters.items()}
        return self.best.with_tensors(tensors, self.steps)

    def _lesson_example(self, index: int) -> Example | None:
        """Return the decisions that lead to an imitated placement; None if its weights do not fit in that order."""
        if index not in self.lesson_examples:
            graph, lesson = self.graphs[index], self.lessons[index]
            forced = np.zeros(len(graph.problem.pinned), dtype=np.int32)
            forced[graph.problem.group] = lesson.device
            schedule = run_schedule(graph, self.best.prepare(graph), forced=forced)
            self.lesson_examples[index] = make_example(graph, *schedule) if schedule else None
        return self.lesson_examples[index]

    def _sample_examples(self, chosen: Sequence[int], rng: np.random.Generator) -> list[Example]:
        """Sample schedules, each weighted by how much shorter its step is than the mean of its graph."""
        policy, examples = self.policy(), list[Example]()
        for index in chosen:
            graph = self.graphs[index]
            choice = policy.prepare(graph)
            schedules = [run_schedule(graph, choice, rng.random(len(graph.problem.pinned))) for _ in range(SCHEDULES)]
            fitting = [item for item in schedules if item]
            candidates = [evaluate_schedule(graph, device) for device, _ in fitting]
            # What does not fit counts as much as twice the step of the fallback.
            worst = 2 * self.lessons[index].fallback_seconds
            costs = np.array([candidate.seconds if candidate else worst for candidate in candidates])
            if len(costs) < 2 or (deviation := float(costs.std())) <= 1e-9 * worst:
                continue
            advantages = (costs.mean() - costs) / deviation
            examples += [
                make_example(graph, device, trace, float(advantage))
                for (device, trace), advantage in zip(fitting, advantages)
            ]
        return examples

    def evaluate(self, recent: Sequence[tuple[float, float]], seconds: float) -> GuidedPoint:
        """Evaluate the policy on unseen graphs; keep it if it is the best so far."""
        losses, rights = zip(*recent)
        policy, costs, teachers = self.policy(), list[float](), list[float]()
        for index in self.validation.tolist():
            graph, lesson = self.graphs[index], self.lessons[index]
            schedule = run_schedule(graph, policy.prepare(graph))
            candidate = evaluate_schedule(graph, schedule[0]) if schedule else None
            costs.append((candidate.seconds if candidate else 2 * lesson.fallback_seconds) / lesson.fallback_seconds)
            teachers.append(lesson.seconds / lesson.fallback_seconds)
        cost = geometric_mean(costs)
        self.keep_if_better(policy, cost)
        return GuidedPoint(
            updates=self.steps,
            seconds=round(seconds, 3),
            loss=float(np.mean(losses)),
            right=float(np.mean(rights)),
            validation_cost=cost,
            teacher_cost=geometric_mean(teachers),
        )
