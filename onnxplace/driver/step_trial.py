"""Try ways to run a training step in turns, and keep the fastest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from onnxplace.bundle import Bundle, Staging
from onnxplace.driver.sharding import PlacedModel
from onnxplace.driver.throughput import Candidate
from onnxplace.driver.throughput_trial import open_candidate, write_candidate
from onnxplace.errors import Diagnostic
from onnxplace.evaluation import find_trial_obstacle, is_doubtful, report_doubt, run_trials
from onnxplace.feeds import Array
from onnxplace.report import format_milliseconds

# A strategy takes the place of one that the prediction prefers only if its step is clearly shorter.
CLEAR_RATIO = 0.98


def keep_fastest_step(
    candidates: Sequence[Candidate], staging: Staging, feeds: Mapping[str, Array], cache: bool
) -> tuple[PlacedModel, list[Diagnostic]]:
    """Run bundles in turns, and return the one with the shortest step, with notes.

    The first candidate is written already; the others are written next to it. The prediction decides where a bundle
    cannot be tried here, or other work on the machine disturbs the trial.

    Raises:
        OnnxplaceError: a bundle fails.
    """
    first = candidates[0]
    if len(candidates) == 1:
        return first.placed, []
    written = [first, *(write_candidate(item, staging, index) for index, item in enumerate(candidates[1:], 1))]
    bundles: list[Bundle] = [open_candidate(item) for item in written]
    if problem := find_trial_obstacle(*bundles):
        return first.placed, [problem]
    trials = run_trials(bundles, feeds, cached=cache)
    times = [trial.step_seconds for trial in trials]
    if any(is_doubtful(trial) for trial in trials):
        what = f"kept {first.name} by prediction: in a trial, steps"
        return first.placed, [report_doubt(what, max(trial.waiting for trial in trials), "step")]
    best = min(range(len(times)), key=lambda index: times[index] * (CLEAR_RATIO if index == 0 else 1.0))
    listed = [(seconds, item.name) for seconds, item in sorted(zip(times, written), key=lambda pair: pair[0])]
    texts = "; ".join(f"{name}: {format_milliseconds(seconds)}" for seconds, name in listed)
    note = Diagnostic("L069", f"a training step, measured: {texts}; kept {written[best].name}", where="step")
    return written[best].placed, [note]
