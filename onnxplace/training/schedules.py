"""Learning rates over the steps of a run."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

Schedule = Callable[[int], float]
"""From the number of a step, 1 for the first one, to its learning rate."""

ScheduleName = Literal["constant", "cosine", "linear"]


def make_schedule(name: ScheduleName, rate: float, steps: int, warmup: int = 0) -> Schedule:
    """Return a schedule: a linear rise over `warmup` steps, then constant, or a fall to zero after `steps`.

    >>> [make_schedule("linear", 1.0, 4)(step) for step in (1, 2, 3, 4)]
    [1.0, 0.75, 0.5, 0.25]
    >>> [make_schedule("constant", 1.0, 4, warmup=2)(step) for step in (1, 2, 3)]
    [0.5, 1.0, 1.0]
    """

    def compute_rate(step: int) -> float:
        if step <= warmup:
            return rate * step / warmup
        progress = min((step - 1 - warmup) / max(steps - warmup, 1), 1.0)
        if name == "cosine":
            return rate * 0.5 * (1 + math.cos(math.pi * progress))
        return rate * (1 - progress) if name == "linear" else rate

    return compute_rate
