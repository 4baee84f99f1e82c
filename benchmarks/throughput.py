"""Requests per second: python benchmarks/throughput.py [MODEL ...] [--requests 50] [--turns 3] [--folder DIR].

Models exported from torch with random weights are compiled for two CPU devices of one core. Then these take turns, each
with 4 and with 8 requests in flight: one device, one session with all cores (requests one after the other), copies of
the model, stages, and what `--objective throughput` chose. The table has requests per second, their speed-up over one
device in the same run, and the error of each prediction. Nothing else should run meanwhile. Needs
`pip install -e '.[cpu,dev,zoo]'`. docs/throughput.md holds the latest table.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from _sharding_models import export
from _tables import report_progress

import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.machine.hardware import available_cores
from onnxplace.measure.compare import open_reference
from onnxplace.reports.text import describe_copies

MODELS = ("resnet50", "bert-base")
DEVICES = "cpu:0,cpu:1"
IN_FLIGHT = (4, 8)
COPIES = "optimize,profile,coplace{join=never},fuse,single,split,replicate{routes=cpu:1},emit"
# How each bundle is compiled.
BUNDLES: Mapping[str, Mapping[str, Any]] = {
    "one device": {"devices": DEVICES, "placer": "single"},  # cpu:0 alone would get all cores
    "copies": {"devices": DEVICES, "pipeline": COPIES},
    "stages": {"devices": DEVICES, "placer": "stages"},
    "chosen": {"devices": DEVICES, "objective": "throughput"},
}
ALL_CORES = "one session, all cores"
HEADER = ("model", "in flight", "what", "requests/s", "speed-up", "predicted", "error")


def time_stream(session: onnxplace.InferenceSession, feeds: Any, in_flight: int, requests: int) -> float:
    """Return requests per second with so many in flight, from before the first to after the last result."""
    began = time.perf_counter()
    futures = [session.submit(feeds) for _ in range(in_flight)]
    for position in range(requests):
        futures[position].result()
        if len(futures) < requests:
            futures.append(session.submit(feeds))
    return requests / (time.perf_counter() - began)


def time_whole(run: Callable[[Any], object], feeds: Any, requests: int) -> float:
    """Return requests per second, one after the other."""
    began = time.perf_counter()
    for _ in range(requests):
        run(feeds)
    return requests / (time.perf_counter() - began)


def measure(name: str, folder: Path, requests: int, turns: int) -> list[tuple[str, ...]]:
    """Return the rows of a model."""
    model = export(name, folder)
    bundles: dict[str, Bundle] = {}
    for what, options in BUNDLES.items():
        report_progress(f"{name}: compiling {what}")
        bundles[what] = onnxplace.compile(model, folder / f"{name}-{what}".replace(" ", "-"), force=True, **options)
    feeds = random_feeds(bundles["chosen"].inputs, bundles["chosen"].manifest.dimensions, 0)
    rows: list[tuple[str, ...]] = []
    with ExitStack() as stack:
        sessions = {what: stack.enter_context(onnxplace.InferenceSession(item)) for what, item in bundles.items()}
        whole = open_reference(bundles["chosen"], None, available_cores())
        for in_flight in IN_FLIGHT:
            report_progress(f"{name}: {in_flight} in flight")
            rates: dict[str, list[float]] = {}
            for turn in range(turns + 1):
                for what, session in sessions.items():
                    rates.setdefault(what, []).append(time_stream(session, feeds, in_flight, requests))
                rates.setdefault(ALL_CORES, []).append(time_whole(whole, feeds, requests))
                if not turn:  # for warming up
                    rates.clear()
            rows += _format_rows(name, in_flight, rates, bundles)
    return rows


def _format_rows(
    name: str, in_flight: int, rates: Mapping[str, list[float]], bundles: Mapping[str, Bundle]
) -> list[tuple[str, ...]]:
    base = median(rates["one device"])
    rows: list[tuple[str, ...]] = []
    for what, values in rates.items():
        rate, predicted, error = median(values), "-", "-"
        if what in bundles:
            manifest = bundles[what].manifest
            expected = 1 / manifest.predicted.interval_seconds
            predicted, error = f"{expected:.2f}", f"{expected / rate - 1:+.0%}"
        label = what if what != "chosen" else f"chosen: {_describe(bundles[what])}"
        rows.append((name, str(in_flight), label, f"{rate:.2f}", f"{rate / base:.2f}", predicted, error))
    return rows


def _describe(bundle: Bundle) -> str:
    manifest = bundle.manifest
    return describe_copies(manifest) if manifest.routes else f"{len(manifest.segments)} segments, {manifest.placer}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--requests", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--folder", type=Path, help="where models are exported to and kept")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
        for name in options.models:
            for row in measure(name, folder, options.requests, options.turns):
                print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
