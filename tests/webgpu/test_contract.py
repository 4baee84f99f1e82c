"""The runtime keeps the contract of runtimes with a GPU on either side of a cut, and with a GPU alone."""

import pytest

from onnxplace.runtimes.onnxruntime import OnnxRuntime
from onnxplace.testing.runtime_contract import check_runtime


@pytest.mark.parametrize("devices", [("webgpu:0", "cpu:0"), ("cpu:0", "webgpu:0"), ("webgpu:0",)], ids=",".join)
def test_the_runtime_satisfies_the_contract(devices):
    check_runtime(OnnxRuntime, devices=devices)
