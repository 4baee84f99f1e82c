"""Simulated requests in flight: like the simulator alone for one, in turn on each device, in turn with states."""

import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace.bundle.bundle_routes import list_routes
from onnxplace.bundle.bundle_simulation import SubmittedRequest, simulate_manifest, simulate_requests
from onnxplace.bundle.manifest import Manifest
from tests.support.small_programs import Node, SmallModel, make_ping_pong, make_random_model


@dataclass(frozen=True)
class Case:
    """A manifest with drawn times of its segments, and requests."""

    manifest: Manifest
    requests: list[SubmittedRequest]


def with_seconds(manifest: Manifest, seconds: list[float]) -> Manifest:
    """Return a manifest whose segments take these times, in turn."""
    drawn = np.resize(np.array(seconds), len(manifest.segments)).tolist()
    segments = [item.model_copy(update={"seconds": time}) for item, time in zip(manifest.segments, drawn)]
    return manifest.model_copy(update={"segments": tuple(segments)})


def compile_manifest(seed: int) -> Manifest:
    with tempfile.TemporaryDirectory() as folder:
        return make_random_model(seed).compile(Path(folder)).manifest


def times(most: int) -> st.SearchStrategy[float]:
    """Draw multiples of a power of two, whose sums are exact: a rounding would decide who is first."""
    return st.integers(0, most).map(lambda number: number / 2**20)


def cases() -> st.SearchStrategy[Case]:
    seconds = st.lists(times(1000), min_size=1, max_size=5)
    request = st.builds(SubmittedRequest, times(5000), st.just(0), st.integers(0, 3))
    manifests = st.builds(with_seconds, st.integers(0, 40).map(compile_manifest), seconds)
    return st.builds(Case, manifests, st.lists(request, min_size=1, max_size=12))


@settings(max_examples=30)
@given(cases(), times(10**7))
def test_a_request_alone_is_simulated_as_always_from_its_submission_on(case, submitted):
    (request,) = simulate_requests(case.manifest, [SubmittedRequest(submitted)])
    expected = simulate_manifest(case.manifest)
    np.testing.assert_allclose(request.start_seconds - submitted, expected.start_seconds, atol=1e-12)
    np.testing.assert_allclose(request.finish_seconds - submitted, expected.finish_seconds, atol=1e-12)
    assert request.end_seconds - submitted == pytest.approx(expected.makespan_seconds, abs=1e-12)
    names = list(case.manifest.values)
    assert sorted(item.value for item in request.transfers) == sorted(names[i] for i in expected.transfers.value)


@settings(max_examples=40)
@given(cases())
def test_devices_run_one_segment_at_a_time_after_its_inputs_have_arrived(case):
    manifest, simulated = case.manifest, simulate_requests(case.manifest, case.requests)
    runs: dict[str, list[tuple[float, float]]] = {}
    for request, result in zip(case.requests, simulated):
        assert result.start_seconds.min() >= request.submitted_seconds
        arrivals = {(item.value, item.destination): item.finish_seconds for item in result.transfers}
        index = {segment.id: position for position, segment in enumerate(manifest.segments)}
        for position, segment in enumerate(manifest.segments):
            start, finish = result.start_seconds[position], result.finish_seconds[position]
            assert finish - start == pytest.approx(segment.seconds, abs=1e-12)
            runs.setdefault(segment.device, []).append((start, finish))
            for name in segment.inputs:
                if (producer := manifest.values[name].producer) is None:
                    continue
                computed = result.finish_seconds[index[producer]]
                crosses = manifest.segments[index[producer]].device != segment.device
                available = arrivals[name, segment.device] if crosses else computed
                assert computed <= available <= start
    for spans in runs.values():
        for (_, finish), (start, _) in pairwise(sorted(spans)):
            assert finish <= start


@settings(max_examples=40)
@given(cases())
def test_with_states_the_requests_of_a_conversation_follow_one_another(case):
    simulated = simulate_requests(case.manifest, case.requests)
    order = sorted(range(len(case.requests)), key=lambda index: (case.requests[index].submitted_seconds, index))
    for conversation in range(4):
        own = [simulated[index] for index in order if case.requests[index].conversation == conversation]
        for earlier, later in pairwise(own):
            if case.manifest.states:
                assert earlier.finish_seconds.max() <= later.start_seconds.min()


def test_requests_without_states_overlap_over_devices(tmp_path):
    chain = SmallModel((Node("middle", "Neg", ("x",), 0), Node("y", "Neg", ("middle",), 1)), states=0)
    manifest = with_seconds(chain.compile(tmp_path).manifest, [1e-3])
    alone = simulate_requests(manifest, [SubmittedRequest(0.0)])[0].end_seconds
    together = max(item.end_seconds for item in simulate_requests(manifest, [SubmittedRequest(0.0)] * 8))
    assert together == pytest.approx(alone + 7e-3), "then a result comes out every millisecond"


def test_a_conversation_does_not_wait_behind_another_one_whose_turn_has_not_come(tmp_path):
    manifest = with_seconds(make_ping_pong(2).compile(tmp_path).manifest, [1e-3])
    alone = simulate_requests(manifest, [SubmittedRequest(0.0)])[0].end_seconds
    first = [SubmittedRequest(0.0, conversation=0) for _ in range(6)]
    *_, second = simulate_requests(manifest, [*first, SubmittedRequest(0.0, conversation=1)])
    assert second.end_seconds < 2.5 * alone, "it is ready at once, and the six before it take turns"


def test_each_route_has_its_devices_and_times(tmp_path):
    manifest = make_ping_pong(2, states=0).compile(tmp_path).manifest
    (first,) = list_routes(manifest)
    swapped = first.model_copy(
        update={
            "devices": dict(zip(first.devices, reversed(list(first.devices.values())))),
            "seconds": dict.fromkeys(first.seconds, 2e-3),
            "share": 0.5,
        }
    )
    manifest = manifest.model_copy(update={"routes": (swapped,)})
    first_result, second_result = simulate_requests(manifest, [SubmittedRequest(0.0), SubmittedRequest(5.0, route=1)])
    np.testing.assert_allclose(second_result.finish_seconds - second_result.start_seconds, 2e-3)
    homes = [
        {item.destination for item in result.transfers if item.value == "t0"}
        for result in (first_result, second_result)
    ]
    assert homes == [{"cpu:1"}, {"cpu:0"}]


def test_no_requests_take_no_time(tmp_path):
    assert simulate_requests(make_ping_pong(2).compile(tmp_path).manifest, []) == ()
