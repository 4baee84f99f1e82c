"""Measured and predicted timelines are compared by medians, and devices by the share of the time that they run."""

from dataclasses import replace

import pytest

from onnxplace.runtime.interface import Event
from onnxplace.runtime.timelines import BusyShare, Difference, RequestTimeline, compare_timelines, predict_timelines
from tests.support.small_programs import make_ping_pong


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return make_ping_pong(2, states=0).compile(tmp_path_factory.mktemp("small")).manifest


def request(number: int, submitted: float, *events: Event) -> RequestTimeline:
    finish = submitted + max((event.finish_seconds for event in events), default=0.0)
    return RequestTimeline(number, submitted, finish, events)


def run(manifest, device: str, start: float, finish: float) -> Event:
    name = next(item.id for item in manifest.segments if item.device == device)
    return Event(device, "run", name, start, finish)


def test_a_device_is_busy_while_it_runs_anything(manifest):
    measured = [
        request(0, 10.0, run(manifest, "cpu:0", 0, 2), run(manifest, "cpu:1", 3, 4)),
        request(1, 11.0, run(manifest, "cpu:0", 0, 3)),  # overlaps for a second
        request(2, 16.0, run(manifest, "cpu:0", 0, 4)),
    ]
    predicted = [request(0, 10.0, run(manifest, "cpu:0", 0, 5)), request(1, 11.0), request(2, 20.0)]
    comparison = compare_timelines(manifest, measured, predicted)
    assert comparison.requests == 3
    assert comparison.devices == (BusyShare("cpu:0", 0.8, 0.5), BusyShare("cpu:1", 0.1, 0.0))


def test_the_largest_difference_is_that_of_medians(manifest):
    slow = [
        request(n, 20.0 * n, run(manifest, "cpu:0", 0, t), run(manifest, "cpu:1", 9, 10))
        for n, t in enumerate((2, 9, 3))
    ]
    fast = [request(n, 20.0 * n, run(manifest, "cpu:0", 0, 1), run(manifest, "cpu:1", 9, 11.5)) for n in range(3)]
    comparison = compare_timelines(manifest, slow, fast)
    name = next(item.id for item in manifest.segments if item.device == "cpu:0")
    assert comparison.segment == Difference(name, "cpu:0", seconds=3, predicted_seconds=1)
    assert comparison.transfer is None


@pytest.mark.parametrize(("requested", "seconds"), [(0.5, 3.0), (1.5, 2.5), (3.0, 1.0)])
def test_a_transfer_takes_from_when_it_is_computed_and_requested_to_its_arrival(manifest, requested, seconds):
    name = next(step.value for step in manifest.programs["cpu:1"] if step.op == "receive")
    producer = manifest.values[name].producer
    events = [
        Event("cpu:0", "run", producer, 0.0, 1.0),
        Event("cpu:1", "wait", name, requested, 3.5),
        Event("cpu:1", "copy", name, 3.5, 4.0),
    ]
    predicted = [Event("cpu:0", "run", producer, 0.0, 1.0), Event("cpu:1", "copy", name, 1.25, 1.5)]
    comparison = compare_timelines(manifest, [request(0, 5.0, *events)], [request(0, 5.0, *predicted)])
    assert comparison.transfer == Difference(name, "cpu:1", seconds=seconds, predicted_seconds=0.25)


def test_a_prediction_does_not_differ_from_itself(manifest):
    predicted = predict_timelines(manifest, [request(n, 1e-3 * n) for n in range(5)])
    comparison = compare_timelines(manifest, predicted, predicted)
    assert comparison.segment is not None
    assert comparison.segment.seconds == comparison.segment.predicted_seconds
    assert all(0 < item.share == item.predicted_share for item in comparison.devices)


def test_no_requests_are_no_difference(manifest):
    comparison = compare_timelines(manifest, [], [])
    assert (comparison.requests, comparison.segment, comparison.transfer) == (0, None, None)
    assert {item.share for item in comparison.devices} == {0.0}


def test_a_request_without_events_counts_with_its_time(manifest):
    measured = [request(0, 0.0, run(manifest, "cpu:0", 0, 1)), replace(request(1, 0.0), finish_seconds=4.0)]
    assert compare_timelines(manifest, measured, []).devices[0] == BusyShare("cpu:0", 0.25, 0.0)
