"""Rings of shared memory: what is put is taken, in order, and nothing is overwritten before."""

import threading
import time

from hypothesis import given, settings, strategies as st

from onnxplace_hosts.ranks import rings
from onnxplace_hosts.ranks.rings import Board, RingReader, RingWriter
from onnxplace_hosts.ranks.shared_blocks import SharedBlock


class Ring:
    """A ring of rank 1 that rank 0 reads."""

    def __init__(self, size: int) -> None:
        self.blocks = SharedBlock(size), SharedBlock(Board.count_bytes(2))
        self.board = Board(self.blocks[1].memory)
        self.writer = RingWriter(self.blocks[0], self.board, 1)
        self.reader = RingReader(self.blocks[0].memory, self.board, 1)

    def close(self) -> None:
        for block in self.blocks:
            block.close()


@given(st.lists(st.one_of(st.integers(0, 300), st.none()), max_size=60))
@settings(max_examples=60, deadline=None)
def test_messages_are_taken_in_order_and_those_without_room_are_refused(lengths):
    ring, waiting, sent = Ring(1024 + 64), [], 0
    try:
        for number, length in enumerate([*lengths, None]):
            if length is None:
                assert ring.reader.take() == waiting
                waiting, sent = [], 0
                continue
            text = bytes([number % 251]) * length
            if ring.writer.put(text) is None:
                assert length > 248 or sent + length + 16 > 1024 - 256  # large ones, or a ring that is nearly full
            else:
                waiting.append(text)
                sent += length + 16
    finally:
        ring.close()


def test_a_reader_beside_the_writer_gets_every_message():
    ring, count = Ring(4096 + 64), 20_000
    texts = [bytes([number % 251]) * (number * 7919 % 400) for number in range(count)]

    def write():
        for text in texts:
            while ring.writer.put(text) is None:
                time.sleep(0)  # lets the reader run, which otherwise waits 5 ms for the interpreter's lock

    thread = threading.Thread(target=write)
    thread.start()
    found = []
    while len(found) < count:
        found += ring.reader.take()
        ring.board.watch(100)
    thread.join()
    ring.close()
    assert found == texts


def test_writers_learn_whether_the_reader_sleeps():
    ring = Ring(rings.RING_BYTES)
    assert ring.writer.put(b"a") is False
    ring.board.show_sleep(1)
    assert ring.writer.put(b"b") is True
    ring.board.show_sleep(-1)
    assert ring.writer.put(b"c") is False
    assert ring.reader.take() == [b"a", b"b", b"c"]
    ring.close()
