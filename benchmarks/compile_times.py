"""What a command takes, from its start to its end: python benchmarks/compile_times.py [NAME ...] [--against CHECKOUT].

Each command runs in a new process with a new cache of measurements; compiled loops are there already, as after the
first use. The table has the median seconds by the clock, the least, and the CPU seconds of the command and of what it
started. `--against` takes turns with another checkout that has an environment in `.venv`, such as a worktree of an
earlier commit, and adds its figures. Nothing else should run meanwhile. bert-base and resnet50 are exported from torch,
which needs `pip install -e '.[cpu,dev,zoo]'`, unless their files are in `--folder` already.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median

sys.path.insert(0, str(Path(__file__).parent))
from _sharding_models import EXPORTED, export

ROOT = Path(__file__).parents[1]
CORES = ("--devices", "cpu:0,cpu:1")
DECODER = ("--layers", "24", "--hidden", "1024", "--heads", "16", "--vocab", "20000", "--external")
# By name: the model, options of examples/models.py, and the command with its options.
COMMANDS: dict[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "two-tower": ("two-tower", (), ("compile", *CORES, "--shape", "images=4,texts=8")),
    "transformer": ("transformer", (), ("compile", *CORES, "--shape", "batch=1,seq=8")),
    "bert-base": ("bert-base", (), ("compile", *CORES)),
    "resnet50 throughput": ("resnet50", (), ("compile", *CORES, "--objective", "throughput")),
    "bert-base throughput": ("bert-base", (), ("compile", *CORES, "--objective", "throughput")),
    "decoder on 8xH100": ("decoder", DECODER, ("plan", "--machine", "8xH100-NVLink", "--llm")),
}


def make_model(name: str, options: Sequence[str], folder: Path) -> Path:
    """Return the file of a model, which is written unless it is there."""
    if name in EXPORTED:
        return export(name, folder)
    path = folder / f"{name}.onnx"
    if not path.is_file():
        command = [sys.executable, str(ROOT / "examples" / "models.py"), name, "-o", str(path), *options]
        subprocess.run(command, check=True, capture_output=True)
    return path


def time_command(checkout: Path, model: Path, command: Sequence[str]) -> tuple[float, float]:
    """Return the seconds by the clock and the CPU seconds of one run of a command on a model."""
    with tempfile.TemporaryDirectory() as folder:
        name, *options = command
        output = ("-o", f"{folder}/bundle") if name == "compile" else ()
        python = checkout / ".venv" / "bin" / "python"
        if not python.is_file():
            python = Path(sys.executable)
        environment = os.environ | {"ONNXPLACE_CACHE_DIR": folder}
        environment.pop("PYTHONDONTWRITEBYTECODE", None)  # some containers set it
        began, used = time.perf_counter(), sum(os.times()[2:4])
        subprocess.run(
            [python, "-m", "onnxplace", name, model, *options, *output],
            env=environment, cwd=checkout, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        return time.perf_counter() - began, sum(os.times()[2:4]) - used


def main() -> None:
    """Print a row for each command and checkout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(COMMANDS)} (default: all)")
    parser.add_argument("--against", type=Path, metavar="CHECKOUT", help="another checkout, whose turns alternate")
    parser.add_argument("--turns", type=int, default=5, help="of each command (default: 5)")
    parser.add_argument("--folder", type=Path, help="where models are kept (default: a temporary folder)")
    arguments = parser.parse_args()
    if unknown := set(arguments.names) - set(COMMANDS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; there are {', '.join(COMMANDS)}")
    checkouts = {"this": ROOT} | ({"other": arguments.against} if arguments.against else {})
    print("| command | checkout | median s | least s | CPU s |\n|---|---|---|---|---|", flush=True)
    with ExitStack() as stack:
        folder = arguments.folder or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in arguments.names or COMMANDS:
            model, options, command = COMMANDS[name]
            path = make_model(model, options, folder.resolve())
            times: dict[str, list[tuple[float, float]]] = {label: [] for label in checkouts}
            for _ in range(arguments.turns):
                for label, checkout in checkouts.items():
                    times[label].append(time_command(checkout.resolve(), path, command))
            for label, pairs in times.items():
                wall, cpu = zip(*pairs)
                print(f"| {name} | {label} | {median(wall):.1f} | {min(wall):.1f} | {median(cpu):.1f} |", flush=True)


if __name__ == "__main__":
    main()
