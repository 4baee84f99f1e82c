"""Frames between the user's process and ranks: what is sent arrives, however the stream is cut."""

import socket
import struct
import threading
from contextlib import contextmanager

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.runtimes.ranks.frames import MAX_JOINED_BYTES, Frame, FrameSocket, FrameSockets, split_header

sizes = st.sampled_from([0, 1, 100, MAX_JOINED_BYTES, MAX_JOINED_BYTES + 1, 200_000])
fields = st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(-(2**60), 2**60), st.text(max_size=20)))
frames = st.builds(
    lambda kind, values, counts, rank: (Frame(kind, values, [np.arange(n).astype(np.uint8) for n in counts]), rank),
    st.text(max_size=8),
    fields,
    st.lists(sizes, max_size=3),
    st.integers(-1, 100),
)


def assert_equal(received, frame, rank):
    assert (received.kind, received.fields, received.rank) == (frame.kind, frame.fields, rank)
    assert len(received.buffers) == len(frame.buffers)
    assert all(map(np.array_equal, received.buffers, frame.buffers))


@given(st.lists(frames, min_size=1, max_size=4), st.booleans())
def test_frames_arrive_whole_and_in_order(sent, together):
    near, far = socket.socketpair()
    sender, receiver = FrameSocket(near), FrameSocket(far)
    packed = [frame.pack(rank) for frame, rank in sent]

    def send():
        if together:
            sender.send(*packed)
        else:
            for item in packed:
                sender.send(item)

    thread = threading.Thread(target=send)
    thread.start()
    try:
        for frame, rank in sent:
            assert_equal(receiver.receive(lambda silent: None).unpack(), frame, rank)
    finally:
        thread.join()
        sender.close()
        receiver.close()


@given(frames, st.data())
def test_a_frame_arrives_in_whatever_pieces_it_is_read(case, data):
    frame, rank = case
    packed = frame.pack(rank)
    stream = packed.header + b"".join(bytes(item) for item in packed.buffers)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=4)))
    near, far = socket.socketpair()
    receiver = FrameSocket(far)

    def send():
        for start, end in zip([0, *cuts], [*cuts, len(stream)]):
            near.sendall(stream[start:end])
        near.close()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        assert_equal(receiver.receive(lambda silent: None).unpack(), frame, rank)
        with pytest.raises(EOFError):
            receiver.receive(lambda silent: None)
    finally:
        thread.join()
        receiver.close()


def test_headers_are_passed_on_as_they_are():
    packed = Frame("report", {"x": 1}, [np.ones(3, np.uint8)]).pack(7)
    again, found_sizes, end = split_header(packed.header + b"more")
    assert (again.header, again.rank, found_sizes, end) == (packed.header, 7, [3], len(packed.header))


@pytest.mark.parametrize("prefix", [(1 << 31, 0, 0), (0, 1 << 31, 0)])
def test_a_stream_that_is_no_stream_of_frames_is_refused(prefix):
    near, far = socket.socketpair()
    receiver = FrameSocket(far)
    near.sendall(struct.pack("<IIi", *prefix))
    with pytest.raises(OSError, match="a frame with"):
        receiver.receive(lambda silent: None)
    near.close()
    receiver.close()


def test_a_silent_stream_is_noticed():
    near, far = socket.socketpair()
    receiver, silences = FrameSocket(far), []

    def tick(seconds):
        silences.append(seconds)
        if len(silences) == 3:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        receiver.receive(tick)
    assert silences == sorted(silences)
    near.close()
    receiver.close()


@contextmanager
def open_sockets(ranks):
    """Yield the driver's sockets of ranks, and the ranks' ends."""
    pairs = {rank: socket.socketpair() for rank in ranks}
    driver = FrameSockets({rank: FrameSocket(near) for rank, (near, _) in pairs.items()})
    try:
        yield driver, {rank: far for rank, (_, far) in pairs.items()}
    finally:
        driver.close()
        for _, far in pairs.values():
            far.close()


@given(st.lists(st.tuples(st.integers(0, 4), frames), min_size=1, max_size=6))
def test_frames_of_several_ranks_arrive_in_the_order_of_each(sent):
    with open_sockets([0, 1, 3]) as (driver, ends):
        senders = {rank: FrameSocket(far) for rank, far in ends.items()}
        entries = [(rank if rank in ends else 0, frame.pack(rank)) for rank, (frame, _) in sent]

        def send():
            for through, packed in entries:
                senders[through].send(packed)

        thread = threading.Thread(target=send)
        thread.start()
        expected = {through: [packed.header for rank, packed in entries if rank == through] for through in ends}
        for _ in entries:
            packed = driver.receive(lambda rank, silent: None)
            assert packed.header == expected[packed.rank if packed.rank in ends else 0].pop(0)
        thread.join()


def test_frames_go_to_the_rank_itself_or_through_rank_0():
    with open_sockets([0, 1]) as (driver, ends):
        driver.send([(rank, Frame("request", {"for": rank})) for rank in (2, 1, 0)])
        receivers = {rank: FrameSocket(far) for rank, far in ends.items()}
        received = [receivers[rank].receive(lambda silent: None).unpack() for rank in (0, 0, 1)]
        assert [(frame.rank, frame.fields["for"]) for frame in received] == [(2, 2), (0, 0), (1, 1)]


def test_the_silence_of_rank_0_is_noticed_while_others_talk():
    with open_sockets([0, 1]) as (driver, ends):
        talker, ended, named = FrameSocket(ends[1]), threading.Event(), []

        def talk():
            while not ended.wait(0.01):
                talker.send(Frame("report").pack(1))

        thread = threading.Thread(target=talk)
        thread.start()

        def tick(rank, silent):
            if silent > 0.3:
                named.append(rank)

        while not named:
            driver.receive(tick)
        ended.set()
        thread.join()
        assert set(named) == {0}


def test_a_rank_that_stops_within_a_frame_is_named():
    with open_sockets([0, 1]) as (driver, ends):
        ends[1].sendall(Frame("report").pack(1).header[:5])

        def tick(rank, silent):
            if silent > 0.15:
                raise TimeoutError(rank)

        with pytest.raises(TimeoutError, match="1"):
            driver.receive(tick)


def test_the_end_of_any_rank_is_noticed():
    with open_sockets([0, 1]) as (driver, ends):
        ends[1].shutdown(socket.SHUT_RDWR)
        with pytest.raises(EOFError):
            driver.receive(lambda rank, silent: None)
