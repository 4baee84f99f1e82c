"""Checks of what users give to the trainer."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from onnxplace.bundle import Bundle, TrainingRecord
from onnxplace.errors import UsageError


def require_training_step(bundle: Bundle) -> TrainingRecord:
    """Return the training step of a bundle; raises UsageError if it is none."""
    if bundle.manifest.training is None:
        hint = "compile the model of a training step, such as onnxplace.torch.export_training_step writes"
        raise UsageError("L040", "this bundle is not one of a training step", where=str(bundle.path), hint=hint)
    return bundle.manifest.training


def check_seed(seed: int) -> int:
    """Return a seed; raises UsageError unless it is a whole number that int64 has, of 0 or more."""
    if isinstance(seed, bool) or not isinstance(seed, (int, np.integer)) or not 0 <= seed < 1 << 63:
        raise UsageError("L043", f"expected a seed of 0 or more, below 2**63, got {seed!r}", where="Trainer")
    return int(seed)


def check_count(number: Any, what: str, where: str) -> int:
    """Return a number of steps or batches; raises UsageError unless it is a whole number of 0 or more."""
    array = np.asarray(number)
    if array.dtype.kind not in "iu" or array.size != 1 or not 0 <= int(array.item()) < 1 << 63:
        raise UsageError("L043", f"expected {what} of 0 or more, got {number!r}", where=where)
    return int(array.item())


def check_rate(rate: Any) -> float:
    """Return a learning rate; raises UsageError unless it is a finite number of 0 or more."""
    try:
        number = math.nan if isinstance(rate, (str, bytes)) else float(rate)
    except (TypeError, ValueError):
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        message = f"expected a learning rate of 0 or more, got {rate!r}"
        raise UsageError("L043", message, where="learning_rate", hint="give a number such as 1e-3")
    return number


def to_number(value: Any) -> Any:
    """Return one number as a float, and any other array as it is."""
    array = np.asarray(value)
    return float(array.item()) if array.size == 1 else array
