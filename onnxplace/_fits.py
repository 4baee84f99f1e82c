"""Fit `latency + bytes / bandwidth` to measured transfers, robustly and by relative error."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from onnxplace.graph import Bools, Floats

# Faster than any memory: what is written where no transfer measured was large enough to show a bandwidth.
UNBOUNDED_BYTES_PER_SECOND = 1e15
# An outlier is off by more than this, and by more than so many times what the other points are off by.
OUTLIER_ERROR = 0.5
OUTLIER_FACTOR = 5.0


@dataclass(frozen=True)
class Point:
    """What transfers of one size took, and what the fit makes of it."""

    bytes: int
    seconds: float
    relative_error: float
    """Of the fit: positive where it says more than was measured."""
    outlier: bool
    """Whether the fit left it out."""


@dataclass(frozen=True)
class LinkFit:
    """A transfer takes `latency_seconds + bytes / bytes_per_second`."""

    latency_seconds: float
    bytes_per_second: float
    points: tuple[Point, ...]

    @property
    def worst_error(self) -> float:
        """Return the largest relative error over the points that are no outliers."""
        return max((abs(point.relative_error) for point in self.points if not point.outlier), default=0.0)


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> LinkFit:
    """Fit non-negative latency and seconds per byte to points, so that relative errors are least.

    A first fit of least absolute relative errors goes through two of the points, which outliers do not move; points
    that are far off it are left out of the second, of least squares. O(n^3) for n points. Raises ValueError without a
    point or with a time that is not positive.
    """
    size, took = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if not len(size) or len(size) != len(took) or not (np.isfinite(took) & (took > 0)).all():
        raise ValueError("a fit needs points of positive times")
    error = np.abs(_errors(_least_absolute(size, took), size, took))
    outlier = error > max(OUTLIER_ERROR, OUTLIER_FACTOR * float(np.median(error)))
    line = _least_squares(size[~outlier], took[~outlier])
    return _result(line, size, took, outlier)


def _result(line: tuple[float, float], size: Floats, took: Floats, outlier: Bools) -> LinkFit:
    errors = _errors(line, size, took)
    points = tuple(
        Point(int(b), float(t), float(e), bool(o)) for b, t, e, o in zip(size, took, errors, outlier)
    )
    return LinkFit(line[0], min(1 / line[1] if line[1] > 0 else math.inf, UNBOUNDED_BYTES_PER_SECOND), points)


def _errors(line: tuple[float, float], size: Floats, took: Floats) -> Floats:
    errors: Floats = (line[0] + line[1] * size) / took - 1
    return errors


def _least_absolute(size: Floats, took: Floats) -> tuple[float, float]:
    """Return the line of least absolute relative errors: through two points, or through one and flat or the origin."""
    lines = [(float(t), 0.0) for t in took]
    lines += [(0.0, float(t / b)) for b, t in zip(size, took) if b > 0]
    for i, j in combinations(range(len(size)), 2):
        if size[i] != size[j]:
            slope = float((took[j] - took[i]) / (size[j] - size[i]))
            base = float(took[i] - slope * size[i])
            if slope >= 0 and base >= 0:
                lines.append((base, slope))
    return min(lines, key=lambda line: float(np.abs(_errors(line, size, took)).sum()))


def _least_squares(size: Floats, took: Floats) -> tuple[float, float]:
    """Return the non-negative line of least squared relative errors."""
    a, b = 1 / took, size / took
    aa, ab, bb, a1, b1 = float(a @ a), float(a @ b), float(b @ b), float(a.sum()), float(b.sum())
    determinant = aa * bb - ab * ab
    if determinant > 1e-12 * aa * bb:
        base, slope = (a1 * bb - b1 * ab) / determinant, (b1 * aa - a1 * ab) / determinant
        if base >= 0 and slope >= 0:
            return base, slope
    flat, through = (a1 / aa, 0.0), (0.0, b1 / bb if bb else 0.0)
    return min(flat, through, key=lambda line: float((_errors(line, size, took) ** 2).sum()))
