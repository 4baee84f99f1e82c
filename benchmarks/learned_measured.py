"""Measured rewards from start to end: python benchmarks/learned_measured.py [--seconds 120] [MODEL ...].

For each example model, on two CPU devices of this machine: compile it with the default placer and with `--placer auto`
(without splitting operators), train a policy with `--reward measured`, compile the model with the device map of the
kept placement and with the policy, and run all bundles in turns. The table has the median of the paired speed-ups
over `auto`, with a 95 % interval from resampled rounds. A busy machine gives rough figures.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

import onnxplace
from onnxplace.measure.step_inputs import choose_step_inputs

ROOT = Path(__file__).parent.parent
DEVICES = "cpu:0,cpu:1"
# Example model -> options of its compilation.
MODELS = {"two-tower": ("--shape", "images=4,texts=4"), "inception-v1": ()}
# Each bundle is run in so many rounds, for so many seconds each time; the first round warms up.
ROUNDS, BURST_SECONDS = 31, 0.25
RESAMPLES = 2_000


def run(*arguments: object) -> None:
    """Run a program; its output goes to stderr, so that stdout has the tables alone."""
    print("$", *arguments[1:], file=sys.stderr, flush=True)
    subprocess.run(list(map(str, arguments)), check=True, stdout=sys.stderr, cwd=ROOT)


def make_bundles(name: str, folder: Path, seconds: float, seed: int) -> dict[str, Path]:
    """Compile a model in all ways; return the bundles by what they are called."""
    command = (sys.executable, "-m", "onnxplace")
    model, policy = folder / f"{name}.onnx", folder / f"{name}.safetensors"
    device_map = policy.with_suffix(".device-map.json")
    options = ("--devices", DEVICES, *MODELS[name])
    run(sys.executable, ROOT / "examples" / "models.py", name, "-o", model)
    learn = ("--graphs", model, "--reward", "measured", "--seconds", seconds, "--seed", seed)
    run(*command, "learn", "placeto", *options, *learn, "-o", policy)
    ways = {
        "auto": ("--placer", "auto"),
        "default, may split operators": (),
        "kept placement": ("--device-map", device_map),
        "policy": ("--placer", f"placeto{{policy={policy}}}"),
    }
    bundles = {label: folder / f"{name}.{index}.bundle" for index, label in enumerate(ways)}
    for label, way in ways.items():
        run(*command, "compile", model, *options, *way, "-o", bundles[label])
    return bundles


def time_rounds(bundles: Mapping[str, Path]) -> dict[str, np.ndarray[Any, Any]]:
    """Return, for each bundle, the median step of each round in seconds; bundles take turns, in changing order."""
    with ExitStack() as stack:
        sessions = {label: stack.enter_context(onnxplace.InferenceSession(path)) for label, path in bundles.items()}
        loaded = onnxplace.load(next(iter(bundles.values())))
        feeds = choose_step_inputs(loaded, None, {}, 0).first
        labels, steps = list(sessions), {label: list[float]() for label in sessions}
        for number in range(ROUNDS):
            for label in labels[number % len(labels) :] + labels[: number % len(labels)]:
                steps[label].append(_time_burst(sessions[label], feeds))
    return {label: np.array(times[1:]) for label, times in steps.items()}


def _time_burst(session: Any, feeds: Mapping[str, Any]) -> float:
    times, began = list[float](), time.perf_counter()
    while time.perf_counter() - began < BURST_SECONDS or len(times) < 3:
        start = time.perf_counter()
        session.run(None, feeds)
        times.append(time.perf_counter() - start)
    return float(np.median(times))


def summarise(rounds: Mapping[str, np.ndarray[Any, Any]]) -> list[tuple[str, str, str, str]]:
    """Return a row per bundle: label, milliseconds, median speed-up over `auto` and its 95 % interval."""
    rng, rows = np.random.default_rng(0), []
    for label, times in rounds.items():
        ratios = rounds["auto"] / times
        drawn = np.median(rng.choice(ratios, (RESAMPLES, len(ratios))), axis=1)
        low, high = np.quantile(drawn, [0.025, 0.975])
        rows.append((label, f"{1e3 * np.median(times):.2f}", f"{np.median(ratios):.3f}", f"{low:.3f} to {high:.3f}"))
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure the models, and print a table for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS), help=", ".join(MODELS))
    parser.add_argument("--seconds", type=float, default=120.0, help="of training for each model")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    for name in options.models:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory() as folder:
            rounds = time_rounds(make_bundles(name, Path(folder), options.seconds, options.seed))
        print(f"\n{name}, {time.perf_counter() - began:.0f} s in all\n")
        print("| bundle | step, ms | speed-up over `auto` | 95 % |\n|---|---|---|---|")
        for row in summarise(rounds):
            print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
