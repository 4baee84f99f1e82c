"""benchmarks/measured_kernels.py finds the coefficients that measured products and collectives were made with."""

import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import measured_kernels
from benchmarks.measured_kernels import Collectives, Products
from onnxplace.target.catalogue import read_catalogue
from onnxplace.target.product_times import ProductTimes

SCRIPT = Path(__file__).parents[2] / "benchmarks/measured_kernels.py"
DEVICE = read_catalogue().devices["H100-SXM"]
TIMES = ProductTimes(2.5e-6, 3.6e-6, 2000.0, 0.8, 0.9, 2.5)
SIZES = np.array([32, 96, 128, 512, 1024, 2560, 4096, 7168, 12288], dtype=np.float64)


def coefficients(times: ProductTimes) -> np.ndarray:
    return np.array([getattr(times, item.name) for item in fields(times)])


def make_products(noise: float = 0.0) -> Products:
    """Products that take what `TIMES` says, with errors of a log-normal distribution."""
    m, n, k = (axis.ravel() for axis in np.meshgrid([1.0, 8, 64, 256, 2048, 8192], SIZES, SIZES))
    rows = Products(m, n, k, np.ones_like(m), 2)
    moving = rows.moving(DEVICE)
    seconds = measured_kernels.predict(coefficients(TIMES), rows.computing(DEVICE, "bfloat16"), moving, k)
    errors = np.random.default_rng(0).normal(0, noise, len(m)) if noise else np.zeros(len(m))
    return replace(rows, seconds=seconds * np.exp(errors))


def test_the_arrays_of_the_fit_follow_the_formula_of_the_estimates() -> None:
    computing, moving, depth = np.array([[1e-7, 3e-4, 2e-3], [2e-7, 3e-4, 1e-5], [32, 1024, 65536]])
    predicted = measured_kernels.predict(coefficients(TIMES), computing, moving, depth)
    expected = [TIMES.seconds(*row) for row in zip(computing, moving, depth)]
    assert predicted.tolist() == pytest.approx(expected)


def test_a_fit_finds_the_coefficients_of_products() -> None:
    fit = measured_kernels.fit_device(make_products(), DEVICE, "bfloat16", 50e6)
    assert coefficients(fit.times) == pytest.approx(coefficients(TIMES), rel=0.02)
    assert np.quantile(fit.errors, 0.9) < 0.01
    assert np.median(fit.peak_errors) > 0.1
    assert fit.left_out == 0


def test_noise_and_a_few_bad_kernels_do_not_move_a_fit() -> None:
    products = make_products(noise=0.05)
    seconds = products.seconds.copy()
    seconds[::20] *= 3
    fit = measured_kernels.fit_device(replace(products, seconds=seconds), DEVICE, "bfloat16", 50e6)
    computing, moving = products.computing(DEVICE, "bfloat16"), products.moving(DEVICE)
    predicted = measured_kernels.predict(coefficients(fit.times), computing, moving, products.k)
    assert predicted == pytest.approx(make_products().seconds, rel=0.06)
    assert np.median(fit.errors) < 0.06


def test_rows_that_a_cache_answered_are_left_out() -> None:
    products = make_products()
    bytes_, moving = products.bytes, products.moving(DEVICE)
    is_cached = (bytes_ < 20e6) & (moving > 1e-6) & (moving > products.computing(DEVICE, "bfloat16"))
    cached = replace(products, seconds=np.where(is_cached, 1e-6 + moving / 10, products.seconds))
    usable = measured_kernels.find_usable_rows(cached, DEVICE, "bfloat16", cache_bytes=20e6)
    assert not usable[is_cached].any()
    assert usable[~is_cached].all()
    fit = measured_kernels.fit_device(cached, DEVICE, "bfloat16", cache_bytes=20e6)
    assert fit.left_out == pytest.approx(is_cached.mean())
    assert fit.times.memory_share == pytest.approx(TIMES.memory_share, rel=0.05)


def test_whole_weights_are_kept_back() -> None:
    products = make_products()
    kept = products.is_kept_back
    weights = set(zip(products.n[kept], products.k[kept]))
    assert not weights & set(zip(products.n[~kept], products.k[~kept]))
    assert 0.1 < kept.mean() < 0.3


def test_a_fit_is_written_as_the_catalogue_has_it() -> None:
    import tomllib

    fit = measured_kernels.fit_device(make_products(), DEVICE, "bfloat16", 50e6)
    written = tomllib.loads("\n".join(measured_kernels.format_toml(fit)))["products"]
    assert written["float16"] == written["bfloat16"]
    assert ProductTimes(**written["bfloat16"]) == fit.times
    assert len(list(measured_kernels.format_products([fit]))) == 3


def test_each_kind_of_collective_has_a_line_of_its_own() -> None:
    names, counts, sizes = (
        axis.ravel() for axis in np.meshgrid(list(measured_kernels.COLLECTIVES), [2, 4, 8], 2.0 ** np.arange(8, 29))
    )
    rows = Collectives(names, counts, sizes, np.ones_like(sizes))
    latency = {name: 5e-6 * (index + 1) for index, name in enumerate(measured_kernels.COLLECTIVES)}
    seconds = np.array([latency[name] for name in names.tolist()]) * counts + rows.sent_bytes / (100e9 * counts)
    fit = measured_kernels.fit_collectives(replace(rows, seconds=seconds), "H100-SXM")
    for (name, count), line in fit.lines.items():
        assert line.latency_seconds == pytest.approx(latency[name] * count)
        assert 1 / line.seconds_per_byte == pytest.approx(100e9 * count)
    assert fit.errors.max() < 1e-6
    assert fit.shared_errors.mean() > 0.2
    assert rows.sent_bytes[(names == "all_reduce") & (counts == 4) & (sizes == 256)] == 384
    assert len(list(measured_kernels.format_collectives([fit]))) == 2 + 4 + 3 + 1
    splits = list(measured_kernels.format_splits([fit]))
    assert len(splits) == 2 + 9
    assert "| 8xH100-SXM-NVLink4 | 2048 |" in splits[-1]


def test_a_wheel_that_is_missing_is_named_with_what_to_do(tmp_path: Path) -> None:
    command = [sys.executable, SCRIPT, tmp_path / "none.whl"]
    result = subprocess.run(command, capture_output=True, text=True, check=False, cwd=SCRIPT.parents[1])
    assert result.returncode == 1
    assert "none.whl: no such file; pip download --no-deps aiconfigurator-core==0.12.0" in result.stderr


def test_tables_are_read_from_the_wheel(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    import io
    import zipfile

    def pack(columns: dict[str, list[object]]) -> bytes:
        buffer = io.BytesIO()
        parquet.write_table(pyarrow.table(columns), buffer)
        return buffer.getvalue()

    path = tmp_path / "tables.whl"
    with zipfile.ZipFile(path, "w") as archive:
        for framework, latency in (("vllm", 0.5), ("sglang", 0.7), ("trtllm", 0.6)):
            row = {"gemm_dtype": ["bfloat16", "fp8"], "m": [1, 1], "n": [2, 2], "k": [3, 3], "latency": [latency, 9.0]}
            archive.writestr(f"{measured_kernels.DATA}/h100_sxm/gemm/{framework}/1/gemm_perf.parquet", pack(row))
        for version, latency in (("2.9", 1.0), ("2.10", 2.0)):
            row = {
                "op_name": ["alltoall", "alltoall"], "num_gpus": [2, 2], "nccl_dtype": ["half", "int8"],
                "message_size": [256, 512], "latency": [latency, latency + 1],
            }  # fmt: skip
            archive.writestr(f"{measured_kernels.DATA}/h100_sxm/comm/nccl/{version}/nccl_perf.parquet", pack(row))
    with zipfile.ZipFile(path) as archive:
        products = measured_kernels.read_products(archive, "h100_sxm", "bfloat16")
        collectives = measured_kernels.read_collectives(archive, "h100_sxm")
        assert measured_kernels.read_products(archive, "h100_sxm", "nvfp4") is None
    assert products is not None
    assert (products.m.tolist(), products.n.tolist(), products.k.tolist()) == ([1], [2], [3])
    assert products.seconds.tolist() == pytest.approx([0.6e-3])
    # Messages of 256 halves and of 512 bytes are the same; the newer version counts.
    assert (collectives.bytes.tolist(), collectives.seconds.tolist()) == ([512], pytest.approx([2.5e-3]))
