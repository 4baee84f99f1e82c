"""Rings: small messages between ranks of one host through shared memory, without a call of the system.

Each pair of ranks has a ring for each direction: memory that one rank writes round and round, and the other reads. Each
rank has a board, on which the others of its host notify its wakeup flag, and on which it shows how far it has read
their rings, and whether it sleeps; then it has to be woken by the socket. Counters are changed and read by atomic
instructions, so what was written before a counter is seen by who has read that counter.
"""

from __future__ import annotations

import mmap
import struct

import numpy as np

from onnxplace.runtimes.execution.compiled_wait import NotifyAndWait
from onnxplace.runtimes.execution.wakeups import count_pauses
from onnxplace_hosts.ranks.atomic_counters import AddAndNotify, bind_load
from onnxplace_hosts.ranks.shared_blocks import SharedBlock

# Room for what a rank receives while it computes; what does not fit goes by the socket.
RING_BYTES = 256 << 10
# Counters of 8 bytes, each of a writer in a cache line of its own.
_LINE_BYTES = 64
_LENGTH = struct.Struct("<q")
# In place of a length: the next message is at the beginning.
_WRAP = -1


def map_block(owner: int, descriptor: int, size: int) -> mmap.mmap:
    """Return a block of another process, to be changed here as well; raises OSError."""
    with open(f"/proc/{owner}/fd/{descriptor}", "r+b") as file:
        return mmap.mmap(file.fileno(), size)


def find_address(memory: mmap.mmap) -> int:
    """Return the address of mapped memory."""
    return int(np.frombuffer(memory, np.uint8, 1).ctypes.data)


class Board:
    """The wakeup flag of a rank, whether it sleeps, and how far it has read the ring of each rank.

    Args:
        memory: A block of `Board.count_bytes`; that of another rank was mapped.
    """

    def __init__(self, memory: mmap.mmap) -> None:
        self._memory = memory
        self.flag = find_address(memory)
        """Its address; the counter behind it is more than 0 while the rank sleeps."""
        self._wait, self._seen = NotifyAndWait(self.flag), 0
        self.show_sleep = AddAndNotify(self.flag + 8, self.flag + 16)
        """Shows that the rank sleeps from now on, by 1, or no more, by -1."""

    @staticmethod
    def count_bytes(ranks: int) -> int:
        """Return the size of a board for so many ranks."""
        return _LINE_BYTES * (1 + ranks)

    def find_position(self, rank: int) -> int:
        """Return the address of the counter of bytes that were read from a rank."""
        return self.flag + _LINE_BYTES * (1 + rank)

    def count_pauses(self) -> int:
        """Return how many pauses `watch` makes at most."""
        return count_pauses(self._wait)

    def watch(self, pauses: int) -> bool:
        """Return whether the flag was notified since the last time, or is before this many pauses."""
        seen, self._seen = self._seen, self._wait(0, 0, self._seen, pauses)
        return seen != self._seen


class RingWriter:
    """The end of a ring at which messages are put.

    Args:
        block: The ring.
        board: That of the reader.
        rank: The writer's.
    """

    def __init__(self, block: SharedBlock, board: Board, rank: int) -> None:
        self._memory, self._board = block.memory, board
        self._load_position = bind_load(board.find_position(rank))
        self._add = AddAndNotify(find_address(block.memory), board.flag)
        self._size = block.size - _LINE_BYTES
        self._written = self._known_read = 0

    def put(self, text: bytes) -> bool | None:
        """Write a message; return whether the reader sleeps, or None if there is no room for a message of this size."""
        length, place = len(text), self._written % self._size
        need = length + 15 & -8  # with its length, in whole counters
        if need > self._size // 4:
            return None
        skipped = self._size - place
        if skipped >= need:  # it fits before the end
            skipped = 0
        if self._written + skipped + need - self._known_read > self._size:
            self._known_read = self._load_position()
            if self._written + skipped + need - self._known_read > self._size:
                return None
        if skipped:
            _LENGTH.pack_into(self._memory, _LINE_BYTES + place, _WRAP)
            place = 0
        start = _LINE_BYTES + place
        self._memory[start + 8 : start + 8 + length] = text
        _LENGTH.pack_into(self._memory, start, length)
        self._written += skipped + need
        return bool(self._add(skipped + need))


class RingReader:
    """The end of a ring at which messages are taken.

    Args:
        memory: The ring, mapped.
        board: That of the reader.
        rank: The writer's.
    """

    def __init__(self, memory: mmap.mmap, board: Board, rank: int) -> None:
        self._memory, self._board = memory, board
        self._load_head = bind_load(find_address(memory))
        self._advance = AddAndNotify(board.find_position(rank), board.flag + 16)
        self._size = len(memory) - _LINE_BYTES
        self._read = 0

    def take(self) -> list[bytes]:
        """Return the messages that are here."""
        texts: list[bytes] = []
        start, head = self._read, self._load_head()
        while self._read < head:
            place = _LINE_BYTES + self._read % self._size
            (length,) = _LENGTH.unpack_from(self._memory, place)
            if length == _WRAP:
                self._read += self._size + _LINE_BYTES - place
                continue
            texts.append(self._memory[place + 8 : place + 8 + length])
            self._read += length + 15 & -8
        if texts:
            self._advance(self._read - start)
        return texts
