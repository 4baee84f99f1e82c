"""A server whose models run in processes of their own: deaths, the requests beside them, states, and readiness."""

import http.client
import json
import os
import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import psutil
import pytest
from onnx import parser

import onnxplace
from onnxplace.machine import isolated_sessions
from onnxplace.machine.isolated_sessions import DeviceProcess
from onnxplace_serving.served_models import Limits
from plugins.serving.tests.support.servers import serve_in_thread
from plugins.serving.tests.test_server import SUM
from tests.conftest import FAST_PIPELINE
from tests.support import endless
from tests.support.fault_checks import HUNG_SECONDS, wait_until
from tests.support.isolated import list_children

FOREVER = 1 << 40


@pytest.fixture(scope="module")
def bundles(tmp_path_factory):
    """Two models: e, which runs for the rounds that a request gives, and s, which carries a state."""
    folder = tmp_path_factory.mktemp("isolated")
    single = endless.endless_bundle(folder, "cpu:0", "cpu:0", "cpu:0", devices="cpu:0")
    sums = parser.parse_model(SUM)
    state = onnxplace.compile(sums, folder / "s", devices="cpu:0", state={"new": "old"}, pipeline=FAST_PIPELINE)
    return {"e": single.path, "s": state.path}


@pytest.fixture(scope="module")
def server(bundles):
    with serve_in_thread(bundles, Limits(max_in_flight=4), isolate=True) as running:
        yield running
    assert not list_children()


def call(server, method, path, entries=(), **parameters):
    """Return the status of an answer, and its text."""
    keys = ("name", "datatype", "shape", "data")
    body = {"inputs": [dict(zip(keys, entry, strict=True)) for entry in entries], "parameters": parameters}
    connection = http.client.HTTPConnection(server.http, timeout=HUNG_SECONDS)
    connection.request(method, path, json.dumps(body))
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text


def run(server, rounds):
    entries = [("limit", "INT64", [], [rounds]), ("x", "FP32", [4], endless.X.tolist())]
    return call(server, "POST", "/v2/models/e/infer", entries)


def add(server, sequence, value, **parameters):
    """Return the status, and the sum of a sequence so far."""
    entries = [("x", "FP32", [1], [value])]
    if parameters:
        entries.append(("old", "FP32", [1], [0]))
    status, text = call(server, "POST", "/v2/models/s/infer", entries, sequence_id=sequence, **parameters)
    return status, -json.loads(text)["outputs"][0]["data"][0] if status == 200 else text


def find_process(session):
    """Return the process of the one device of a session."""
    (device,) = session._session.engine._devices.values()
    (process,) = isolated_sessions.find_processes(device.memory.address.owner)
    return process


def kill(session, number=signal.SIGSEGV):
    psutil.Process(find_process(session)._child._process.pid).send_signal(number)


def count_deaths(server, model):
    (line,) = [
        line for line in call(server, "GET", "/metrics")[1].splitlines() if f'deaths_total{{model="{model}' in line
    ]
    return int(line.split()[1])


@pytest.mark.parametrize("number", [signal.SIGSEGV, signal.SIGFPE])
def test_only_the_request_that_ran_fails_and_the_others_go_on(server, number):
    model = server.models["e"]
    before, deaths = model.statistics.failures.copy(), [count_deaths(server, name) for name in ("e", "s")]
    with ThreadPoolExecutor(8) as callers:
        running = callers.submit(run, server, FOREVER)
        wait_until(lambda: "runs segment" in describe(model))
        waiting = [callers.submit(run, server, 3) for _ in range(6)]
        wait_until(lambda: model.open_requests == 7)
        kill(model.session, number)
        status, text = running.result(HUNG_SECONDS)
        assert status == 503
        assert f"segment cpu0-000 failed: the process of this device ended: {number.name}" in text
        assert "it is opened again for other requests" in text
        for future in waiting:
            status, text = future.result(HUNG_SECONDS)
            assert (status, json.loads(text)["outputs"][0]["data"]) == (200, endless.X.tolist())
    assert model.statistics.failures - before == {"unavailable": 1}
    assert [count_deaths(server, name) for name in ("e", "s")] == [deaths[0] + 1, deaths[1]]


def describe(model):
    return "".join(item.describe_progress() for item in model.session._session.engine._in_flight.values())


def test_readiness_names_the_death_until_the_model_is_open_again(server, monkeypatch):
    may_start, start = threading.Event(), DeviceProcess.start
    monkeypatch.setattr(DeviceProcess, "start", lambda process: may_start.wait(HUNG_SECONDS) and start(process))
    assert call(server, "GET", "/v2/health/ready")[0] == 200
    kill(server.models["e"].session)
    wait_until(lambda: call(server, "GET", "/v2/health/ready")[0] == 503)
    reason = "cpu:0 is opened again: the process of cpu:0 ended: SIGSEGV"
    assert call(server, "GET", "/v2/models/e/ready") == (503, reason)
    assert call(server, "GET", "/v2/models/s/ready") == (200, "")
    index = {item["name"]: item for item in json.loads(call(server, "POST", "/v2/repository/index")[1])}
    assert (index["e"]["state"], index["e"]["reason"], index["s"]["state"]) == ("UNAVAILABLE", reason, "READY")
    assert add(server, 1, 5, sequence_start=True) == (200, 5)
    may_start.set()
    wait_until(lambda: call(server, "GET", "/v2/health/ready")[0] == 200)
    assert run(server, 3)[0] == 200


def test_only_the_states_of_the_request_that_ran_are_lost(server, monkeypatch):
    process = find_process(server.models["s"].session)
    before = process.death_count
    for sequence in (1, 2):
        assert add(server, sequence, 5, sequence_start=True) == (200, 5)
    kill(server.models["s"].session)  # no request runs: the states are in this process
    wait_until(lambda: process.death_count > before)
    assert add(server, 1, 1) == (200, 6)
    original = isolated_sessions.IsolatedSession.run

    def die(session, *arguments):
        monkeypatch.setattr(isolated_sessions.IsolatedSession, "run", original)
        kill(server.models["s"].session, signal.SIGKILL)  # ends all threads at once: no other one can still answer
        return original(session, *arguments)

    monkeypatch.setattr(isolated_sessions.IsolatedSession, "run", die)
    status, text = add(server, 1, 1)
    assert (status, "X016" in text) == (503, True)
    status, text = add(server, 1, 1)
    assert (status, "the previous request failed and lost it" in text) == (400, True)
    assert add(server, 2, 1) == (200, 6)
    assert add(server, 1, 7, sequence_start=True) == (200, 7)


@pytest.mark.slow
def test_a_model_that_cannot_be_opened_again_is_tried_again(server, bundles, monkeypatch):
    monkeypatch.setattr(isolated_sessions, "PAUSE_SECONDS", 0.01)
    segments, process = bundles["e"] / "segments", find_process(server.models["e"].session)
    before = process.death_count
    ((_, files),) = process.sessions.values()
    monkeypatch.setattr(isolated_sessions, "_list_file_states", lambda _: files)  # or else it does not even start
    os.rename(segments, segments.with_name("away"))
    kill(server.models["e"].session)
    wait_until(lambda: process.death_count > before + 1)
    assert call(server, "GET", "/v2/models/e/ready")[0] == 503
    assert run(server, 3)[0] in (400, 500, 503)
    os.rename(segments.with_name("away"), segments)
    wait_until(lambda: call(server, "GET", "/v2/models/e/ready")[0] == 200)
    assert run(server, 3)[0] == 200


def test_a_client_that_leaves_ends_its_run_and_not_the_process(server):
    model, before = server.models["e"], list_children()
    failures = model.statistics.failures.copy()
    connection = http.client.HTTPConnection(server.http)
    entries = [("limit", "INT64", [], [FOREVER]), ("x", "FP32", [4], endless.X.tolist())]
    keys = ("name", "datatype", "shape", "data")
    body = {"inputs": [dict(zip(keys, entry, strict=True)) for entry in entries]}
    connection.request("POST", "/v2/models/e/infer", json.dumps(body))
    wait_until(lambda: "runs segment" in describe(model))
    connection.close()
    assert run(server, 3)[0] == 200
    assert model.statistics.failures - failures == {"cancelled": 1}
    assert list_children() == before


def test_joined_requests_with_one_that_kills_are_answered_one_by_one(compiled, monkeypatch):
    original, poison = isolated_sessions.IsolatedSession.run, 13.0

    def die(session, names, feeds, *arguments):
        if any((array == poison).any() for array in feeds.values()):
            process = psutil.Process(session._process._child._process.pid)
            process.suspend()  # it neither answers nor ends before it has the request
            threading.Timer(0.5, process.kill).start()
        return original(session, names, feeds, *arguments)

    monkeypatch.setattr(isolated_sessions.IsolatedSession, "run", die)
    batching = onnxplace.Batching(max_batch=8, max_delay_ms=50)
    options = {"batching": batching, "isolate": True, "max_in_flight": 1}
    with onnxplace.InferenceSession(compiled, **options) as session:
        futures = [session.submit({"x": np.full((1, 64), value, "f4")}) for value in (1, 2, poison, 3, 4)]
        failures = [future.exception(HUNG_SECONDS) for future in futures]
    assert [failure and failure.code for failure in failures] == [None, None, "X016", None, None]


def test_python_says_how_often_a_process_died(bundles):
    with onnxplace.InferenceSession(bundles["e"], isolate=True) as session:
        (copy,) = session.list_copies()
        assert (copy.name, copy.is_open, copy.requests, copy.failures, copy.last_failure) == ("cpu:0", True, 0, 0, "")
        kill(session, signal.SIGKILL)
        wait_until(lambda: session.list_copies()[0].failures == 1)
        np.testing.assert_array_equal(session.run(None, endless.feeds(3))[0], endless.X)
        (copy,) = session.list_copies()
        assert (copy.is_open, copy.requests, copy.failures) == (True, 1, 1)
        assert copy.last_failure == "the process of cpu:0 ended: SIGKILL"


def test_a_fallback_or_another_runtime_is_refused(run_cli, bundles):
    serve = ("serve", bundles["e"], "--isolate", "--port", 0, "--grpc-port", 0)
    result = run_cli(*serve, "--fallback", "cpu:0")
    assert (result.code, "error[U045] fallback: " in result.err, "leave one of both out" in result.err) == (2, 1, 1)
    result = run_cli(*serve, "--runtime", "mpi")
    assert (result.code, "runtime 'mpi' has no option 'isolate'" in result.err) == (2, True)
