"""Fit the catalogue's coefficients to measured kernels: python benchmarks/measured_kernels.py WHEEL.

WHEEL is that of aiconfigurator-core 0.12.0 (Apache-2.0), which has tables of kernels that were measured on GPUs:

    pip download --no-deps aiconfigurator-core==0.12.0
    pip install 'onnxplace[tables]'     # pyarrow

Prints the coefficients of matrix products as catalogue.toml has them; how far off they are for weights that the fit did
not see, and for products in batches; what `plan` adds to a product; the same for collectives, and what the exchanges
of a split model would take with them. Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import io
import itertools
import re
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx.parser
from numpy.typing import NDArray

from onnxplace.driver.plan import plan_model
from onnxplace.passes.profiling.roofline import device_peaks
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts
from onnxplace.target.catalogue import CatalogueDevice, read_catalogue
from onnxplace.target.machines import parse_machine
from onnxplace.target.product_times import ProductTimes

Floats = NDArray[np.float64]
Columns = Mapping[str, NDArray[Any]]

PACKAGE = "aiconfigurator-core==0.12.0"
DATA = "aiconfigurator_core/systems/data"
# Folder of tables -> device of the catalogue, and the bytes of its last cache.
SYSTEMS = {
    "h100_sxm": ("H100-SXM", 50e6),
    "h200_sxm": ("H200", 50e6),
    "a100_sxm": ("A100-80", 40e6),
    "l40s": ("L40S", 96e6),
    "b200_sxm": ("B200", 126e6),
    "b300_sxm": ("B300", 126e6),
    "rtx_pro_6000_server": ("RTX-PRO-6000", 128e6),
}
# Types of the tables that are fitted -> bytes of an element of the operands; results have two bytes.
TYPES = {"bfloat16": 2, "fp8": 1}
# Products of float16 run on the same units, by the same kernels, as those of bfloat16.
SAME_AS = {"bfloat16": ("float16", "bfloat16"), "fp8": ("fp8",)}
COLLECTIVES: Mapping[str, Callable[[int], float]] = {
    # The share of a message that each GPU sends, by their number: rings.
    "all_reduce": lambda count: 2 * (count - 1) / count,
    "all_gather": lambda count: (count - 1) / count,
    "reduce_scatter": lambda count: (count - 1) / count,
    "alltoall": lambda count: (count - 1) / count,
}
# The tables give messages in elements of these types.
MESSAGE_TYPES = {"half": 2, "int8": 1}

# A device whose memory is outrun by more than this share of rows answers them from its cache.
MAX_OUTRUN = 0.01
# Products of which `plan` is compared with what was measured.
REQUEST_SIDES, REQUEST_ROWS = (1024, 4096, 8192), (1, 16, 128, 1024, 4096, 8192)
# Rows whose bytes take less than this are those of the launch, wherever the bytes come from.
MIN_MOVING_SECONDS = 1e-6
# Types whose median error is larger have no coefficients: frameworks use different kernels for them.
MAX_ERROR = 0.08
# Weights of fewer rows or columns are rare in models, and count by this factor.
COMMON_SIDE, RARE_WEIGHT = 1024, 0.2
# One in so many weights is kept back.
KEPT_BACK = 5
# Errors well above this count linearly: kernels that a library chose badly do not decide.
TYPICAL_ERROR = 0.03
STEPS = 80


# ------------------------------------------------------------------------------------------------------------- products


@dataclass(frozen=True)
class Products:
    """Measured products of [m, k] by [k, n], one row each."""

    m: Floats
    n: Floats
    k: Floats
    seconds: Floats
    """Median of the frameworks that measured it."""
    element_bytes: int

    def computing(self, device: CatalogueDevice, kind: str) -> Floats:
        """Return the seconds of the operations at the peak rate."""
        return 2 * self.m * self.n * self.k / device.rates[kind]

    def moving(self, device: CatalogueDevice) -> Floats:
        """Return the seconds of the bytes at the peak rate."""
        return self.bytes / device.memory_bytes_per_second

    def columns(self, device: CatalogueDevice, kind: str) -> tuple[Floats, Floats, Floats]:
        """Return the seconds of operations and bytes at the peak rates, and the depth: what `predict` takes."""
        return self.computing(device, kind), self.moving(device), self.k

    @property
    def bytes(self) -> Floats:
        return self.element_bytes * self.k * (self.m + self.n) + 2 * self.m * self.n

    @property
    def is_common(self) -> NDArray[np.bool_]:
        """Return which rows have weights as large as those of models."""
        return np.asarray(np.minimum(self.n, self.k) >= COMMON_SIDE)

    @property
    def is_kept_back(self) -> NDArray[np.bool_]:
        """Return which rows the fit does not see: all of one weight in five."""
        return np.asarray((self.n * 7919 + self.k * 104729) % KEPT_BACK == 0)

    def select(self, rows: NDArray[np.bool_]) -> Products:
        return Products(self.m[rows], self.n[rows], self.k[rows], self.seconds[rows], self.element_bytes)


def read_products(archive: zipfile.ZipFile, system: str, kind: str) -> Products | None:
    """Return the products of a type that were measured on a system, None without any."""
    rows: dict[tuple[int, int, int], list[float]] = {}
    for path in list_tables(archive, rf"{system}/gemm/.*/gemm_perf\.parquet"):
        table = read_table(archive, path)
        is_kind = table["gemm_dtype"] == kind
        for *shape, latency in zip(*(table[name][is_kind].tolist() for name in ("m", "n", "k", "latency"))):
            rows.setdefault((shape[0], shape[1], shape[2]), []).append(latency * 1e-3)
    if not rows:
        return None
    m, n, k = np.array(list(rows), dtype=np.float64).T
    return Products(m, n, k, np.array([np.median(times) for times in rows.values()]), TYPES[kind])


def find_usable_rows(products: Products, device: CatalogueDevice, kind: str, cache_bytes: float) -> NDArray[np.bool_]:
    """Return the rows that measure the device's memory.

    A benchmark repeats a product, so that operands which fit into the cache stay there. In a model they do not. Where
    the cache is much faster than the memory, these rows would be taken for the memory's.
    """
    computing, moving = products.computing(device, kind), products.moving(device)
    outruns = products.seconds < np.maximum(computing, moving)
    if outruns.mean() <= MAX_OUTRUN:
        return np.asarray(~outruns)
    is_cached = (products.bytes <= cache_bytes) & (moving > computing) & (moving > MIN_MOVING_SECONDS)
    return np.asarray(~outruns & ~is_cached)


def predict(coefficients: Floats, computing: Floats, moving: Floats, depth: Floats) -> Floats:
    """Return what `ProductTimes.seconds` returns, for many products."""
    launch, ramp, length, compute_share, memory_share, sharpness = coefficients
    parts = np.stack([computing / compute_share, moving / memory_share])
    longest = parts.max(axis=0)
    overlapped = longest * ((parts / longest) ** sharpness).sum(axis=0) ** (1 / sharpness)
    return np.asarray(launch + ramp * depth / (depth + length) + overlapped)


LEAST = np.array([1e-7, 1e-8, 10.0, 0.05, 0.05, 1.0])
MOST = np.array([1e-3, 1e-3, 1e6, 1.0, 1.0, 20.0])
FIRST = np.array([3e-6, 2e-6, 1500.0, 0.7, 0.8, 2.0])


def fit_products(computing: Floats, moving: Floats, depth: Floats, seconds: Floats, importance: Floats) -> Floats:
    """Return the coefficients with the least relative errors, weighted by the importance of each row.

    Gauss-Newton steps with damping (Levenberg, Marquardt) in the logarithms of the coefficients, on the logarithms of
    predicted over measured. Each row is weighted by the inverse of its error, so that the sum of errors falls, not that
    of their squares: libraries choose bad kernels for some shapes.
    """
    least, most = np.log(LEAST), np.log(MOST)
    point = np.log(FIRST)

    def errors(at: Floats) -> Floats:
        return np.asarray(np.log(predict(np.exp(at), computing, moving, depth) / seconds))

    def total(of: Floats) -> float:
        return float((importance * np.sqrt(of**2 + TYPICAL_ERROR**2)).sum())

    current, damping, step = errors(point), 1e-2, 1e-4
    for _ in range(STEPS):
        slopes = np.stack([(errors(point + step * unit) - current) / step for unit in np.eye(len(point))], axis=1)
        weighted = slopes * (importance / np.sqrt(current**2 + TYPICAL_ERROR**2))[:, None]
        curvature = weighted.T @ slopes
        diagonal = np.diag(np.diag(curvature) + 1e-9)
        trial, tried = point, current
        while damping < 1e6:
            trial = np.clip(point - np.linalg.solve(curvature + damping * diagonal, weighted.T @ current), least, most)
            tried = errors(trial)
            if total(tried) < total(current):
                break
            damping *= 4
        gain = total(current) - total(tried)
        point, current, damping = trial, tried, max(damping / 3, 1e-6)
        if gain < 1e-7 * total(current):
            break
    return np.asarray(np.exp(point))


def round_coefficients(coefficients: Floats) -> ProductTimes:
    """Return coefficients with three digits, as the catalogue has them."""
    return ProductTimes(*(float(f"{value:.3g}") for value in coefficients))


@dataclass(frozen=True)
class ProductFit:
    """Coefficients of one type on one device, and their relative errors for weights that were kept back."""

    device: str
    kind: str
    times: ProductTimes
    rows: int
    left_out: float
    """Share of rows that measure the cache."""
    errors: Floats
    common_errors: Floats
    """Of weights as large as those of models."""
    all_errors: Floats
    """Also of rows that measure the cache."""
    peak_errors: Floats
    """Errors of the peak rates, with the same launch."""
    large_ratio: float
    """Measured time over that of the peak rates, median of products with 10^11 operations and more."""


def fit_device(products: Products, device: CatalogueDevice, kind: str, cache_bytes: float) -> ProductFit:
    """Fit the products of one type on one device, without the weights that are kept back."""
    is_usable = find_usable_rows(products, device, kind, cache_bytes)
    usable = products.select(is_usable)
    computing, moving, depth = usable.columns(device, kind)
    measured = usable.seconds
    kept, is_common = usable.is_kept_back, usable.is_common
    columns = computing, moving, depth, measured, np.where(is_common, 1.0, RARE_WEIGHT)
    times = round_coefficients(fit_products(*(column[~kept] for column in columns)))
    coefficients = np.array([getattr(times, item.name) for item in fields(times)])
    predicted = predict(coefficients, computing, moving, depth)
    all_predicted = predict(coefficients, *products.columns(device, kind))
    peak = np.maximum(computing, moving) + times.launch_seconds
    is_large = 2 * usable.m * usable.n * usable.k >= 1e11
    return ProductFit(
        device=device.name,
        kind=kind,
        times=times,
        rows=len(products.seconds),
        left_out=1 - float(is_usable.mean()),
        errors=np.abs(predicted / measured - 1)[kept],
        common_errors=np.abs(predicted / measured - 1)[kept & is_common],
        all_errors=np.abs(all_predicted / products.seconds - 1)[products.is_kept_back],
        peak_errors=np.abs(peak / measured - 1)[kept],
        large_ratio=float(np.median((measured / peak)[is_large])),
    )


def format_toml(fit: ProductFit) -> Iterator[str]:
    """Yield the lines of catalogue.toml."""
    values = ", ".join(f"{item.name} = {getattr(fit.times, item.name):g}" for item in fields(fit.times))
    for kind in SAME_AS[fit.kind]:
        yield f"products.{kind} = {{{values}}}"


def format_products(fits: Sequence[ProductFit]) -> Iterator[str]:
    """Yield the rows of the table of products."""
    header = (
        "device",
        "type",
        "products",
        "from the cache",
        "large ones: measured / peak",
        "error of peak rates",
        "error",
        "nine in ten below",
        "worst",
        "error of large weights",
        "error with the cache",
    )
    yield f"| {' | '.join(header)} |"
    yield f"|{'---|' * len(header)}"
    for fit in fits:
        median, high = np.quantile(fit.errors, [0.5, 0.9])
        yield (
            f"| {fit.device} | {fit.kind} | {fit.rows:,} | {fit.left_out:.0%} | {fit.large_ratio:.2f} "
            f"| {np.median(fit.peak_errors):.0%} | {median:.1%} | {high:.0%} | {fit.errors.max():.0%} "
            f"| {np.median(fit.common_errors):.1%} | {np.median(fit.all_errors):.1%} |"
        )


@dataclass(frozen=True)
class BatchErrors:
    """How far off products in batches are, which no fit saw."""

    device: str
    rows: int
    ratios: Floats
    """Estimate over measured time."""
    peak_ratios: Floats
    is_large: NDArray[np.bool_]
    """Whether a row has 10^10 operations or more."""


def compare_batches(archive: zipfile.ZipFile, system: str, device: CatalogueDevice) -> BatchErrors:
    """Compare estimates with the products of latent attention, one for each head.

    They have [tokens, 128] by [128, 512] before it, and [tokens, 512] by [512, 128] after it.
    """
    rows = []
    for path in list_tables(archive, rf"{system}/mla_bmm/.*/mla_bmm_perf\.parquet"):
        table = read_table(archive, path)
        names = ("op_name", "bmm_dtype", "num_heads", "num_tokens", "latency")
        rows += [row[:1] + row[2:] for row in zip(*(table[name].tolist() for name in names)) if row[1] == "bfloat16"]
    times = device.products["bfloat16"]
    ratios, peak_ratios, is_large = [], [], []
    for name, heads, tokens, latency in rows:
        depth, width = (128, 512) if name == "mla_gen_pre" else (512, 128)
        operations = 2 * heads * tokens * depth * width
        moving = 2 * heads * (tokens * (depth + width) + depth * width) / device.memory_bytes_per_second
        computing = operations / device.rates["bfloat16"]
        ratios.append(times.seconds(computing, moving, depth) / (latency * 1e-3))
        peak_ratios.append((max(computing, moving) + times.launch_seconds) / (latency * 1e-3))
        is_large.append(operations >= 1e10)
    return BatchErrors(device.name, len(rows), np.array(ratios), np.array(peak_ratios), np.array(is_large))


def format_batches(batches: Sequence[BatchErrors]) -> Iterator[str]:
    """Yield the rows of the table of products in batches."""
    yield "| device | products | error of peak rates | error | large ones: peak / measured | estimate / measured |"
    yield "|---|---|---|---|---|---|"
    for item in batches:
        errors = [f"{np.median(np.abs(ratios - 1)):.0%}" for ratios in (item.peak_ratios, item.ratios)]
        large = [f"{np.median(ratios[item.is_large]):.2f}" for ratios in (item.peak_ratios, item.ratios)]
        yield f"| {item.device} | {item.rows:,} | {' | '.join((*errors, *large))} |"


def format_requests(products: Products, device: CatalogueDevice) -> Iterator[str]:
    """Yield what `plan` adds to measured products of float16: by coefficients, and by peak rates."""
    target = parse_machine(device.name).to_target()
    plain = replace(target, devices=tuple(replace(item, products={}) for item in target.devices))
    rows = zip(products.m.tolist(), products.n.tolist(), products.k.tolist(), products.seconds.tolist())
    measured = {tuple(map(int, shape)): seconds for *shape, seconds in rows}
    yield "| m | n, k | measured | estimate by coefficients | more than measured | by peak rates | more than measured |"
    yield "|---|---|---|---|---|---|---|"
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "product.onnx")
        for side, m in itertools.product(REQUEST_SIDES, REQUEST_ROWS):
            onnx.save(make_product(m, side), path)
            cells = [f"{measured[m, side, side] * 1e6:,.1f} us"]
            for item in (target, plain):
                step = plan_model(path, target=item, estimate=True).strategies[0].step_seconds or np.nan
                cells += [f"{step * 1e6:,.1f} us", f"{(step - measured[m, side, side]) * 1e6:,.1f} us"]
            yield f"| {m} | {side} | {' | '.join(cells)} |"


def make_product(rows: int, side: int) -> onnx.ModelProto:
    """Return a model of one product of float16."""
    return onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
        product (float16[{rows}, {side}] x, float16[{side}, {side}] w) => (float16[{rows}, {side}] y) {{
            y = MatMul(x, w)
        }}""")


# ---------------------------------------------------------------------------------------------------------- collectives


@dataclass(frozen=True)
class Collectives:
    """Measured collectives, one row each."""

    name: NDArray[np.str_]
    count: NDArray[np.int64]
    """Number of GPUs."""
    bytes: Floats
    """Of the message."""
    seconds: Floats

    @property
    def sent_bytes(self) -> Floats:
        """Return the bytes that each GPU sends."""
        shares = [COLLECTIVES[name](count) for name, count in zip(self.name.tolist(), self.count.tolist())]
        return np.asarray(self.bytes * np.array(shares))

    @property
    def is_kept_back(self) -> NDArray[np.bool_]:
        """Return which rows the fit does not see: all of one size in three."""
        return np.asarray(np.log2(self.bytes).round() % 3 == 1)


@dataclass(frozen=True)
class Line:
    """A time that grows with the bytes that a GPU sends."""

    latency_seconds: float
    seconds_per_byte: float

    def seconds(self, sent_bytes: Floats) -> Floats:
        return self.latency_seconds + sent_bytes * self.seconds_per_byte


def read_collectives(archive: zipfile.ZipFile, system: str) -> Collectives:
    """Return the collectives of NCCL that were measured on a system, by its newest version."""
    paths = list_tables(archive, rf"{system}/comm/nccl/.*/nccl_perf\.parquet")
    table = read_table(archive, max(paths, key=lambda path: [int(part) for part in re.findall(r"\d+", path)]))
    sizes = np.array([MESSAGE_TYPES[kind] for kind in table["nccl_dtype"].tolist()])
    rows = dict[tuple[str, int, int], list[float]]()
    keys = zip(table["op_name"].tolist(), table["num_gpus"].tolist(), (table["message_size"] * sizes).tolist())
    for key, latency in zip(keys, table["latency"].tolist()):
        rows.setdefault(key, []).append(latency * 1e-3)
    names, counts, bytes_ = zip(*rows)
    seconds = np.array([np.median(times) for times in rows.values()])
    return Collectives(np.array(names), np.array(counts), np.array(bytes_, dtype=np.float64), seconds)


def fit_line(sent_bytes: Floats, seconds: Floats) -> Line:
    """Return the line with the least relative errors, as in `fit_products`."""
    terms = np.stack([np.ones_like(sent_bytes), sent_bytes], axis=1) / seconds[:, None]
    weights = np.ones(len(seconds))
    line = np.zeros(2)
    for _ in range(STEPS):
        scale = weights[:, None]
        line = np.maximum(np.linalg.lstsq(terms * scale, weights, rcond=None)[0], 1e-15)
        weights = (((terms @ line) - 1) ** 2 + TYPICAL_ERROR**2) ** -0.25
    return Line(float(line[0]), float(line[1]))


@dataclass(frozen=True)
class CollectiveFit:
    """Lines of one device's collectives, and relative errors for sizes that were kept back."""

    device: str
    lines: Mapping[tuple[str, int], Line]
    """By collective and number of GPUs."""
    errors: Floats
    shared_errors: Floats
    """Of one line for all."""


def fit_collectives(rows: Collectives, device: str) -> CollectiveFit:
    """Fit a line for each collective and number of GPUs, and one for all."""
    sent, kept = rows.sent_bytes, rows.is_kept_back
    lines = {}
    predicted = np.zeros(len(sent))
    for name, count in sorted(set(zip(rows.name.tolist(), rows.count.tolist()))):
        own = (rows.name == name) & (rows.count == count)
        lines[name, count] = fit_line(sent[own & ~kept], rows.seconds[own & ~kept])
        predicted[own] = lines[name, count].seconds(sent[own])
    shared = fit_line(sent[~kept], rows.seconds[~kept]).seconds(sent)
    errors = [np.abs(times / rows.seconds - 1)[kept] for times in (predicted, shared)]
    return CollectiveFit(device, lines, errors[0], errors[1])


def format_collectives(fits: Sequence[CollectiveFit]) -> Iterator[str]:
    """Yield the rows of the table of collectives: latency and rate."""
    counts = sorted({count for fit in fits for _, count in fit.lines})
    yield f"| device | collective | {' | '.join(f'{count} GPUs' for count in counts)} |"
    yield f"|---|---|{'---|' * len(counts)}"
    for fit in fits:
        for name in COLLECTIVES:
            lines = [fit.lines[name, count] for count in counts if (name, count) in fit.lines]
            cells = [f"{line.latency_seconds * 1e6:.3g} us, {1e-9 / line.seconds_per_byte:.3g} GB/s" for line in lines]
            yield f"| {fit.device} | {name} | {' | '.join(cells)} |"
    yield ""
    yield "| device | error with a line for each | with one line for all |"
    yield "|---|---|---|"
    for fit in fits:
        means = [f"{np.median(item):.0%}, mean {item.mean():.0%}" for item in (fit.errors, fit.shared_errors)]
        yield f"| {fit.device} | {means[0]} | {means[1]} |"


def format_splits(fits: Sequence[CollectiveFit], width: int = 8192) -> Iterator[str]:
    """Yield what the sum of a split product [tokens, width] in float16 takes: our messages, and NCCL's all-reduce."""
    yield "| machine | tokens | bytes | our messages | all-reduce |"
    yield "|---|---|---|---|---|"
    for fit in fits:
        for count in (2, 4, 8):
            target = parse_machine(f"{count}x{fit.device}").to_target()
            peaks = device_peaks(target.devices[0])
            ours = ExchangeCosts.of(target, range(count), peaks.bytes_per_second, peaks.kernel_seconds)
            for tokens in (1, 128, 2048):
                size = 2 * tokens * width
                sent = np.array([size * COLLECTIVES["all_reduce"](count)])
                collective = fit.lines["all_reduce", count].seconds(sent)[0]
                seconds = [ours.seconds(PARTIAL, REPLICATED, size), collective]
                cells = " | ".join(f"{item * 1e6:,.0f} us" for item in seconds)
                yield f"| {parse_machine(f'{count}x{fit.device}').name} | {tokens} | {size:,} | {cells} |"


# --------------------------------------------------------------------------------------------------------------- tables


def list_tables(archive: zipfile.ZipFile, pattern: str) -> list[str]:
    """Return the paths of tables in the wheel."""
    return [path for path in archive.namelist() if re.fullmatch(f"{DATA}/{pattern}", path)]


def read_table(archive: zipfile.ZipFile, path: str) -> Columns:
    """Return the columns of a table."""
    from pyarrow import parquet

    table = parquet.read_table(io.BytesIO(archive.read(path)))
    return {name: np.array(table[name].to_pylist()) for name in table.column_names}


def main() -> None:
    """Print coefficients and tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("wheel", type=Path, help=f"That of {PACKAGE}.")
    parser.add_argument("--device", default="", help="Only this device of the catalogue.")
    options = parser.parse_args()
    if not options.wheel.is_file():
        sys.exit(f"{options.wheel}: no such file; pip download --no-deps {PACKAGE}")
    devices = read_catalogue().devices
    products, batches, collectives, requests = [], [], [], list[str]()
    with zipfile.ZipFile(options.wheel) as archive:
        for system, (name, cache_bytes) in SYSTEMS.items():
            if options.device not in ("", name):
                continue
            for kind in TYPES:
                rows = read_products(archive, system, kind) if kind in devices[name].rates else None
                products += [fit_device(rows, devices[name], kind, cache_bytes)] if rows else []
                if rows and (name, kind) == ("H100-SXM", "bfloat16"):
                    requests = list(format_requests(rows, devices[name]))
            batches.append(compare_batches(archive, system, devices[name]))
            collectives.append(fit_collectives(read_collectives(archive, system), name))
    for fit in products:
        if np.median(fit.errors) <= MAX_ERROR:
            print(f"[devices.{fit.device}]", *format_toml(fit), sep="\n")
    for lines in (
        format_products(products),
        format_batches(batches),
        requests,
        format_collectives(collectives),
        format_splits(collectives),
    ):
        print("", *lines, sep="\n")


if __name__ == "__main__":
    main()
