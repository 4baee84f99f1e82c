"""Predicted and measured steps: python benchmarks/prediction.py [--models NAMES] [--placers m-etf,auto] [--target F].

Each model is compiled for one device (`cpu:0`) and for two (`cpu:0,cpu:1`), one core each, and run as `onnxplace bench`
runs it; rows of one model, and one session with the core of a device, take turns of a few steps. Prints, per row, the
step as predicted and as measured, each device's busy time (neither waiting nor copying), copies received, and how many
values cross; then the median and worst absolute error, and of how many pairs of placements of one model, whose measured
steps differ by more than 10 %, the faster was predicted. `planned` is the error of the prediction from the costs of
nodes, before the trial.

`speed-up` is how many times as fast a bundle is as the session: as `compile` reports it, whose trial takes turns, too,
and as measured. The last lines have the median error over bundles for two devices. Other work slows both sides of a
ratio, which is therefore the figure to trust on a busy machine.

On a busy machine, the longest wait of a worker for a core is subtracted from each step (Linux), and the steps that
waited least count. `waited` is that wait: large values make the figures unreliable.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
sys.path.insert(0, str(Path(__file__).parent))
from _tables import format_milliseconds
from step_times import SHAPES

import models
import onnxplace
from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import format_count
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.machine.hardware import available_cores, local_target
from onnxplace.machine.repeated_runs import DOUBTFUL_WAITING_SHARE, longest_wait, read_run_delays
from onnxplace.measure.compare import open_reference
from onnxplace.measure.device_usage import TracedRequests
from onnxplace.runtime.interface import Result
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from onnxplace.target.target import Target
from onnxplace.target.target_file import read_target

DEVICES = ("cpu:0", "cpu:0,cpu:1")
# Pairs of placements whose measured steps differ by less are not compared.
MIN_DIFFERENCE = 0.1
# The first seconds and steps of a turn fill the caches, which another case has used; the next steps count.
SETTLING_SECONDS, SETTLING_STEPS, COUNTED_STEPS = 0.02, 2, 5
HEADER = (
    "model", "devices", "placer", "segments", "transfers", "predicted ms", "measured ms", "error", "planned",
    "busy, predicted ms", "busy, measured ms", "copies ms", "waited",
    "speed-up, predicted", "speed-up, measured", "its error",
)  # fmt: skip


@dataclass
class Steps:
    """Measured steps, `COUNTED_STEPS` in each turn."""

    taken: list[float] = field(default_factory=list)
    """Per step, seconds without the longest wait of a worker."""
    waited: list[float] = field(default_factory=list)
    """Per step, that wait as a share."""

    traced: TracedRequests = field(default_factory=TracedRequests)

    def take_turn(self, run: Callable[[], Result]) -> None:
        """Run steps that do not count, and then those that do."""
        deadline, settled = time.perf_counter() + SETTLING_SECONDS, 0
        while settled < SETTLING_STEPS or time.perf_counter() < deadline:
            run()
            settled += 1
        # Reading the waits of threads takes longer than a small step, and disturbs caches: once for all steps.
        before, results = read_run_delays(pool=True), [run() for _ in range(COUNTED_STEPS)]
        spent = sum(result.seconds for result in results)
        share = min(longest_wait(before, read_run_delays(pool=True)) / spent, 1.0)
        for result in results:
            self.taken.append(result.seconds * (1 - share))
            self.waited.append(share)
            self.traced.add(result.events)

    def median(self, values: Sequence[float]) -> float:
        """Return the median over the steps that count."""
        return float(np.median(np.array(values)[select_undisturbed(self.waited)]))


@dataclass
class Case:
    """A model compiled in one way, and its measured steps."""

    model: str
    devices: str
    placer: str
    bundle: Bundle
    steps: Steps = field(default_factory=Steps)
    one_device: Steps = field(default_factory=Steps)
    """Of a session over the unsplit model with the core of one device, in the same turns."""

    @property
    def predicted(self) -> float:
        return self.bundle.manifest.predicted.step_seconds

    @property
    def measured(self) -> float:
        return self.steps.median(self.steps.taken)

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    @property
    def planned(self) -> float:
        """Return the error of the prediction from the costs of nodes alone."""
        trial = self.bundle.manifest.trial
        return (trial.planned_seconds if trial else self.predicted) / self.measured - 1

    @property
    def predicted_speedup(self) -> float:
        """Return the speed-up that `compile` reports, from the turns of its trial."""
        return self.bundle.manifest.speedup or float("nan")

    @property
    def speedup(self) -> float:
        """Return the measured speed-up over one device: the median over turns, so that both sides had the same load."""
        ours, one_device = (
            [np.reshape(values, (-1, COUNTED_STEPS)) for values in (steps.taken, steps.waited)]
            for steps in (self.steps, self.one_device)
        )
        turns = np.median(one_device[0], axis=1) / np.median(ours[0], axis=1)
        return float(np.median(turns[select_undisturbed(ours[1].max(axis=1) + one_device[1].max(axis=1))]))

    @property
    def is_disturbed(self) -> bool:
        """Return whether other work delayed the trial or the measurement."""
        trial = self.bundle.manifest.trial
        shares = self.steps.median(self.steps.waited), self.one_device.median(self.one_device.waited)
        return max(*shares, trial.waiting if trial else 0.0) > DOUBTFUL_WAITING_SHARE

    @property
    def speedup_error(self) -> float:
        return self.predicted_speedup / self.speedup - 1


def select_undisturbed(waited: Sequence[float] | np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Return the indices of what counts: the quarter that waited least, at least five."""
    return np.argsort(waited, kind="stable")[: max(len(waited) // 4, 5)]


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
    """Run all cases, and a session with the core of one device, in turn for about `seconds`."""
    with ExitStack() as stack:
        ready: list[tuple[Steps, Callable[[], Result]]] = []
        for case in measured_cases:
            session = stack.enter_context(OnnxRuntime().open(case.bundle, trace=True))
            feeds = random_feeds(case.bundle.inputs, case.bundle.manifest.dimensions)
            ready.append((case.steps, partial(session.run, feeds)))
        one_device = Steps()
        ready.append((one_device, open_plain(measured_cases[0].bundle)))
        for case in measured_cases:
            case.one_device = one_device
        deadline, rounds = time.perf_counter() + seconds, 0
        while rounds < 3 or time.perf_counter() < deadline:
            rounds += 1
            for steps, run in ready:
                steps.take_turn(run)


def open_plain(bundle: Bundle) -> Callable[[], Result]:
    """Return a function that runs the unsplit model in a session with the core of one device."""
    run_model = open_reference(bundle, None, available_cores()[: bundle.target.devices[0].cores])
    feeds = random_feeds(bundle.inputs, bundle.manifest.dimensions)

    def run() -> Result:
        began = time.perf_counter()
        outputs = run_model(feeds)
        return Result(outputs, (), time.perf_counter() - began)

    return run


def format_row(case: Case) -> list[str]:
    """Return a case as a row of the table."""
    manifest, traced = case.bundle.manifest, case.steps.traced
    busy = [traced.busy(s for s in manifest.segments if s.device == device.id) for device in manifest.devices]
    copies = sum(traced.copying(device.id) for device in manifest.devices)
    return [
        case.model, case.devices, case.placer, str(len(manifest.segments)), str(manifest.transfers),
        format_milliseconds(case.predicted), format_milliseconds(case.measured), f"{case.error:+.0%}",
        f"{case.planned:+.0%}", " ".join(format_milliseconds(device.compute_seconds) for device in manifest.devices),
        " ".join(map(format_milliseconds, busy)), format_milliseconds(copies),
        f"{case.steps.median(case.steps.waited):.0%}",
        *(f"{ratio:.2f}" for ratio in (case.predicted_speedup, case.speedup)), f"{case.speedup_error:+.1%}",
    ]  # fmt: skip


def count_ordered_pairs(measured_cases: Sequence[Case]) -> tuple[int, int]:
    """Return the number of pairs of one model predicted in order, and of all pairs."""
    ordered = pairs = 0
    for a, b in combinations(measured_cases, 2):
        measured = a.measured / b.measured
        if a.model == b.model and not 1 / (1 + MIN_DIFFERENCE) <= measured <= 1 + MIN_DIFFERENCE:
            pairs += 1
            ordered += (measured > 1) == (a.predicted > b.predicted)
    return ordered, pairs


def summarise(measured_cases: Sequence[Case]) -> str:
    """Return the errors of steps, over all rows and by number of devices, the order of pairs, errors of speed-ups."""
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
    lines.append(f"order right in {ordered} of {pairs} pairs that differ by more than {MIN_DIFFERENCE:.0%}")
    return "\n".join([*lines, *summarise_speedups(measured_cases)])


def summarise_speedups(measured_cases: Sequence[Case]) -> Iterator[str]:
    """Yield the errors of speed-ups: of all bundles for two devices, and of those that use both."""
    split = [case for case in measured_cases if "," in case.devices]
    both = [case for case in split if len({item.device for item in case.bundle.manifest.segments}) > 1]
    undisturbed = [case for case in both if not case.is_disturbed]
    for name, group in (
        ("for two devices", split),
        (f"that use both and waited for {DOUBTFUL_WAITING_SHARE:.0%} or less of the time", undisturbed),
        ("that use both", both),
    ):
        if group:
            errors = np.array([abs(case.speedup_error) for case in group])
            worst = group[int(errors.argmax())]
            yield (
                f"speed-up over one device, {format_count(len(group), 'bundle')} {name}: "
                f"median error {np.median(errors):.1%}, worst {errors.max():.0%} ({worst.model} {worst.placer})"
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
