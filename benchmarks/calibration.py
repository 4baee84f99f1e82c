"""Does calibration say the same twice: python benchmarks/calibration.py [--devices cpu:0,cpu:1] [--runs 2].

Runs `onnxplace devices --calibrate` several times, each in a process of its own, and prints a row per run and link, and
the largest difference between runs. Calm are the points that did not have to be taken from samples that waited.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
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


def main() -> None:
    """Print a table and how far the runs are apart."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", default="cpu:0,cpu:1")
    parser.add_argument("--runs", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=20.0)
    asked = parser.parse_args()
    runs = []
    print(f"| {' | '.join(HEADINGS)} |\n|{'---|' * len(HEADINGS)}", flush=True)
    for number in range(1, asked.runs + 1):
        progress(f"calibrating {asked.devices}, {number} of {asked.runs}")
        runs.append(measured(asked.devices, asked.seconds))
        for link in runs[-1]["links"]:
            print(f"| {' | '.join(row(number, link))} |", flush=True)
    for what in ("bytes_per_second", "latency_seconds"):
        spread = [max(values) / min(values) - 1 for values in zip(*([link[what] for link in r["links"]] for r in runs))]
        print(f"\n{what}: runs differ by up to {max(spread):.0%}", flush=True)


if __name__ == "__main__":
    main()
