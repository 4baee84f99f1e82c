"""The step of a placement of an ONNX model, measured by running its bundle on this machine."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from onnxplace.bundle import Bundle
from onnxplace.errors import InfeasibleError, OnnxplaceError, UsageError
from onnxplace.evaluation import find_trial_obstacle, is_doubtful, run_trials
from onnxplace.facts import Emitted
from onnxplace.graph import Ints
from onnxplace.model import Model
from onnxplace.pipeline import Pipeline, make_pass
from onnxplace_learned.policies.placing import commit_devices
from onnxplace_learned.training.problems import LearningGraph

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
            raise UsageError("H013", message, where="--reward", hint=hint)
        self.name, self.problem = graph.name, graph.problem
        self.bundles = 0
        """How many were run."""
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
                raise UsageError("H013", f"a measured reward is not possible: {obstacle.message}", where="--reward")
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
