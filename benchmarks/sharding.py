"""Operators split over devices: python benchmarks/sharding.py [MODEL ...] [--simulate] [--markdown].

Without --simulate, models exported from torch with random weights are compiled for two CPU devices of one core, and run
in turns with one session on one core: the speed-up, the error of the prediction, and the memory of each device with as
few weights as possible. Nothing else should run meanwhile. Needs `pip install -e '.[cpu,dev,zoo]'`.

With --simulate, large transformers are planned for 2, 4 and 8 GPUs like the H200 (800 TFLOP/s, 4 TB/s; links of 400
GB/s and 10 us, or 25 GB/s and 20 us), by estimated costs. docs/sharding.md holds the latest tables.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parent))
from _sharding_models import EXPORTED, export, write_transformer
from _tables import report_progress

from onnxplace.errors import InfeasibleError
from onnxplace.facts import Profile, Segments, Shards
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.state_binding import bind_states
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import single_device_seconds
from onnxplace.state import State
from onnxplace.target.target import Device, Link, Target

DEVICES = "cpu:0,cpu:1"
LINKS = {"nvlink": (10e-6, 400e9), "pcie": (20e-6, 25e9)}
# What a cut costs a GPU that is waited for after each segment.
SEGMENT_SECONDS = 20e-6
# Model, batch, tokens, past tokens.
CASES = (
    ("bert-large", 1, 2048, 0),
    ("bert-large", 32, 128, 0),
    ("bert-large", 32, 2048, 0),
    ("llama-7b", 1, 128, 0),
    ("llama-7b", 1, 2048, 0),
    ("llama-7b", 32, 128, 0),
    ("llama-7b", 32, 2048, 0),
    ("llama-7b", 1, 1, 2048),
    ("llama-7b", 32, 1, 2048),
    ("llama-70b", 1, 128, 0),
    ("llama-70b", 1, 2048, 0),
    ("llama-70b", 32, 2048, 0),
    ("llama-70b", 1, 1, 2048),
    ("llama-70b", 32, 1, 2048),
)


def run_command(*arguments: str) -> dict[str, Any]:
    """Return what `onnxplace ... --json` prints."""
    command = [sys.executable, "-m", "onnxplace", *arguments, "--json"]
    finished = subprocess.run(command, capture_output=True, text=True, check=True)
    result: dict[str, Any] = json.loads(finished.stdout)
    return result


def measure(name: str, folder: Path, repeat: int) -> list[str]:
    """Return a row: what came out, times in one run, and memory."""
    report_progress(name)
    model, bundle = export(name, folder), folder / f"{name}.bundle"
    compiled = run_command("compile", str(model), "-o", str(bundle), "--force", "--devices", DEVICES)
    bench = run_command("bench", str(bundle), "--repeat", str(repeat), "--no-memory")
    sharding = compiled["sharding"]
    exchanges = ", ".join(f"{n} {kind}" for kind, n in sharding["exchanges"].items()) if sharding else "not split"
    one, several = bench["one_device"]["median_seconds"], bench["bundle"]["median_seconds"]
    predicted = compiled["predicted"]["step_seconds"]
    least = run_command(
        "compile", str(model), "-o", str(bundle), "--force", "--devices", DEVICES, "--no-trial",
        "--objective", "fit", "--shard", "2",
    )  # fmt: skip
    alone = run_command("compile", str(model), "-o", str(bundle), "--force", "--devices", "cpu:0", "--no-trial")
    memory = max(d["peak_bytes"] for d in least["devices"]) / max(d["peak_bytes"] for d in alone["devices"])
    return [
        name,
        exchanges,
        f"{one * 1e3:.1f}",
        f"{several * 1e3:.1f}",
        f"{one / several:.2f}",
        f"{predicted / several - 1:+.0%}",
        f"{memory:.2f}",
    ]


def simulate(case: tuple[str, int, int, int], folder: Path) -> Iterable[list[str]]:
    """Yield two rows per link: predicted speed-ups over one device for at most 2, 4 and 8 ways.

    The first row is for segments that are waited for, and a message to each other device; the second for exchanges that
    cost one message. Each cell has two figures: what the choice promises, and simulated, message by message.
    """
    name, batch, tokens, past = case
    report_progress(f"{name}, batch {batch}, {tokens} tokens, {past} past")
    path = folder / f"{name}-{batch}-{tokens}-{past}.onnx"
    states = write_transformer(name, path, batch, tokens, past)
    bound = bind(load(path), {"past": past} if past else {}, {})
    model = bind_states(bound, {output: source for source, output in states.items()})
    for link in LINKS:
        for kind, collective in (("waits", False), ("one message", True)):
            cells, best = [], (1.0, 1.0)
            for ways in (2, 4, 8):
                chosen, simulated = speed_up(model, make_target(ways, link, collective))
                # N ways at most: fewer are used where more gain nothing.
                best = max(best[0], chosen), max(best[1], simulated)
                cells.append(f"{best[0]:.2f}, {best[1]:.2f}")
            yield [name, str(batch), str(tokens), str(past), link, kind, *cells]


def speed_up(model: Any, target: Target) -> tuple[float, float]:
    """Return the speed-ups of a model split over all GPUs of a target: as the choice promises it, and simulated."""
    count = len(target.devices)
    text = f"shard{{ways={count},exact=true}},coplace{{join=never}},fuse,m-etf,split"
    profiled, _ = Pipeline.parse("optimize,profile{estimate=true}").run(State(target).with_facts(model))
    alone = float(single_device_seconds(profiled[Profile], target).min())
    try:
        after, _ = Pipeline.parse(text).run(profiled)
    except InfeasibleError:
        return 1.0, 1.0
    if after[Shards].ways == 1:
        return 1.0, 1.0
    return alone / after[Shards].seconds, alone / after[Segments].simulation.makespan_seconds


def make_target(count: int, link: str, collective: bool) -> Target:
    """Return a target of GPUs like the H200; memory is not the matter here.

    With `collective`, all messages of an exchange together have the latency of one, and a cut costs nothing else.
    """
    latency, rate = LINKS[link]
    latency = latency / (count - 1) if collective else latency
    devices = tuple(
        Device(
            f"cuda:{index}",
            memory_bytes=1 << 42,
            model="H200",
            segment_seconds=0.0 if collective else SEGMENT_SECONDS,
            operations_per_second=800e12,
            memory_bytes_per_second=4e12,
            kernel_seconds=1e-6,
        )
        for index in range(count)
    )
    links = tuple(Link(a.id, b.id, latency, rate, link) for a in devices for b in devices if a is not b)
    return Target(devices, links)


def print_markdown(header: list[str], rows: Iterable[list[str]]) -> None:
    """Print a table row by row, as they come."""
    print("| " + " | ".join(header) + " |\n|" + "---|" * len(header), flush=True)
    for row in rows:
        print("| " + " | ".join(row) + " |", flush=True)


def main() -> None:
    """Print the table that the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"default: all of {', '.join(EXPORTED)}")
    parser.add_argument("--simulate", action="store_true", help="plan large transformers for GPUs instead")
    parser.add_argument("--folder", type=Path, help="where exported models are kept; default: a temporary one")
    parser.add_argument("--repeat", type=int, default=30, help="runs of each measured step")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.folder or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        if arguments.simulate:
            cases = [case for case in CASES if not arguments.models or case[0] in arguments.models]
            header = ["model", "batch", "tokens", "past", "link", "exchange", "2 ways", "4 ways", "8 ways"]
            print_markdown(header, (row for case in cases for row in simulate(case, Path(temporary))))
            return
        names = arguments.models or list(EXPORTED)
        header = ["model", "exchanges", "one device, ms", "two devices, ms", "speed-up", "prediction", "least memory"]
        print_markdown(header, (measure(name, folder, arguments.repeat) for name in names))


if __name__ == "__main__":
    main()
