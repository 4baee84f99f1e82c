"""The trace of a small run, entry by entry, and rows where events overlap."""

import json
from pathlib import Path

import pytest
from hypothesis import given, strategies as st

from onnxplace.runtime.chrome_format import chrome_trace
from onnxplace.runtime.interface import Event
from onnxplace.runtime.timelines import RequestTimeline
from tests.support.small_programs import make_ping_pong
from tests.support.trace_checks import check_format, list_events, name_rows

GOLDEN = Path(__file__).parent / "golden_trace.json"


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    return make_ping_pong(2, states=0).compile(tmp_path_factory.mktemp("small")).manifest


def request(number: int, submitted: float, finish: float, *events: Event, conversation: int = 0) -> RequestTimeline:
    return RequestTimeline(number, submitted, submitted + finish, events, conversation=conversation)


def make_events(manifest, delay: float) -> list[Event]:
    """Return a run on each device, with the transfer of a value in between."""
    value = next(step.value for step in manifest.programs["cpu:1"] if step.op == "receive")
    producer, reader = manifest.values[value].producer, manifest.values[value].readers
    target = next(item.id for item in manifest.segments if item.id in reader and item.device == "cpu:1")
    return [
        Event("cpu:0", "run", producer, delay, delay + 1e-3),
        Event("cpu:1", "wait", value, 0.0, delay + 1e-3),
        Event("cpu:1", "copy", value, delay + 1e-3, delay + 1.5e-3, bytes=16),
        Event("cpu:1", "run", target, delay + 1.5e-3, delay + 4.25e-3),
    ]


def test_a_small_trace_is_written_as_expected(manifest):
    measured = [request(0, 100.0, 5e-3, *make_events(manifest, 0.0)), request(1, 100.001, 9e-3, conversation=2)]
    predicted = [request(0, 100.0, 4e-3, *make_events(manifest, 1.25e-4))]
    trace = chrome_trace(measured, predicted, manifest, {manifest.segments[0].id: ["t0", "between", "last"]})
    check_format(trace)
    assert trace == json.loads(GOLDEN.read_text())


def test_events_that_overlap_have_rows_of_their_own(manifest):
    name = manifest.segments[0].id
    spans = [(0, 4), (1, 2), (2, 5), (4, 6), (5, 6)]
    events = [Event("cpu:0", "run", name, start * 1e-3, finish * 1e-3) for start, finish in spans]
    trace = chrome_trace([request(0, 0.0, 6e-3, *events)], [], manifest)
    check_format(trace)
    rows = name_rows(trace, "measured")
    assert [rows[event["tid"]] for event in list_events(trace, "measured", "run")] == [
        *("cpu:0 compute", "cpu:0 compute 2", "cpu:0 compute 2", "cpu:0 compute", "cpu:0 compute 2"),
    ]


def test_a_copy_by_the_device_that_computed_the_value_is_outgoing_and_has_no_arrow(manifest):
    value = next(step.value for step in manifest.programs["cpu:1"] if step.op == "receive")
    events = [*make_events(manifest, 0.0), Event("cpu:0", "copy", value, 1e-3, 1.25e-3)]
    trace = chrome_trace([request(0, 0.0, 6e-3, *events)], [], manifest)
    check_format(trace)
    assert "cpu:0 outgoing" in name_rows(trace, "measured").values()
    assert [entry["ph"] for entry in trace["traceEvents"] if entry["ph"] in "stf"] == ["s", "t", "f"]


def test_events_without_a_duration_stay_valid(manifest):
    events = [Event(event.device, event.kind, event.name, 0.0, 0.0) for event in make_events(manifest, 0.0)]
    trace = chrome_trace([request(number, 0.0, 0.0, *events) for number in range(3)], [], manifest)
    check_format(trace)


def test_colours_tell_requests_apart_and_repeat(manifest):
    trace = chrome_trace([request(number, 0.0, 1.0) for number in range(25)], [], manifest)
    colours = [event["cname"] for event in list_events(trace)]
    assert len(set(colours[:10])) == 10
    assert colours[10:20] == colours[:10]


def test_no_requests_are_an_empty_trace(manifest):
    assert chrome_trace([], [], manifest)["traceEvents"] == []


@given(st.lists(st.integers(1, 10**6), min_size=2, max_size=30), st.floats(0, 1e6))
def test_events_that_touch_share_a_row_whatever_is_rounded(manifest, durations, origin):
    name, start, requests = manifest.segments[0].id, 0.0, []
    for number, duration in enumerate(durations):
        submitted = origin + start
        finish = start + duration * 1e-9
        requests.append(
            request(number, submitted, 1.0, Event("cpu:0", "run", name, 0.0, (origin + finish) - submitted))
        )
        start = finish
    trace = chrome_trace(requests, [], manifest)
    check_format(trace)
    assert [text for text in name_rows(trace, "measured").values() if "compute" in text] == ["cpu:0 compute"]
