"""Large values in memory that processes of one machine share, where a socket would copy them twice.

A process writes a value once, into a block of its own, and lends the block to others, which read it where it is. A
block is an anonymous file in memory, so nothing is left of it however its processes end. Others reach it by the owner's
entry in /proc, which other users cannot. Processes that cannot either, such as those in another container, find that
out by a probe, and get values by the socket.
"""

from __future__ import annotations

import math
import mmap
import os
import secrets
import threading
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from onnxplace_hosts.ranks.frames import Frame

# Smaller buffers are as quick by the socket.
MIN_SHARED_BYTES = 32 << 10
# Smaller values are copied as quickly as they are computed in memory that another core has just read.
MIN_PLACED_BYTES = 512 << 10
_TOKEN_BYTES = 16


class SharedBlock:
    """Memory that other processes can map."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.readers = 0
        """How many have not given it back; this process is one of them while it has an array there."""
        self.descriptor = os.memfd_create("onnxplace", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, size)
            self.memory = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        """Give the memory back; if there are arrays on it, once they are gone."""
        with suppress(BufferError):
            self.memory.close()
        os.close(self.descriptor)


class ArraysInBlocks:
    """The arrays of this process that are in blocks, its own or borrowed ones, until nothing refers to them."""

    def __init__(self) -> None:
        self._arrays: dict[int, tuple[weakref.KeyedRef[int, Any], int, int]] = {}
        """With the descriptor of the block and the number of bytes; by `id`."""
        self._ended: deque[int] = deque()
        """Blocks that have no array any more; any thread may find that out, at any time."""

    def make(self, memory: mmap.mmap, descriptor: int, dtype: Any, length: int) -> Any:
        """Return a flat array of so many elements at the beginning of a block; views of it keep it."""
        array: Any = np.frombuffer(memory, dtype, length)
        self._arrays[id(array)] = weakref.KeyedRef(array, self._end, id(array)), descriptor, array.nbytes
        return array

    def _end(self, reference: weakref.KeyedRef[int, Any]) -> None:
        self._ended.append(self._arrays.pop(reference.key)[1])

    def find(self, buffer: Any) -> int:
        """Return the block that begins with the bytes of a flat array, if they are those of an array here; else -1."""
        _, descriptor, length = self._arrays.get(id(buffer.base), (None, -1, 0))
        return descriptor if length == len(buffer) else -1

    def take_ended(self) -> list[int]:
        """Return the blocks whose arrays have ended, each once."""
        return [self._ended.popleft() for _ in range(len(self._ended))]


class SharedBlocks:
    """The blocks of one process, lent to others until these give them back; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._free: dict[int, list[SharedBlock]] = {}
        """By size; the last one that came back is taken first, as it may still be in the caches of a core."""
        self._lent: dict[int, SharedBlock] = {}
        self._arrays = ArraysInBlocks()
        self._probe: SharedBlock | None = None

    def make_probe(self) -> list[Any]:
        """Return what another process needs to try whether it can map blocks; empty where there is no such memory."""
        if not hasattr(os, "memfd_create"):
            return []
        if self._probe is None:
            self._probe = SharedBlock(_TOKEN_BYTES)
            self._probe.memory[:] = secrets.token_bytes(_TOKEN_BYTES)
        return [os.getpid(), self._probe.descriptor, self._probe.memory[:].hex()]

    def allocate(self, shape: Sequence[int], dtype: Any) -> Any:
        """Return an array like `np.empty`, in a block that `lend` need not copy if it is large and there is memory."""
        length = math.prod(shape)
        with self._lock:
            if (block := self._take(length * dtype.itemsize)) is None:
                return np.empty(shape, dtype)
            return self._arrays.make(block.memory, block.descriptor, dtype, length).reshape(shape)

    def lend(self, buffer: Any) -> SharedBlock | None:
        """Lend the block of a flat array of bytes, or copy them into one, until its reader has given it back.

        Returns None if the bytes are few, or the system has no more memory or files for blocks.
        """
        with self._lock:  # so that no block is closed meanwhile
            if (block := self._lent.get(self._arrays.find(buffer))) is not None:
                block.readers += 1
            elif (block := self._take(len(buffer))) is not None:
                block.memory[: len(buffer)] = memoryview(buffer)
        return block

    def lend_again(self, block: SharedBlock) -> bool:
        """Lend a block to one more reader; returns False if all others have given it back."""
        with self._lock:
            block.readers += block.readers > 0
            return block.readers > 0

    def place(self, frame: Frame) -> list[int]:
        """Move the large buffers of a frame into blocks; return these, for `give_back`."""
        buffers, shared = list(frame.buffers), []
        for index, buffer in enumerate(buffers):
            if (block := self.lend(buffer)) is not None:
                shared.append([index, block.descriptor, block.size, len(buffer)])
                buffers[index] = np.empty(0, np.uint8)
        if shared:
            frame.fields["shared"], frame.buffers = shared, buffers
        return [descriptor for _, descriptor, _, _ in shared]

    def _take(self, length: int) -> SharedBlock | None:
        """Return a free block that is large enough, or a new one, with one reader; None if there is none or need be."""
        if self._is_closed or length < MIN_SHARED_BYTES:
            return None
        self._release(self._arrays.take_ended())
        size = 1 << (length - 1).bit_length()
        try:
            block = free.pop() if (free := self._free.get(size)) else SharedBlock(size)
        except OSError:
            return None
        block.readers = 1
        self._lent[block.descriptor] = block
        return block

    def give_back(self, descriptors: Iterable[int]) -> None:
        """Note that a reader needs blocks no more."""
        with self._lock:
            self._release(descriptors)

    def _release(self, descriptors: Iterable[int]) -> None:
        for descriptor in descriptors:
            if (block := self._lent.get(descriptor)) is not None:
                block.readers -= 1
                if not block.readers:
                    self._free.setdefault(block.size, []).append(self._lent.pop(descriptor))

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            self._is_closed = True
            free = [block for blocks in self._free.values() for block in blocks]
            for block in [*free, *self._lent.values(), *([self._probe] if self._probe else [])]:
                block.close()
            self._free, self._lent, self._probe = {}, {}, None


class MappedBlocks:
    """The blocks of another process as this one sees them."""

    def __init__(self) -> None:
        self.is_mapped = False
        """Whether the probe has shown that this process can map them."""
        self.owner = 0
        self._maps: dict[tuple[int, int], mmap.mmap] = {}
        self._arrays = ArraysInBlocks()

    def try_probe(self, probe: Sequence[Any]) -> bool:
        """Return whether this process can map blocks of the one that made the probe."""
        if not probe:
            return False
        self.owner, descriptor, token = probe
        with suppress(OSError, ValueError):
            self.is_mapped = bool(self._map(descriptor, _TOKEN_BYTES)[:].hex() == token)
        return self.is_mapped

    def borrow(self, descriptor: int, size: int, length: int) -> Any:
        """Return the bytes that were lent, as a flat array that nobody may write to.

        Once neither it nor an array that shares its memory is left, `take_returned` has the block.
        """
        return self._arrays.make(self._map(descriptor, size), descriptor, np.uint8, length)

    def take_returned(self) -> list[int]:
        """Return blocks that are needed no more, for the owner's `give_back`; each once."""
        return self._arrays.take_ended()

    def restore(self, frame: Frame) -> None:
        """Put the shared buffers of a frame back into it; they share the memory of the owner."""
        buffers = list(frame.buffers)
        for index, descriptor, size, length in frame.fields.get("shared", ()):
            buffers[index] = np.frombuffer(self._map(descriptor, size), np.uint8, length)
        frame.buffers = buffers

    def _map(self, descriptor: int, size: int) -> mmap.mmap:
        """Return the memory of a block, which nobody may write to here."""
        if (memory := self._maps.get((descriptor, size))) is None:
            with open(f"/proc/{self.owner}/fd/{descriptor}", "rb") as file:
                memory = self._maps[descriptor, size] = mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
        return memory
