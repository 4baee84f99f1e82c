"""Large inputs in memory that ranks share with the driver."""

import os

import numpy as np
import pytest
from hypothesis import given, strategies as st

from onnxplace.runtimes.ranks.frames import Frame
from onnxplace.runtimes.ranks.shared_blocks import MIN_SHARED_BYTES, MappedBlocks, SharedBlocks

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
            blocks.place(number, frame)
            assert all(len(buffer) < MIN_SHARED_BYTES for buffer in frame.buffers)
            waiting.append((number, frame, expected))
            if len(waiting) > in_flight:
                first, frame, expected = waiting.pop(0)
                mapped.restore(frame)
                assert len(frame.buffers) == len(expected)
                assert all(map(np.array_equal, frame.buffers, expected))
                blocks.free(first)
    finally:
        blocks.close()


def test_memory_of_ended_requests_is_taken_again(blocks):
    counts = []
    for number in range(20):
        blocks.place(number, make_frame(MIN_SHARED_BYTES, MIN_SHARED_BYTES * 3))
        blocks.free(number)
        counts.append(open_files())
    assert len(set(counts)) == 1


def test_closing_gives_all_memory_back_and_later_frames_keep_their_buffers():
    before, blocks = open_files(), SharedBlocks()
    blocks.make_probe()
    blocks.place(0, make_frame(MIN_SHARED_BYTES))
    blocks.place(1, make_frame(MIN_SHARED_BYTES))
    blocks.free(1)
    blocks.close()
    assert open_files() == before
    frame = make_frame(MIN_SHARED_BYTES)
    blocks.place(2, frame)
    assert len(frame.buffers[0]) == MIN_SHARED_BYTES
    assert "shared" not in frame.fields


def test_buffers_stay_in_the_frame_where_no_memory_is_left(blocks, monkeypatch):
    def refuse(name, flags=0):
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "memfd_create", refuse)
    frame = make_frame(MIN_SHARED_BYTES)
    blocks.place(0, frame)
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
