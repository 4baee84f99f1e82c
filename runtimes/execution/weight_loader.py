"""Weights that stream: a thread per device reads them into a pool, ahead of the runs that take them.

A *block* is the weights of one segment that stream. The blocks of a device's program are read in its order, from the
last one of a step on with the first one of the next, as far ahead as the pool has room. A run takes the next block,
waiting for it if it has not arrived, and releases its room. A run that takes another block than the next one, because
the request before ended in the middle, lets the thread begin again there.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.bundle_routes import list_routes
from onnxplace.bundle.manifest import WeightRecord
from onnxplace.errors import ExecutionError, format_one_line
from onnxplace.feeds.feeds import numpy_type
from onnxplace.machine.ort_values import is_native_type, to_ort_value
from onnxplace.machine.transfer_rates import READ_PIECE_BYTES, drop_pages
from onnxplace.runtimes.execution.failures import is_out_of_memory
from onnxplace.runtimes.execution.requests import Request
from onnxplace.runtimes.execution.segments import PlacedDevice
from onnxplace.runtimes.execution.weight_files import WeightFiles
from onnxplace.simulation.weight_streams import PAGE_BYTES, PoolLayout, measure_block

# Blocks: what is read, and where it lies in the pool.


@dataclass(frozen=True)
class PooledWeight:
    """A weight that streams."""

    name: str
    record: WeightRecord
    position: int
    """In the pool, in bytes."""


@dataclass(frozen=True)
class Extent:
    """Weights that are neighbours in their file as well as in the pool, and are read as one."""

    path: Path
    position: int
    """Where it begins in the pool."""
    offset: int
    """Where it begins in its file."""
    size: int
    """Bytes."""
    is_kept: bool
    """Whether the host's memory keeps it."""
    weights: tuple[PooledWeight, ...]

    def cut(self) -> Iterator[tuple[int, int]]:
        """Yield the begin and the size of each piece.

        The system drops each from its cache before that takes memory from what stays there, and a request that ends
        does not wait for long.
        """
        return ((begin, min(READ_PIECE_BYTES, self.size - begin)) for begin in range(0, self.size, READ_PIECE_BYTES))


@dataclass(frozen=True)
class Block:
    """The weights of one segment that stream."""

    segment: str
    extents: tuple[Extent, ...]
    distance: int
    """How many blocks before it must be released before it may be read."""

    @cached_property
    def weights(self) -> list[PooledWeight]:
        """Return its weights."""
        return [weight for extent in self.extents for weight in extent.weights]

    @cached_property
    def size(self) -> int:
        """Return the bytes of its weights."""
        return sum(weight.record.bytes for weight in self.weights)


def list_blocks(bundle: Bundle, device: str, pool_bytes: int) -> list[Block]:
    """Return the blocks of a device's program, in its order."""
    manifest = bundle.manifest
    streamed = {segment.id: segment.streamed for segment in manifest.segments if segment.streamed}
    order = [step.segment for step in manifest.programs[device] if step.op == "run" and step.segment in streamed]
    sizes = [measure_block(manifest.streamed[name].bytes for name in streamed[segment]) for segment in order]
    layout = PoolLayout.of(sizes, pool_bytes)
    return [
        Block(segment, tuple(_list_extents(bundle, streamed[segment], position)), distance)
        for segment, position, distance in zip(order, layout.offsets, layout.distances)
    ]


def _list_extents(bundle: Bundle, names: Sequence[str], position: int) -> Iterator[Extent]:
    """Yield the extents of weights that lie one after the other in the pool, in the order of their files."""
    group: list[PooledWeight] = []
    records = [(name, bundle.manifest.streamed[name]) for name in names]
    for name, record in sorted(records, key=lambda item: (item[1].linked, item[1].file, item[1].offset, item[0])):
        if group and not _are_neighbours(group[-1], record, position):
            yield _make_extent(bundle, group)
            group = []
        group.append(PooledWeight(name, record, position))
        position += measure_block([record.bytes])
    yield _make_extent(bundle, group)


def _are_neighbours(weight: PooledWeight, record: WeightRecord, position: int) -> bool:
    first = weight.record
    is_same = (first.linked, first.file, first.home) == (record.linked, record.file, record.home)
    return is_same and record.offset - first.offset == position - weight.position


def _make_extent(bundle: Bundle, weights: Sequence[PooledWeight]) -> Extent:
    first, last = weights[0].record, weights[-1].record
    return Extent(
        path=(bundle.linked_file if first.linked else bundle.file)(first.file),
        position=weights[0].position,
        offset=first.offset,
        size=last.offset + last.bytes - first.offset,
        is_kept=first.home == "host",
        weights=tuple(weights),
    )


# Pools: the memory that blocks are read into.

ReadPiece = Callable[[Extent, int, memoryview], None]
"""Fills a view with bytes of an extent, which begin at an offset within it; raises ExecutionError if it cannot."""


class SupersededError(Exception):
    """The block that is being read is not needed any more."""


class WeightPool(ABC):
    """Memory of a fixed size for the blocks of one stream; only the thread of the stream uses it."""

    @abstractmethod
    def load(self, block: Block, read: ReadPiece, freed: Any, waits: bool) -> Mapping[str, Any]:
        """Return the weights of a block as values of the device, by name.

        Args:
            block: What to bring into the pool.
            read: Reads a part of it from its file.
            freed: The checkpoint after which its room is free; None if it is free.
            waits: Whether to return only when all bytes are there, and not only on their way.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the memory, when what is on its way has arrived."""


class HostPool(WeightPool):
    """A pool in the host's memory: values are arrays, or OrtValues of types that numpy lacks, that share its memory."""

    def __init__(self, size: int) -> None:
        memory = np.empty(size + PAGE_BYTES, np.uint8)  # for which numpy asks the system for huge pages
        self._bytes = memory[-memory.ctypes.data % PAGE_BYTES :][:size]
        self._values: dict[str, Mapping[str, Any]] = {}

    def load(self, block: Block, read: ReadPiece, freed: Any, waits: bool) -> Mapping[str, Any]:
        """Read a block to its place."""
        for extent in block.extents:
            view = self._bytes.data[extent.position :]
            for begin, size in extent.cut():
                read(extent, begin, view[begin : begin + size])
        if block.segment not in self._values:
            self._values[block.segment] = {weight.name: self._share(weight) for weight in block.weights}
        return self._values[block.segment]

    def _share(self, weight: PooledWeight) -> Any:
        record, element = weight.record, numpy_type(weight.record.dtype)
        assert element is not None
        array = self._bytes[weight.position :][: record.bytes].view(element).reshape(record.shape)
        return array if is_native_type(record.dtype) else to_ort_value(array)

    def close(self) -> None:
        """Drop the memory; values that a run still reads keep it."""
        self._values, self._bytes = {}, self._bytes[:0].copy()


# Streams: the thread that reads, and the runs that take what it has read.


def read_at(file: FileIO, offset: int, view: memoryview) -> int | None:
    """Read bytes of a file into a view, perhaps fewer than it has room for; return their number."""
    file.seek(offset)
    return file.readinto(view)


@dataclass(frozen=True)
class Load:
    """When a block was read, on the clock of requests."""

    segment: str
    start: float
    finish: float
    bytes: int


class WeightLoader:
    """Brings the weights that stream to one device for one program.

    Args:
        files: The weights files of an open bundle.
        device: The device.
        home: The device in whose program the segments are; another one on further routes.
        pool_bytes: Size of the pool.
        trace: Whether times are recorded.

    Raises ExecutionError if the device has no memory for the pool.
    """

    def __init__(self, files: WeightFiles, device: PlacedDevice, home: str, pool_bytes: int, trace: bool) -> None:
        self.device = device
        self.reopen = partial(WeightLoader, files, device, home, pool_bytes, trace)
        """Returns another one like this."""
        self._home, self._trace = home, trace
        self._blocks = list_blocks(files.bundle, home, pool_bytes)
        self._indices = {block.segment: index for index, block in enumerate(self._blocks)}
        self._pool: WeightPool = device.memory.open_weight_pool(pool_bytes) or HostPool(pool_bytes)
        self._open_again, self._files = files.open_again, dict[Path, FileIO]()
        self._lock = threading.Lock()
        self._changes: queue.SimpleQueue[None] = queue.SimpleQueue()
        """A token makes the thread look whether it can read on; a superfluous one does no harm."""
        # Blocks are counted over steps: these were read, taken and released.
        self._arrived = self._taken = self._released = 0
        self._values: list[Mapping[str, Any]] = [{}] * len(self._blocks)
        self._freed: list[Any] = [None] * len(self._blocks)
        """By block, the checkpoint of the last run that has released it."""
        self._last_freed: Any = None
        self._generation = 0
        """How often the thread had to begin again; what it read before does not count."""
        self._waiting: Request | None = None
        self._failure: ExecutionError | None = None
        """Why the next block cannot be read."""
        self._death = ""
        """Why the thread does not read any more."""
        self._is_ended = False
        self._loads: deque[Load] = deque()

    # -- the thread of the device -----------------------------------------------------------------------------

    def take(self, segment: str, request: Request) -> Mapping[str, Any]:
        """Wait for the weights of a segment and return them; they stay where they are until `release`.

        Raises ExecutionError if they cannot be read, CancelledError if the request ends meanwhile.
        """
        index = self._indices[segment]
        with self._lock:
            is_next = self._taken == self._released and self._taken % len(self._blocks) == index
            if not is_next or (self._failure is not None and self._taken == self._arrived):
                self._begin_at(index)
        while True:
            with self._lock:
                if self._death:
                    raise ExecutionError("X005", self._death, where=self.device.id, hint="open a new session")
                if self._taken < self._arrived:
                    self._taken += 1
                    return self._values[index]
                if (failure := self._failure) is not None:
                    self._begin_at(index)  # the error, whose traceback has the frames of its caller, is not kept
                    raise failure
                self._waiting = request
            request.receive("", self._home)  # no value has an empty name: it is the arrival of a block

    def release(self, checkpoint: Any) -> None:
        """Give back the room of what was taken last, which is free after a checkpoint of the device, or at once."""
        with self._lock:
            self._freed[self._released % len(self._blocks)] = self._last_freed = checkpoint
            self._released = self._taken
        self._changes.put(None)

    def pop_loads(self) -> Iterator[Load]:
        """Remove and return what was read since the last call."""
        while self._loads:
            yield self._loads.popleft()

    def _begin_at(self, index: int) -> None:
        """Let the thread begin again at a block."""
        self._generation += 1
        self._arrived = self._taken = self._released = index
        self._freed = [self._last_freed] * len(self._blocks)
        self._failure = None
        self._changes.put(None)

    # -- the thread that reads --------------------------------------------------------------------------------

    def read(self, device: PlacedDevice) -> None:
        """Read blocks until the stream ends."""
        try:
            while not self._is_ended:
                with self._lock:
                    generation, count = self._generation, self._arrived
                    block = self._blocks[count % len(self._blocks)]
                    has_room = self._failure is None and count < self._released + block.distance
                    freed = self._freed[(count - block.distance) % len(self._blocks)]
                if has_room:
                    self._load(block, generation, freed)
                else:
                    self._changes.get()
        except BaseException as cause:  # noqa: BLE001 - whatever ends a thread, such as an exception set from outside
            self._death = f"the thread that reads its weights died: {type(cause).__name__}: {cause}".rstrip(": ")
            self._announce()
        finally:
            for file in self._files.values():
                file.close()
            self._pool.close()
            self._values = []

    def end(self) -> None:
        """Let the thread end after the piece that it reads; does not wait."""
        self._is_ended = True
        self._changes.put(None)

    def _load(self, block: Block, generation: int, freed: Any) -> None:
        """Bring the next block into the pool, or note why not."""
        values, failure, start = dict[str, Any](), None, time.perf_counter()
        try:
            values |= self._pool.load(block, partial(self._read_piece, generation), freed, self._trace)
        except SupersededError:
            return
        except ExecutionError as problem:
            failure = problem
        except Exception as problem:  # noqa: BLE001 - the request that takes the block gets it
            text, code = format_one_line(problem), "X010" if is_out_of_memory(problem) else "X001"
            message = f"the weights of segment {block.segment} did not arrive: {text}"
            failure = ExecutionError(code, message, where=self.device.id, hint="run again, or open a new session")
        with self._lock:
            if generation != self._generation:
                return
            if failure is None:
                self._values[self._arrived % len(self._blocks)] = values
                self._arrived += 1
            self._failure = failure
        if self._trace and failure is None:
            self._loads.append(Load(block.segment, start, time.perf_counter(), block.size))
        self._announce()

    def _announce(self) -> None:
        """Wake the thread of the device."""
        with self._lock:
            waiting, self._waiting = self._waiting, None
        if waiting is not None:
            waiting.deliver("", self._home, None)

    def _read_piece(self, generation: int, extent: Extent, begin: int, view: memoryview) -> None:
        """Fill a view with bytes of an extent; raises ExecutionError if the file does not give them."""
        offset, done = extent.offset + begin, 0
        try:
            file = self._open(extent.path)
            while done < len(view):
                if self._is_ended or generation != self._generation:
                    raise SupersededError
                if not (count := read_at(file, offset + done, view[done:])):
                    raise EOFError(f"the file ends there, and has {os.fstat(file.fileno()).st_size} bytes")
                done += count
            if not extent.is_kept:
                drop_pages(file.fileno(), offset, len(view))
        except (OSError, EOFError) as problem:
            raise _describe_failure(extent, offset + done, problem) from problem

    def _open(self, path: Path) -> FileIO:
        if path not in self._files:
            self._files[path] = file = self._open_again(path)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
        return self._files[path]


def _describe_failure(extent: Extent, offset: int, problem: Exception) -> ExecutionError:
    weight = next(item for item in reversed(extent.weights) if item.record.offset <= offset)
    text = getattr(problem, "strerror", None) or format_one_line(problem)
    message = f"weight {weight.name!r}, which streams, cannot be read at byte {offset}: {text}"
    hint = "check the disk; restore the file, or compile the model again, and open a new session"
    return ExecutionError("X017", message, where=str(extent.path), hint=hint)


def open_weight_loaders(
    files: WeightFiles, devices: Mapping[str, PlacedDevice], trace: bool
) -> dict[tuple[str, str], WeightLoader]:
    """Return the loaders of devices, by device and by the one in whose program its segments are, on all routes.

    Raises ExecutionError if a device has no memory for its pool.
    """
    manifest = files.bundle.manifest
    pools = {stream.device: stream.pool_bytes for stream in manifest.streams}
    homes = {segment.device for segment in manifest.segments if segment.streamed}
    return {
        (route.devices[home], home): WeightLoader(
            files, devices[route.devices[home]], home, pools.get(route.devices[home], pools[home]), trace
        )
        for route in (list_routes(manifest) if pools else ())
        for home in sorted(homes)
        if route.devices[home] in devices
    }
