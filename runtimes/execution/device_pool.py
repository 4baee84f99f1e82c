"""A pool for weights that stream in the memory of a device with streams, such as a GPU.

Copies have their own queue, so that they run while earlier segments compute. Nothing waits for them here: a run
waits on the device for the copies of its weights, and a copy for the run that read what lay in its place.
"""

from __future__ import annotations

import ctypes
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from onnx import helper

from onnxplace.errors import ExecutionError
from onnxplace.feeds import numpy_type
from onnxplace.runtimes.execution.device_streams import (
    Allocation,
    DeviceTensor,
    Driver,
    DriverError,
    Mark,
    PinnedPool,
    StreamValue,
    WorkQueue,
)
from onnxplace.runtimes.execution.weight_loader import Block, Extent, PooledWeight, ReadPiece, WeightPool

# Page-locked buffers of a stream: one is filled from the disk while others are emptied into the device.
STAGING_BUFFERS = 4


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
            if len(self._staged) >= STAGING_BUFFERS:
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
