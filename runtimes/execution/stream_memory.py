"""The memory of devices that execute what is enqueued on streams, such as CUDA's: no thread waits between segments.

A device has three streams: runs, copies that come in, and copies that go out. The host runs ahead of them. Marks keep
their order: a run waits for the copies of its inputs, a copy for the run that computes its value, and neither makes a
thread wait. A thread waits only where the host needs a value.

Memory may be reused as soon as its last reference is dropped, by later work of the queue that is its `home`. So work of
any other queue that reads or writes it holds a reference until that work is over.
"""

from __future__ import annotations

import ctypes
from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from onnx import helper

from onnxplace.errors import ExecutionError, format_one_line
from onnxplace.feeds.feeds import numpy_type
from onnxplace.machine.ort_values import (
    is_copyable_tensor,
    is_native_array,
    to_fed_value,
    to_ort_value,
    to_ort_value_if_possible,
    to_python,
)
from onnxplace.runtimes.execution.device_streams import (
    Allocation,
    DeviceTensor,
    Download,
    Driver,
    DriverError,
    Mark,
    PinnedPool,
    RunOutput,
    StreamValue,
    WorkQueue,
)
from onnxplace.runtimes.execution.failures import is_out_of_memory
from onnxplace.runtimes.execution.weight_loader import Block, Extent, PooledWeight, ReadPiece, WeightPool
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.device_memory import DeviceMemory

# Copies through page-locked memory go in pieces, so that one is on its way while the next one is filled.
PIECE_BYTES = 4 << 20
# Buffers of a copy between two devices through the host: one is filled while the other one is emptied.
STAGING_BUFFERS = 2


@dataclass(frozen=True)
class SessionPlaces:
    """Where a session reads its inputs and leaves its outputs."""

    name: str
    """Name in error messages, such as `segment cuda0-001`."""
    host_inputs: frozenset[str] = frozenset()
    host_outputs: frozenset[str] = frozenset()


class StreamMemory(DeviceMemory):
    """The memory of one device, or of a logical device, of a driver with streams."""

    is_asynchronous = True
    runs_ahead = True

    def __init__(self, address: DeviceAddress, cores: Sequence[int]) -> None:
        super().__init__(address, cores)
        self.driver = self.open_driver()
        self.device = address.index
        """The driver's number of the device, which logical devices share."""
        self.computing, self.incoming, self.outgoing = (
            WorkQueue(self.driver, self.device, address.id) for _ in range(3)
        )
        self.pool = PinnedPool(self.driver)
        self._places: WeakKeyDictionary[Any, SessionPlaces] = WeakKeyDictionary()
        self._peers: dict[int, bool] = {}

    # -- what a kind of devices has to add ------------------------------------------------------------------------

    @abstractmethod
    def open_driver(self) -> Driver:
        """Return the driver; the same one for all devices between which it can copy."""

    @abstractmethod
    def find_places(self, session: Any, name: str) -> SessionPlaces:
        """Return where a session reads its inputs and leaves its outputs."""

    @abstractmethod
    def enqueue(
        self, session: Any, inputs: Mapping[str, Any], outputs: Sequence[str], places: SessionPlaces, options: Any
    ) -> list[Any]:
        """Enqueue a run of a session on the queue `computing`.

        Args:
            session: A session of ONNX Runtime.
            inputs: DeviceTensor, or OrtValue in the host's memory, by name.
            outputs: Names of all outputs.
            places: What `find_places` returned.
            options: ONNX Runtime's RunOptions.

        Returns:
            For each output a RunOutput, or, for one in the host's memory, an OrtValue; complete after the run.
        """

    # -- the interface of memories ------------------------------------------------------------------------

    def adopt(self, session: Any, name: str) -> None:
        """Note a session that will run here."""
        self._places[session] = self.find_places(session, name)

    def feed(self, array: Any, declared: str) -> Any:
        """Return an input; the first run that reads it on the device copies it there."""
        return StreamValue(to_fed_value(array, declared))

    def run(
        self, session: Any, inputs: dict[str, Any], outputs: Sequence[str], leaving: Collection[str], options: Any
    ) -> list[Any]:
        """Enqueue a run; its outputs are complete after its mark."""
        self._release()
        places = self._places[session]
        with self._naming_failures():
            bound = {
                name: to_ort_value_if_possible(self.to_host(value)) if name in places.host_inputs else self.place(value)
                for name, value in inputs.items()
            }
            tensors = [item for item in bound.values() if isinstance(item, DeviceTensor)]
            # Inputs may still be on their way on other queues: the run waits for their marks on the device, not here.
            for tensor in tensors:
                self.computing.wait(tensor.ready)
            # Only memory of this queue is safe without a reference: what is freed is reused by later work of its home.
            kept = [item for item in bound.values() if getattr(item, "home", None) is not self.computing]
            self.computing.hold(*kept)
            try:
                results = self.enqueue(session, bound, outputs, places, options)
            except Exception:
                self._release()  # raises the error of earlier work, which may be the cause
                raise
            finally:  # a run that failed may have enqueued a part
                mark = self.computing.mark(places.name, kept)
        # Any thread may read these in the host's memory, at any time: they have to be complete.
        if places.host_outputs:
            mark.synchronize()
        return [self._adopt_output(result, mark) for result in results]

    def run_unbound(self, call: Callable[[], Sequence[Any]]) -> list[Any]:
        """Run a session with values that cannot be bound, and wait for it; all of them are on the host."""
        results = list(call())
        self.computing.mark("a run with values of the host").synchronize()
        return [StreamValue(result) for result in results]

    def to_host(self, value: Any) -> Any:
        """Return a value in the host's memory; waits for it."""
        if value.tensor is not None and value.host is None:
            value.host = self._download(value.tensor).fetch()
        return value.host

    def send(self, value: Any, destination: DeviceMemory | None) -> Any:
        """Return a value as it is to a device of the same driver; enqueue its copy to the host for all others."""
        # The receiver copies from device to device, or shares the tensor on the same one.
        near = isinstance(destination, StreamMemory) and destination.driver is self.driver
        if value.tensor is None or near:
            return value
        with self._naming_failures():
            return self._download(value.tensor)

    def receive(self, sent: Any, source: DeviceMemory) -> Any:
        """Return a sent value as a value; a tensor of the same device is shared, the copy of another's is enqueued."""
        if not isinstance(sent, StreamValue):
            return StreamValue(to_ort_value_if_possible(source.fetch(sent)))
        tensor = sent.tensor
        if tensor is not None and tensor.device != self.device:
            assert isinstance(source, StreamMemory)
            with self._naming_failures():
                tensor = self._copy_from(tensor, source)
        return StreamValue(sent.host, tensor)

    def fetch(self, sent: Any) -> Any:
        """Return a sent value in the host's memory; waits for its copy."""
        if isinstance(sent, StreamValue):
            return sent.host
        if not isinstance(sent, Download):
            return sent
        array = sent.fetch()
        with suppress(ExecutionError):  # of other work, whose own request gets it
            self.outgoing.release()
        return array

    def read(self, sent: Any) -> Any:
        """Return a sent value as numpy; waits for its copy."""
        return to_python(self.fetch(sent))

    def keep(self, value: Any) -> Any:
        """Return a value of the device itself, and a copy of others, which may refer to memory of feeds."""
        if value.tensor is not None:
            return StreamValue(tensor=value.tensor)
        host = value.host
        if not (is_native_array(host) or is_copyable_tensor(host)):
            return value
        return StreamValue(to_ort_value(np.array(to_python(host))))

    def open_weight_pool(self, size: int) -> DevicePool:
        """Return a pool on the device; raises ExecutionError if it has no memory for that."""
        allocation = self._allocate(size)
        self.incoming.mark("the allocation of a pool").synchronize()
        return DevicePool(self.driver, self.computing, self.pool, allocation)

    def checkpoint(self) -> Any:
        """Return the mark of the last run; None if none is under way."""
        return self.computing.last_mark()

    def settle(self, checkpoint: Any) -> None:
        """Wait for a mark, and drop what is held for all that is over."""
        if checkpoint is not None:
            checkpoint.synchronize()
        self._release()

    def finish(self) -> None:
        """Wait for everything that was enqueued."""
        self._for_all_queues(WorkQueue.finish)

    def close(self) -> None:
        """Wait for everything that was enqueued, then drop what was held for it, and free page-locked memory."""
        with suppress(ExecutionError):  # of requests that nothing waits for
            self.finish()
        for queue in self._queues:
            queue.discard()
        self.pool.close()

    # -- copies ------------------------------------------------------------------------------------

    def place(self, value: StreamValue) -> DeviceTensor:
        """Return a value as a tensor on the device; copies it from the host if it is not there yet."""
        if value.tensor is None:
            value.tensor = self._upload(to_ort_value_if_possible(value.host))
        return value.tensor

    def _upload(self, value: Any) -> DeviceTensor:
        """Enqueue the copy of an OrtValue to the device; the value itself is read at once."""
        size, source = value.tensor_size_in_bytes(), value.data_ptr()
        allocation, ready = self._allocate(size), None
        for offset, length in cut_into_pieces(size):
            buffer = self.pool.take(length)
            self.incoming.hold(buffer, allocation)
            # Only page-locked memory is copied in the background. With its bytes there, the feed itself may change.
            self.driver.write_host(buffer.address, source + offset, length)
            self.driver.copy_to_device(allocation.address + offset, buffer.address, length, self.incoming.stream)
            ready = self.incoming.mark("a copy from the host", buffer, allocation)
        ready = ready or self.incoming.mark("an empty copy from the host", allocation)
        return DeviceTensor(
            address=allocation.address,
            size=size,
            element_type=value.element_type(),
            data_type=value.data_type(),
            shape=tuple(value.shape()),
            device=self.device,
            owner=allocation,
            home=self.computing,
            ready=ready,
        )

    def _download(self, tensor: DeviceTensor) -> Download:
        """Enqueue the copy of a tensor of this device to the host."""
        self.outgoing.wait(tensor.ready)
        pieces = []
        for offset, length in cut_into_pieces(tensor.size):
            buffer = self.pool.take(length)
            self.outgoing.hold(buffer, tensor)
            self.driver.copy_to_host(buffer.address, tensor.address + offset, length, self.outgoing.stream)
            pieces.append((buffer, length, self.outgoing.mark("a copy to the host", buffer, tensor)))
        return Download(tensor, pieces)

    def _copy_from(self, tensor: DeviceTensor, source: StreamMemory) -> DeviceTensor:
        """Enqueue the copy of a tensor of another device to this one."""
        allocation = self._allocate(tensor.size)
        # Directly where the hardware can, else through the host, in pieces that overlap.
        if self._can_read(tensor.device):
            self.incoming.wait(tensor.ready)
            self.incoming.hold(tensor, allocation)
            self.driver.copy_to_peer(
                allocation.address, self.device, tensor.address, tensor.device, tensor.size, self.incoming.stream
            )
            ready = self.incoming.mark(f"a copy from {source.address.id}", tensor, allocation)
        else:
            ready = self._copy_through_host(tensor, allocation, source)
        return replace(
            tensor, address=allocation.address, device=self.device, owner=allocation, home=self.computing, ready=ready
        )

    def _copy_through_host(self, tensor: DeviceTensor, allocation: Allocation, source: StreamMemory) -> Mark:
        """Enqueue the copy of a tensor of another device in pieces, each out of that device and then into this one."""
        text = f"a copy from {source.address.id} through the host"
        pieces = cut_into_pieces(tensor.size)
        buffers = [self.pool.take(length) for _, length in pieces[:STAGING_BUFFERS]]
        emptied: list[Mark] = []
        source.outgoing.wait(tensor.ready)
        for index, (offset, length) in enumerate(pieces):
            buffer = buffers[index % STAGING_BUFFERS]
            # The buffer is free again when the copy out of it, two pieces ago, is over.
            if index >= STAGING_BUFFERS:
                source.outgoing.wait(emptied[index - STAGING_BUFFERS])
            source.outgoing.hold(buffer, tensor)
            self.driver.copy_to_host(buffer.address, tensor.address + offset, length, source.outgoing.stream)
            self.incoming.hold(buffer, allocation)
            self.incoming.wait(source.outgoing.mark(text, buffer, tensor))
            self.driver.copy_to_device(allocation.address + offset, buffer.address, length, self.incoming.stream)
            emptied.append(self.incoming.mark(text, buffer, allocation))
        return emptied[-1] if emptied else self.incoming.mark(text, allocation)

    def _can_read(self, device: int) -> bool:
        """Return whether this device reads another one's memory directly; enables that on first use."""
        if device not in self._peers:
            self._peers[device] = self.driver.enable_peer_access(self.device, device)
        return self._peers[device]

    def _allocate(self, size: int) -> Allocation:
        """Return memory for a copy that comes in.

        Raises ExecutionError if the device has no more.
        """
        try:
            # At least a byte: an empty tensor needs an address too.
            address = self.driver.allocate(self.device, max(size, 1), self.incoming.stream)
        except DriverError as problem:
            if not is_out_of_memory(problem):
                raise
            message = f"out of memory for a copy that comes in: it asked for {size} bytes: {format_one_line(problem)}"
            hint = "run fewer requests at a time, lower the limits of devices on this GPU, or compile for more devices"
            raise ExecutionError("X010", message, where=self.address.id, hint=hint) from problem
        return Allocation(address, self.computing)

    # -- marks ------------------------------------------------------------------------------------

    @property
    def _queues(self) -> tuple[WorkQueue, ...]:
        return self.computing, self.incoming, self.outgoing

    def _release(self) -> None:
        """Drop what is held for work that is over; raises ExecutionError if some failed."""
        self._for_all_queues(WorkQueue.release)

    def _for_all_queues(self, act: Callable[[WorkQueue], None]) -> None:
        """Do something with each queue, also after one that failed; raises the first ExecutionError."""
        failures = []
        for queue in self._queues:
            try:
                act(queue)
            except ExecutionError as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    def _adopt_output(self, result: Any, mark: Mark) -> StreamValue:
        """Return an output of a run as a value."""
        if not isinstance(result, RunOutput):
            return StreamValue(result)
        tensor = DeviceTensor(**vars(result), device=self.device, home=self.computing, ready=mark)
        return StreamValue(tensor=tensor)

    @contextmanager
    def _naming_failures(self) -> Iterator[None]:
        """Turn the error of a driver's call into that of the enqueued work which caused it, if some has failed."""
        try:
            yield
        except DriverError as problem:
            for queue in self._queues:
                if (failed := queue.find_failed()) is not None:
                    raise failed.describe(problem) from problem
            raise


def cut_into_pieces(size: int) -> list[tuple[int, int]]:
    """Return the offsets and lengths of the pieces in which a tensor is copied.

    >>> cut_into_pieces(5 << 20)
    [(0, 4194304), (4194304, 1048576)]
    """
    return [(offset, min(PIECE_BYTES, size - offset)) for offset in range(0, size, PIECE_BYTES)]


# A pool for weights that stream.
#
# Copies have their own queue, so that they run while earlier segments compute. Nothing waits for them here: a run
# waits on the device for the copies of its weights, and a copy for the run that read what lay in its place.

# Page-locked buffers of a stream: one is filled from the disk while others are emptied into the device.
POOL_BUFFERS = 4


class DevicePool(WeightPool):
    """One allocation of a device.

    Weights whose home is the host's memory are kept there page-locked after they were read for the first time, so that
    no thread copies them later. Others pass through page-locked buffers.

    Args:
        driver: The driver.
        computing: The queue of the device's runs.
        buffers: Page-locked memory of the device.
        allocation: The memory of the pool.
    """

    def __init__(self, driver: Driver, computing: WorkQueue, buffers: PinnedPool, allocation: Allocation) -> None:
        self._driver, self._computing, self._buffers = driver, computing, buffers
        self._allocation: Allocation | None = allocation
        self._queue = WorkQueue(driver, computing.device, computing.name)
        self._kept: dict[tuple[Path, int, int], int] = {}
        """Page-locked memory by file, offset and bytes."""
        self._staged: deque[Mark] = deque()

    def load(self, block: Block, read: ReadPiece, freed: Mark | None, waits: bool) -> Mapping[str, Any]:
        """Enqueue the copies of a block to its place, after the run that frees it.

        After an error, copies that were enqueued before are still in order before those of the next call.
        """
        self._queue.release()
        if freed is not None:
            self._queue.wait(freed)
        for extent in block.extents:
            self._copy_kept(extent, read) if extent.is_kept else self._copy_through_buffers(extent, read)
        ready = self._queue.mark(f"the copy of weights of segment {block.segment}")
        if waits:
            ready.synchronize()
        return {weight.name: StreamValue(tensor=self._describe(weight, ready)) for weight in block.weights}

    def _copy_kept(self, extent: Extent, read: ReadPiece) -> None:
        key = (extent.path, extent.offset, extent.size)
        if key not in self._kept:
            address = self._driver.allocate_host(extent.size)
            try:
                for begin, size in extent.cut():
                    read(extent, begin, _view(address + begin, size))
            except BaseException:
                self._driver.free_host(address)
                raise
            self._kept[key] = address
        self._copy(extent.position, self._kept[key], extent.size)

    def _copy_through_buffers(self, extent: Extent, read: ReadPiece) -> None:
        for begin, size in extent.cut():
            if len(self._staged) >= POOL_BUFFERS:
                self._staged.popleft().synchronize()
                self._queue.release()
            buffer = self._buffers.take(size)
            read(extent, begin, _view(buffer.address, size))
            self._queue.hold(buffer)
            self._copy(extent.position + begin, buffer.address, size)
            self._staged.append(self._queue.mark("a copy of weights"))

    def _copy(self, position: int, source: int, size: int) -> None:
        assert self._allocation is not None
        self._driver.copy_to_device(self._allocation.address + position, source, size, self._queue.stream)

    def _describe(self, weight: PooledWeight, ready: Mark) -> DeviceTensor:
        record, element = weight.record, numpy_type(weight.record.dtype)
        assert element is not None
        assert self._allocation is not None
        return DeviceTensor(
            address=self._allocation.address + weight.position,
            size=record.bytes,
            element_type=helper.np_dtype_to_tensor_dtype(element),
            data_type=record.dtype,
            shape=record.shape,
            device=self._computing.device,
            owner=self._allocation,
            home=self._computing,
            ready=ready,
        )

    def close(self) -> None:
        """Free the memory: that of the device after the runs that are enqueued."""
        with suppress(DriverError, ExecutionError):  # of copies that nothing waits for
            self._queue.finish()
        self._queue.discard()
        self._staged.clear()
        self._allocation = None
        for address in self._kept.values():
            with suppress(DriverError):  # nothing waits for an answer
                self._driver.free_host(address)
        self._kept.clear()


def _view(address: int, size: int) -> memoryview:
    """Return page-locked memory as bytes that can be written."""
    return memoryview((ctypes.c_char * size).from_address(address)).cast("B")
