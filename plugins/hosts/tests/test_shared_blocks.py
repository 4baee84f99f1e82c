"""Large values in memory that processes of one machine share."""

import os

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace_hosts.ranks.frames import Frame, flatten
from onnxplace_hosts.ranks.shared_blocks import MIN_SHARED_BYTES, MappedBlocks, SharedBlocks

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="only Linux has such memory")


@pytest.fixture
def blocks():
    shared = SharedBlocks()
    yield shared
    shared.close()


def open_files():
    return len(os.listdir("/proc/self/fd"))


def make_frame(*sizes, seed=0):
    random = np.random.default_rng(seed)
    return Frame("request", {}, [random.integers(0, 256, size, np.uint8) for size in sizes])


sizes = st.sampled_from([0, 10, MIN_SHARED_BYTES - 1, MIN_SHARED_BYTES, 200_001])


@given(st.lists(st.lists(sizes, max_size=4), max_size=6), st.integers(1, 3))
def test_a_rank_reads_what_the_driver_placed_while_requests_overlap(requests, in_flight):
    blocks, mapped = SharedBlocks(), MappedBlocks()
    try:
        assert mapped.try_probe(blocks.make_probe())
        waiting = []
        for number, buffer_sizes in enumerate([*requests, *[[]] * in_flight]):
            frame = make_frame(*buffer_sizes, seed=number)
            expected = [buffer.copy() for buffer in frame.buffers]
            lent = blocks.place(frame)
            assert all(len(buffer) < MIN_SHARED_BYTES for buffer in frame.buffers)
            waiting.append((lent, frame, expected))
            if len(waiting) > in_flight:
                lent, frame, expected = waiting.pop(0)
                mapped.restore(frame)
                assert len(frame.buffers) == len(expected)
                assert all(map(np.array_equal, frame.buffers, expected))
                blocks.give_back(lent)
    finally:
        blocks.close()


def test_memory_of_ended_requests_is_taken_again(blocks):
    counts = []
    for _ in range(20):
        blocks.give_back(blocks.place(make_frame(MIN_SHARED_BYTES, MIN_SHARED_BYTES * 3)))
        counts.append(open_files())
    assert len(set(counts)) == 1


def test_closing_gives_all_memory_back_and_later_frames_keep_their_buffers():
    before, blocks = open_files(), SharedBlocks()
    blocks.make_probe()
    blocks.place(make_frame(MIN_SHARED_BYTES))
    blocks.give_back(blocks.place(make_frame(MIN_SHARED_BYTES)))
    blocks.close()
    assert open_files() == before
    frame = make_frame(MIN_SHARED_BYTES)
    assert blocks.place(frame) == []
    assert len(frame.buffers[0]) == MIN_SHARED_BYTES
    assert "shared" not in frame.fields


def test_buffers_stay_in_the_frame_where_no_memory_is_left(blocks, monkeypatch):
    def refuse(name, flags=0):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    frame = make_frame(MIN_SHARED_BYTES)
    assert blocks.place(frame) == []
    assert len(frame.buffers[0]) == MIN_SHARED_BYTES


@pytest.mark.parametrize("change", ["token", "process", "descriptor"])
def test_a_process_that_sees_other_memory_does_not_share(blocks, change):
    process, descriptor, token = blocks.make_probe()
    probe = {
        "token": [process, descriptor, "00" * (len(token) // 2)],
        "process": [2**22 + 1, descriptor, token],
        "descriptor": [process, 10_000, token],
    }[change]
    assert not MappedBlocks().try_probe(probe)


def test_systems_without_such_memory_have_no_probe(blocks, monkeypatch):
    monkeypatch.delattr(os, "memfd_create")
    assert blocks.make_probe() == []
    assert not MappedBlocks().try_probe([])


def test_a_block_is_lent_again_only_after_all_its_readers_have_let_it_go(blocks):
    mapped = MappedBlocks()
    assert mapped.try_probe(blocks.make_probe())
    block = blocks.lend(np.full(MIN_SHARED_BYTES, 7, np.uint8))
    assert blocks.lend_again(block)
    borrowed = mapped.borrow(block.descriptor, block.size, MIN_SHARED_BYTES)
    part = borrowed.view(np.float32).reshape(2, -1)[1]  # what is read may be any view
    assert not borrowed.flags.writeable
    del borrowed
    assert mapped.take_returned() == []
    assert part.tobytes() == bytes([7]) * (MIN_SHARED_BYTES // 2)
    del part
    assert mapped.take_returned() == [block.descriptor]
    blocks.give_back([block.descriptor])
    assert blocks.lend(np.zeros(MIN_SHARED_BYTES, np.uint8)) is not block  # the second reader has it
    blocks.give_back([block.descriptor])
    assert blocks.lend(np.zeros(MIN_SHARED_BYTES, np.uint8)) is block
    blocks.give_back([block.descriptor])
    assert not blocks.lend_again(block)


def test_an_array_in_a_block_is_lent_without_a_copy_until_it_and_its_readers_have_ended(blocks):
    mapped = MappedBlocks()
    assert mapped.try_probe(blocks.make_probe())
    array = blocks.allocate((100, 200), np.dtype(np.float32))
    block = blocks.lend(flatten(array))
    array[:] = np.arange(200)
    borrowed = mapped.borrow(block.descriptor, block.size, array.nbytes)
    assert borrowed.tobytes() == array.tobytes()
    assert blocks.lend(flatten(array)) is block  # for another reader
    part = array[1]
    del array
    blocks.give_back([block.descriptor] * 2)
    others = [blocks.allocate((100, 200), np.dtype(np.float32)) for _ in range(2)]
    assert not any(np.shares_memory(part, other) for other in others)
    address = part.ctypes.data - part.nbytes
    del part
    assert blocks.allocate((100, 200), np.dtype(np.float32)).ctypes.data == address


@pytest.mark.parametrize(
    "view", [lambda a: a[1:], lambda a: a[:-1], lambda a: a[::-1], lambda a: a.T, lambda a: a[:, :150]]
)
def test_of_views_the_bytes_that_they_show_are_lent(blocks, view):
    mapped = MappedBlocks()
    assert mapped.try_probe(blocks.make_probe())
    array = blocks.allocate((200, 200), np.dtype(np.float32))
    array[:] = np.arange(40_000).reshape(200, 200)
    shown = view(array)
    block = blocks.lend(flatten(shown))
    assert mapped.borrow(block.descriptor, block.size, shown.nbytes).tobytes() == shown.tobytes()


def test_arrays_outlive_the_blocks_in_which_they_are():
    before, blocks = open_files(), SharedBlocks()
    array = blocks.allocate((100_000,), np.dtype(np.int64))
    array[:] = 7
    blocks.close()
    assert set(array) == {7}
    assert blocks.lend(flatten(array)) is None
    assert blocks.allocate((2, 3), np.dtype(np.int8)).shape == (2, 3)  # elsewhere
    del array
    assert open_files() == before
