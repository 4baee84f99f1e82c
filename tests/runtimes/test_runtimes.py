"""Both runtimes satisfy the contract, and the one with workers behaves well under load and failure."""

import gc
import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from onnx import TensorProto, helper

import onnxplace
from onnxplace.bundle.bundle_simulation import simulate_manifest
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from onnxplace.runtimes.simulated import Simulated
from onnxplace.testing.runtime_contract import check_runtime
from tests.support.fault_checks import read_resident_bytes


def test_the_onnxruntime_runtime_satisfies_the_contract():
    check_runtime(OnnxRuntime)


def test_the_simulated_runtime_satisfies_the_contract_without_computing():
    check_runtime(Simulated, computes=False)


@pytest.fixture
def bundle(compiled):
    return onnxplace.load(compiled)


def make_feeds(bundle, seed):
    from onnxplace.feeds.synthetic import random_feeds

    return random_feeds(bundle.inputs, bundle.manifest.dimensions, seed)


def test_requests_in_flight_do_not_mix(bundle):
    feeds = [make_feeds(bundle, seed) for seed in range(24)]
    with onnxplace.InferenceSession(bundle) as session:
        alone = [session.run(None, item) for item in feeds]
        with ThreadPoolExecutor(6) as pool:
            together = list(pool.map(lambda item: session.run(None, item), feeds))
    for first, second in zip(alone, together):
        for a, b in zip(first, second):
            np.testing.assert_array_equal(a, b)


def test_run_async_calls_back_with_outputs_or_with_the_error(bundle):
    feeds, finished, results = make_feeds(bundle, 0), threading.Event(), []

    def callback(outputs, error):
        results.append((outputs, error))
        finished.set()

    with onnxplace.InferenceSession(bundle) as session:
        expected = session.run(None, feeds)
        session.run_async(None, feeds, callback)
        assert finished.wait(120)
    ((outputs, error),) = results
    assert error is None
    for actual, want in zip(outputs, expected):
        np.testing.assert_array_equal(actual, want)


def test_run_async_with_user_data_calls_back_as_onnx_runtime_does(bundle):
    feeds, finished, results = make_feeds(bundle, 0), threading.Event(), []

    def callback(outputs, user_data, text):
        results.append((outputs, user_data, text))
        finished.set()

    with onnxplace.InferenceSession(bundle) as session:
        expected = session.run(None, feeds)
        for given in ({"mine": 1}, None):
            finished.clear()
            session.run_async(None, feeds, callback, given)
            assert finished.wait(120)
            outputs, user_data, text = results.pop()
            assert user_data is given
            assert text == ""
            np.testing.assert_array_equal(outputs[0], expected[0])


def test_outputs_outlive_the_session(bundle):
    feeds = make_feeds(bundle, 0)
    with onnxplace.InferenceSession(bundle) as session:
        outputs = session.run(None, feeds)
        copies = [np.array(output) for output in outputs]
    del session
    gc.collect()
    for output, copy in zip(outputs, copies):
        np.testing.assert_array_equal(output, copy)


def test_a_deleted_session_ends_its_threads(bundle):
    def workers():
        return {thread for thread in threading.enumerate() if thread.name.startswith("onnxplace c")}

    before = workers()
    session = onnxplace.InferenceSession(bundle)
    workers_of_session = workers() - before
    assert workers_of_session
    del session
    gc.collect()
    for thread in workers_of_session:  # the session did not wait for them
        thread.join(120)
    assert workers() == before


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="threads cannot be pinned")
def test_opening_leaves_the_callers_thread_where_it_is(bundle, monkeypatch):
    """On the core of a device that was opened last, it would wait for the worker of that device, and that for it."""
    pinned, set_affinity = [], os.sched_setaffinity
    monkeypatch.setattr(
        os, "sched_setaffinity", lambda *args: pinned.append(threading.get_ident()) or set_affinity(*args)
    )
    with onnxplace.InferenceSession(bundle):
        assert pinned
        assert threading.get_ident() not in pinned


def test_outputs_can_be_chosen_and_unknown_ones_are_refused(bundle):
    feeds = make_feeds(bundle, 0)
    with onnxplace.InferenceSession(bundle) as session:
        names = [item.name for item in session.get_outputs()]
        assert len(session.run(names[:1], feeds)) == 1
        with pytest.raises(onnxplace.UsageError, match="no output 'odd'"):
            session.run(["odd"], feeds)


def test_a_trace_names_segments_and_devices(bundle):
    with onnxplace.InferenceSession(bundle, trace=True) as session:
        session.run(None, make_feeds(bundle, 0))
        events = session.trace()["traceEvents"]
    runs = {event["name"] for event in events if event.get("cat") == "run"}
    assert runs == {segment.id for segment in bundle.manifest.segments}
    assert json.dumps(events)


def test_the_simulated_step_equals_the_prediction(bundle):
    simulation = simulate_manifest(bundle.manifest)
    predicted = bundle.manifest.predicted
    assert simulation.makespan_seconds + predicted.request_seconds == pytest.approx(predicted.step_seconds, rel=1e-9)
    assert len(simulation.transfers) == bundle.manifest.transfers


def test_a_callback_may_run_the_session_again_and_close_it(bundle):
    feeds, finished, results = make_feeds(bundle, 0), threading.Event(), []
    session = onnxplace.InferenceSession(bundle)

    def callback(outputs, error):
        results.append(session.run(None, feeds))
        session.close()
        finished.set()

    session.run_async(None, feeds, callback)
    assert finished.wait(120)
    assert len(results[0]) == len(session.get_outputs())


@pytest.fixture
def opened(bundle):
    with OnnxRuntime().open(bundle) as session:
        yield session


def first_device(bundle):
    return bundle.manifest.segments[0].device


def record_threads(session, monkeypatch):
    """Return a dictionary that will hold, by device, the names of the threads that followed its program."""
    threads, follow = {}, session.engine.follow_program

    def noting(device, program, request):
        threads.setdefault(device.id, set()).add(threading.current_thread().name)
        follow(device, program, request)

    monkeypatch.setattr(session.engine, "follow_program", noting)
    return threads


def test_run_does_one_devices_part_in_the_callers_thread_if_no_other_is_in_flight(bundle, opened, monkeypatch):
    threads = record_threads(opened, monkeypatch)
    expected = opened.submit(make_feeds(bundle, 0)).result().outputs
    assert threads == {device.id: {f"onnxplace {device.id}"} for device in bundle.target.devices}
    threads.clear()
    outputs = opened.run(make_feeds(bundle, 0)).outputs
    caller = threading.current_thread().name
    assert threads == {
        device.id: {caller if device.id == first_device(bundle) else f"onnxplace {device.id}"}
        for device in bundle.target.devices
    }
    for name, value in expected.items():
        np.testing.assert_array_equal(outputs[name], value)


def test_run_leaves_the_work_to_the_workers_while_others_are_in_flight(bundle, opened, monkeypatch):
    threads, begun, go_on = record_threads(opened, monkeypatch), threading.Event(), threading.Event()
    follow = opened.engine.follow_program

    def held_up(*arguments):
        begun.set()
        assert go_on.wait(120)
        follow(*arguments)

    monkeypatch.setattr(opened.engine, "follow_program", held_up)
    before = opened.submit(make_feeds(bundle, 0))
    assert begun.wait(120)
    monkeypatch.setattr(opened.engine, "follow_program", follow)
    with ThreadPoolExecutor(1, "caller") as pool:
        after = pool.submit(opened.run, make_feeds(bundle, 1))
        assert not after.done()
        go_on.set()
        before.result(30)
        after.result(30)
    assert not any(name.startswith("caller") for names in threads.values() for name in names)


def test_a_request_that_comes_while_a_caller_runs_waits_for_its_device(bundle, opened, monkeypatch):
    in_flight, counts, follow = [], [], opened.engine.follow_program

    def counted(device, program, request):
        if device.id == first_device(bundle):
            in_flight.append(request)
            counts.append(len(in_flight))
        follow(device, program, request)
        if device.id == first_device(bundle):
            in_flight.remove(request)

    monkeypatch.setattr(opened.engine, "follow_program", counted)
    feeds = [make_feeds(bundle, seed) for seed in range(40)]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda fed: opened.run(fed).outputs, feeds))
    monkeypatch.undo()
    assert max(counts) == 1
    for fed, outputs in zip(feeds, results):
        for name, value in opened.run(fed).outputs.items():
            np.testing.assert_array_equal(outputs[name], value)


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="no affinities here")
def test_run_does_not_change_the_cores_of_the_callers_thread(bundle, opened, monkeypatch):
    before, affinities, follow = os.sched_getaffinity(0), [], opened.engine.follow_program
    monkeypatch.setattr(
        opened.engine,
        "follow_program",
        lambda *arguments: (affinities.append(os.sched_getaffinity(0)), follow(*arguments)),
    )
    opened.run(make_feeds(bundle, 0))
    assert before in affinities
    assert os.sched_getaffinity(0) == before


def test_an_error_in_the_callers_thread_is_raised_there_and_the_next_run_succeeds(bundle, opened, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(opened.engine, "run_segment", lambda *arguments: 1 / 0)
        with pytest.raises(onnxplace.ExecutionError, match="division by zero"):
            opened.run(make_feeds(bundle, 0))
    assert opened.run(make_feeds(bundle, 0)).outputs


def test_an_interrupt_in_the_callers_thread_ends_the_request_and_is_raised_again(bundle, opened, monkeypatch):
    follow = opened.engine.follow_program

    def interrupted(device, program, request):
        if device.id == first_device(bundle):
            raise KeyboardInterrupt
        follow(device, program, request)

    with monkeypatch.context() as patch:
        patch.setattr(opened.engine, "follow_program", interrupted)
        with pytest.raises(KeyboardInterrupt):
            opened.run(make_feeds(bundle, 0))
    assert opened.submit(make_feeds(bundle, 0)).result(30).outputs
    assert opened.run(make_feeds(bundle, 0)).outputs


def test_closing_waits_for_a_caller_that_runs(bundle, monkeypatch):
    session, begun, go_on = OnnxRuntime().open(bundle), threading.Event(), threading.Event()
    follow = session.engine.follow_program

    def held_up(device, program, request):
        if device.id == first_device(bundle):
            begun.set()
            assert go_on.wait(120)
        follow(device, program, request)

    monkeypatch.setattr(session.engine, "follow_program", held_up)
    with ThreadPoolExecutor(2) as pool:
        result = pool.submit(session.run, make_feeds(bundle, 0))
        assert begun.wait(120)
        closed = pool.submit(session.close)
        go_on.set()
        closed.result(30)
        assert result.result(30).outputs
    with pytest.raises(onnxplace.ExecutionError, match="closed"):
        session.run(make_feeds(bundle, 0))


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no /proc here")
def test_many_segments_need_the_memory_of_live_values_and_not_the_sum_of_all(tmp_path):
    value_bytes, steps = 4 << 20, 24
    names = [f"v{index}" for index in range(steps + 1)]
    inputs_and_outputs = [
        helper.make_tensor_value_info(name, TensorProto.FLOAT, [value_bytes // 4]) for name in ("v0", names[-1])
    ]
    nodes = [helper.make_node("Neg", [a], [b], name=b) for a, b in pairwise(names)]
    graph = helper.make_graph(nodes, "chain", inputs_and_outputs[:1], inputs_and_outputs[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    device_map = tmp_path / "map.json"
    device_map.write_text(json.dumps({name: f"cpu:{index % 2}" for index, name in enumerate(names[1:])}))
    pipeline = f'profile{{estimate=true}},coplace{{join=never,device_map="{device_map}"}},m-topo,split,emit'
    bundle = onnxplace.compile(model, tmp_path / "out", devices="cpu:0,cpu:1", pipeline=pipeline)
    assert len(bundle.manifest.segments) == steps
    feeds = {"v0": np.ones(value_bytes // 4, np.float32)}
    with onnxplace.InferenceSession(bundle) as session:
        before = read_resident_bytes()
        for _ in range(3):
            session.run(None, feeds)
        assert read_resident_bytes() - before < steps * value_bytes / 2
