"""The runtime keeps the contract of runtimes with OpenVINO on either side of a cut, on both, and alone."""

import pytest

from onnxplace.runtimes.onnxruntime import OnnxRuntime
from onnxplace.testing.runtime_contract import check_runtime

PAIRS = [
    ("openvino/cpu:0", "cpu:0"),
    ("cpu:0", "openvino/cpu:0"),
    ("openvino/cpu:0", "openvino/cpu:1"),
    ("openvino/cpu:0",),
]


@pytest.mark.parametrize("devices", PAIRS, ids=",".join)
def test_the_runtime_satisfies_the_contract(devices):
    check_runtime(OnnxRuntime, devices=devices)
