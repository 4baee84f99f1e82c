"""When measurements stop, on a simulated machine: python benchmarks/stop_rules.py [--seeds 100] [--noises].

The clock is virtual, and noise is drawn from seeds. For steps of 1, 10, 100 and 250 ms, prints what a profile takes and
how far its median is off; then the same of a trial that compares a bundle with one device (1.1 times as fast), and of
one that compares two bundles (5 % apart). Means over all kinds of noise; with `--noises`, a row for each.

`off` is the share of measurements more than 5 % off, `sure, off` that of those which report no doubt either, `wrong`
the share of trials that prefer the slower of two; `unsure` the share that report doubt. Times are virtual seconds, as
they would pass.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from onnxplace.graph.op_graph import Floats
from onnxplace.machine.repeated_runs import DOUBTFUL_WAITING_SHARE, RepeatPolicy
from onnxplace.passes.profile import ProfileCosts
from tests.support.simulated_machine import NOISES, SimulatedMachine, run_simulated_trials

STEPS = (1e-3, 10e-3, 100e-3, 250e-3)


def measure_profile(machine: SimulatedMachine, step: float) -> tuple[float, bool, bool]:
    """Return the error of the median, whether it is in doubt, and False."""
    options = ProfileCosts()
    policy = RepeatPolicy(options.repeat, options.seconds, options.tolerance)
    with machine.installed():
        machine.run(step)  # the warm-up
        runs, _ = policy.run(lambda: machine.run(step), pool=False)
    doubt = max(runs.waiting, runs.uncertainty) > DOUBTFUL_WAITING_SHARE
    return runs.seconds / step - 1, doubt, False


def measure_speedup(machine: SimulatedMachine, step: float) -> tuple[float, bool, bool]:
    """Return the error of a speed-up over one device, whether it is in doubt, and whether the verdict is wrong."""
    (trial,) = run_simulated_trials(machine, [step / 1.1], one_device=step, all_cores=0.7 * step)
    assert trial.plain
    speedup = trial.plain.one_device_seconds / trial.step_seconds
    return speedup / 1.1 - 1, trial.is_doubtful, speedup < 1


def measure_two(machine: SimulatedMachine, step: float) -> tuple[float, bool, bool]:
    """Return the error of the ratio of two bundles, whether it is in doubt, and whether the verdict is wrong."""
    trials = run_simulated_trials(machine, [step, 1.05 * step])
    ratio = trials[1].step_seconds / trials[0].step_seconds
    return ratio / 1.05 - 1, any(trial.is_doubtful for trial in trials), ratio < 1


def main() -> None:
    """Print a row for each measurement and step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=100, help="simulated measurements of each row and noise")
    parser.add_argument("--noises", action="store_true", help="print each kind of noise")
    arguments = parser.parse_args()
    kinds: dict[str, Callable[[SimulatedMachine, float], tuple[float, bool, bool]]] = {
        "profile": measure_profile,
        "trial, one device": measure_speedup,
        "trial, two bundles": measure_two,
    }
    print(f"{'measurement':<20}{'noise':<12}{'ms':>5}{'runs':>6}{'seconds':>9}{'off':>7}{'sure, off':>11}", end="")
    print(f"{'unsure':>8}{'wrong':>7}")
    for kind, measure in kinds.items():
        for step in STEPS:
            means = {name: _measure_all(measure, name, step, arguments.seeds) for name in NOISES}
            for name, row in means.items() if arguments.noises else [("all", np.mean([*means.values()], axis=0))]:
                texts = "".join(f"{share:>{width}.1%}" for share, width in zip(row[2:], (7, 11, 8, 7)))
                print(f"{kind:<20}{name:<12}{step * 1e3:>5.0f}{row[0]:>6.0f}{row[1]:>9.2f}{texts}", flush=True)


def _measure_all(
    measure: Callable[[SimulatedMachine, float], tuple[float, bool, bool]], noise: str, step: float, seeds: int
) -> Floats:
    """Return means over seeds: runs, seconds, and the shares of `main`."""
    rows = []
    for seed in range(seeds):
        machine = SimulatedMachine(NOISES[noise], seed)
        error, doubt, wrong = measure(machine, step)
        off = abs(error) > 0.05
        rows.append((machine.runs, machine.now, off, off and not doubt, doubt, wrong))
    means: Floats = np.mean(np.array(rows, dtype=float), axis=0)
    return means


if __name__ == "__main__":
    main()
