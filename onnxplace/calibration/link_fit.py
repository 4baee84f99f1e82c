"""Fit `latency + bytes / bandwidth` to measured transfers, robustly and by relative error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from onnxplace.graph import Bools, Floats

# Faster than any memory: what is written where no transfer measured was large enough to show a bandwidth.
UNBOUNDED_BYTES_PER_SECOND = 1e15
# A point that is off by more than this factor is an outlier. Smaller ones may be real: caches, and the pages that large
# copies need, bend the line by a factor of three.
OUTLIER_FACTOR = 5.0
# Beyond this error (of the logarithm) a point pulls no harder (Huber, Robust estimation of a location parameter, 1964).
MAX_PULL = 0.5
MAX_FIT_STEPS, MIN_RELATIVE_GAIN = 100, 1e-9


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
    """Fit non-negative latency and seconds per byte to points, so that the logarithms of predicted and measured agree.

    So an error of a half counts as much where too much is said as where too little is, and at every size. A first fit
    of least absolute errors goes through two of the points, which outliers do not move; without those, the second is
    of least squares where errors are small. It moves little when points do. O(n^3) for n points. Raises ValueError
    without a point or with a time that is not positive.
    """
    size, took = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if not len(size) or len(size) != len(took) or not (np.isfinite(took) & (took > 0)).all():
        raise ValueError("a fit needs points of positive times")
    first = _fit_least_absolute(size, took)
    outlier: Bools = np.abs(_log_errors(first, size, took)) > np.log(OUTLIER_FACTOR)
    base, slope = _refine_fit(first, size[~outlier], took[~outlier])
    slope = max(slope, 1 / UNBOUNDED_BYTES_PER_SECOND)
    relative = (base + slope * size) / took - 1
    points = (Point(int(b), float(t), float(e), bool(o)) for b, t, e, o in zip(size, took, relative, outlier))
    return LinkFit(base, 1 / slope, tuple(points))


def _log_errors(line: tuple[float, float], size: Floats, took: Floats) -> Floats:
    errors: Floats = np.log(np.maximum((line[0] + line[1] * size) / took, 1e-300))
    return errors


def _fit_least_absolute(size: Floats, took: Floats) -> tuple[float, float]:
    """Return the line of least absolute errors: through two points, or through one and flat or the origin."""
    lines = [(float(t), 0.0) for t in took]
    lines += [(0.0, float(t / b)) for b, t in zip(size, took) if b > 0]
    for i, j in combinations(range(len(size)), 2):
        if size[i] != size[j]:
            slope = float((took[j] - took[i]) / (size[j] - size[i]))
            base = float(took[i] - slope * size[i])
            if slope >= 0 and base >= 0:
                lines.append((base, slope))
    return min(lines, key=lambda line: float(np.abs(_log_errors(line, size, took)).sum()))


def _refine_fit(line: tuple[float, float], size: Floats, took: Floats) -> tuple[float, float]:
    """Return the line of least Huber loss near a first one, by Gauss-Newton over the logarithms of its coefficients.

    A coefficient that is zero stays so.
    """
    free = np.array(line) > 0
    best, least = line, _huber_loss(_log_errors(line, size, took))
    for _ in range(MAX_FIT_STEPS):
        base, slope = best
        parts = np.stack([np.full(len(size), base), slope * size], axis=1) / (base + slope * size)[:, None]
        error = _log_errors(best, size, took)
        weight = np.minimum(1.0, MAX_PULL / np.maximum(np.abs(error), 1e-12))
        weighted = parts * weight[:, None]
        step = np.linalg.lstsq(weighted.T @ parts, weighted.T @ error, rcond=1e-12)[0]
        factor = np.where(free, np.exp(-np.clip(step, -1.0, 1.0)), 1.0)
        tried = (float(base * factor[0]), float(slope * factor[1]))
        loss = _huber_loss(_log_errors(tried, size, took))
        if not loss < least - MIN_RELATIVE_GAIN * least:
            return best
        best, least = tried, loss
    return best


def _huber_loss(error: Floats) -> float:
    far = np.abs(error)
    return float(np.where(far <= MAX_PULL, far**2 / 2, MAX_PULL * (far - MAX_PULL / 2)).sum())
