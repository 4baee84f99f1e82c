"""Frames between the user's process and ranks: what is sent arrives, however the stream is cut or interrupted."""

import select
import socket
import struct
import threading
from contextlib import contextmanager, nullcontext

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from onnxplace_hosts.ranks.driver_sockets import FrameSockets
from onnxplace_hosts.ranks.frames import Frame, FrameSocket
from tests.support.interrupts import Interrupts

sizes = st.sampled_from([0, 1, 100, 16 << 10, 64 << 10, (64 << 10) + 1, 300_000])
fields = st.dictionaries(st.text(max_size=5), st.one_of(st.none(), st.integers(-(2**60), 2**60), st.text(max_size=20)))
frames = st.builds(
    lambda kind, values, counts, rank: (Frame(kind, values, [np.arange(n).astype(np.uint8) for n in counts]), rank),
    st.text(max_size=8),
    fields,
    st.lists(sizes, max_size=3),
    st.integers(-1, 100),
)
WAIT_SECONDS = 60.0


def assert_equal(received, frame, rank):
    assert (received.kind, received.fields, received.rank) == (frame.kind, frame.fields, rank)
    assert len(received.buffers) == len(frame.buffers)
    assert all(map(np.array_equal, received.buffers, frame.buffers))


def push_all(sender, near, packed):
    """Send frames while another thread reads."""
    sender.push(*packed)
    while not sender.flush():
        select.select([], [near], [], WAIT_SECONDS)


def read_all(receiver, far, count):
    """Return so many frames."""
    received = []
    while len(received) < count:
        select.select([far], [], [], WAIT_SECONDS)
        received += receiver.read()
    return received


@contextmanager
def in_thread(act, *arguments):
    thread = threading.Thread(target=act, args=arguments)
    thread.start()
    try:
        yield
    finally:
        thread.join()


@given(st.lists(frames, min_size=1, max_size=4))
def test_frames_arrive_whole_and_in_order(sent):
    near, far = socket.socketpair()
    with near, far, in_thread(push_all, FrameSocket(near), near, [frame.pack(rank) for frame, rank in sent]):
        for received, (frame, rank) in zip(read_all(FrameSocket(far), far, len(sent)), sent):
            assert_equal(received.unpack(), frame, rank)


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

    with far, in_thread(send):
        (received,) = read_all(receiver, far, 1)
        assert_equal(received.unpack(), frame, rank)
        select.select([far], [], [], WAIT_SECONDS)
        with pytest.raises(EOFError):
            receiver.read()


@pytest.mark.parametrize("prefix", [(1 << 31, 0, 0), (0, 1 << 31, 0)])
def test_a_stream_that_is_no_stream_of_frames_is_refused(prefix):
    near, far = socket.socketpair()
    with near, far:
        near.sendall(struct.pack("<IIi", *prefix))
        with pytest.raises(OSError, match="a frame with"):
            FrameSocket(far).read()


# -- the driver's sockets


@contextmanager
def open_sockets(ranks):
    """Yield the driver's sockets of ranks, and the ranks' ends."""
    pairs = {rank: socket.socketpair() for rank in ranks}
    driver = FrameSockets({rank: near for rank, (near, _) in pairs.items()})
    try:
        yield driver, {rank: far for rank, (_, far) in pairs.items()}
    finally:
        driver.close()
        for _, far in pairs.values():
            far.close()


def await_frame(driver):
    while (frame := driver.receive(WAIT_SECONDS)) is None:
        pass
    return frame


@given(st.lists(st.tuples(st.integers(0, 4), frames), min_size=1, max_size=6))
def test_frames_of_several_ranks_arrive_in_the_order_of_each(sent):
    with open_sockets([0, 1, 3]) as (driver, ends):
        entries = [(rank if rank in ends else 0, rank, frame) for rank, (frame, _) in sent]

        def send():
            senders = {rank: FrameSocket(far) for rank, far in ends.items()}
            for through, rank, frame in entries:
                push_all(senders[through], ends[through], [frame.pack(rank)])

        with in_thread(send):
            expected = {end: [(frame, rank) for through, rank, frame in entries if through == end] for end in ends}
            for _ in entries:
                received = await_frame(driver)
                assert_equal(received, *expected[received.rank if received.rank in ends else 0].pop(0))


def test_frames_go_to_the_rank_itself_or_through_rank_0():
    with open_sockets([0, 1]) as (driver, ends):
        driver.send([(rank, Frame("request", {"for": rank})) for rank in (2, 1, 0)])
        received = [item.unpack() for rank in (0, 1) for item in read_all(FrameSocket(ends[rank]), ends[rank], 1)]
        assert [(frame.rank, frame.fields["for"]) for frame in received] == [(2, 2), (0, 0), (1, 1)]


@pytest.mark.parametrize("reads", [True, False])
def test_what_a_socket_does_not_take_at_once_follows_while_others_are_not_held_up(reads):
    large, small = Frame("request", {}, [np.arange(3_000_000).astype(np.uint8)]), Frame("cancel")
    with open_sockets([0, 1]) as (driver, ends):
        driver.send([(0, large), (1, small)])
        driver.send([(0, small)])
        assert driver.unsent
        assert_equal(read_all(FrameSocket(ends[1]), ends[1], 1)[0].unpack(), small, 1)

        def go_on():
            while driver.unsent:
                if reads:
                    assert driver.receive(0.1) is None
                else:
                    driver.sleep(0.1)
                    with driver.sending:
                        driver.flush()

        with in_thread(go_on):
            first, second = read_all(FrameSocket(ends[0]), ends[0], 2)
        assert_equal(first.unpack(), large, 0)
        assert_equal(second.unpack(), small, 0)


@pytest.mark.parametrize("wait", [FrameSockets.receive, FrameSockets.sleep])
def test_a_wait_ends_when_it_is_woken_also_before_it_begins(wait):
    with open_sockets([0]) as (driver, _):
        driver.wake()
        assert wait(driver, WAIT_SECONDS) is None
        with in_thread(driver.wake):
            assert wait(driver, WAIT_SECONDS) is None
        assert driver.find(0.0) is None
    driver.wake()  # a finalizer may be late


def test_the_silence_of_rank_0_is_noticed_while_others_talk():
    with open_sockets([0, 1]) as (driver, ends):
        ended = threading.Event()

        def talk():
            talker = FrameSocket(ends[1])
            while not ended.wait(0.01):
                talker.push(Frame("report").pack(1))

        with in_thread(talk):
            while driver.find_silence()[1] < 0.3:
                driver.receive(0.1)
            ended.set()
        assert driver.find_silence()[0] == 0
        FrameSocket(ends[0]).push(Frame("alive").pack(0))
        while await_frame(driver).kind != "alive":
            pass
        assert driver.find_silence()[1] < 0.3


def test_a_rank_that_stops_within_a_frame_is_named():
    with open_sockets([0, 1]) as (driver, ends):
        ends[1].sendall(Frame("report").pack(1).header[:5])
        alive, named = FrameSocket(ends[0]), []
        while not named:
            alive.push(Frame("alive").pack(0))
            driver.receive(0.1)
            rank, silent = driver.find_silence()
            named += [rank] if silent > 0.15 else []
        assert named == [1]


def test_the_end_of_any_rank_is_noticed():
    with open_sockets([0, 1]) as (driver, ends):
        ends[1].shutdown(socket.SHUT_RDWR)
        with pytest.raises(EOFError):
            driver.receive(WAIT_SECONDS)


# -- Ctrl-C


@settings(max_examples=150)
@given(st.lists(frames, min_size=1, max_size=2), st.floats(1e-6, 5e-4))
def test_no_interrupt_loses_or_repeats_a_byte(sent, seconds):
    with open_sockets([0]) as (driver, ends):
        other, received = FrameSocket(ends[0]), []
        to_driver = [frame.pack(0) for frame, _ in sent]

        def exchange():
            with driver.sending:
                driver.flush()
            if (found := driver.find(0.0)) is not None:
                # No call between these, as where frames are taken by the main thread.
                received[len(received) :], found.frames = found.frames[:1], found.frames[1:]

        with driver.sending:
            driver.unsent = driver.pack([(0, frame.pack(0)) for frame, _ in sent])
        other.push(*to_driver)
        sent_there = []
        for turn in range(1000):
            other.flush()
            try:
                with Interrupts(seconds) if turn < 30 else nullcontext():
                    exchange()
            except KeyboardInterrupt:
                pass
            sent_there += other.read()
            if len(received) == len(sent_there) == len(sent):
                break
        assert not driver.unsent
        assert driver.find(0.0) is None
        for got in (received, sent_there):
            for item, (frame, _) in zip(got, sent, strict=True):
                assert_equal(item.unpack(), frame, 0)
