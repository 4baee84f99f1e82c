"""What starting up takes: python benchmarks/startup.py [--first].

Without options: CPU seconds of commands that compute nothing; the goal is under 0.3 s each. With `--first`: the first
`place` and `compile` on a machine, and the second, in Markdown. CPU seconds hold on a busy machine too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
COMMANDS = {
    "python, nothing imported": [sys.executable, "-c", "pass"],
    "import onnxplace": [sys.executable, "-c", "import onnxplace"],
    "onnxplace --help": [sys.executable, "-m", "onnxplace", "--help"],
    "onnxplace passes": [sys.executable, "-m", "onnxplace", "passes"],
}
# Run a command; write its seconds by the clock, and the CPU seconds of it and of the processes that it started.
WATCHED = """
import json, os, sys, time
began = time.perf_counter()
from onnxplace.cli import main
assert main(sys.argv[2:]) == 0
seconds, used = time.perf_counter() - began, os.times()
with open(sys.argv[1], "w") as file:
    json.dump([seconds, sum(used[:4])], file)
"""
COLUMNS = ("command", "loops compiled", "wall s", "CPU s")


def measure_cpu_seconds(command: list[str]) -> float:
    """Return the user and system seconds of one run."""
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def first_commands(folder: Path) -> dict[str, list[str]]:
    """Return commands by name, with what they read, made in `folder`."""
    from onnxplace.cost_graph import tf_like

    graph, model = folder / "graph.json", folder / "two-tower.onnx"
    drawn = tf_like(300, 1)
    profile = drawn.profile.graph
    data = {
        "devices": [{"id": index, "memory_bytes": 1 << 34} for index in range(4)],
        "comm": {"intercept_us": 50, "coef_us_per_byte": 1e-4},
        "nodes": [{"id": name, "compute_time_us": 90, "memory_bytes": 4096} for name in profile.names],
        "edges": [
            {"src": profile.names[source], "dst": profile.names[reader], "bytes": 4096}
            for reader in range(len(profile))
            for source in profile.predecessors[reader].tolist()
        ],
    }
    graph.write_text(json.dumps(data))
    subprocess.run([sys.executable, EXAMPLES / "models.py", "two-tower", "-o", model], check=True, capture_output=True)
    devices, shape = ("--devices", "cpu:0,cpu:1"), ("--shape", "images=4,texts=8")
    bundle = ("-o", str(folder / "bundle"), "--force", "--no-cache")
    return {"place": ["place", str(graph)], "compile": ["compile", str(model), *devices, *shape, *bundle]}


def rows(commands: dict[str, list[str]], folder: Path) -> Iterator[Sequence[object]]:
    """Run each command on an empty cache of compiled loops, then again; yield a row of the table for each."""
    for name, arguments in commands.items():
        kept = folder / f"loops-{name}"
        for turn in ("first", "second"):
            before = len(list(kept.rglob("*.nbi")))
            subprocess.run(
                [sys.executable, "-c", WATCHED, folder / "seconds", *arguments],
                env={**os.environ, "NUMBA_CACHE_DIR": str(kept)},
                check=True,
                capture_output=True,
            )
            seconds = json.loads((folder / "seconds").read_text())
            yield f"{turn} `{name}`", len(list(kept.rglob("*.nbi"))) - before, *(f"{each:.1f}" for each in seconds)


def main() -> None:
    """Print the median of nine runs of each command, or the table of first commands."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", action="store_true", help="first and second place and compile instead; a minute")
    if not parser.parse_args().first:
        for name, command in COMMANDS.items():
            print(f"{name}: {statistics.median(measure_cpu_seconds(command) for _ in range(9)):.2f} s of CPU")
        return
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        for row in rows(first_commands(Path(folder)), Path(folder)):
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
