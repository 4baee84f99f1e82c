"""Requests that are joined, and requests on several routes, with a GPU."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from onnx import numpy_helper

import onnxplace
from onnxplace.target.target import Device, Target
from tests.conftest import FAST_PIPELINE, branches
from tests.support.fault_checks import HUNG_SECONDS

REQUESTS = 24
# The first route is on the CPU, which is estimated to be faster for so small a model.
COPIES = "optimize,profile{estimate=true},coplace{join=never},single,split,replicate{routes=webgpu:0},emit"


def compile_branches(folder, devices, pipeline):
    target = Target(tuple(Device(name, 1 << 30) for name in devices))
    return onnxplace.compile(branches(), folder / "bundle", target=target, shape={"batch": 2}, pipeline=pipeline)


def make_feeds(number, rows=2):
    return {"x": np.random.default_rng(number).standard_normal((rows, 64)).astype(np.float32)}


def compute(feeds):
    weights = {item.name: numpy_helper.to_array(item) for item in branches().graph.initializer}
    return np.maximum(feeds["x"] @ weights["w_left"], 0) + np.tanh(feeds["x"] @ weights["w_right"])


@pytest.mark.parametrize("devices", [("webgpu:0", "cpu:0"), ("webgpu:0",)], ids=",".join)
def test_requests_of_many_callers_are_joined_and_cut_apart_again(devices, tmp_path):
    bundle = compile_branches(tmp_path, devices, FAST_PIPELINE)
    requests = [make_feeds(number, rows=1 + number % 3) for number in range(REQUESTS)]
    batching = onnxplace.Batching(max_batch=8, max_delay_ms=20)
    with onnxplace.InferenceSession(bundle, batching=batching) as session, ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda feeds: session.run(None, feeds)[0], requests))
    for feeds, result in zip(requests, results):
        np.testing.assert_allclose(result, compute(feeds), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("devices", [("webgpu:0", "cpu:0"), ("webgpu:0",)], ids=",".join)
def test_a_stream_returns_results_in_order(devices, tmp_path):
    bundle = compile_branches(tmp_path, devices, FAST_PIPELINE)
    requests = [make_feeds(number) for number in range(REQUESTS)]
    with onnxplace.InferenceSession(bundle) as session:
        results = [outputs[0] for outputs in session.stream(iter(requests), in_flight=4)]
    assert len(results) == REQUESTS
    for feeds, result in zip(requests, results):
        np.testing.assert_allclose(result, compute(feeds), rtol=1e-3, atol=1e-4)


def test_requests_in_flight_use_a_copy_on_the_gpu_and_one_on_the_cpu(tmp_path):
    bundle = compile_branches(tmp_path, ("webgpu:0", "cpu:0"), COPIES)
    requests = [make_feeds(number) for number in range(REQUESTS)]
    with onnxplace.InferenceSession(bundle, trace=True) as session:
        futures = [session.submit(feeds) for feeds in requests]
        results = [future.result(HUNG_SECONDS) for future in futures]
    assert {event.device for result in results for event in result.events} == {"webgpu:0", "cpu:0"}
    for feeds, result in zip(requests, results):
        np.testing.assert_allclose(result.outputs["y"], compute(feeds), rtol=1e-3, atol=1e-4)
