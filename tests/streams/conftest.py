"""Tests of devices with streams, `fake:N`; each one has a new driver, whose choices depend on the name of the test."""

import zlib

import pytest

from onnxplace.runtimes.execution import stream_memory
from tests.support.fake_streams import FakeDriver, register_fake_kind, use_fake_driver


@pytest.fixture(autouse=True, scope="module")
def fake_kind():
    with register_fake_kind():
        yield


@pytest.fixture(autouse=True)
def driver(request, monkeypatch):
    seed = zlib.crc32(request.node.nodeid.encode())
    monkeypatch.setattr(stream_memory, "PIECE_BYTES", [8, 64, 4 << 20][seed % 3])
    with use_fake_driver(FakeDriver(seed, has_peer_access=bool(seed & 8))) as driver:
        yield driver
