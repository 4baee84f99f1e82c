"""Requests that are joined, and requests on several routes, with a GPU."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import onnxplace
from onnxplace.target import Device, Target
from tests.conftest import FAST_PIPELINE, branches

REQUESTS = 24


def compile_branches(folder, devices, pipeline):
    target = Target(tuple(Device(name, 1 << 30) for name in devices))
    return onnxplace.compile(branches(), folder / "bundle", target=target, shape={"batch": 2}, pipeline=pipeline)


def make_feeds(number, rows=2):
    return {"x": np.random.default_rng(number).standard_normal((rows, 64)).astype(np.float32)}


def compute(feeds):
    left, right = (np.array(item.float_data) if item.float_data else to_array(item) for item in weights())
    x = feeds["x"]
    return np.maximum(x @ left, 0) + np.tanh(x @ right)


def weights():
    by_name = {item.name: item for item in branches().graph.initializer}
    return by_name["w_left"], by_name["w_right"]


def to_array(tensor):
    from onnx import numpy_helper

    return numpy_helper.to_array(tensor)
