"""The spread of repeated calibrations: python benchmarks/calibration.py [--devices cpu:0,cpu:1] [--runs 5].

Runs `onnxplace devices --calibrate` several times, each in its own process. Prints a row per run and link, and the
largest difference of two runs: consecutive ones, and any two, since a virtual machine drifts over minutes. Calm points
are those with enough samples that did not wait for a core.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import combinations, pairwise
from typing import Any

from _tables import report_progress

HEADINGS = ("run", "link", "latency us", "GB/s", "worst error of the fit", "calm points", "outliers from")


def calibrate(devices: str, seconds: float) -> dict[str, Any]:
    """Calibrate in a new process and return its JSON."""
    command = [sys.executable, "-m", "onnxplace", "devices", "--calibrate", "--devices", devices, "--json"]
    process = subprocess.run([*command, "--seconds", str(seconds)], stdout=subprocess.PIPE, text=True, check=True)
    calibration: dict[str, Any] = json.loads(process.stdout)["calibration"]
    return calibration


def format_row(number: int, link: dict[str, Any]) -> list[str]:
    """Return the table row of one link in one run."""
    points = link["points"]
    outlier_bytes = [point["bytes"] for point in points if point["outlier"]]
    return [
        str(number),
        f"{link['source']} -> {link['destination']}",
        f"{link['latency_seconds'] * 1e6:.1f}",
        f"{link['bytes_per_second'] / 1e9:.2f}",
        f"{link['worst_relative_error']:.0%}",
        f"{sum(point['undisturbed_samples'] >= 3 for point in points)} of {len(points)}",
        f"{min(outlier_bytes) >> 20} MiB" if outlier_bytes else "-",
    ]


def compare_pair(pair: tuple[float, float]) -> float:
    """Return the relative difference of two numbers."""
    return max(pair) / min(pair) - 1


def main() -> None:
    """Print the table and the differences of the runs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    runs = []
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}", flush=True)
    for number in range(1, options.runs + 1):
        report_progress(f"calibrating {options.devices}, {number} of {options.runs}")
        runs.append(calibrate(options.devices, options.seconds))
        for link in runs[-1]["links"]:
            print(f"| {' | '.join(format_row(number, link))} |", flush=True)
    for what in ("bytes_per_second", "latency_seconds"):
        by_link = list(zip(*([link[what] for link in run["links"]] for run in runs)))
        consecutive, any_pair = (
            max((compare_pair(pair) for values in by_link for pair in pairs(values)), default=0.0)
            for pairs in (pairwise, lambda values: combinations(values, 2))
        )
        print(
            f"\n{what}: two runs in a row differ by up to {consecutive:.0%}, any two by up to {any_pair:.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main()
