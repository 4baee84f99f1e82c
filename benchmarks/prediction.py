"""Predicted beside measured: python benchmarks/prediction.py [--models NAMES] [--placers m-etf,auto] [--target F].

Each model is compiled for one device (`cpu:0`) and for two (`cpu:0,cpu:1`), one core each, and run as `onnxplace bench`
runs it; rows of one model take turns of a few steps. Prints, per row, the step as predicted and as measured, each
device's busy time (neither waiting nor copying), copies received, and how many values cross; then the median and worst
absolute error, and of how many pairs of placements of one model, whose measured steps differ by more than 10 %, the
faster was foretold. `planned` is the error of what the costs of nodes foretold before the bundle was tried out.

On a busy machine, the wait for a core of the worker that waited longest is taken off each step (Linux), and the steps
that waited least count. `waited` says how much that was: figures are worth as much as it is small.
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
from _tables import milliseconds
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
# Placements whose measured steps differ by less are not told apart.
APART = 0.1
# The first seconds and steps of a turn fill the caches, which the case before has used; these many more count.
SETTLING_SECONDS, SETTLING, COUNTED = 0.02, 2, 5
HEADER = (
    "model", "devices", "placer", "segments", "transfers", "predicted ms", "measured ms", "error", "planned",
    "busy, predicted ms", "busy, measured ms", "copies ms", "waited",
)  # fmt: skip


@dataclass
class Case:
    """A model compiled one way, and how its steps went."""

    model: str
    devices: str
    placer: str
    bundle: Bundle
    taken: list[float] = field(default_factory=list)
    """Per step, seconds without what the worker that waited longest waited."""
    waited: list[float] = field(default_factory=list)
    """Per step, that wait as a share."""
    traced: TracedRequests = field(default_factory=TracedRequests)

    @property
    def predicted(self) -> float:
        return self.bundle.manifest.predicted.step_seconds

    @property
    def calm(self) -> list[int]:
        """Return the steps to go by: the quarter that waited least, five at least."""
        return [int(index) for index in np.argsort(self.waited, kind="stable")[: max(len(self.waited) // 4, 5)]]

    def middle(self, values: Sequence[float]) -> float:
        """Return the median over the steps to go by."""
        return float(np.median([values[index] for index in self.calm]))

    @property
    def error(self) -> float:
        return self.predicted / self.middle(self.taken) - 1

    @property
    def planned(self) -> float:
        """Return the error of what the costs of the nodes alone foretold."""
        trial = self.bundle.manifest.trial
        return (trial.planned_seconds if trial else self.predicted) / self.middle(self.taken) - 1


def cases(name: str, placers: Sequence[str], target: Target | None, folder: Path) -> Iterator[Case]:
    """Compile a model in every way."""
    path = folder / f"{name}.onnx"
    models.save(models.build(name), path)
    for devices in DEVICES:
        for placer in filter(None, placers if "," in devices else ["single"]):
            where = part(local_target(DEVICES[-1]) if target is None else target, devices)
            bundle = onnxplace.compile(
                path, folder / f"{name}-{devices}-{placer}", target=where, shape=SHAPES.get(name), placer=placer
            )  # fmt: skip
            yield Case(name, devices, placer, bundle)


def part(target: Target, devices: str) -> Target:
    """Return a target with these of its devices only, so that one device is one of two."""
    ids = devices.split(",")
    kept = tuple(device for device in target.devices if device.id in ids)
    links = tuple(link for link in target.links if link.source in ids and link.destination in ids)
    shared = tuple(entry for entry in target.shared if set(entry.devices) <= set(ids))
    return replace(target, devices=kept, links=links, shared=shared)


def measure(found: Sequence[Case], seconds: float) -> None:
    """Run all cases in turn for about this long."""
    with ExitStack() as stack:
        ready = []
        for case in found:
            session = stack.enter_context(OnnxRuntime().open(case.bundle, trace=True))
            feeds = random_feeds(case.bundle.inputs, case.bundle.manifest.dimensions)
            ready.append((case, session, feeds))
        until, rounds = time.perf_counter() + seconds, 0
        while rounds < 3 or time.perf_counter() < until:
            rounds += 1
            for case, session, feeds in ready:
                settled, steps = time.perf_counter() + SETTLING_SECONDS, 0
                while steps < SETTLING or time.perf_counter() < settled:
                    session.run(feeds)
                    steps += 1
                # To look what threads waited takes longer than a small step, and its caches: once for all that count.
                before, results = read_run_delays(pool=True), [session.run(feeds) for _ in range(COUNTED)]
                spent = sum(result.seconds for result in results)
                share = min(longest_wait(before, read_run_delays(pool=True)) / spent, 1.0)
                for result in results:
                    case.taken.append(result.seconds * (1 - share))
                    case.waited.append(share)
                    case.traced.add(result.events)


def row(case: Case) -> list[str]:
    """Return a case as a row of the table."""
    manifest, traced = case.bundle.manifest, case.traced
    busy = [traced.busy(s for s in manifest.segments if s.device == device.id) for device in manifest.devices]
    copies = sum(traced.copying(device.id) for device in manifest.devices)
    return [
        case.model, case.devices, case.placer, str(len(manifest.segments)), str(manifest.transfers),
        milliseconds(case.predicted), milliseconds(case.middle(case.taken)), f"{case.error:+.0%}",
        f"{case.planned:+.0%}", " ".join(milliseconds(device.compute_seconds) for device in manifest.devices),
        " ".join(map(milliseconds, busy)), milliseconds(copies), f"{case.middle(case.waited):.0%}",
    ]  # fmt: skip


def order(found: Sequence[Case]) -> tuple[int, int]:
    """Return how many pairs of one model were foretold in their order, and how many there are."""
    right = pairs = 0
    for a, b in combinations(found, 2):
        measured = a.middle(a.taken) / b.middle(b.taken)
        if a.model == b.model and not 1 / (1 + APART) <= measured <= 1 + APART:
            pairs += 1
            right += (measured > 1) == (a.predicted > b.predicted)
    return right, pairs


def summary(found: Sequence[Case]) -> str:
    """Return the median and the worst error, over all rows and by number of devices, and the order of pairs."""
    lines = []
    groups: Mapping[str, Sequence[Case]] = {
        "all": found, **{devices: [case for case in found if case.devices == devices] for devices in DEVICES}
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
    right, pairs = order(found)
    return "\n".join([*lines, f"order right in {right} of {pairs} pairs that differ by more than {APART:.0%}"])


def main() -> None:
    """Print the table and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(name for name in models.MODELS if name != "vgg19"))
    parser.add_argument("--placers", default="m-etf,auto")
    parser.add_argument("--target", type=Path, help="calibrated: onnxplace devices --calibrate -o F")
    parser.add_argument("--seconds", type=float, default=10.0, help="of runs per model")
    chosen = parser.parse_args()
    target = read_target(chosen.target) if chosen.target else None
    print(f"| {' | '.join(HEADER)} |\n|{'---|' * len(HEADER)}", flush=True)
    found: list[Case] = []
    for name in chosen.models.split(","):
        with tempfile.TemporaryDirectory(prefix="onnxplace-bench-") as folder:
            os.environ["ONNXPLACE_CACHE_DIR"] = folder  # the machine may have been faster another day
            these = list(cases(name, chosen.placers.split(","), target, Path(folder)))
            measure(these, chosen.seconds)
            for case in these:
                print(f"| {' | '.join(row(case))} |", flush=True)
            found += these
    print(f"\n{summary(found)}")


if __name__ == "__main__":
    main()
