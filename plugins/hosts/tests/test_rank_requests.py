"""Requests of a rank: cancellations at any time, and several in progress at once."""

import threading
import time
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import TensorProto, helper

import onnxplace
from onnxplace.runtimes.execution.segments import PlacedDevice, open_routes
from onnxplace_hosts.ranks.frames import Frame, decode_values, encode_values
from onnxplace_hosts.ranks.opening import Opening
from onnxplace_hosts.ranks.rank_loop import MAX_IN_PROGRESS, RankLoop
from tests.conftest import FAST_PIPELINE, branches
from tests.support.two_hosts import compile_alternating


@pytest.fixture
def loop(tmp_path: Path) -> RankLoop:
    """A rank that has the whole of a bundle, so that it needs no messages."""
    bundle = onnxplace.compile(branches(), tmp_path / "b", devices="cpu:0", shape={"batch": 2}, pipeline=FAST_PIPELINE)
    opening = Opening(
        bundle=bundle, devices=["cpu:0"], trace=False, libraries=(), versions={}, optimises=True, remote=()
    )
    device = PlacedDevice(bundle.target.devices[0], ())
    links = SimpleNamespace(rank=0, lock=threading.RLock(), is_sending=False, call_helper=lambda: None)
    loop = RankLoop(opening, device, open_routes(bundle, {"cpu:0": device}), links)
    yield loop
    loop.close()


def request(serial: int, name: str = "x", value: float = 1.0) -> Frame:
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
        "feeds": encode_values({name: np.full((2, 64), value, np.float32)}, buffers),
    }
    return Frame("request", fields, buffers)


def finish(part):
    """Return the report of a request that has to wait for nothing."""
    with pytest.raises(StopIteration) as end:
        next(part)
    return end.value.value


def test_a_cancellation_that_comes_before_its_request_is_kept(loop):
    loop.cancel(2)
    report = finish(loop.follow(request(1)))
    assert not report.fields["cancelled"]
    assert "y" in report.fields["outputs"]
    assert finish(loop.follow(request(2))).fields["cancelled"]
    assert not finish(loop.follow(request(3))).fields["cancelled"]
    assert not loop._cancelled


def test_cancellations_and_values_of_requests_that_have_ended_are_dropped(loop):
    loop.cancel(1)
    assert finish(loop.follow(request(1))).fields["cancelled"]
    loop.cancel(1)  # it comes late
    loop.accept_value(1, "v", np.ones(3))
    assert not loop._cancelled
    assert not loop._arrived


class Ranks:
    """The ranks of two devices, whose messages wait until they are delivered."""

    def __init__(self, folder: Path) -> None:
        self.bundle = compile_alternating(chain(), folder, "cpu:0", "cpu:1")
        opening = Opening(
            bundle=self.bundle,
            devices=["cpu:0", "cpu:1"],
            trace=False,
            libraries=(),
            versions={},
            optimises=True,
            remote=(),
        )
        self.messages, self.loops = ([], []), []
        for rank, item in enumerate(self.bundle.target.devices):
            device = PlacedDevice(item, ())
            links = SimpleNamespace(
                rank=rank,
                lock=threading.RLock(),
                is_sending=False,
                call_helper=lambda: None,
                send_value=lambda other, *message: self.messages[other].append(message),
            )
            self.loops.append(RankLoop(opening, device, open_routes(self.bundle, {item.id: device}), links))

    def close(self) -> None:
        for loop in self.loops:
            loop.close()


def chain():
    """Return ten negations, with an addition at the end."""
    names = [f"v{number}" for number in range(11)]
    nodes = [helper.make_node("Neg", [one], [other]) for one, other in pairwise(names)]
    nodes.append(helper.make_node("Add", [names[-1], names[-1]], ["y"]))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 64]) for name in ("v0", "y")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory) -> Ranks:
    with closing(Ranks(tmp_path_factory.mktemp("ranks"))) as ranks:
        yield ranks


@given(st.integers(1, MAX_IN_PROGRESS), st.sets(st.integers(0, 3)), st.integers(0, 999))
@settings(max_examples=40, deadline=None)
def test_requests_in_progress_go_on_in_any_order_and_report_in_theirs(ranks, count, cancelled, seed):
    random = Random(seed)
    first = ranks.loops[0]._begun + 1
    serials = range(first, first + count)
    cancelled = {first + index for index in cancelled}
    parts = [
        {serial: [loop.follow(request(serial, "v0", float(serial))), lambda: True] for serial in serials}
        for loop in ranks.loops
    ]
    reports, begun = ([], []), [first, first]
    while any(parts):
        rank = random.choice([rank for rank, left in enumerate(parts) if left])
        loop, messages = ranks.loops[rank], ranks.messages[rank]
        random.shuffle(messages)
        while messages and random.random() < 0.8:
            loop.accept_value(*messages.pop())
        ready = [serial for serial, (_, condition) in parts[rank].items() if condition() and serial <= begun[rank]]
        for serial in random.sample(ready, min(len(ready), 1)):
            begun[rank] = max(begun[rank], serial + 1)
            if serial in cancelled and random.random() < 0.3:
                for item in ranks.loops:
                    item.cancel(serial)
            part = parts[rank][serial]
            try:
                part[1] = next(part[0])
            except StopIteration as end:
                reports[rank].append(end.value)
                del parts[rank][serial]
                if end.value.fields["cancelled"]:  # as the driver does
                    ranks.loops[1 - rank].cancel(serial)
    for rank, loop in enumerate(ranks.loops):
        assert [report.fields["serial"] for report in reports[rank]] == list(serials)
        while ranks.messages[rank]:
            loop.accept_value(*ranks.messages[rank].pop())  # they come late
        assert not loop._arrived
        assert not loop.is_busy
    outputs = {}
    for report in (*reports[0], *reports[1]):
        serial = report.fields["serial"]
        assert "error" not in report.fields
        assert not report.fields["cancelled"] or serial in cancelled
        for value in decode_values(report.fields.get("outputs", {}), iter(report.buffers)).values():
            outputs[serial] = value
            np.testing.assert_array_equal(value, np.full((2, 64), 2.0 * serial, np.float32))
    assert outputs.keys() >= set(serials) - cancelled
