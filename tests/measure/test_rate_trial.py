"""Trials with requests in flight: what is measured, cached and recorded."""

from concurrent.futures import Future

import onnx
import pytest
from hypothesis import given, strategies as st

import onnxplace
from onnxplace.feeds.synthetic import random_feeds
from onnxplace.machine import measurement_cache
from onnxplace.measure import rate_trial
from onnxplace.measure.rate_trial import (
    RequestStream,
    Turn,
    apply_rate_trial,
    choose_in_flight,
    run_rate_trials,
    run_rounds,
)
from onnxplace.runtime.interface import Result
from onnxplace.target.target import Device, Target
from tests.conftest import branches

COPIES = "optimize,profile{estimate=true},coplace{join=never},single,split,replicate{routes=cpu:1},emit"
ALONE = COPIES.replace("replicate{routes=cpu:1},", "")


@pytest.fixture(autouse=True)
def short_turns(monkeypatch):
    """Keep trials short."""
    monkeypatch.setattr(rate_trial, "TURNS", 3)
    monkeypatch.setattr(rate_trial, "TURN_SECONDS", 0.0)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    folder = tmp_path_factory.mktemp("rates")
    onnx.save(branches(), folder / "m.onnx")
    target = Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30)))
    return [
        onnxplace.compile(folder / "m.onnx", folder / name, target=target, shape={"batch": 4}, pipeline=steps)
        for name, steps in (("copies", COPIES), ("alone", ALONE))
    ]


def feeds_of(bundle) -> dict:
    return random_feeds(bundle.inputs, bundle.manifest.dimensions, 0)


def test_each_bundle_has_an_interval_and_times_of_its_segments(bundles):
    trials = run_rate_trials(bundles, feeds_of(bundles[0]), 4, cached=False)
    for trial, bundle in zip(trials, bundles):
        assert trial.interval_seconds > 0
        assert set(trial.segment_seconds) == {segment.id for segment in bundle.manifest.segments}
        assert min(trial.segment_seconds.values()) > 0
        assert trial.in_flight == 4
        assert trial.requests >= 4
        assert 0 <= trial.waiting <= 1


class Scripted:
    """A stream whose turns have given times between results and shares of waiting; the last one is repeated."""

    def __init__(self, *intervals: float, waiting: tuple[float, ...] = (0.0,)) -> None:
        self.intervals, self.waiting, self.count = intervals, waiting, 0

    def take_turn(self) -> Turn:
        position, self.count = self.count, self.count + 1
        waiting = self.waiting[min(position, len(self.waiting) - 1)]
        return Turn(self.intervals[min(position, len(self.intervals) - 1)], 1, (), waiting)


@pytest.mark.parametrize(
    ("streams", "counts"),
    [
        ([Scripted(1.0)], [2]),  # two agree
        ([Scripted(1.0), Scripted(1.02)], [2, 2]),  # which one is faster is noise
        ([Scripted(1.0), Scripted(1.2)], [2, 1]),  # clearly behind
        ([Scripted(1.2), Scripted(1.0), Scripted(3.0)], [1, 2, 1]),
        ([Scripted(1.5, 1.0), Scripted(1.5, 1.2)], [3, 2]),  # behind in the second round; the first was not warm
        ([Scripted(1.0, 1.2, 1.0, 1.2, 1.0)], [5]),  # never the same
        ([Scripted(1.0), Scripted(1.2, waiting=(0.5,))], [5, 5]),  # other work
        ([Scripted(1.0), Scripted(1.2, waiting=(0.5, 0.0))], [2, 2]),
    ],
)
def test_rounds_end_when_two_agree_and_bundles_that_are_behind_drop_out(monkeypatch, streams, counts):
    monkeypatch.setattr(rate_trial, "TURNS", 5)
    assert [len(turns) for turns in run_rounds(streams)] == counts


@given(
    st.lists(
        st.lists(st.tuples(st.floats(0.5, 2), st.sampled_from([0.0, 0.05, 0.5])), min_size=3, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_the_fastest_of_undisturbed_rounds_is_never_dropped(tables):
    streams = [Scripted(*(x for x, _ in rows), waiting=tuple(w for _, w in rows)) for rows in tables]
    turns = run_rounds(streams)
    last = max(map(len, turns))
    assert 1 <= last <= rate_trial.TURNS
    running = [own[-1].interval_seconds for own in turns if len(own) == last]
    assert running, "some bundle is in all rounds"
    for number in range(last):
        in_round = [own[number] for own in turns if len(own) > number]
        stays = [own for own in turns if len(own) > number + 1]
        if stays and all(turn.waiting <= rate_trial.MAX_WAITING_SHARE for turn in in_round):
            assert min(in_round, key=lambda turn: turn.interval_seconds) in [own[number] for own in stays]


def test_twice_as_many_requests_as_devices_are_in_flight_but_at_most_eight(bundles):
    copies, alone = (bundle.manifest for bundle in bundles)
    assert (choose_in_flight(copies), choose_in_flight(alone)) == (4, 2)
    assert rate_trial.MAX_REQUESTS_IN_FLIGHT == 8


def test_a_turn_never_has_more_requests_in_flight_and_ends_with_none(bundles):
    unfinished, counts = [], []
    with onnxplace.InferenceSession(bundles[0]) as session:

        def start() -> Future[Result]:
            future = session.submit(feeds_of(bundles[0]))
            unfinished.append(future)
            future.add_done_callback(unfinished.remove)
            counts.append(len(unfinished))
            return future

        turn = RequestStream(start, 3).take_turn()
        assert unfinished == []
    assert max(counts) <= 3
    assert len(counts) == turn.results + 6, "three to start, three to end"
    assert turn.interval_seconds == turn.seconds / turn.results


def test_a_failing_request_ends_the_trial_with_its_error():
    def start() -> Future[Result]:
        future: Future[Result] = Future()
        future.set_exception(ValueError("broken"))
        return future

    with pytest.raises(ValueError, match="broken"):
        RequestStream(start, 2).take_turn()


def test_trials_are_cached_unless_they_are_doubtful(bundles, monkeypatch):
    feeds, monkey = feeds_of(bundles[0]), monkeypatch
    monkey.setattr(rate_trial, "MAX_WAITING_SHARE", 1.0)
    first = run_rate_trials(bundles, feeds, 2)
    assert run_rate_trials(bundles, feeds, 2) == first
    assert run_rate_trials(bundles, feeds, 4) != first, "another number in flight is another trial"
    monkey.setattr(rate_trial, "MAX_WAITING_SHARE", -1.0)
    again = run_rate_trials(bundles[:1], feeds, 2)
    assert run_rate_trials(bundles[:1], feeds, 2) != again, "doubtful ones are measured again"


@pytest.mark.parametrize("data", [{}, {"trials": [{}]}, {"trials": "x"}])
def test_a_damaged_entry_of_the_cache_is_measured_again(bundles, monkeypatch, data):
    monkeypatch.setattr(rate_trial, "MAX_WAITING_SHARE", 1.0)
    monkeypatch.setattr(measurement_cache, "read", lambda name: data)
    (trial,) = run_rate_trials(bundles[:1], feeds_of(bundles[0]), 2)
    assert trial.interval_seconds > 0


def test_the_manifest_predicts_the_measured_interval(bundles):
    (trial,) = run_rate_trials(bundles[:1], feeds_of(bundles[0]), 4, cached=False)
    manifest = apply_rate_trial(bundles[0].manifest, trial)
    assert manifest.predicted.interval_seconds == trial.interval_seconds
    assert manifest.predicted.step_seconds == bundles[0].manifest.predicted.step_seconds
