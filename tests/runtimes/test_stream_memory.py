"""Devices with streams, on a driver whose work is late: the contract of runtimes, and every order that must be kept."""

import pytest

from onnxplace.runtimes.onnxruntime import OnnxRuntime
from onnxplace.testing import check_runtime
from tests.support.fake_streams import FakeDriver, use_fake_driver

DEVICES = [("fake:0", "fake:1"), ("fake:0/0", "fake:0/1"), ("fake:0", "cpu:0"), ("cpu:0", "fake:0"), ("fake:0",)]


@pytest.mark.parametrize("has_peer_access", [True, False], ids=["peer", "host"])
@pytest.mark.parametrize("devices", DEVICES, ids=",".join)
@pytest.mark.parametrize("seed", [1, 2])
def test_the_runtime_satisfies_the_contract(devices, has_peer_access, seed):
    with use_fake_driver(FakeDriver(seed, has_peer_access)):
        check_runtime(OnnxRuntime, devices=devices)
