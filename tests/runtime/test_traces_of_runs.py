"""Traces of real and simulated runs: complete and valid, for any model, placement, route and number in flight."""

import json
import tempfile
import threading
from concurrent.futures import Future
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, settings, strategies as st

import onnxplace
from onnxplace.errors import UsageError
from onnxplace.pipeline.registry import find_plugin
from onnxplace.runtime.interface import Event, Result, Runtime, RuntimeSession
from onnxplace.runtime.timelines import MAX_TRACED_REQUESTS, TraceRecorder
from tests.conftest import branches
from tests.support.copies import compile_copies, make_feeds
from tests.support.small_programs import Talker, make_ping_pong, make_random_model
from tests.support.trace_checks import check_format, check_requests, list_events, name_rows


@pytest.fixture(scope="module")
def ping_pong(tmp_path_factory):
    return make_ping_pong(2, states=0).compile(tmp_path_factory.mktemp("ping_pong"))


@pytest.fixture(scope="module")
def replicas(tmp_path_factory):
    return compile_copies(tmp_path_factory.mktemp("replicas"))


def feeds(number: int) -> dict:
    return {"x": np.arange(number, number + 4, dtype=np.float32)}


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.integers(1, 6), st.integers(1, 12), st.sampled_from(["onnxruntime", "simulated"]))
def test_a_trace_has_all_that_random_models_do_with_requests_in_flight(seed, in_flight, requests, runtime):
    model = make_random_model(seed)
    with tempfile.TemporaryDirectory() as folder:
        bundle = model.compile(Path(folder))
        start = model.make_start(0)
        with onnxplace.InferenceSession(bundle, runtime=runtime, trace=True) as session:
            results = session.stream(({**model.make_feeds(n), **start} for n in range(requests)), in_flight=in_flight)
            assert len(list(results)) == requests
            trace = session.trace()
    check_format(trace)
    check_requests(trace, bundle.manifest, range(requests))


def test_runs_streams_submissions_and_callbacks_are_all_recorded(ping_pong):
    done = threading.Event()
    with onnxplace.InferenceSession(ping_pong, trace=True) as session:
        session.run(None, feeds(0))
        session.run(None, feeds(0), timeout=60)
        session.run_timed(feeds(0))
        session.submit(feeds(0)).result()
        list(session.stream([feeds(n) for n in range(3)], in_flight=2))
        session.run_async(None, feeds(0), lambda *_: done.set())
        assert done.wait(60)
        trace = session.trace()
    check_format(trace)
    check_requests(trace, ping_pong.manifest, range(8))


def test_the_last_requests_can_be_chosen(ping_pong):
    with onnxplace.InferenceSession(ping_pong, trace=True) as session:
        list(session.stream([feeds(n) for n in range(5)], in_flight=2))
        whole, last = session.trace(), session.trace(last=2)
        assert [item["name"] for item in list_events(last, "measured", "request")] == ["request 3", "request 4"]
        check_format(last)
        numbers = {item["args"]["request"] for item in list_events(whole)}
        assert numbers == set(range(5))
        with pytest.raises(UsageError, match="expected last to be an integer from 1 to 1000, got 0"):
            session.trace(last=0)
        with pytest.raises(UsageError, match="got 1001"):
            session.trace(last=1001)


def test_a_session_without_a_trace_records_nothing(ping_pong):
    with onnxplace.InferenceSession(ping_pong) as session:
        result = session.submit(feeds(0)).result()
        session.run(None, feeds(0))
        assert result.events == ()
        assert session.list_timelines() == ()
        with pytest.raises(UsageError, match=r"U042.*without trace=True"):
            session.trace()


def test_a_request_that_fails_leaves_no_events(replicas):
    with onnxplace.InferenceSession(replicas, trace=True) as session:
        for segment in session._session.engine._routes[0].segments.values():
            segment.run = None
        with pytest.raises(onnxplace.OnnxplaceError):
            session.run(None, make_feeds(0))
        assert session.list_timelines() == ()


def test_requests_on_several_routes_have_rows_on_the_devices_of_their_route(replicas):
    with onnxplace.InferenceSession(replicas, trace=True) as session:
        list(session.stream([make_feeds(n) for n in range(12)], in_flight=4))
        trace = session.trace()
    check_format(trace)
    check_requests(trace, replicas.manifest, range(12))
    for process in ("measured", "predicted"):
        rows = {name for name in name_rows(trace, process).values() if "compute" in name}
        assert rows == {"cpu:0 compute", "cpu:1 compute"}


@pytest.mark.parametrize("runtime", ["onnxruntime", "simulated"])
def test_conversations_have_numbers_and_their_requests_follow_one_another(tmp_path, runtime):
    model = make_ping_pong(2)
    bundle = model.compile(tmp_path)
    with onnxplace.InferenceSession(bundle, runtime=runtime, trace=True) as session:
        users = [session, session.conversation(), session.conversation()]
        feeds = [{**model.make_feeds(n), **model.make_start(n)} for n in range(4)]
        futures = [user.submit(item) for item in feeds for user in users]
        for future in futures:
            future.result()
        trace = session.trace()
    check_format(trace)
    check_requests(trace, bundle.manifest, range(12))
    for process in ("measured", "predicted"):
        for conversation in range(3):
            own = [item for item in list_events(trace, process) if item["args"]["conversation"] == conversation]
            spans = []
            for number in sorted({item["args"]["request"] for item in own}):
                runs = [item for item in own if item["args"]["request"] == number and item["cat"] == "run"]
                spans.append((min(run["ts"] for run in runs), max(run["ts"] + run["dur"] for run in runs)))
            assert len(spans) == 4
            assert all(finish <= start for (_, finish), (start, _) in pairwise(spans))


def test_a_transfer_has_its_measured_size(tmp_path):
    model = make_ping_pong(2, states=0)
    bundle = model.compile(tmp_path)
    with onnxplace.InferenceSession(bundle, trace=True) as session:
        session.run(None, {"x": np.zeros(1000, np.float32)})
        copies = list(list_events(session.trace(), "measured", "copy"))
        predicted = list(list_events(session.trace(), "predicted", "copy"))
    assert {copy["args"]["bytes"] for copy in copies} == {4000}
    assert {copy["args"]["bytes"] for copy in predicted} == {16}, "of the compiled shape"
    assert {copy["args"]["from"] for copy in copies} <= {"cpu:0", "cpu:1"}


def test_segments_name_their_nodes(ping_pong):
    with onnxplace.InferenceSession(ping_pong, trace=True) as session:
        session.run(None, feeds(0))
        runs = list(list_events(session.trace(), "measured", "run"))
    names = {name for run in runs for name in (run["args"]["first node"], run["args"]["last node"])}
    assert names <= {"t0", "t1", "mixed", "turned", "y"}
    assert sum(run["args"]["nodes"] for run in runs) == 5


def test_joined_requests_are_one_with_its_number_of_callers(replicas, tmp_path):
    onnx.save(branches(), tmp_path / "m.onnx")
    bundle = onnxplace.compile(
        tmp_path / "m.onnx", tmp_path / "b", devices="cpu:0,cpu:1", shape={"batch": 2},
        pipeline="optimize,profile{estimate=true},coplace,m-etf,split,emit",
    )  # fmt: skip
    batching = onnxplace.Batching(max_batch=8, max_delay_ms=200.0)
    with onnxplace.InferenceSession(bundle, trace=True, batching=batching) as session:
        futures = [session.submit(make_feeds(n)) for n in range(6)]
        for future in futures:
            future.result()
        trace = session.trace()
    check_format(trace)
    requests = list(list_events(trace, "measured", "request"))
    assert sum(item["args"].get("joined requests", 1) for item in requests) == 6
    assert len(requests) < 6


class PlainSession(RuntimeSession):
    """A plugin's session that knows neither the number nor the time of a request."""

    def submit(self, feeds, states=()):
        future: Future[Result] = Future()
        events = (Event("cpu:0", "run", "cpu0-000", 0.0, 0.5), Event("cpu:9", "copy", "unknown", 0.1, 0.2))
        future.set_result(Result({}, events, 0.5))
        return future

    def close(self, timeout=None):
        pass


def test_timings_of_a_plugin_that_says_no_more_than_them_are_a_valid_trace(ping_pong):
    class Plain(Runtime):
        name = "plain"

        def open(self, bundle, *, trace=False):
            return PlainSession()

    session = onnxplace.InferenceSession(ping_pong, trace=True)
    with session:
        session._session.close()
        session._session = Plain().open(ping_pong)
        for _ in range(3):
            session.submit(feeds(0)).result()
            session.run(None, feeds(0))
        trace = session.trace()
    check_format(trace)
    assert len(list(list_events(trace, "measured", "request"))) == 6
    rows = name_rows(trace, "measured").values()
    assert {"cpu:0 compute 2", "cpu:9 incoming"} <= set(rows), "they overlap, since each takes half a second at once"


def test_the_recorder_keeps_the_last_requests_only():
    recorder = TraceRecorder(capacity=3)
    for number in range(5):
        recorder.add(float(number), Result({"y": object()}, (), 0.25))
    assert [item.submitted_seconds for item in recorder.list_timelines()] == [2.0, 3.0, 4.0]
    assert [item.finish_seconds for item in recorder.list_timelines()] == [2.25, 3.25, 4.25]
    assert MAX_TRACED_REQUESTS == 1000


def test_predictions_of_one_request_are_the_simulated_runtime(ping_pong):
    with find_plugin("runtimes", "simulated")().open(ping_pong, trace=True) as session:
        result = session.run({})
    with onnxplace.InferenceSession(ping_pong, trace=True) as session:
        session.run(None, feeds(0))
        trace = session.trace()
    expected = [
        (item.name, round(item.start_seconds * 8e6), round(item.finish_seconds * 8e6)) for item in result.events
    ]
    origin = next(list_events(trace, "predicted", "request"))["ts"]
    actual = [
        (item["name"], round((item["ts"] - origin) * 8), round((item["ts"] + item["dur"] - origin) * 8))
        for item in list_events(trace, "predicted")
        if item["cat"] != "request"
    ]
    assert sorted(actual) == sorted(expected)


def test_talkers_get_the_same_answers_with_a_trace(tmp_path):
    model = make_random_model(3)
    with onnxplace.InferenceSession(model.compile(tmp_path), trace=True) as session:
        talker = Talker(session, model)
        for number in range(5):
            feeds, expected = talker.prepare(number)
            outputs = session.run_timed(feeds, list(expected)).outputs
            for name, array in expected.items():
                np.testing.assert_array_equal(outputs[name], array)
            talker.keep(outputs)
    assert json.dumps(session.trace())
