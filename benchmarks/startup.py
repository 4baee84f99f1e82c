"""What starting up takes: python benchmarks/startup.py [--first] [--opening].

Without options: CPU seconds of commands that compute nothing; the goal is under 0.3 s each. With `--first`: the first
`place` and `compile` on a machine, and the second. With `--opening`: sessions of bundles for two CPU devices, and one
of the whole model with as many threads, in turns; the overhead is the bundle's time by the model's, and the goal is 1.2
or less. CPU seconds hold on a busy machine too.
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

# Some containers set it: then each process compiles all modules that it imports, and not those of an installed numpy.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
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
from onnxplace.cli.app import main
assert main(sys.argv[2:]) == 0
seconds, used = time.perf_counter() - began, os.times()
with open(sys.argv[1], "w") as file:
    json.dump([seconds, sum(used[:4])], file)
"""
COLUMNS = ("command", "loops compiled", "wall s", "CPU s")
# The models of `--opening`, with options of examples/models.py and of compile.
OPENED = {
    "squeezenet": ((), ()),
    "resnet50": ((), ()),
    "two-tower": ((), ("--shape", "images=4,texts=8")),
    "two-encoders": ((), ()),
    "decoder": (("--layers", "8", "--hidden", "1024", "--heads", "16", "--vocab", "20000", "--external"), ("--llm",)),
}
# Open a model so many times in one process, after one time that does not count, or once as the first thing that a
# process does; write wall and CPU seconds of each.
OPENING = """
import json, sys, time
path, turns = sys.argv[2], int(sys.argv[3])
began = time.perf_counter(), time.process_time()
def open_once():
    if path.endswith(".onnx"):
        import onnxruntime
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 2
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    import onnxplace
    return onnxplace.InferenceSession(path)
times = []
for turn in range(turns + 1):
    session = open_once()
    times.append((time.perf_counter() - began[0], time.process_time() - began[1]))
    if not path.endswith(".onnx"):
        session.close()
    del session
    began = time.perf_counter(), time.process_time()
with open(sys.argv[1], "w") as file:
    json.dump(times, file)
"""
OPENING_COLUMNS = ("model", "process", "whole: ms", "CPU ms", "bundle: ms", "CPU ms", "overhead", "overhead of CPU")


def measure_cpu_seconds(command: list[str]) -> float:
    """Return the user and system seconds of one run."""
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    return after.children_user - before.children_user + after.children_system - before.children_system


def first_commands(folder: Path) -> dict[str, list[str]]:
    """Return commands by name, with what they read, made in `folder`."""
    from onnxplace_formats.generators import tf_like

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


def opening_rows(folder: Path, turns: int) -> Iterator[Sequence[object]]:
    """Open each model and its bundle in turns; yield a row for new processes, and one for those that go on."""
    for name, (recipe, options) in OPENED.items():
        model, bundle = folder / f"{name}.onnx", folder / f"{name}.bundle"
        for command in (
            [EXAMPLES / "models.py", name, "-o", model, *recipe],
            ["-m", "onnxplace", "compile", model, "-o", bundle, "--devices", "cpu:0,cpu:1", *options],
        ):
            subprocess.run([sys.executable, *map(str, command)], check=True, capture_output=True)
        times: dict[tuple[Path, bool], list[tuple[float, float]]] = {}
        for _ in range(turns):
            for path in (model, bundle):
                arguments = [sys.executable, "-c", OPENING, str(folder / "seconds"), str(path), "3"]
                subprocess.run(arguments, check=True, capture_output=True)
                first, *later = json.loads((folder / "seconds").read_text())
                times.setdefault((path, True), []).append(first)
                times.setdefault((path, False), []).extend(later)
        for is_new in (True, False):
            (wall, cpu), (bundle_wall, bundle_cpu) = (
                [1e3 * statistics.median(values) for values in zip(*times[path, is_new])] for path in (model, bundle)
            )
            figures = [f"{value:.0f}" for value in (wall, cpu, bundle_wall, bundle_cpu)]
            ratios = [f"{bundle_wall / wall:.2f}", f"{bundle_cpu / cpu:.2f}"]
            yield name, "new" if is_new else "goes on", *figures, *ratios


def main() -> None:
    """Print the median of nine runs of each command, or a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--first", action="store_true", help="first and second place and compile instead; a minute")
    parser.add_argument("--opening", action="store_true", help="sessions of bundles and of whole models; two minutes")
    parser.add_argument("--turns", type=int, default=9, help="of processes that open each model (default: 9)")
    arguments = parser.parse_args()
    if not arguments.first and not arguments.opening:
        for name, command in COMMANDS.items():
            print(f"{name}: {statistics.median(measure_cpu_seconds(command) for _ in range(9)):.2f} s of CPU")
        return
    columns = OPENING_COLUMNS if arguments.opening else COLUMNS
    print(f"| {' | '.join(columns)} |\n|{'---|' * len(columns)}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        table = opening_rows(folder, arguments.turns) if arguments.opening else rows(first_commands(folder), folder)
        for row in table:
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
