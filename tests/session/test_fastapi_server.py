"""The example of a server: probes, checks of requests, joined requests, and an orderly end."""

import http.client
import json
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from onnx import parser

import onnxplace
from tests.conftest import FAST_PIPELINE
from tests.support import endless

pytest.importorskip("fastapi", reason="the extra [dev] has it")
pytest.importorskip("httpx2")

from fastapi.testclient import TestClient

import fastapi_server

EXAMPLE = Path(fastapi_server.__file__)
WAIT_SECONDS = 60
MODEL = """<ir_version: 8, opset_import: ["": 17]>
mixed (float[n, 2] x, int64[n] i, string[k] t, float[2] bias) => (float[n, 2] y, int64[n] j, string[k] u)
<float[2] bias = {1, 2}> { a = Log(x)  y = Add(a, bias)  b = Neg(i)  j = Abs(b)  u = Identity(t) }"""


def await_true(condition):
    deadline = time.monotonic() + WAIT_SECONDS
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def await_ready(client):
    await_true(lambda: client.get("/ready").status_code == 200)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    options = {"devices": "cpu:0,cpu:1", "shape": {"n": 2, "k": 1}, "pipeline": FAST_PIPELINE}
    return onnxplace.compile(parser.parse_model(MODEL), tmp_path_factory.mktemp("server") / "b", **options)


@pytest.fixture(scope="module")
def client(bundle):
    with TestClient(fastapi_server.create_app(bundle.path, fastapi_server.Options(max_batch=1))) as opened:
        await_ready(opened)
        yield opened


INPUTS = {"x": [[1, 0], [1.0, 1.0]], "i": [1, -2], "t": ["\u00fc"]}


def test_inputs_of_all_types_are_answered_and_numbers_that_are_not_finite_are_null(client):
    answer = client.post("/run", json={"inputs": INPUTS})
    assert answer.status_code == 200
    assert answer.json() == {"outputs": {"y": [[1.0, None], [1.0, 2.0]], "j": [1, 2], "u": ["\u00fc"]}}
    answer = client.post("/run", json={"inputs": {**INPUTS, "bias": [0, 0]}, "outputs": ["j", "y"]})
    assert answer.json() == {"outputs": {"j": [1, 2], "y": [[0.0, None], [0.0, 0.0]]}}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"inputs": {**INPUTS, "z": [1]}}, ["inputs", "z", "not permitted"]),
        ({"inputs": {"x": [[1, 2]]}}, ["inputs", "i", "required"]),
        ({"inputs": {**INPUTS, "x": {"a": 1}}}, ["inputs", "x"]),
        ({"inputs": {**INPUTS, "x": [[1, 2, 3]]}}, ["F003", "input 'x'"]),
        ({"inputs": {**INPUTS, "x": [[1, 2], [3]]}}, ["F003", "input 'x'"]),
        ({"inputs": {**INPUTS, "x": [["a", "b"]]}}, ["F003", "input 'x'", "not all elements are numbers"]),
        ({"inputs": {**INPUTS, "i": [1.5, 2]}}, ["F003", "input 'i'", "not all elements are int64 numbers"]),
        ({"inputs": INPUTS, "outputs": ["w"]}, ["F001", "no output 'w'"]),
        ({"inputs": INPUTS, "output": ["y"]}, ["output", "not permitted"]),
    ],
)
def test_requests_that_do_not_fit_the_bundle_are_refused_with_the_place(client, change, words):
    answer = client.post("/run", json=change)
    assert answer.status_code == 422
    assert [word for word in words if word not in answer.text] == []


def test_the_server_describes_itself(client, bundle):
    assert client.get("/health").json() == {"status": "alive"}
    assert client.get("/ready").json() == {"ready": True}
    model = client.get("/model").json()
    assert [item["name"] for item in model["inputs"]] == [item.name for item in bundle.inputs]
    assert model["outputs"][0] == {"name": "y", "type": "tensor(float)", "shape": ["n", 2]}
    fields = client.get("/openapi.json").json()["components"]["schemas"]["Inputs"]
    assert fields["required"] == ["x", "i", "t"]


def test_a_server_that_has_ended_or_failed_to_start_says_so(compiled, tmp_path):
    with TestClient(fastapi_server.create_app(compiled)) as opened:
        await_ready(opened)
    assert opened.get("/ready").status_code == 503
    answer = opened.post("/run", json={"inputs": {"x": [[0.0] * 64]}})
    assert (answer.status_code, answer.headers["retry-after"]) == (503, "1")
    whole = endless.endless_bundle(tmp_path)  # no dimension of it is symbolic, so that requests cannot be joined
    with TestClient(fastapi_server.create_app(whole.path, fastapi_server.Options(max_batch=8))) as opened:
        await_true(lambda: opened.get("/health").status_code != 200)
        answer = opened.get("/health")
        assert (answer.status_code, answer.json()["error"]["code"]) == (500, "U083")
        assert opened.get("/ready").status_code == 503


def test_a_request_without_a_result_in_time_is_ended(tmp_path):
    options = fastapi_server.Options(max_batch=1, timeout_seconds=0.2)
    with TestClient(fastapi_server.create_app(endless.endless_bundle(tmp_path).path, options)) as opened:
        await_ready(opened)
        answer = opened.post("/run", json={"inputs": {"limit": 1 << 62, "x": [1, 2, 3, 4]}})
        assert (answer.status_code, answer.json()["error"]["code"]) == (504, "X007")

        def answers_again():  # a busy machine may need more than the time limit
            answer = opened.post("/run", json={"inputs": {"limit": 3, "x": [1, 2, 3, 4]}})
            return answer.status_code == 200 and answer.json()["outputs"]["y"] == [1, 2, 3, 4]

        await_true(answers_again)


def test_a_server_answers_requests_at_a_time_and_finishes_them_when_it_is_told_to_end(compiled):
    command = [sys.executable, "-W", "ignore", EXAMPLE, compiled, "--port", "0", "--max-batch", "4"]  # any free port
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    log: list[str] = []
    reader = threading.Thread(target=lambda: log.extend(server.stderr))
    reader.start()
    try:
        await_true(lambda: find_port(log) or server.poll() is not None)
        port = find_port(log)
        await_true(lambda: is_ready(port, server))
        random = np.random.default_rng(0)
        requests = [random.standard_normal((size, 64)).astype("f4") for size in (1, 2, 1, 3, 1, 1, 2, 1)]
        with onnxplace.InferenceSession(compiled) as session:
            expected = [session.run(None, {"x": x})[0] for x in requests]
        bodies = [json.dumps({"inputs": {"x": x.tolist()}}).encode() for x in requests]
        with ThreadPoolExecutor(len(requests)) as callers:
            answers = list(callers.map(lambda body: call(port, "/run", body), bodies))
        # A request whose body is only half there when the server is told to end.
        late = http.client.HTTPConnection("127.0.0.1", port, timeout=WAIT_SECONDS)
        late.putrequest("POST", "/run")
        for name, value in (("content-type", "application/json"), ("content-length", str(len(bodies[0])))):
            late.putheader(name, value)
        late.endheaders(bodies[0][:10])
        call(port, "/ready")
        server.send_signal(signal.SIGTERM)
        await_true(lambda: any("Shutting down" in line for line in log))
        late.send(bodies[0][10:])
        answer = late.getresponse()
        answers.append(json.load(answer))
        late.close()
        for actual, array in zip(answers, [*expected, expected[0]], strict=True):
            np.testing.assert_allclose(actual["outputs"]["y"], array, rtol=1e-4, atol=1e-5)
        assert server.wait(WAIT_SECONDS) in (0, -signal.SIGTERM), "uvicorn passes the signal on at its end"
    finally:
        server.kill()
        server.wait()
        reader.join()
        server.stderr.close()
    assert any("Application shutdown complete" in line for line in log), log
    assert not any("Traceback" in line for line in log), log


def find_port(log):
    """Return the port that the server has chosen, None if it does not answer yet."""
    port = re.search(r"running on http://127\.0\.0\.1:(\d+)", "".join(log))
    return port and int(port[1])


def is_ready(port, server):
    assert server.poll() is None
    try:
        return call(port, "/ready")["ready"]
    except urllib.error.HTTPError as refusal:  # 503
        refusal.close()
    return False


def call(port, path, body=None):
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=WAIT_SECONDS) as answer:
        return json.load(answer)
