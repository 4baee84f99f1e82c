"""CPU seconds of startup: python benchmarks/startup.py. The goal is under 0.3 s each."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

COMMANDS = {
    "python, nothing imported": [sys.executable, "-c", "pass"],
    "import onnxplace": [sys.executable, "-c", "import onnxplace"],
    "onnxplace --help": [sys.executable, "-m", "onnxplace", "--help"],
    "onnxplace passes": [sys.executable, "-m", "onnxplace", "passes"],
}


def measure_cpu_seconds(command: list[str]) -> float:
    """Return the user and system seconds of one run."""
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def main() -> None:
    """Print the median of nine runs for each command."""
    for name, command in COMMANDS.items():
        print(f"{name}: {statistics.median(measure_cpu_seconds(command) for _ in range(9)):.2f} s of CPU")


if __name__ == "__main__":
    main()
