"""Fits of latency and bandwidth to measured transfers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.target.target import Link
from onnxplace_doctor.calibrator import TRANSFER_SIZES_BYTES
from onnxplace_doctor.link_fit import UNBOUNDED_BYTES_PER_SECOND, fit_link
from plugins.doctor.tests.test_calibration import compute_times

latencies = st.floats(1e-6, 5e-5)
bandwidths = st.floats(1e9, 5e9)


@given(st.floats(1e-7, 1e-3), st.floats(1e8, 1e11))
def test_a_fit_of_exact_times_is_exact(latency, bandwidth):
    fit = fit_link(TRANSFER_SIZES_BYTES, compute_times(latency, bandwidth))
    assert fit.latency_seconds == pytest.approx(latency, rel=1e-6)
    assert fit.bytes_per_second == pytest.approx(bandwidth, rel=1e-6)
    assert fit.worst_error < 1e-6
    assert not any(point.outlier for point in fit.points)


@given(latencies, bandwidths, st.randoms(use_true_random=False))
def test_the_error_of_a_fit_is_at_most_the_noise(latency, bandwidth, random):
    noise = np.array([random.uniform(0.95, 1.05) for _ in TRANSFER_SIZES_BYTES])
    fit = fit_link(TRANSFER_SIZES_BYTES, compute_times(latency, bandwidth) * noise)
    assert fit.latency_seconds == pytest.approx(latency, rel=0.1)
    assert fit.bytes_per_second == pytest.approx(bandwidth, rel=0.1)


@given(
    latencies,
    bandwidths,
    st.sets(st.integers(0, len(TRANSFER_SIZES_BYTES) - 1), min_size=1, max_size=3),
    st.floats(6, 30),
)
def test_outliers_are_reported_and_do_not_move_the_fit(latency, bandwidth, wrong, factor):
    measured = compute_times(latency, bandwidth)
    measured[list(wrong)] *= factor
    fit = fit_link(TRANSFER_SIZES_BYTES, measured)
    assert {index for index, point in enumerate(fit.points) if point.outlier} == wrong
    assert fit.latency_seconds == pytest.approx(latency, rel=1e-6)
    assert fit.bytes_per_second == pytest.approx(bandwidth, rel=1e-6)
    assert fit.worst_error < 1e-6


@given(latencies, bandwidths, st.integers(0, len(TRANSFER_SIZES_BYTES) - 1), st.floats(1.5, 4))
def test_a_moderate_deviation_is_no_outlier_and_moves_the_fit_a_little(latency, bandwidth, wrong, factor):
    measured = compute_times(latency, bandwidth)
    measured[wrong] *= factor
    fit = fit_link(TRANSFER_SIZES_BYTES, measured)
    assert not any(point.outlier for point in fit.points)
    assert fit.latency_seconds == pytest.approx(latency, rel=0.15)
    assert fit.bytes_per_second == pytest.approx(bandwidth, rel=0.15)


@given(latencies, bandwidths, st.randoms(use_true_random=False))
def test_small_changes_of_points_change_the_fit_little(latency, bandwidth, random):
    """Also where no line fits: half of the bandwidth beyond 16 MiB."""
    bent = compute_times(latency, bandwidth) + np.maximum(np.array(TRANSFER_SIZES_BYTES) - (1 << 24), 0) / bandwidth
    noisy = bent * np.array([random.uniform(0.95, 1.05) for _ in TRANSFER_SIZES_BYTES])
    fit, noisy_fit = fit_link(TRANSFER_SIZES_BYTES, bent), fit_link(TRANSFER_SIZES_BYTES, noisy)
    assert noisy_fit.bytes_per_second == pytest.approx(fit.bytes_per_second, rel=0.15)
    assert noisy_fit.latency_seconds == pytest.approx(fit.latency_seconds, rel=0.15)


@given(st.lists(st.tuples(st.integers(1, 1 << 30), st.floats(1e-9, 10)), min_size=1, max_size=15))
def test_a_fit_of_any_measurement_is_a_valid_link(points):
    sizes, seconds = zip(*points)
    fit = fit_link(sizes, seconds)
    Link("cpu:0", "cpu:1", fit.latency_seconds, fit.bytes_per_second)
    for point in fit.points:
        fitted = fit.latency_seconds + point.bytes / fit.bytes_per_second
        assert fitted == pytest.approx((1 + point.relative_error) * point.seconds, rel=1e-6, abs=2e-6)


def test_transfers_too_small_for_a_bandwidth_give_an_unbounded_one():
    fit = fit_link([1, 2, 4], [3e-5, 3e-5, 3e-5])
    assert fit.bytes_per_second == pytest.approx(UNBOUNDED_BYTES_PER_SECOND)
    assert fit.latency_seconds == pytest.approx(3e-5)


@pytest.mark.parametrize("points", [([], []), ([1], [0.0]), ([1], [float("nan")]), ([1, 2], [1.0])])
def test_invalid_points_are_refused(points):
    with pytest.raises(ValueError, match="points"):
        fit_link(*points)
