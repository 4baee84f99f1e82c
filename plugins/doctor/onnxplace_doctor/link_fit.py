"""Fit `latency + bytes / bandwidth` to measured transfers, robustly and by relative error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from onnxplace.graph.op_graph import Bools, Floats

# Faster than any memory: the bandwidth of a link if no measured transfer was large enough to show one.
UNBOUNDED_BYTES_PER_SECOND = 1e15
# A point that differs from the fit by more than this factor is an outlier. Smaller deviations may be real: caches, and
# the pages that large copies need, bend the line by a factor of three.
OUTLIER_FACTOR = 5.0
# Error of the logarithm beyond which the loss is linear (Huber, Robust estimation of a location parameter, 1964).
HUBER_THRESHOLD = 0.5
# The second fit ends after these steps, or when a step improves the loss by less than this share.
MAX_FIT_STEPS, MIN_RELATIVE_GAIN = 100, 1e-9


@dataclass(frozen=True)
class Point:
    """Measured transfers of one size, and the error of the fit there."""

    bytes: int
    seconds: float
    relative_error: float
    """The error of the fit: positive where it predicts more than was measured."""
    outlier: bool
    """Whether the fit ignored it."""


@dataclass(frozen=True)
class LinkFit:
    """A linear model: a transfer takes `latency_seconds + bytes / bytes_per_second`."""

    latency_seconds: float
    bytes_per_second: float
    points: tuple[Point, ...]

    @property
    def worst_error(self) -> float:
        """Return the largest relative error over all points except outliers."""
        return max((abs(point.relative_error) for point in self.points if not point.outlier), default=0.0)


def fit_link(sizes: Sequence[int], seconds: Sequence[float]) -> LinkFit:
    """Fit non-negative latency and seconds per byte to measured transfers.

    The fit minimises errors of logarithms. So predicting twice the time counts as much as predicting half of it, at
    every size. A first fit of least absolute errors passes through two of the points, and outliers do not move it. A
    second fit ignores the outliers, and is of least squares where errors are small. Small changes of points change it
    little. O(n^3) for n points. Raises ValueError without points, or for a time that is not positive.

    >>> fit = fit_link([1, 1000, 1000000], [1e-5, 1.1e-5, 1e-3])
    >>> round(fit.latency_seconds * 1e6), round(fit.bytes_per_second / 1e6)
    (10, 1010)
    """
    size, measured = np.asarray(sizes, dtype=np.float64), np.asarray(seconds, dtype=np.float64)
    if not len(size) or len(size) != len(measured) or not (np.isfinite(measured) & (measured > 0)).all():
        raise ValueError("expected points with positive times")
    first = _fit_least_absolute(size, measured)
    outlier: Bools = np.abs(_log_errors(first, size, measured)) > np.log(OUTLIER_FACTOR)
    base, slope = _refine_fit(first, size[~outlier], measured[~outlier])
    slope = max(slope, 1 / UNBOUNDED_BYTES_PER_SECOND)
    relative = (base + slope * size) / measured - 1
    points = (Point(int(b), float(t), float(e), bool(o)) for b, t, e, o in zip(size, measured, relative, outlier))
    return LinkFit(base, 1 / slope, tuple(points))


def _log_errors(line: tuple[float, float], size: Floats, measured: Floats) -> Floats:
    errors: Floats = np.log(np.maximum((line[0] + line[1] * size) / measured, 1e-300))
    return errors


def _fit_least_absolute(size: Floats, measured: Floats) -> tuple[float, float]:
    """Return the line of least absolute errors.

    It passes through two points, or through one point and either the origin or with slope zero.
    """
    lines = [(float(t), 0.0) for t in measured]
    lines += [(0.0, float(t / b)) for b, t in zip(size, measured) if b > 0]
    for i, j in combinations(range(len(size)), 2):
        if size[i] != size[j]:
            slope = float((measured[j] - measured[i]) / (size[j] - size[i]))
            base = float(measured[i] - slope * size[i])
            if slope >= 0 and base >= 0:
                lines.append((base, slope))
    return min(lines, key=lambda line: float(np.abs(_log_errors(line, size, measured)).sum()))


def _refine_fit(line: tuple[float, float], size: Floats, measured: Floats) -> tuple[float, float]:
    """Return the line of least Huber loss near a first one.

    Gauss-Newton over the logarithms of the coefficients; a coefficient that is zero stays zero.
    """
    positive = np.array(line) > 0
    best, least_loss = line, _huber_loss(_log_errors(line, size, measured))
    for _ in range(MAX_FIT_STEPS):
        base, slope = best
        parts = np.stack([np.full(len(size), base), slope * size], axis=1) / (base + slope * size)[:, None]
        error = _log_errors(best, size, measured)
        weight = np.minimum(1.0, HUBER_THRESHOLD / np.maximum(np.abs(error), 1e-12))
        weighted = parts * weight[:, None]
        step = np.linalg.lstsq(weighted.T @ parts, weighted.T @ error, rcond=1e-12)[0]
        factor = np.where(positive, np.exp(-np.clip(step, -1.0, 1.0)), 1.0)
        candidate = (float(base * factor[0]), float(slope * factor[1]))
        loss = _huber_loss(_log_errors(candidate, size, measured))
        if not loss < least_loss - MIN_RELATIVE_GAIN * least_loss:
            return best
        best, least_loss = candidate, loss
    return best


def _huber_loss(error: Floats) -> float:
    distance = np.abs(error)
    linear = HUBER_THRESHOLD * (distance - HUBER_THRESHOLD / 2)
    return float(np.where(distance <= HUBER_THRESHOLD, distance**2 / 2, linear).sum())
