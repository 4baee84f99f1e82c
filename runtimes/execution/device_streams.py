"""What the memory of enqueued devices is built of: a driver, page-locked memory, queues of work, and values."""

from __future__ import annotations

import ctypes
import threading
from abc import ABC, abstractmethod
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import helper

from onnxplace.errors import ExecutionError, format_one_line
from onnxplace.machine.ort_values import count_bytes, is_native_type
from onnxplace.runtimes.execution.failures import is_out_of_memory
from onnxplace.utils.ort import import_onnxruntime

# What the memory of enqueued devices needs of a driver: streams, events, memory and asynchronous copies.


class DriverError(RuntimeError):
    """A call of a driver failed, or work that was enqueued before it."""


class Driver(ABC):
    """The driver of one kind of devices; its objects may be used by any thread.

    A *stream* executes what is enqueued on it, in order, at some time after the call. An *event* is a point of a
    stream. Devices are numbered as the driver does; logical devices share a number. Addresses are whole numbers, sizes
    are in bytes. Streams and events are destroyed with their last reference. All methods raise DriverError.
    """

    @abstractmethod
    def create_stream(self, device: int) -> Any:
        """Return a new stream of a device, which waits for no other."""

    @abstractmethod
    def get_handle(self, stream: Any) -> int:
        """Return the address by which other libraries know a stream."""

    @abstractmethod
    def record(self, stream: Any) -> Any:
        """Return an event after all that was enqueued on a stream so far."""

    @abstractmethod
    def wait(self, stream: Any, event: Any) -> None:
        """Let what is enqueued on a stream later begin after an event, perhaps of another device."""

    @abstractmethod
    def is_complete(self, event: Any) -> bool:
        """Return whether an event is over; does not wait. Raises the error of the work before it."""

    @abstractmethod
    def synchronize(self, event: Any) -> None:
        """Wait for an event. Raises the error of the work before it."""

    @abstractmethod
    def allocate(self, device: int, size: int, stream: Any) -> int:
        """Return memory of a device that work on a stream, or ordered after it, may use from now on."""

    @abstractmethod
    def free(self, address: int, stream: Any) -> None:
        """Free memory of `allocate` after what was enqueued on a stream so far."""

    @abstractmethod
    def allocate_host(self, size: int) -> int:
        """Return page-locked memory of the host, which every device reads and writes directly."""

    @abstractmethod
    def free_host(self, address: int) -> None:
        """Free memory of `allocate_host` at once; no copy may be in flight."""

    def write_host(self, address: int, source: int, size: int) -> None:
        """Copy ordinary memory into that of `allocate_host`, at once."""
        ctypes.memmove(address, source, size)

    @abstractmethod
    def copy_to_device(self, destination: int, source: int, size: int, stream: Any) -> None:
        """Enqueue a copy from memory of `allocate_host` to a device."""

    @abstractmethod
    def copy_to_host(self, destination: int, source: int, size: int, stream: Any) -> None:
        """Enqueue a copy from a device to memory of `allocate_host`."""

    @abstractmethod
    def copy_to_peer(
        self, destination: int, to_device: int, source: int, from_device: int, size: int, stream: Any
    ) -> None:
        """Enqueue a copy from one device to another, on a stream of the second one."""

    @abstractmethod
    def enable_peer_access(self, device: int, peer: int) -> bool:
        """Let a device read the memory of another one; returns False where the hardware cannot."""


# Page-locked memory of the host, kept for further copies.

# The least size of a buffer: smaller values share one bucket.
MIN_BUFFER_BYTES = 1 << 12
# Page-locked memory that a pool keeps while no copy needs it.
MAX_KEPT_BYTES = 256 << 20


class PinnedBuffer:
    """A piece of page-locked memory, which returns to its pool with its last reference."""

    def __init__(self, pool: PinnedPool, address: int, size: int) -> None:
        self.address = address
        self.size = size
        """Bytes, a power of two."""
        self._pool = pool

    def __del__(self) -> None:
        self._pool.put_back(self.address, self.size)


class PinnedPool:
    """Buffers of powers of two, kept because a driver takes long to lock pages, and may stall devices meanwhile."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        # Reentrant: garbage collection may return a buffer while its thread takes one.
        self._lock = threading.RLock()
        self._free: dict[int, list[int]] = {}
        self._kept_bytes = 0
        self._closed = False

    def __del__(self) -> None:
        self.close()  # of a session that was dropped without being closed

    def take(self, size: int) -> PinnedBuffer:
        """Return a buffer of at least `size` bytes."""
        rounded = max(1 << max(size - 1, 0).bit_length(), MIN_BUFFER_BYTES)
        with self._lock:
            if addresses := self._free.get(rounded):
                self._kept_bytes -= rounded
                return PinnedBuffer(self, addresses.pop(), rounded)
        return PinnedBuffer(self, self._driver.allocate_host(rounded), rounded)

    def put_back(self, address: int, size: int) -> None:
        """Keep a buffer, or free it if the pool has enough."""
        with self._lock:
            if not self._closed and self._kept_bytes + size <= MAX_KEPT_BYTES:
                self._free.setdefault(size, []).append(address)
                self._kept_bytes += size
                return
        with suppress(DriverError):  # a finalizer has no caller to tell
            self._driver.free_host(address)

    def close(self) -> None:
        """Free all that is kept, and what returns later."""
        with self._lock:
            self._closed = True
            addresses = [address for group in self._free.values() for address in group]
            self._free.clear()
        for address in addresses:
            with suppress(DriverError):
                self._driver.free_host(address)


# Streams with what their work needs: marks on them, and references that are held until a mark is over.


class Mark:
    """A point of a work queue: the end of a run or copy."""

    def __init__(
        self, queue: WorkQueue, event: Any, label: str, kept: tuple[Any, ...], waits: tuple[Mark, ...]
    ) -> None:
        self.queue = queue
        self.event = event
        self.label = label
        """The work that ends here, as in `segment cuda0-001`."""
        self.kept = kept
        """What must not be freed or reused before."""
        self.waits = waits
        """Marks of other queues that this work waits for."""

    def synchronize(self) -> None:
        """Wait until it is over; raises ExecutionError that names the work which failed."""
        try:
            self.queue.driver.synchronize(self.event)
        except DriverError as problem:
            raise self.describe(problem) from problem

    def is_over(self) -> bool:
        """Return whether it is over without an error; does not wait."""
        try:
            return self.queue.driver.is_complete(self.event)
        except DriverError:
            return False

    def has_failed(self) -> bool:
        """Return whether its work, or work before it, is known to have failed; does not wait."""
        try:
            self.queue.driver.is_complete(self.event)
        except DriverError:
            return True
        return False

    def find_unfinished(self) -> Mark:
        """Return the work that this one waits for, or itself: the first that is not known to have succeeded."""
        first = self.queue.find_first_unfinished(self)
        for other in first.waits:
            if not other.is_over():
                return other.find_unfinished()
        return first

    def describe(self, problem: BaseException) -> ExecutionError:
        """Return the error of the work before this mark.

        Drivers do not say which work failed, so it is the first that is not known to have succeeded.
        """
        culprit, text = self.find_unfinished(), format_one_line(problem)
        if is_out_of_memory(problem):
            hint = "run fewer requests at a time, lower the limits of its memory, or compile for more devices"
            return ExecutionError(
                "X010", f"{culprit.label} ran out of memory: {text}", where=culprit.queue.name, hint=hint
            )
        hint = "try the same feeds on the whole model: onnxplace verify; a new session may need a new process"
        return ExecutionError("X001", f"{culprit.label} failed: {text}", where=culprit.queue.name, hint=hint)


class WorkQueue:
    """A stream of a device. Any thread may use it; work and its mark are enqueued by `with queue.lock`."""

    def __init__(self, driver: Driver, device: int, name: str) -> None:
        self.driver, self.device = driver, device
        self.stream = driver.create_stream(device)
        self.name = name
        """The id of its device, for error messages."""
        # Reentrant: dropping what a mark keeps may free memory, whose finalizer uses a queue too.
        self.lock = threading.RLock()
        self._marks: deque[Mark] = deque()
        self._waits: list[Mark] = []
        self._held: list[Any] = []
        """What work needs that is about to be enqueued, until the next mark has it."""

    def wait(self, mark: Mark) -> None:
        """Let later work of this queue begin after a mark."""
        if mark.queue is not self:
            with self.lock:
                self.driver.wait(self.stream, mark.event)
                self._waits.append(mark)

    def hold(self, *kept: Any) -> None:
        """Hold objects until the next mark is over; called before the work that needs them is enqueued.

        Ctrl-C may come between the work and its own mark, and what is freed then could be reused while it is in flight.
        """
        with self.lock:
            self._held.extend(kept)

    def mark(self, label: str, *kept: Any) -> Mark:
        """Return a mark after all work so far, and hold objects until it is over."""
        with self.lock:
            event = self.driver.record(self.stream)
            mark = Mark(self, event, label, (*self._held, *kept), tuple(self._waits))
            self._marks.append(mark)
            self._waits.clear()
            self._held.clear()
        return mark

    def last_mark(self) -> Mark | None:
        """Return the mark after the last work; None if everything is over."""
        with self.lock:
            return self._marks[-1] if self._marks else None

    def find_first_unfinished(self, mark: Mark) -> Mark:
        """Return the first mark that is not known to be over, at most `mark`."""
        with self.lock:
            marks = list(self._marks)
        return next((item for item in marks if item is mark or not item.is_over()), mark)

    def find_failed(self) -> Mark | None:
        """Return the first mark whose work is known to have failed; does not wait."""
        with self.lock:
            marks = list(self._marks)
        return next((item for item in marks if item.has_failed()), None)

    def release(self) -> None:
        """Drop what is held for work that is over; raises ExecutionError that names work which failed."""
        over, failure = [], None
        with self.lock:
            try:
                while self._marks and self.driver.is_complete(self._marks[0].event):
                    over.append(self._marks.popleft())
            except DriverError as problem:
                failed, failure = self._marks[0], problem
        for mark in over:
            mark.kept, mark.waits = (), ()
        if failure is not None:  # described without the lock: that takes those of other queues, in any order
            raise failed.describe(failure) from failure

    def finish(self) -> None:
        """Wait for all work; raises ExecutionError that names what failed."""
        if self._held:  # an interrupt came before the mark of what may have been enqueued
            self.mark("interrupted work")
        if (last := self.last_mark()) is not None:
            last.synchronize()
            self.release()

    def discard(self) -> None:
        """Drop all that is held, for a stream that has failed for good or is done."""
        with self.lock:
            marks, self._marks, self._held = list(self._marks), deque(), []
        for mark in marks:
            mark.kept, mark.waits = (), ()


# Values of enqueued devices: tensors that are complete after a mark, and copies to the host that are under way.


class Allocation:
    """Memory of a device; it is freed in the order of a queue, after what was enqueued there."""

    def __init__(self, address: int, queue: WorkQueue) -> None:
        self.address = address
        self._queue = queue

    def __del__(self) -> None:
        with suppress(DriverError):  # a finalizer has no caller to tell
            self._queue.driver.free(self.address, self._queue.stream)


@dataclass(frozen=True)
class RunOutput:
    """An output of an enqueued run: a tensor that will be complete in its device's memory."""

    address: int
    size: int
    """Bytes."""
    element_type: int
    """ONNX's number."""
    data_type: str
    """ONNX Runtime's name, such as `tensor(float)`."""
    shape: tuple[int, ...]
    owner: Any
    """Keeps the memory: an Allocation, or an OrtValue with its session."""


@dataclass(frozen=True)
class DeviceTensor(RunOutput):
    """A tensor in the memory of a device."""

    device: int
    """The driver's number of the device that holds it."""
    home: WorkQueue
    """Its memory may be reused by work that is enqueued here after its last reference is dropped."""
    ready: Mark
    """The mark after which it is complete."""


class StreamValue:
    """A value of an enqueued device: a tensor there, or anything in the host's memory, or both."""

    def __init__(self, host: Any = None, tensor: DeviceTensor | None = None) -> None:
        self.host = host
        """OrtValue, array or list; None if it is on the device alone, or an absent optional."""
        self.tensor = tensor

    def count_bytes(self) -> int | None:
        """Return the bytes of a tensor; None for other values, and strings."""
        return self.tensor.size if self.tensor is not None else count_bytes(self.host)

    def shape(self) -> list[int]:
        """Return the sizes of its dimensions."""
        return list(self.tensor.shape if self.tensor is not None else self.host.shape())


class Download:
    """A tensor on its way from a device to the host's memory; the copy is enqueued."""

    def __init__(self, tensor: DeviceTensor, pieces: list[tuple[PinnedBuffer, int, Mark]]) -> None:
        self._shape, self._size = tensor.shape, tensor.size
        self._element_type, self._data_type = tensor.element_type, tensor.data_type
        self._pieces = pieces
        """Buffers with the bytes used and the end of their copies."""

    def fetch(self) -> Any:
        """Wait for the copy; return an array, or an OrtValue of a type that numpy lacks, with its own memory."""
        result: Any
        if is_native_type(self._data_type):
            result = np.empty(self._shape, helper.tensor_dtype_to_np_dtype(self._element_type))
            address = result.ctypes.data
        else:
            make_value = import_onnxruntime().OrtValue.ortvalue_from_shape_and_type
            result = make_value(list(self._shape), self._element_type)
            address = result.data_ptr()
        offset = 0
        for buffer, size, mark in self._pieces:
            mark.synchronize()
            ctypes.memmove(address + offset, buffer.address, size)
            offset += size
        return result
