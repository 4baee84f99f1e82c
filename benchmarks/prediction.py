"""Predicted and measured steps: python benchmarks/prediction.py [--models NAMES] [--placers m-etf,auto] [--target F].

Each model is compiled for one device (`cpu:0`) and for two (`cpu:0,cpu:1`), one core each, and run as `onnxplace bench`
runs it; rows of one model take turns of a few steps. Prints, per row, the step as predicted and as measured, each
device's busy time (neither waiting nor copying), copies received, and how many values cross; then the median and worst
absolute error, and of how many pairs of placements of one model, whose measured steps differ by more than 10 %, the
faster was predicted. `planned` is the error of the prediction from the costs of nodes, before the trial.

On a busy machine, the longest wait of a worker for a core is subtracted from each step (Linux), and the steps that
waited least count. `waited` is that wait: large values make the figures unreliable.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
from _tables import format_milliseconds
from step_times import SHAPES

import models
import onnxplace
from onnxplace.bundle import Bundle
from onnxplace.evaluation import TracedRequests
from onnxplace.feeds import random_feeds
from onnxplace.machine import local_target, longest_wait, read_run_delays
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from onnxplace.target import Target, read_target

DEVICES = ("cpu:0", "cpu:0,cpu:1")
# Pairs of placements whose measured steps differ by less are not compared.
MIN_DIFFERENCE = 0.1
# The first seconds and steps of a turn fill the caches, which another case has used; the next steps count.
SETTLING_SECONDS, SETTLING_STEPS, COUNTED_STEPS = 0.02, 2, 5
HEADER = (
    "model", "devices", "placer", "segments", "transfers", "predicted ms", "measured ms", "error", "planned",
    "busy, predicted ms", "busy, measured ms", "copies ms", "waited",
)  # fmt: skip


@dataclass
class Case:
    """A model compiled in one way, and its measured steps."""

    model: str
    devices: str
    placer: str
    bundle: Bundle
    taken: list[float] = field(default_factory=list)
    """Per step, seconds without the longest wait of a worker."""
    waited: list[float] = field(default_factory=list)
    """Per step, that wait as a share."""
    traced: TracedRequests = field(default_factory=TracedRequests)

    @property
    def predicted(self) -> float:
        return self.bundle.manifest.predicted.step_seconds

    @property
    def undisturbed(self) -> list[int]:
        """Return the steps that count: the quarter that waited least, at least five."""
        return [int(index) for index in np.argsort(self.waited, kind="stable")[: max(len(self.waited) // 4, 5)]]

    def median(self, values: Sequence[float]) -> float:
        """Return the median over the steps that count."""
        return float(np.median([values[index] for index in self.undisturbed]))

    @property
    def error(self) -> float:
        return self.predicted / self.median(self.taken) - 1

    @property
    def planned(self) -> float:
        """Return the error of the prediction from the costs of nodes alone."""
        trial = self.bundle.manifest.trial
        return (trial.planned_seconds if trial else self.predicted) / self.median(self.taken) - 1


def compile_cases(name: str, placers: Sequence[str], target: Target | None, folder: Path) -> Iterator[Case]:
    """Compile a model in every way."""
    path = folder / f"{name}.onnx"
    models.save(models.build(name), path)
    for devices in DEVICES:
        for placer in filter(None, placers if "," in devices else ["single"]):
            where = select_devices(local_target(DEVICES[-1]) if target is None else target, devices)
            bundle = onnxplace.compile(
                path, folder / f"{name}-{devices}-{placer}", target=where, shape=SHAPES.get(name), placer=placer
            )  # fmt: skip
            yield Case(name, devices, placer, bundle)


def select_devices(target: Target, devices: str) -> Target:
    """Return a target with only these devices."""
    ids = devices.split(",")
    devices_kept = tuple(device for device in target.devices if device.id in ids)
    links = tuple(link for link in target.links if link.source in ids and link.destination in ids)
    shared = tuple(entry for entry in target.shared if set(entry.devices) <= set(ids))
    return replace(target, devices=devices_kept, links=links, shared=shared)


def measure(measured_cases: Sequence[Case], seconds: float) -> None:
    """Run all cases in turn for about `seconds`."""
    with ExitStack() as stack:
        ready = []
        for case in measured_cases:
            session = stack.enter_context(OnnxRuntime().open(case.bundle, trace=True))
            feeds = random_feeds(case.bundle.inputs, case.bundle.manifest.dimensions)
            ready.append((case, session, feeds))
        deadline, rounds = time.perf_counter() + seconds, 0
        while rounds < 3 or time.perf_counter() < deadline:
            rounds += 1
            for case, session, feeds in ready:
                settle_deadline, steps = time.perf_counter() + SETTLING_SECONDS, 0
                while steps < SETTLING_STEPS or time.perf_counter() < settle_deadline:
                    session.run(feeds)
                    steps += 1
                # Reading the waits of threads takes longer than a small step, and disturbs caches: once for all steps.
                before, results = read_run_delays(pool=True), [session.run(feeds) for _ in range(COUNTED_STEPS)]
                spent = sum(result.seconds for result in results)
                share = min(longest_wait(before, read_run_delays(pool=True)) / spent, 1.0)
                for result in results:
                    case.taken.append(result.seconds * (1 - share))
                    case.waited.append(share)
                    case.traced.add(result.events)


def format_row(case: Case) -> list[str]:
    """Return a case as a row of the table."""
    manifest, traced = case.bundle.manifest, case.traced
    busy = [traced.busy(s for s in manifest.segments if s.device == device.id) for device in manifest.devices]
    copies = sum(traced.copying(device.id) for device in manifest.devices)
    return [
        case.model, case.devices, case.placer, str(len(manifest.segments)), str(manifest.transfers),
        format_milliseconds(case.predicted), format_milliseconds(case.median(case.taken)), f"{case.error:+.0%}",
        f"{case.planned:+.0%}", " ".join(format_milliseconds(device.compute_seconds) for device in manifest.devices),
        " ".join(map(format_milliseconds, busy)), format_milliseconds(copies), f"{case.median(case.waited):.0%}",
    ]  # fmt: skip


def count_ordered_pairs(measured_cases: Sequence[Case]) -> tuple[int, int]:
    """Return the number of pairs of one model predicted in order, and of all pairs."""
    ordered = pairs = 0
    for a, b in combinations(measured_cases, 2):
        measured = a.median(a.taken) / b.median(b.taken)
        if a.model == b.model and not 1 / (1 + MIN_DIFFERENCE) <= measured <= 1 + MIN_DIFFERENCE:
            pairs += 1
            ordered += (measured > 1) == (a.predicted > b.predicted)
    return ordered, pairs


def summarise(measured_cases: Sequence[Case]) -> str:
    """Return the median and the worst error, over all rows and by number of devices, and the order of pairs."""
    lines = []
    groups: Mapping[str, Sequence[Case]] = {
        "all": measured_cases,
        **{devices: [case for case in measured_cases if case.devices == devices] for devices in DEVICES},
    }  # fmt: skip
    for name, group in groups.items():
        errors = np.array([abs(case.error) for case in group])
        if len(errors):
            worst = group[int(errors.argmax())]
            lines.append(
                f"{name}: median error {np.median(errors):.1%}, "
                f"worst {errors.max():.0%} ({worst.model} {worst.placer}), "
                f"{int((errors <= 0.1).sum())} of {len(errors)} within 10 %, {int((errors <= 0.25).sum())} within 25 %"
            )
    ordered, pairs = count_ordered_pairs(measured_cases)
    return "\n".join(
        [*lines, f"order right in {ordered} of {pairs} pairs that differ by more than {MIN_DIFFERENCE:.0%}"]
    )


def main() -> None:
    """Print the table and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(name for name in models.MODELS if name != "vgg19"))
    parser.add_argument("--placers", default="m-etf,auto")
    parser.add_argument("--target", type=Path, help="calibrated: onnxplace devices --calibrate -o F")
    parser.add_argument("--seconds", type=float, default=10.0, help="of runs per model")
    options = parser.parse_args()
    target = read_target(options.target) if options.target else None
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
    measured_cases: list[Case] = []
    for name in options.models.split(","):
        with tempfile.TemporaryDirectory(prefix="onnxplace-bench-") as folder:
            os.environ["ONNXPLACE_CACHE_DIR"] = folder  # costs of another day may be those of a faster machine
            model_cases = list(compile_cases(name, options.placers.split(","), target, Path(folder)))
            measure(model_cases, options.seconds)
            for case in model_cases:
                print(f"| {' | '.join(format_row(case))} |", flush=True)
            measured_cases += model_cases
    print(f"\n{summarise(measured_cases)}")


if __name__ == "__main__":
    main()
