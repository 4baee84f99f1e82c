"""Predicted timelines: from the measured submissions, or with a number of requests in flight."""

import pytest

from onnxplace.runtime.timelines import RequestTimeline, compare_timelines, predict_stream, predict_timelines
from tests.support.small_programs import Node, SmallModel


@pytest.fixture(scope="module")
def manifest(tmp_path_factory):
    """Two segments, a millisecond on each of two devices, and a transfer; a request takes no time around them."""
    chain = SmallModel((Node("middle", "Neg", ("x",), 0), Node("y", "Neg", ("middle",), 1)), states=0)
    manifest = chain.compile(tmp_path_factory.mktemp("chain")).manifest
    segments = tuple(item.model_copy(update={"seconds": 1e-3}) for item in manifest.segments)
    predicted = manifest.predicted.model_copy(update={"request_seconds": 0.0})
    return manifest.model_copy(update={"segments": segments, "predicted": predicted})


def request(number: int, submitted: float) -> RequestTimeline:
    return RequestTimeline(number, submitted, submitted + 1.0, ())


def test_predicted_requests_are_submitted_when_the_measured_ones_were(manifest):
    predicted = predict_timelines(manifest, [request(0, 7.0), request(1, 9.0)])
    assert [item.submitted_seconds for item in predicted] == [7.0, 9.0]
    step = predicted[0].finish_seconds - 7.0
    assert 2e-3 < step < 2.2e-3
    assert predicted[1].finish_seconds == pytest.approx(9.0 + step)


@pytest.mark.parametrize("in_flight", [1, 2, 3, 50])
def test_so_many_requests_of_a_predicted_stream_are_in_flight(manifest, in_flight):
    predicted = predict_stream(manifest, [request(number, 7.0 + number) for number in range(9)], in_flight)
    assert predicted[0].submitted_seconds == 7.0
    for item in predicted:
        others = [other for other in predicted if other.number < item.number]
        open_requests = [other for other in others if other.finish_seconds > item.submitted_seconds]
        assert len(open_requests) == min(in_flight - 1, item.number)


def test_more_requests_in_flight_keep_both_devices_busy(manifest):
    requests = [request(number, 0.0) for number in range(40)]
    shares = []
    for in_flight in (1, 2, 4):
        predicted = predict_stream(manifest, requests, in_flight)
        shares.append({item.predicted_share for item in compare_timelines(manifest, requests, predicted).devices})
    assert all(0.4 < share < 0.5 for share in shares[0])
    assert all(share > 0.9 for share in shares[1] | shares[2])


def test_the_time_around_the_segments_counts(manifest):
    around = manifest.predicted.model_copy(update={"request_seconds": 0.5})
    (predicted,) = predict_timelines(manifest.model_copy(update={"predicted": around}), [request(0, 1.0)])
    assert predicted.finish_seconds == pytest.approx(1.5 + 2e-3, rel=1e-3)


def test_a_stream_of_nothing_is_nothing(manifest):
    assert predict_stream(manifest, [], 4) == ()
