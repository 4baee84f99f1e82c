"""Compare steps of a bundle and of the unsplit model, and measure how far that model is from itself."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import inf, isfinite
from pathlib import Path
from typing import Any

from onnxplace.bundle import Bundle
from onnxplace.evaluation.compare import OutputDifference, compare_outputs, find_bundle_lineages, open_reference
from onnxplace.evaluation.step_inputs import StateCarrier, StepInputs
from onnxplace.machine import Level, available_cores, uses_optimisations
from onnxplace.utils import report_progress

Differences = Sequence[Sequence[OutputDifference]]
"""By step, of each output."""
Run = Callable[[Mapping[str, Any]], Mapping[str, Any]]

# How the unsplit model runs once more: with other fusions and memory layouts, it rounds otherwise.
_OTHER_LEVELS: tuple[Level, ...] = ("none", "basic", "extended", "all")
# A bundle has its own fusions, so that it may be further off than the unsplit model is from itself.
MAX_OWN_ERRORS = 2.0
UNREPEATABLE = "two equal runs of the unsplit model differ in it, so that only type and shape are compared"
# The option of glibc's mallopt.
_M_PERTURB = -6
_FLOATS = ("tensor(float)", "tensor(double)", "tensor(float16)", "tensor(bfloat16)")


@contextmanager
def _fill_allocations() -> Iterator[None]:
    """Fill memory that is allocated inside with bytes other than zeros, where the C library can."""
    set_option = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if set_option:
        set_option(_M_PERTURB, 0xA5)
    try:
        yield
    finally:
        if set_option:
            set_option(_M_PERTURB, 0)


class ModelComparison:
    """Compares with the unsplit model, which is the file `against`, or else the bundle's copy."""

    def __init__(self, bundle: Bundle, against: str | Path | None, cores: Sequence[int], names: Sequence[str]) -> None:
        """Open the model on such cores, to compare these outputs."""
        self._bundle, self._against, self._cores, self.names = bundle, against, cores, names
        self._run_model, self._lineages = open_reference(bundle, against, cores), find_bundle_lineages(bundle)
        self._floats = {item.name for item in bundle.outputs if item.dtype in _FLOATS}

    def compare(self, run: Run, steps: StepInputs, count: int) -> Differences:
        """Return how far `run` is from the model in each step; where it differs, also how far the model is from itself.

        An output that the model computes otherwise in two equal runs counts as equal if its type and shape agree.
        """
        differences = self.compare_steps(run, steps, count)
        if all(item.equal for step in differences for item in step):
            return differences
        again = self.compare_steps(StateCarrier(self._run_model, self._bundle), steps, count)
        if all(item.equal for step in again for item in step):
            with _fill_allocations():  # memory that no kernel writes may hold the same twice
                run_model = open_reference(self._bundle, self._against, self._cores)
                again = self.compare_steps(StateCarrier(run_model, self._bundle), steps, count)
        others = [self.compare_steps(run_model, steps, count) for run_model in self._open_others()]
        return [[self._add_own_error(*items) for items in zip(*step)] for step in zip(differences, again, *others)]

    def compare_steps(self, run: Run, steps: StepInputs, count: int) -> Differences:
        """Return how far `run` is from the model in each step."""
        reference, differences = StateCarrier(self._run_model, self._bundle), []
        for number in range(count):
            with steps.explained(number):
                feeds = steps.feeds(number)
                differences.append(compare_outputs(run, reference, feeds, self.names, self._lineages))
            report_progress(number + 1, count)
            if number == 0:
                steps.learn(reference.states)
        return differences

    def _open_others(self) -> Iterator[Run]:
        for level in _OTHER_LEVELS:
            yield StateCarrier(open_reference(self._bundle, self._against, available_cores()[:1], level), self._bundle)

    def _add_own_error(
        self, item: OutputDifference, again: OutputDifference, *others: OutputDifference
    ) -> OutputDifference:
        if item.equal or not again.equal:
            return replace(
                item, equal=item.equal or isfinite(item.max_abs_error), own_error=0.0 if again.equal else inf
            )
        errors = [other.max_abs_error for other in others if item.name in self._floats]
        own_error = max(filter(isfinite, errors), default=0.0)
        # Without optimisations, only sums that are split over devices have another order.
        has_split_sums = self._bundle.manifest.sharding is not None and not uses_optimisations()
        return replace(
            item, own_error=own_error, equal=has_split_sums and item.max_abs_error <= MAX_OWN_ERRORS * own_error
        )
