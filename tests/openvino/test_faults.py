"""Failures with OpenVINO: requests of sizes that do not fit, processes that end, libraries that cannot be loaded."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
from onnx import parser

import onnxplace
from onnxplace.errors import FallbackWarning
from onnxplace.target.plugin_providers import LIBRARIES_VARIABLE
from tests.conftest import Ran
from tests.openvino.devices import OPENVINO, place
from tests.runtimes import test_faults
from tests.runtimes.conftest import hook_errors as hook_errors, session as session
from tests.support.commands import only_json
from tests.support.endless import endless_bundle, feeds
from tests.support.fault_checks import HUNG_SECONDS, assert_expected
from tests.support.isolated import crash_at_next_run

# Collected here too, with the bundle of this file.
REUSED = (
    "test_a_callback_on_a_worker_may_submit_and_close_but_not_run",
    "test_a_close_with_timeout_ends_runs_in_flight",
    "test_a_deleted_session_waits_for_nothing",
    "test_a_forked_child_gets_an_error_and_ends",
    "test_an_interrupt_at_any_moment_of_a_run_leaves_a_session_that_works",
    "test_leaving_a_block_by_an_error_waits_for_runs_in_flight",
    "test_leaving_a_block_by_an_interrupt_does_not_wait_for_runs_in_flight",
    "test_the_timeout_includes_the_wait_for_a_slot",
)
globals().update({name: getattr(test_faults, name) for name in REUSED})


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """The loop is on the CPU, where it can be ended; its result has no known rank, which OpenVINO needs."""
    folder = tmp_path_factory.mktemp("endless")
    return endless_bundle(folder, spin="cpu:0", last="cpu:0", other=OPENVINO, devices=f"cpu:0,{OPENVINO}")


def test_a_timeout_ends_a_run_and_the_next_one_works(session):
    with pytest.raises(onnxplace.RunTimeoutError, match="X007"):
        session.run(None, feeds(None), timeout=0.2)
    assert_expected(session.run(None, feeds(3), timeout=HUNG_SECONDS), 3)


# A model of open sizes, those of a request that fits, and of one that does not.
MODELS = {
    "sum": ("(float[n, 4] x) => (float[m, 4] y) <float[2, 1] p = {0.5, -0.25}> { y = Add(x, p) }", (2, 4), (3, 4)),
    "product and sum": (
        "(float[n, 2] x) => (float[m, 2] y) <float[2, 2] w = {1, 2, 3, 4}, float[2, 1] p = {0.5, -0.25}> "
        "{ a = MatMul(x, w) y = Add(a, p) }",
        (2, 2),
        (3, 2),
    ),
    "choice": (
        "(float[n, m] x) => (float[n, m] y) <float[2, 1] p = {0.5, -0.25}, float zero = {0.0}> "
        "{ c = Greater(x, zero) y = Where(c, x, p) }",
        (2, 3),
        (3, 3),
    ),
    "convolution": (
        "(float[1, c, h, w] x) => (float[a, b, h, w] y) <float[1, 2, 1, 1] k = {1.0, 2.0}> { y = Conv(x, k) }",
        (1, 2, 3, 3),
        (1, 3, 3, 3),
    ),
    "reshape": (
        "(float[n, m] x) => (float[2, b] y) <int64[2] s = {2, -1}> { y = Reshape(x, s) }",
        (2, 4),
        (3, 3),
    ),
}


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", MODELS)
def test_a_request_of_sizes_that_do_not_fit_fails_and_the_next_one_is_right(tmp_path, name, threads):
    """By itself, OpenVINO returns what is left of the last request, or fails again."""
    text, good, bad = MODELS[name]
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    fitting, other = (np.random.default_rng(0).standard_normal(shape).astype(np.float32) for shape in (good, bad))
    found = place(model, tmp_path, f"{OPENVINO}{{threads={threads}}}", {".*": OPENVINO}, inputs={"x": fitting})
    with onnxplace.InferenceSession(found) as session:
        expected = session.run(None, {"x": fitting})
        session.run(None, {"x": -fitting})
        for _ in range(2):
            with pytest.raises(onnxplace.ExecutionError, match="X001"):
                session.run(None, {"x": other})
            np.testing.assert_array_equal(session.run(None, {"x": fitting}), expected)


def test_a_process_of_its_own_that_ends_fails_one_request(monkeypatch, tmp_path):
    model = parser.parse_model('<ir_version: 8, opset_import: ["": 17]> g (float[4] x) => (float[4] y) { y = Relu(x) }')
    found = place(model, tmp_path, f"{OPENVINO}{{isolate=true}}", {".*": OPENVINO})
    x = np.array([-1, 0, 1, 2], dtype=np.float32)
    with onnxplace.InferenceSession(found) as session:
        np.testing.assert_array_equal(session.run(None, {"x": x})[0], np.maximum(x, 0))
        crash_at_next_run(monkeypatch)
        with pytest.raises(onnxplace.ExecutionError, match=f"X016.*{OPENVINO}.*SIGKILL"):
            session.run(None, {"x": x})
    with onnxplace.InferenceSession(found, fallback="cpu:0") as session:
        crash_at_next_run(monkeypatch)
        with pytest.warns(FallbackWarning):
            (result,) = session.run(None, {"x": x})
        np.testing.assert_array_equal(result, np.maximum(x, 0))


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "does not exist"), (b"nothing to load", "ONNX Runtime cannot load its library")],
    ids=["missing", "of something else"],
)
def test_a_library_that_cannot_be_loaded_is_named_and_other_devices_work(tmp_path, content, words):
    path = tmp_path / "lib.so"
    if content:
        path.write_bytes(content)
    environment = {**os.environ, LIBRARIES_VARIABLE: f"openvino={path}", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "onnxplace", "devices", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    listed = only_json(Ran(done.returncode, done.stdout, ""))["accelerators"]
    (problem,) = [item["problem"] for item in listed if item["provider"] == "openvino"]
    assert str(path) in problem
    assert words in problem
    assert json.loads(done.stdout)["host"]["cores"]
