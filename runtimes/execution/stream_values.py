"""Values of enqueued devices: tensors that are complete after a mark, and copies to the host that are under way."""

from __future__ import annotations

import ctypes
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import helper

from onnxplace.machine import count_bytes, is_native_type
from onnxplace.ort import import_onnxruntime
from onnxplace.runtimes.execution.pinned_memory import PinnedBuffer
from onnxplace.runtimes.execution.stream_driver import DriverError
from onnxplace.runtimes.execution.work_queues import Mark, WorkQueue


class Allocation:
    """Memory of a device; it is freed in the order of a queue, after what was enqueued there."""

    def __init__(self, address: int, queue: WorkQueue) -> None:
        self.address = address
        self._queue = queue

    def __del__(self) -> None:
        with suppress(DriverError):  # a finalizer has no caller to tell
            self._queue.driver.free(self.address, self._queue.stream)


@dataclass(frozen=True)
class DeviceTensor:
    """A tensor in the memory of a device."""

    address: int
    size: int
    """Bytes."""
    element_type: int
    """ONNX's number."""
    data_type: str
    """ONNX Runtime's name, such as `tensor(float)`."""
    shape: tuple[int, ...]
    device: int
    """The driver's number of the device that holds it."""
    owner: Any
    """Keeps the memory: an Allocation, or an OrtValue with its session."""
    home: WorkQueue
    """Its memory may be reused by work that is enqueued here after its last reference is dropped."""
    ready: Mark
    """After which it is complete."""


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
        """Wait for the copy; return an array, or an OrtValue of a type that numpy lacks, with memory of its own."""
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
