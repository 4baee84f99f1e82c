"""Does calibration say the same twice: python benchmarks/calibration.py [--devices cpu:0,cpu:1] [--runs 5].

Runs `onnxplace devices --calibrate` several times, each in a process of its own, and prints a row per run and link, and
by how much two runs differ at most: one after the other, and any two, since a virtual machine drifts over minutes. Calm
are the points that did not have to be taken from samples that waited.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from itertools import combinations, pairwise
from typing import Any

from _tables import progress

HEADINGS = ("run", "link", "latency us", "GB/s", "worst error of the fit", "calm points", "outliers from")


def measured(devices: str, seconds: float) -> dict[str, Any]:
    """Calibrate in a fresh process and return what it printed."""
    command = [sys.executable, "-m", "onnxplace", "devices", "--calibrate", "--devices", devices, "--json"]
    ended = subprocess.run([*command, "--seconds", str(seconds)], stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, Any] = json.loads(ended.stdout)["calibration"]
    return found


def row(number: int, link: dict[str, Any]) -> list[str]:
    """Return the row of one direction in one run."""
    points = link["points"]
    left_out = [point["bytes"] for point in points if point["outlier"]]
    return [
        str(number),
        f"{link['source']} -> {link['destination']}",
        f"{link['latency_seconds'] * 1e6:.1f}",
        f"{link['bytes_per_second'] / 1e9:.2f}",
        f"{link['worst_relative_error']:.0%}",
        f"{sum(point['calm_samples'] >= 3 for point in points)} of {len(points)}",
        f"{min(left_out) >> 20} MiB" if left_out else "-",
    ]


def apart(pair: tuple[float, float]) -> float:
    """Return by how much the larger exceeds the smaller."""
    return max(pair) / min(pair) - 1


def main() -> None:
    """Print a table and how far the runs are apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=30.0)
    asked = parser.parse_args()
    runs = []
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}", flush=True)
    for number in range(1, asked.runs + 1):
        progress(f"calibrating {asked.devices}, {number} of {asked.runs}")
        runs.append(measured(asked.devices, asked.seconds))
        for link in runs[-1]["links"]:
            print(f"| {' | '.join(row(number, link))} |", flush=True)
    for what in ("bytes_per_second", "latency_seconds"):
        by_link = list(zip(*([link[what] for link in run["links"]] for run in runs)))
        next_ones, any_two = (
            max((apart(pair) for values in by_link for pair in pairs(values)), default=0.0)
            for pairs in (pairwise, lambda values: combinations(values, 2))
        )
        print(
            f"\n{what}: two runs in a row differ by up to {next_ones:.0%}, any two by up to {any_two:.0%}", flush=True
        )


if __name__ == "__main__":
    main()
