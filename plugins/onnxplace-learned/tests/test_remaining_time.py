"""The remaining time of a training follows from its limits and its own speed, not from what came before."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest

from onnxplace.cli import terminal
from onnxplace.utils.progress import observe_progress
from onnxplace_learned.policy_training import training_loop
from onnxplace_learned.policy_training.training_loop import TrainingLoop


@dataclass
class Training(TrainingLoop):
    """Updates of a second each."""

    clock: SimpleNamespace
    limits: tuple[float, int] = (0.0, 0)
    updates: int = 0
    point_updates = 1

    def improve(self, progress):
        self.updates += 1
        self.clock.now += 1

    def evaluate(self, recent, seconds):
        return SimpleNamespace(seconds=seconds)

    def restore(self):
        """Nothing."""

    write_learner = write_best = lambda self, path: None


@pytest.mark.parametrize("limits", [(8.0, 0), (0.0, 108), (8.0, 1000)])
@pytest.mark.parametrize("is_resumed", [False, True])
def test_preparations_and_earlier_runs_do_not_count(limits, is_resumed, monkeypatch):
    clock = SimpleNamespace(now=100.0)
    clock.monotonic = lambda: clock.now
    monkeypatch.setattr(terminal, "time", clock)
    monkeypatch.setattr(training_loop, "budget_clock", clock.monotonic)
    display, training = terminal.Display("learning"), Training("", None, clock=clock, limits=limits)
    clock.now += 60  # searches for what to imitate
    total = limits[0] or limits[1]
    if is_resumed:
        training.updates, training.points = 100, [SimpleNamespace(seconds=100.0)]
        total = 8
    monkeypatch.setattr(training, "write_checkpoint", lambda: None)
    with observe_progress(display):
        for number, (share, _) in enumerate(training.run(), start=1):
            display.advance(share)
            if number > 1:
                assert display.estimate_remaining() == pytest.approx(total - number, abs=1e-6)
