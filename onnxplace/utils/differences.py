"""The difference of two arrays, relative to the largest element."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Difference:
    """How an array differs from its reference, of the same shape."""

    absolute: float
    """The largest error of an element that is finite in the reference."""
    relative: float
    """That error over the largest magnitude of the reference; the error itself if that is zero."""
    is_as_finite: bool
    """Whether NaN and infinities are in the same places."""


def find_difference(actual: NDArray[Any], reference: NDArray[Any]) -> Difference:
    """Return the difference of two arrays of numbers of one shape.

    >>> find_difference(np.array([1.0, 2.5]), np.array([1.0, 2.0])).relative
    0.25
    """
    finite = np.isfinite(reference)
    same_special = np.array_equal(actual[~finite], reference[~finite], equal_nan=True)
    is_as_finite = same_special and bool((np.isfinite(actual) == finite).all())
    precise = np.complex128 if np.iscomplexobj(reference) else np.float64
    # In double precision, so that the difference itself is not rounded.
    error = float(np.abs(actual[finite].astype(precise) - reference[finite]).max(initial=0.0))
    scale = float(np.abs(reference[finite]).max(initial=0.0))
    # Relative to the largest element, not to each one: small ones are often differences of large numbers.
    return Difference(error, error / scale if scale > 0 else error, is_as_finite)


def relative_error(actual: Any, reference: Any) -> float:
    """Return the largest error of an array over the largest magnitude of its reference.

    It is infinite where types, shapes, NaN or infinities differ, and where integers do, except for those of eight bits,
    which stand for rounded numbers. Values other than arrays have no error.
    """
    if not isinstance(reference, np.ndarray):
        return 0.0
    if not isinstance(actual, np.ndarray) or actual.shape != reference.shape or actual.dtype != reference.dtype:
        return np.inf
    kind = reference.dtype.kind
    if kind in "bOUS" or (kind in "iu" and reference.dtype.itemsize > 1):
        return 0.0 if np.array_equal(actual, reference) else np.inf
    if kind not in "fciu":  # a type of the package ml_dtypes, which numpy does not know
        actual, reference = actual.astype(np.float32), reference.astype(np.float32)
    difference = find_difference(actual, reference)
    return difference.relative if difference.is_as_finite else np.inf
