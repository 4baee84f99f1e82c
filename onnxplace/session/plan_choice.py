"""Which plan of a bundle is the fastest at a size: predicted between known sizes, and corrected by what is measured.

The manifest has the step of each plan at a few sizes. At any other one, the nearer sizes count more: the logarithm of a
step is interpolated on a logarithmic scale of sizes, and beyond the known sizes the nearest ones hold. Requests that
ran alone correct it: the typical time of a plan takes the place of its prediction, and the predictions of plans that
were not measured are scaled as that one was wrong. Another plan is chosen when it is faster by a tenth, so that noise
changes nothing. Where another plan is nearly as fast as predicted, it is tried now and then.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from onnxplace.bundle.manifest import SizeRecord
from onnxplace.feeds.dimensions import drop_derived_sizes

# Nothing is faster; it keeps logarithms finite.
MIN_SECONDS = 1e-9
# A plan is taken for so many times slower than the best one at a size at which it was not tried.
UNTRIED_RATIO = 2.0
# Another plan has to be faster by this factor before it takes over a size.
HYSTERESIS = 0.9
# One in so many requests of a size tries another plan, if that is predicted to take this much longer at most.
TRIAL_PERIOD = 64
TRIAL_RATIO = 1.25
# How much of the typical time each further request replaces. One that took longer than twice the time was disturbed.
NEW_SHARE = 0.2
OUTLIER_RATIO = 2.0


class StepTable:
    """The steps of the plans at known sizes, from which those at other sizes follow.

    >>> records = [SizeRecord(dimensions={"n": size}, seconds=seconds) for size, seconds in ((1, (1, 2)), (9, (9, 4)))]
    >>> [round(step, 6) for step in StepTable(records).predict({"n": 9})]
    [9.0, 4.0]
    """

    def __init__(self, records: Sequence[SizeRecord]) -> None:
        sizes = [drop_derived_sizes(record.dimensions) for record in records]
        self._names = [name for name in sizes[0] if all(name in item for item in sizes)]
        self._points = np.log1p([[item[name] for name in self._names] for item in sizes])
        steps = np.array([[math.nan if step is None else step for step in record.seconds] for record in records])
        steps = np.log(np.maximum(steps, MIN_SECONDS))
        best = np.nanmin(steps, axis=1, keepdims=True)
        self._steps = np.where(np.isnan(steps), best + math.log(UNTRIED_RATIO), steps)

    def predict(self, sizes: Mapping[str, int]) -> list[float]:
        """Return the seconds of each plan at a size; dimensions that are not given do not count."""
        axes = [axis for axis, name in enumerate(self._names) if name in sizes]
        points = self._points[:, axes]
        asked = np.log1p([sizes[self._names[axis]] for axis in axes])
        distances = ((points - np.clip(asked, points.min(axis=0), points.max(axis=0))) ** 2).sum(axis=1)
        weights = (distances == 0).astype(float) if (distances == 0).any() else 1 / distances
        return [float(step) for step in np.exp(weights @ self._steps / weights.sum())]


class SizeSteps:
    """The steps of the plans at one size, and the plan that its requests take.

    Args:
        predicted: Seconds of each plan, infinite for one that does not take the size.
    """

    def __init__(self, predicted: Sequence[float]) -> None:
        self._predicted = predicted
        self._typical: dict[int, float] = {}
        """Plan -> seconds of its requests."""
        self._runs = [0] * len(predicted)
        self._choices = 0
        self.seconds = list(predicted)
        """Seconds of each plan, corrected."""
        self.choice = self.seconds.index(min(self.seconds))

    def add(self, plan: int, seconds: float) -> None:
        """Count a request that ran alone."""
        self._runs[plan] += 1
        if self._runs[plan] == 1:  # which allocates memory, and loads code
            return
        last = self._typical.get(plan, seconds)
        self._typical[plan] = last + NEW_SHARE * (min(seconds, OUTLIER_RATIO * last) - last)
        scale = self._typical[plan] / self._predicted[plan]
        self.seconds = [self._typical.get(key, scale * item) for key, item in enumerate(self._predicted)]
        if min(self.seconds) < HYSTERESIS * self.seconds[self.choice]:
            self.choice = self.seconds.index(min(self.seconds))

    def choose(self) -> int:
        """Return the plan of the next request, which is now and then another one that may be as fast."""
        self._choices += 1
        limit = TRIAL_RATIO * self.seconds[self.choice]
        others = [plan for plan, seconds in enumerate(self.seconds) if seconds <= limit and plan != self.choice]
        if self._choices % TRIAL_PERIOD or not others:
            return self.choice
        return min(others, key=lambda plan: self._runs[plan])
