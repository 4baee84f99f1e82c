"""Speed-ups in the benchmark of predictions: from the turns that waited least, above 1 where a bundle is faster."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))  # for what benchmarks share with each other

from benchmarks.prediction import COUNTED_STEPS, Case, Steps, summarise_speedups


def steps_of(*turns):
    """Return steps whose turns have the given seconds and waits."""
    steps = Steps()
    for seconds, waited in turns:
        steps.taken += [seconds] * COUNTED_STEPS
        steps.waited += [waited] * COUNTED_STEPS
    return steps


def case_of(bundle, one_device, predicted, devices="cpu:0,cpu:1", waiting=0.0):
    """Return a case for which `compile` predicted a speed-up, in a trial that waited for a share of its time."""
    segments = [SimpleNamespace(device=device) for device in devices.split(",")]
    manifest = SimpleNamespace(speedup=predicted, segments=segments, trial=SimpleNamespace(waiting=waiting))
    return Case("m", devices, "auto", SimpleNamespace(manifest=manifest), steps_of(*bundle), steps_of(*one_device))


def test_a_bundle_that_is_faster_than_one_device_has_a_speedup_above_one():
    case = case_of([(1.0, 0)] * 5, [(2.0, 0)] * 5, predicted=1.9)
    assert case.speedup == 2.0
    assert case.speedup_error == pytest.approx(-0.05)


def test_both_sides_of_a_speedup_are_from_one_turn():
    speeds = (1.0, 3.0, 2.0, 5.0, 4.0)  # the machine gets slower and faster
    assert case_of([(speed, 0) for speed in speeds], [(2 * speed, 0) for speed in speeds], 2.0).speedup == 2.0


def test_turns_in_which_either_side_waited_do_not_count():
    calm, bundle_waited, one_waited = (1.0, 0.0), (9.0, 0.5), (9.0, 0.5)
    bundle = [calm] * 10 + [bundle_waited] * 5 + [calm] * 5
    one_device = [(2.0, 0.0)] * 15 + [one_waited] * 5
    assert case_of(bundle, one_device, 2.0).speedup == 2.0


def test_the_summary_tells_apart_what_was_disturbed_and_what_uses_one_device():
    exact = [(1.0, 0)] * 5, [(2.0, 0)] * 5
    cases = [
        case_of(*exact, 2.0),
        case_of(*exact, 2.2),
        case_of(*exact, 3.0, waiting=0.9),
        case_of([(1.0, 0)] * 5, [(1.0, 0)] * 5, 0.5, devices="cpu:0"),
    ]
    every, calm, both = summarise_speedups(cases)
    assert "3 bundles for two devices: median error 10.0%, worst 50% (m auto)" in every
    assert "2 bundles that use both and waited for 5% or less of the time: median error 5.0%" in calm
    assert "3 bundles that use both: median error 10.0%" in both
