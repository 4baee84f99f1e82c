"""The runtime keeps the contract of runtimes with devices whose work is enqueued."""

import pytest

from onnxplace.runtimes.onnxruntime import OnnxRuntime
from onnxplace.testing.runtime_contract import check_runtime
from tests.support.fake_streams import FakeDriver, use_fake_driver

DEVICES = [("fake:0", "fake:1"), ("fake:0/0", "fake:0/1"), ("fake:0", "cpu:0"), ("cpu:0", "fake:0"), ("fake:0",)]


@pytest.mark.parametrize("has_peer_access", [True, False], ids=["peer", "host"])
@pytest.mark.parametrize("devices", DEVICES, ids=",".join)
def test_the_runtime_satisfies_the_contract(devices, has_peer_access):
    with use_fake_driver(FakeDriver(1, has_peer_access)):
        check_runtime(OnnxRuntime, devices=devices)
