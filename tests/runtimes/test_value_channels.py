"""Values from rank to rank, on messages in memory that arrive late and in parts."""

import threading
from collections import defaultdict
from types import SimpleNamespace

import numpy as np
from hypothesis import given, strategies as st

from onnxplace.runtimes.ranks.frames import MAX_JOINED_BYTES
from onnxplace.runtimes.ranks.mpi_messages import ValueChannels

DTYPES = {
    "tensor(float)": np.float32,
    "tensor(int64)": np.int64,
    "tensor(bool)": np.bool_,
    "tensor(float16)": np.float16,
}


class Receive:
    """A receive that is through after some looks, as those of MPI."""

    def __init__(self, bus, key, buffer, looks):
        self.bus, self.key, self.buffer, self.looks = bus, key, buffer, looks
        self.is_cancelled = False

    def Test(self):  # noqa: N802 - the name of MPI
        pending = self.bus.receives[self.key]
        assert not self.is_cancelled
        if pending[0] is not self or not self.bus.messages[self.key]:
            return False
        if self.looks:
            self.looks -= 1
            return False
        pending.pop(0)
        data = self.bus.messages[self.key].pop(0)
        self.buffer[: len(data)] = np.frombuffer(data, np.uint8)  # raises if it is too long, as MPI does
        return True

    def Cancel(self):  # noqa: N802
        self.is_cancelled = True

    def Free(self):  # noqa: N802
        assert self.is_cancelled


class MemoryBus:
    """What channels need of a bus; messages with one tag keep their order."""

    max_tag = 1 << 20

    def __init__(self, looks=0):
        self.lock = threading.RLock()
        self.messages, self.receives, self.looks = defaultdict(list), defaultdict(list), looks

    def send_value(self, rank, tag, data):
        self.messages[tag].append(bytes(data))

    def receive_value(self, source, tag, buffer):
        request = Receive(self, tag, buffer, self.looks)
        self.receives[tag].append(request)
        return request


def make_manifest(values):
    """Return what channels read of a manifest: dtype and shape by name."""
    steps = [SimpleNamespace(op="send", value=name) for name in values]
    records = {name: SimpleNamespace(dtype=dtype, shape=shape) for name, (dtype, shape) in values.items()}
    return SimpleNamespace(programs={"cpu:0": steps}, values=records)


shapes = st.sampled_from([(), (0, 3), (5,), (2, 3), (MAX_JOINED_BYTES,), (70, 300)])


@st.composite
def transfers(draw):
    """Return values with declared and actual shapes, and which requests are cancelled before which of their sends."""
    values = {}
    for index in range(draw(st.integers(1, 4))):
        shape = draw(shapes)
        declared = draw(st.sampled_from([shape, None, tuple("n" for _ in shape), (3,)]))  # the last may be wrong
        values[f"v{index}"] = (draw(st.sampled_from(sorted(DTYPES))), declared, shape)
    requests = draw(st.lists(st.integers(0, len(values)), min_size=1, max_size=5))
    return values, [*requests, len(values)], draw(st.integers(0, 3))


@given(transfers())
def test_each_request_gets_its_own_values_whatever_was_cancelled_before(case):
    values, sent_counts, looks = case
    manifest = make_manifest({name: (dtype, declared) for name, (dtype, declared, _) in values.items()})
    bus = MemoryBus(looks)
    sender, receiver = ValueChannels(bus, manifest), ValueChannels(bus, manifest)
    random = np.random.default_rng(0)
    for serial, sent_count in enumerate(sent_counts):
        arrays = {name: (random.random(shape) * 9).astype(DTYPES[dtype]) for name, (dtype, _, shape) in values.items()}
        for name in list(values)[:sent_count]:
            sender.send(1, serial, name, arrays[name])
        receiver.expect((name, 0) for name in values)
        if sent_count < len(values):  # cancelled on both sides, and the receiver had looked, or not
            if serial % 2:
                receiver.look(serial)
            continue
        for name in values:
            receiver.look(serial)
            channel = receiver.find(name, 0)
            for _ in range(1000):
                if channel.look(serial):
                    break
            received = channel.take()
            assert received.dtype == arrays[name].dtype
            assert received.flags.c_contiguous
            np.testing.assert_array_equal(received, arrays[name])
            assert received.shape == arrays[name].shape
    receiver.close()
    assert not any(bus.messages.values())


def test_a_value_of_a_later_request_stays_until_that_begins():
    bus = MemoryBus()
    manifest = make_manifest({"v": ("tensor(float)", (2,))})
    channels = ValueChannels(bus, manifest)
    channels.send(0, 7, "v", np.ones(2, np.float32))
    channels.expect([("v", 0)])
    channel = channels.find("v", 0)
    assert not channel.look(6)
    assert channel.look(7)
    np.testing.assert_array_equal(channel.take(), [1, 1])


def test_types_that_numpy_lacks_have_no_channel():
    channels = ValueChannels(
        MemoryBus(), make_manifest({"s": ("tensor(string)", (2,)), "q": ("seq(tensor(float))", None)})
    )
    assert "s" not in channels
    assert "q" not in channels


def test_values_beyond_the_tags_of_mpi_have_no_channel():
    bus = MemoryBus()
    bus.max_tag = 7
    channels = ValueChannels(bus, make_manifest({f"v{i}": ("tensor(float)", (1,)) for i in range(9)}))
    assert [f"v{i}" in channels for i in range(4)] == [True, True, True, False]
