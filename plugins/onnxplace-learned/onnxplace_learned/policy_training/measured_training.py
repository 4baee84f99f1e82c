"""Train a policy with measured rewards: the steps of bundles that are run on this machine."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import InfeasibleError, InputError, OnnxplaceError, UsageError
from onnxplace.facts import Emitted, Profile
from onnxplace.graph.op_graph import Ints
from onnxplace.measure.trial import find_trial_obstacle, is_doubtful, run_trials
from onnxplace.model.model import Model
from onnxplace.pipeline.pipeline import Pipeline, make_pass
from onnxplace.utils.file_locks import temporary_folder
from onnxplace.utils.files import read_json, write_each, write_file
from onnxplace_learned.policies.environment import Environment
from onnxplace_learned.policies.placeto_learning import Learner, Update, update_from_ends
from onnxplace_learned.policies.placeto_network import Policy, Shape, hash_names
from onnxplace_learned.policies.placing import coarsen_to, commit_devices
from onnxplace_learned.policies.teacher import search_lesson
from onnxplace_learned.policy_training.learning_graphs import LearningGraph
from onnxplace_learned.policy_training.placeto_training import PlacetoOptions, PlacetoTraining
from onnxplace_learned.policy_training.training_loop import (
    Plotted,
    geometric_mean,
)

PLACER = "placeto"


class BundleTimer:
    """Writes, runs and removes bundles of one model, one placement after the other.

    A step is the median of several runs after a warm-up, as in the trial of `compile`. Each placement is run once and
    its time is kept for the rest of the session.
    """

    def __init__(self, graph: LearningGraph, folder: Path) -> None:
        """Prepare to time a model.

        Args:
            graph: The model; raises UsageError unless it is one.
            folder: For the bundles; it has to exist.
        """
        if graph.state is None:
            message = f"a measured reward needs ONNX models, and {graph.name} is a cost graph"
            hint = "--graphs model.onnx, or a folder of models; cost graphs and families have simulated rewards"
            raise UsageError("H011", message, where="--reward", hint=hint)
        self.name, self.problem = graph.name, graph.problem
        self.bundles = 0
        """Number of bundles that were run."""
        self.disturbed = 0
        """How many of them waited so much for a core that their times are doubtful."""
        self._state, self._folder = graph.state, folder
        self._feeds = graph.state[Model].feeds()
        self._seconds: dict[bytes, float | None] = {}

    def require_time(self, device: Ints) -> float:
        """Return the step of a placement that has to work, in seconds.

        Raises:
            InfeasibleError: It does not fit.
            UsageError: Its bundle cannot be run on this machine.
            OnnxplaceError: Its bundle fails.
        """
        bundle = self._write(device)
        try:
            if bundle is None:
                raise InfeasibleError("P001", "no placement to start from fits the devices", where=self.name)
            if obstacle := find_trial_obstacle(bundle):
                raise UsageError("H011", f"a measured reward is not possible: {obstacle.message}", where="--reward")
            self._seconds[device.tobytes()] = seconds = self._run([bundle])[0]
        finally:
            self._remove(bundle)
        return seconds

    def time(self, device: Ints) -> float | None:
        """Return the step of a placement in seconds; None if it does not fit, or its bundle fails."""
        key = device.tobytes()
        if key not in self._seconds:
            bundle = None
            try:
                bundle = self._write(device)
                self._seconds[key] = self._run([bundle])[0] if bundle else None
            except OnnxplaceError:
                self._seconds[key] = None
            finally:
                self._remove(bundle)
        return self._seconds[key]

    def compare(self, devices: Sequence[Ints]) -> list[float] | None:
        """Return the steps of several placements that are run in turns.

        None where that is not possible, or where other work on the machine makes the times doubtful.
        """
        bundles: list[Bundle | None] = []
        try:
            for device in devices:
                bundles.append(self._write(device))
            written = [bundle for bundle in bundles if bundle]
            if len(written) < len(devices) or find_trial_obstacle(*written):
                return None
            disturbed = self.disturbed
            seconds = self._run(written)
            return seconds if self.disturbed == disturbed else None
        except OnnxplaceError:
            return None
        finally:
            for bundle in bundles:
                self._remove(bundle)

    def _write(self, device: Ints) -> Bundle | None:
        """Write the bundle of a placement; return None if it does not fit."""
        state = commit_devices(self._state, self.problem, device, PLACER)
        if state is None:
            return None
        self.bundles += 1
        emit: Any = make_pass("emit")
        path = self._folder / f"{self.bundles}.bundle"
        state, _ = Pipeline((make_pass("split"), replace(emit, path=str(path)))).run(state)
        return Bundle.open(state[Emitted].path)

    def _run(self, bundles: Sequence[Bundle]) -> list[float]:
        trials = run_trials(bundles, self._feeds, cached=False)
        self.disturbed += sum(map(is_doubtful, trials))
        return [trial.step_seconds for trial in trials]

    def _remove(self, bundle: Bundle | None) -> None:
        if bundle:
            shutil.rmtree(bundle.path, ignore_errors=True)


# What a placement that does not fit, or whose bundle fails, counts as, and the most that any counts as; 1 is the start.
FAILED_COST = 10.0
# Placements that are run in turns at the end, besides the one that a search finds.
CONFIRMED = 3
# Moves of that search, which places single nodes. Another placement is kept only if it takes clearly less time.
SEARCH_PROPOSALS, CLEAR_RATIO = 100_000, 0.98


@dataclass(frozen=True)
class MeasuredPoint(Plotted):
    """The state of a training after some updates. Costs are measured steps, relative to that of the start."""

    UNIT: ClassVar[str] = "measured step, relative to the start"
    LINES: ClassVar[Mapping[str, str]] = MappingProxyType(
        {"best_cost": "best so far", "validation_cost": "policy", "train_cost": "episodes, mean"}
    )

    episodes: int
    bundles: int
    """How many were run, those of earlier sessions not included."""
    disturbed: int
    """How many of them other work on the machine slowed, so that their times are doubtful."""
    train_cost: float
    """Mean of the episodes since the last point."""
    best_cost: float
    """Cost of the best placement so far."""
    validation_cost: float
    """Cost of the placement that the policy holds best."""
    entropy: float
    """Mean entropy of the choices."""


@dataclass
class MeasuredModel:
    """A model in training: its environment, its timer, and the best placement so far."""

    environment: Environment
    cluster: Ints
    """Per node of the problem, its node in the environment."""
    timer: BundleTimer
    names: tuple[str, ...]
    """Names of the nodes of the model."""
    start_seconds: float = 1.0
    searched: Ints = field(default_factory=lambda: np.zeros(0, dtype=np.int32))
    """The placement that a search finds in simulated time."""
    tried: dict[bytes, tuple[float, Ints]] = field(default_factory=dict)
    """Seconds and devices of the placements that work."""

    def measure_starts(self, known: Ints | None) -> None:
        """Measure the start of episodes, single devices, a searched placement, and one that is known from before."""
        problem, start = self.timer.problem, self.environment.start[self.cluster]
        self.start_seconds = self.timer.require_time(start)
        self.tried[start.tobytes()] = (self.start_seconds, start)
        devices = range(len(problem.target.devices))
        pinned = problem.pinned[problem.group]
        alone = [np.where(pinned >= 0, pinned, device).astype(np.int32) for device in devices]
        lesson = search_lesson(problem, SEARCH_PROPOSALS, 0)
        self.searched = lesson.device if lesson and self.measure(lesson.device) < FAILED_COST else start
        for device in [*alone, *([known] if known is not None else [])]:
            self.measure(device)

    def measure(self, device: Ints) -> float:
        """Return the cost of a placement of the problem's nodes."""
        seconds = self.timer.time(device)
        if seconds is None:
            return FAILED_COST
        self.tried[device.tobytes()] = (seconds, device)
        return float(np.clip(seconds / self.start_seconds, 1 / FAILED_COST, FAILED_COST))

    def measure_coarse(self, device: Ints) -> float:
        """Return the cost of a placement of the environment's nodes."""
        return self.measure(device[self.cluster].astype(np.int32))

    @property
    def reference(self) -> tuple[float, Ints]:
        """Return seconds and devices of the placement that the search finds."""
        return self.tried[self.searched.tobytes()]

    @property
    def best(self) -> tuple[float, Ints]:
        """Return seconds and devices of the best placement so far: that of the search, unless one is clearly better."""
        fastest = min(self.tried.values(), key=lambda item: item[0])
        return fastest if fastest[0] < CLEAR_RATIO * self.reference[0] else self.reference

    def confirm(self) -> None:
        """Run the best placements and that of the search in turns, since the best of many noisy times is too good.

        Where other work on the machine disturbs that, the search decides.
        """
        _, searched = self.reference
        ranked = sorted(self.tried.values(), key=lambda item: item[0])[:CONFIRMED]
        finalists = [searched, *(device for _, device in ranked if device.tobytes() != searched.tobytes())]
        seconds = self.timer.compare(finalists)
        if seconds is None:
            finalists, seconds = [searched], [self.reference[0]]
        self.tried = {device.tobytes(): (time, device) for time, device in zip(seconds, finalists)}

    def write_map(self, path: Path) -> None:
        """Write the device map of the best placement."""
        text = json.dumps(self.device_map(), indent=1)
        write_file(path, lambda stream: stream.write(text.encode()))

    def device_map(self) -> dict[str, str]:
        """Return the best placement as `compile --device-map` reads it."""
        devices = self.timer.problem.target.devices
        chosen = self.best[1][self.timer.problem.members]
        common = int(np.bincount(chosen, minlength=len(devices)).argmax())
        others = {
            re.escape(name): devices[index].id for name, index in zip(self.names, chosen.tolist()) if index != common
        }
        return {**others, ".*": devices[common].id}

    def read_device_map(self, path: Path) -> Ints | None:
        """Return the placement in a device map; None if it is not one of this model."""
        position = {device.id: index for index, device in enumerate(self.timer.problem.target.devices)}
        try:
            entries = [(re.compile(key), position[value]) for key, value in read_json(path, "H012", "").items()]
            chosen = [next(index for key, index in entries if key.fullmatch(name)) for name in self.names]
        except (InputError, AttributeError, KeyError, StopIteration, TypeError, re.error):
            return None
        device = np.zeros(len(self.cluster), dtype=np.int32)
        device[self.timer.problem.members] = chosen
        return device


@dataclass
class MeasuredTraining(PlacetoTraining):
    """A training of Placeto's policy, rewarded by the measured step of the last placement of each episode.

    Models are coarsened to `options.max_groups` nodes. Next to the policy is, for each model, a device map: of the
    placement with the shortest measured step, since a policy alone may place worse. It is that of a search, unless
    another one is clearly better when both are run in turns. Times differ from run to run, so trainings are not
    repeatable.
    """

    point_kind: ClassVar[type[Plotted]] = MeasuredPoint
    point_updates: ClassVar[int] = 1

    models: Sequence[MeasuredModel] = ()

    @classmethod
    @contextmanager
    def opened(
        cls, graphs: Sequence[LearningGraph], options: PlacetoOptions, output: Path, family: str
    ) -> Iterator[MeasuredTraining]:
        """Yield a training at its beginning, with a folder for its bundles."""
        with temporary_folder() as folder:
            yield cls.for_models(graphs, options, output, family, folder)

    @staticmethod
    def for_models(
        graphs: Sequence[LearningGraph], options: PlacetoOptions, output: Path, family: str, folder: Path
    ) -> MeasuredTraining:
        """Return a training at its beginning; bundles are written into the folder."""
        models, seed = [], options.settings.seed
        for index, graph in enumerate(graphs):
            (folder / str(index)).mkdir()
            timer = BundleTimer(graph, folder / str(index))
            problem, cluster = coarsen_to(graph.problem, options.max_groups)
            environment = Environment(problem, options.order, seed, options.start)
            names = graph.state[Profile].graph.names if graph.state else ()
            models.append(MeasuredModel(environment, cluster, timer, tuple(names)))
        shape = Shape(options.devices)
        policy = Policy(
            shape=shape,
            theta=shape.draw_parameters(seed),
            order=options.order,
            start=options.start,
            family=family,
            graphs=len(models),
            seed=seed,
            reward="measured",
            max_nodes=options.max_groups,
        )
        environments = [model.environment for model in models]
        return MeasuredTraining(output, policy, environments, environments, options, Learner.of(policy), models=models)

    @property
    def name(self) -> str:
        return "placeto, measured"

    def begin(self, *, resume: bool) -> None:
        """Measure what episodes start from, and the best placements of an earlier run."""
        for model, path in zip(self.models, self.map_paths):
            model.measure_starts(model.read_device_map(path) if resume else None)

    @property
    def measured_ratio(self) -> float:
        """Return the mean step of the kept placements, relative to those of the searches."""
        return geometric_mean([model.best[0] / model.reference[0] for model in self.models])

    def finish(self) -> Sequence[Path]:
        """Run the best placements in turns."""
        for model in self.models:
            model.confirm()
        return self.map_paths

    @property
    def map_paths(self) -> list[Path]:
        """Return the file of the device map of each model."""
        if len(self.models) == 1:
            return [self.output.with_suffix(".device-map.json")]
        stems = [model.timer.name.removesuffix(".onnx") for model in self.models]
        return [self.output.with_suffix(f".{stem}.device-map.json") for stem in stems]

    def update(self, index: int, progress: float) -> Update:
        """Run some episodes in one environment, and their bundles; return the update of the policy."""
        model, settings = self.models[index], self.options.settings
        steps = len(model.environment.visits.group)
        settings = replace(settings, steps=max(steps, 1))
        return update_from_ends(self.learner, model.environment, settings, progress, model.measure_coarse)

    def evaluate(self, recent: Sequence[Update], seconds: float) -> MeasuredPoint:
        """Measure what the policy holds best; keep the policy if that is the best so far."""
        policy = self.learner.policy
        costs = [model.measure_coarse(model.environment.run(policy.network).final) for model in self.models]
        cost = geometric_mean(costs)
        self.keep_if_better(policy, cost)
        best = [model.best[0] / model.start_seconds for model in self.models]
        return MeasuredPoint(
            updates=policy.updates,
            seconds=round(seconds, 3),
            episodes=policy.updates * self.options.settings.episodes,
            bundles=sum(model.timer.bundles for model in self.models),
            disturbed=sum(model.timer.disturbed for model in self.models),
            train_cost=float(np.mean([update.cost for update in recent])),
            best_cost=geometric_mean(best),
            validation_cost=cost,
            entropy=float(np.mean([update.entropy for update in recent])),
        )

    def write_checkpoint(self) -> None:
        """Write the best policy so far, what a training is resumed from, the curve, and the best placements."""
        kept = {hash_names(model.names): model.best[1][model.timer.problem.members] for model in self.models}
        self.best = replace(self.best, kept=kept)
        maps = zip(self.models, self.map_paths)
        write_each(super().write_checkpoint, *(partial(model.write_map, path) for model, path in maps))
