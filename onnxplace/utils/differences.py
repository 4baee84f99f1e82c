"""The difference of two arrays, relative to the largest element."""

from __future__ import annotations

from typing import Any

import numpy as np


def relative_error(actual: Any, reference: Any) -> float:
    """Return the largest error of an array over the largest magnitude of its reference.

    It is infinite where shapes, NaN or infinities differ, and where integers do, except for those of eight bits,
    which stand for rounded numbers. Values other than arrays have no error.

    >>> relative_error(np.array([1.0, 2.5]), np.array([1.0, 2.0]))
    0.25
    """
    if not isinstance(reference, np.ndarray):
        return 0.0
    is_exact = reference.dtype.kind in "bOUS" or (reference.dtype.kind in "iu" and reference.dtype.itemsize > 1)
    if is_exact or np.shape(actual) != reference.shape:
        return 0.0 if np.array_equal(actual, reference) else np.inf
    return find_largest_error(actual, reference)[1]


def find_largest_error(actual: Any, reference: Any) -> tuple[float, float, tuple[int, ...]]:
    """Return the largest error of numbers, the same over the largest magnitude of the reference, and its index.

    Both are infinite where NaN or infinities differ. Relative to the largest element, not to each one: small ones are
    often differences of large numbers.
    """
    # In double precision, so that the difference itself is not rounded.
    precise = np.complex128 if reference.dtype.kind == "c" else np.float64
    actual, reference = actual.astype(precise), reference.astype(precise)
    with np.errstate(all="ignore"):  # such as infinity minus itself
        errors = np.where(np.isfinite(actual) & np.isfinite(reference), np.abs(actual - reference), np.inf)
    errors[(actual == reference) | (np.isnan(actual) & np.isnan(reference))] = 0.0
    error, scale = float(errors.max(initial=0.0)), float(np.abs(reference[np.isfinite(reference)]).max(initial=0.0))
    index = np.unravel_index(errors.argmax(), errors.shape) if error > 0 else ()
    return error, error / (scale or 1.0), tuple(map(int, index))
