"""A rank that has the whole of a bundle, so that it needs no messages; in this process."""

import threading
import time
from types import SimpleNamespace

import numpy as np

import onnxplace
from onnxplace.runtimes.execution import PlacedDevice, open_routes
from onnxplace.runtimes.ranks.frames import Frame, encode_values
from onnxplace.runtimes.ranks.opening import Opening
from onnxplace.runtimes.ranks.rank_loop import RankLoop
from onnxplace.runtimes.ranks.shared_blocks import SharedBlocks
from tests.conftest import FAST_PIPELINE, branches


def open_lone_rank(folder, batch, probe=()):
    """Return the loop of a rank, and its memory; the probe is that of its driver."""
    shape = {"batch": batch}
    bundle = onnxplace.compile(branches(), folder / "b", devices="cpu:0", shape=shape, pipeline=FAST_PIPELINE)
    opening = Opening(
        bundle=bundle, devices=["cpu:0"], trace=False, libraries=(), versions={}, optimises=True, remote=(), probe=probe
    )
    device, blocks = PlacedDevice(bundle.target.devices[0], ()), SharedBlocks()
    links = SimpleNamespace(rank=0, lock=threading.RLock(), is_sending=False, call_helper=lambda: None)
    links.blocks, links.shares_memory = blocks, False
    return RankLoop(opening, device, open_routes(bundle, {"cpu:0": device}), links, wait=lambda *_: None), blocks


def make_request(serial, batch, taken=None):
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
        "taken": taken,
        "feeds": encode_values({"x": np.full((batch, 64), serial, np.float32)}, buffers),
    }
    return Frame("request", fields, buffers)
