"""Bundles with weights that stream: what their manifest may say, and what it predicts."""

import shutil
from itertools import pairwise

import numpy as np
import pytest

from onnxplace.bundle.bundle import Bundle, extract_device_part
from onnxplace.bundle.bundle_simulation import (
    SubmittedRequest,
    predict_interval_seconds,
    predict_weight_wait_seconds,
    simulate_manifest,
    simulate_requests,
)
from onnxplace.errors import BundleError
from tests.bundle.test_hostile_bundles import edit
from tests.support.large_chains import compile_chain, write_chain


@pytest.fixture(scope="module")
def streamed(tmp_path_factory):
    """A bundle of which some weights stream: read it, copy it, do not alter it."""
    folder = tmp_path_factory.mktemp("streamed")
    return compile_chain(write_chain(folder / "chain.onnx"), folder / "bundle")


def change_weight(**values):
    return lambda data: next(iter(data["streamed"].values())).update(values)


def change_stream(**values):
    return lambda data: data["streams"][0].update(values)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (change_weight(file="segments/elsewhere.bin"), "is in 'segments/elsewhere.bin', which is not a file of"),
        (change_weight(linked=True), "which is not a file of the bundle"),
        (change_weight(offset=1 << 40), "ends at byte"),
        (change_weight(shape=[3, 3]), "has 1048576 bytes, expected 36"),
        (change_weight(dtype="tensor(string)"), "is of type tensor(string), which cannot be stored"),
        (change_weight(home="cloud"), "the manifest is malformed at 'streamed."),
        (lambda data: data["streamed"].clear(), "and no file has it"),
        (lambda data: data["streams"].clear(), "stream to cpu:0, and its stream is not described"),
        (change_stream(bytes_per_second={"host": 1e9}), "stream to cpu:0, and its stream is not described"),
        (change_stream(device="cpu:7"), "weights stream to 'cpu:7', which the target does not have"),
        (change_stream(pool_bytes=4096), "take 1048576 bytes, and their pool has 4096"),
        (change_stream(bytes_per_second={"disk": 0}), "the manifest is malformed at 'streams.0.bytes_per_second"),
    ],
)
def test_a_bundle_whose_streamed_weights_do_not_fit_is_refused(streamed, tmp_path, change, words):
    folder = shutil.copytree(streamed.path, tmp_path / "bundle")
    edit(folder, change)
    with pytest.raises(BundleError) as caught:
        Bundle.open(folder)
    assert words in str(caught.value)
    assert caught.value.code == "N002"


def set_rate(manifest, bytes_per_second):
    streams = [item.model_copy(update={"bytes_per_second": {"disk": bytes_per_second}}) for item in manifest.streams]
    return manifest.model_copy(update={"streams": tuple(streams)})


def test_a_step_waits_for_weights_by_the_rate_at_which_they_come(streamed):
    manifest = streamed.manifest
    computing = sum(segment.seconds for segment in manifest.segments)
    size = sum(manifest.streamed[name].bytes for segment in manifest.segments for name in segment.streamed)
    slow, fast = set_rate(manifest, size / 10.0), set_rate(manifest, 1e18)
    assert predict_weight_wait_seconds(fast) == pytest.approx(0.0, abs=1e-9)
    assert simulate_manifest(fast).makespan_seconds == pytest.approx(computing)
    assert simulate_manifest(slow).makespan_seconds >= 10.0
    assert predict_weight_wait_seconds(slow) == pytest.approx(simulate_manifest(slow).makespan_seconds - computing)
    # Waits are no part of the times of segments.
    busy = simulate_manifest(slow).finish_seconds - simulate_manifest(slow).start_seconds
    assert busy == pytest.approx([segment.seconds for segment in manifest.segments])


def test_the_manifest_has_the_part_of_a_step_that_waits_for_weights(streamed):
    predicted = streamed.manifest.predicted
    assert predicted.weight_wait_seconds == predict_weight_wait_seconds(streamed.manifest) > 0
    makespan = simulate_manifest(streamed.manifest).makespan_seconds
    assert predicted.step_seconds == pytest.approx(makespan + predicted.request_seconds)
    assert predicted.interval_seconds == pytest.approx(predict_interval_seconds(streamed.manifest))


def test_requests_in_flight_come_out_at_the_rate_of_their_weights(streamed):
    size = sum(streamed.manifest.streamed[name].bytes for item in streamed.manifest.segments for name in item.streamed)
    manifest = set_rate(streamed.manifest, size / 10.0)
    requests = simulate_requests(manifest, [SubmittedRequest(0.0)] * 6)
    intervals = np.diff([request.end_seconds for request in requests])
    assert intervals[1:] == pytest.approx([predict_interval_seconds(manifest)] * 4)
    assert predict_interval_seconds(manifest) >= 10.0


def test_a_request_after_a_pause_finds_the_first_weights_in_the_pool(streamed):
    size = sum(streamed.manifest.streamed[name].bytes for item in streamed.manifest.segments for name in item.streamed)
    manifest = set_rate(streamed.manifest, size / 10.0)
    first, later = simulate_requests(manifest, [SubmittedRequest(0.0), SubmittedRequest(100.0)])
    assert later.end_seconds - 100.0 == pytest.approx(first.end_seconds)
    assert first.end_seconds < simulate_manifest(manifest).makespan_seconds


def test_loads_follow_one_another_and_each_ends_before_the_run_that_reads_it(streamed):
    (request,) = simulate_requests(set_rate(streamed.manifest, 1e6), [SubmittedRequest(5.0)])
    loads = sorted(request.loads, key=lambda item: item.start_seconds)
    assert {load.segment for load in loads} <= {item.id for item in streamed.manifest.segments if item.streamed}
    starts = dict(zip((item.id for item in streamed.manifest.segments), request.start_seconds))
    assert all(load.finish_seconds <= starts[load.segment] for load in loads)
    assert all(first.finish_seconds <= second.start_seconds for first, second in pairwise(loads))


def test_the_part_of_a_device_has_its_stream(streamed):
    part = extract_device_part(streamed, "cpu:0").manifest
    assert part.streams == streamed.manifest.streams
    assert extract_device_part(streamed, "cpu:1").manifest.streams == ()
