"""Large inputs in memory that ranks on the driver's machine share, where a socket would copy them twice.

A block is an anonymous file in memory, so nothing is left of it however its processes end. A rank reaches it by the
driver's entry in /proc, which other users cannot. Ranks that cannot either, such as those in another container, say so
when they open the bundle, and get their inputs by the socket.
"""

from __future__ import annotations

import mmap
import os
import secrets
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from onnxplace.runtimes.ranks.frames import Frame

# Smaller buffers are as quick by the socket.
MIN_SHARED_BYTES = 64 << 10
_TOKEN_BYTES = 16


class _SharedBlock:
    """Memory that other processes can map."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("onnxplace", os.MFD_CLOEXEC)
        try:
            os.ftruncate(self.descriptor, size)
            self.memory = mmap.mmap(self.descriptor, size)
        except BaseException:
            os.close(self.descriptor)
            raise

    def close(self) -> None:
        self.memory.close()
        os.close(self.descriptor)


class SharedBlocks:
    """The blocks of a driver, taken by requests while these are in flight; for any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_closed = False
        self._free: list[_SharedBlock] = []
        self._taken: dict[int, list[_SharedBlock]] = {}
        self._probe: _SharedBlock | None = None

    def make_probe(self) -> list[Any]:
        """Return what a rank needs to try whether it can share memory; empty where the system has no such memory."""
        if not hasattr(os, "memfd_create"):
            return []
        self._probe = self._probe or _SharedBlock(_TOKEN_BYTES)
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._probe.memory[:] = token
        return [os.getpid(), self._probe.descriptor, token.hex()]

    def place(self, number: int, frame: Frame) -> None:
        """Move the large buffers of a request's frame into blocks, which it has until `free`.

        Buffers stay in the frame where the system has no more memory or files for blocks.
        """
        buffers, shared = list(frame.buffers), []
        with self._lock:  # so that no block is closed meanwhile
            for index, buffer in enumerate(buffers):
                if (length := len(buffer)) >= MIN_SHARED_BYTES and (block := self._take(number, length)) is not None:
                    block.memory[:length] = memoryview(buffer)
                    shared.append([index, block.descriptor, block.size, length])
                    buffers[index] = np.empty(0, np.uint8)
        if shared:
            frame.fields["shared"], frame.buffers = shared, buffers

    def _take(self, number: int, length: int) -> _SharedBlock | None:
        """Return the smallest free block that is large enough, or a new one; None if there is none."""
        if self._is_closed:
            return None
        fitting = [block for block in self._free if block.size >= length]
        if fitting:
            block = min(fitting, key=lambda item: item.size)
            self._free.remove(block)
        else:
            try:
                block = _SharedBlock(1 << (length - 1).bit_length())
            except OSError:
                return None
        self._taken.setdefault(number, []).append(block)
        return block

    def free(self, number: int) -> None:
        """Free the blocks of a request that has ended on all ranks."""
        with self._lock:
            self._free += self._taken.pop(number, ())

    def close(self) -> None:
        """Give all memory back."""
        with self._lock:
            self._is_closed = True
            blocks = [*self._free, *(block for taken in self._taken.values() for block in taken)]
            for block in [*blocks, *([self._probe] if self._probe else [])]:
                block.close()
            self._free, self._taken, self._probe = [], {}, None


class MappedBlocks:
    """The blocks of a driver as a rank sees them."""

    def __init__(self) -> None:
        self._driver = 0
        self._maps: dict[tuple[int, int], Any] = {}

    def try_probe(self, probe: Sequence[Any]) -> bool:
        """Return whether this process can map blocks of the driver."""
        if not probe:
            return False
        self._driver, descriptor, token = probe
        try:
            return bool(self._map(descriptor, _TOKEN_BYTES).tobytes().hex() == token)
        except (OSError, ValueError):
            return False

    def restore(self, frame: Frame) -> None:
        """Put the shared buffers of a request back into its frame; they share the memory of the driver."""
        buffers = list(frame.buffers)
        for index, descriptor, size, length in frame.fields.get("shared", ()):
            buffers[index] = self._map(descriptor, size)[:length]
        frame.buffers = buffers

    def _map(self, descriptor: int, size: int) -> Any:
        """Return the bytes of a block."""
        if (array := self._maps.get((descriptor, size))) is None:
            with open(f"/proc/{self._driver}/fd/{descriptor}", "rb") as file:
                array = np.frombuffer(mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ), np.uint8)
            self._maps[descriptor, size] = array
        return array
