"""Both runtimes keep the contract, and the worker-per-device one behaves under load and failure."""

import gc
import json
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import onnxplace
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from onnxplace.runtimes.simulated import Simulated, simulate_bundle
from onnxplace.testing import check_runtime


def test_the_onnxruntime_runtime_keeps_the_contract():
    check_runtime(OnnxRuntime)


def test_the_simulated_runtime_keeps_the_contract_and_computes_nothing():
    check_runtime(Simulated, computes=False)


@pytest.fixture
def bundle(compiled):
    return onnxplace.load(compiled)


def feeds_of(bundle, seed):
    from onnxplace.feeds import random_feeds

    return random_feeds(bundle.inputs, bundle.manifest.dimensions, seed)


def test_requests_under_way_together_do_not_mix(bundle):
    feeds = [feeds_of(bundle, seed) for seed in range(24)]
    with onnxplace.InferenceSession(bundle) as session:
        alone = [session.run(None, each) for each in feeds]
        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(lambda each: session.run(None, each), feeds))
    for one, other in zip(alone, together):
        for a, b in zip(one, other):
            np.testing.assert_array_equal(a, b)


def test_run_async_calls_back_with_outputs_or_with_the_error(bundle):
    feeds, done, heard = feeds_of(bundle, 0), threading.Event(), []

    def callback(outputs, error):
        heard.append((outputs, error))
        done.set()

    with onnxplace.InferenceSession(bundle) as session:
        expected = session.run(None, feeds)
        session.run_async(None, feeds, callback)
        assert done.wait(30)
    ((outputs, error),) = heard
    assert error is None
    for got, want in zip(outputs, expected):
        np.testing.assert_array_equal(got, want)


def test_outputs_outlive_the_session(bundle):
    feeds = feeds_of(bundle, 0)
    with onnxplace.InferenceSession(bundle) as session:
        outputs = session.run(None, feeds)
        copies = [np.array(output) for output in outputs]
    del session
    gc.collect()
    for output, copy in zip(outputs, copies):
        np.testing.assert_array_equal(output, copy)


def test_a_session_that_is_forgotten_ends_its_threads(bundle):
    before = threading.active_count()
    session = onnxplace.InferenceSession(bundle)
    assert threading.active_count() > before
    del session
    gc.collect()
    assert threading.active_count() == before


def test_outputs_can_be_chosen_and_unknown_ones_are_refused(bundle):
    feeds = feeds_of(bundle, 0)
    with onnxplace.InferenceSession(bundle) as session:
        names = [item.name for item in session.get_outputs()]
        assert len(session.run(names[:1], feeds)) == 1
        with pytest.raises(onnxplace.UsageError, match="no output 'odd'"):
            session.run(["odd"], feeds)


def test_a_trace_names_what_ran_where(bundle):
    with onnxplace.InferenceSession(bundle, trace=True) as session:
        session.run(None, feeds_of(bundle, 0))
        events = session.trace()["traceEvents"]
    ran = {event["name"] for event in events if event.get("cat") == "run"}
    assert ran == {segment.id for segment in bundle.manifest.segments}
    assert json.dumps(events)


def test_the_simulated_step_is_the_one_the_compiler_predicted(bundle):
    found = simulate_bundle(bundle)
    assert found.makespan_seconds == pytest.approx(bundle.manifest.predicted.step_seconds, rel=1e-9)
    assert len(found.transfers) == bundle.manifest.transfers


def test_a_callback_may_run_the_session_again_and_close_it(bundle):
    feeds, done, heard = feeds_of(bundle, 0), threading.Event(), []
    session = onnxplace.InferenceSession(bundle)

    def callback(outputs, error):
        heard.append(session.run(None, feeds))
        session.close()
        done.set()

    session.run_async(None, feeds, callback)
    assert done.wait(30)
    assert len(heard[0]) == len(session.get_outputs())
