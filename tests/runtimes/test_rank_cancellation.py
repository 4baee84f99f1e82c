"""Cancellations that reach a rank while it ends another request."""

import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import onnxplace
from onnxplace.runtimes.execution import PlacedDevice, open_routes
from onnxplace.runtimes.ranks.frames import Frame, encode_values
from onnxplace.runtimes.ranks.opening import Opening
from onnxplace.runtimes.ranks.rank_loop import RankLoop
from tests.conftest import FAST_PIPELINE, branches


class MeddledSet(set):
    """A set to which another thread adds while it is read: what comes must not be lost with the set that was read."""

    def __iter__(self):
        yield from list(super().__iter__())
        self.while_read()


@pytest.fixture
def loop(tmp_path: Path) -> RankLoop:
    """A rank that has the whole of a bundle, so that it needs no messages."""
    bundle = onnxplace.compile(branches(), tmp_path / "b", devices="cpu:0", shape={"batch": 2}, pipeline=FAST_PIPELINE)
    opening = Opening(
        bundle=bundle, devices=["cpu:0"], trace=False, libraries=(), versions={}, optimises=True, remote=()
    )
    device = PlacedDevice(bundle.target.devices[0], ())
    links = SimpleNamespace(rank=0, lock=threading.RLock(), is_sending=False, call_helper=lambda: None)
    loop = RankLoop(opening, device, open_routes(bundle, {"cpu:0": device}), links, wait=lambda *_: None)
    yield loop
    loop.close()


def request(serial: int) -> Frame:
    """Return a request as the driver sends it."""
    buffers = []
    fields = {
        "serial": serial,
        "number": serial,
        "route": 0,
        "conversation": 0,
        "submitted": time.perf_counter(),
        "states": [],
        "stored": {},
        "taken": None,
        "feeds": encode_values({"x": np.ones((2, 64), np.float32)}, buffers),
    }
    return Frame("request", fields, buffers)


def test_a_cancellation_that_comes_while_another_request_ends_is_kept(loop):
    cancelled = loop._cancelled = MeddledSet()
    cancelled.while_read = lambda: loop.cancel(2)
    report = loop.follow(request(1))
    assert not report.fields["cancelled"]
    assert "y" in report.fields["outputs"]
    cancelled.while_read = lambda: None
    assert loop.follow(request(2)).fields["cancelled"]
    assert not loop.follow(request(3)).fields["cancelled"]


def test_cancellations_of_requests_that_have_ended_are_dropped(loop):
    loop.cancel(1)
    assert loop.follow(request(1)).fields["cancelled"]
    loop.cancel(1)  # it comes late
    assert not loop._cancelled
