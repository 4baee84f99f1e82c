"""How values of a device travel between ranks: through the host's memory, or read by MPI where they are.

A data plane turns a value of a device into what is sent, and what has arrived into a value. Another one, such as NCCL
for GPUs on both ends, would be a further class here; `choose_plane` is the only place that knows all of them.
"""

from __future__ import annotations

import ctypes
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import helper

from onnxplace.machine.ort_values import is_native_type
from onnxplace.runtimes.execution.device_streams import DeviceTensor, StreamValue
from onnxplace.runtimes.execution.segments import PlacedDevice
from onnxplace.target.device_memory import DeviceMemory

_LOOK_SECONDS = 1e-3

# Smaller values are sent together with their header, which is in the host's memory.
MIN_DEVICE_BYTES = 16 << 10
# Number of CUDA in MPICH's question which GPUs it supports.
_MPICH_CUDA = 0


class HostPlane:
    """The way of values between a device and MPI through the host's memory; GPUs copy by page-locked buffers there."""

    def __init__(self, memory: DeviceMemory) -> None:
        self._memory = memory

    def export(self, value: Any) -> Any:
        """Return a value, after its copy, as an array, an object for frames, or a DeviceArray.

        Nothing alters it while it is referred to.
        """
        return self._memory.read(self._memory.send(value, None))

    def accept(self, value: Any, declared: str) -> Any:
        """Return what has arrived in the host's memory as a value of the device.

        Args:
            value: An array, or an object of a frame. It is read before the request ends.
            declared: ONNX Runtime's name of its type.
        """
        return self._memory.feed(value, declared)


class DevicePlane(HostPlane):
    """MPI reads large values in the memory of the device; they still arrive in the host's memory."""

    def export(self, value: Any) -> Any:
        """Return a value in the memory of the device, after the run that computes it; small ones as HostPlane does."""
        tensor = value.tensor if isinstance(value, StreamValue) else None
        if tensor is None or tensor.size <= MIN_DEVICE_BYTES or not is_native_type(tensor.data_type):
            return super().export(value)
        tensor.ready.synchronize()
        return DeviceArray(tensor)


class DeviceArray:
    """A tensor in the memory of a device, as libraries read it: by its address. It keeps the memory.

    Args:
        tensor: It is complete.
    """

    def __init__(self, tensor: DeviceTensor) -> None:
        self._tensor = tensor
        self.shape, self.ndim, self.nbytes = tensor.shape, len(tensor.shape), tensor.size
        self.dtype: np.dtype[Any] = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.element_type))

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Return its bytes as a flat array, in version 3 of the protocol."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self._tensor.address, True), "version": 3}


def choose_plane(device: PlacedDevice) -> HostPlane:
    """Return the data plane of a device: HostPlane, unless MPI reads the memory of such devices."""
    return (DevicePlane if reads_device_memory(device.kind.name) else HostPlane)(device.memory)


def reads_device_memory(kind: str) -> bool:
    """Return whether MPI reads the memory of a kind of devices, as MPI itself says."""
    if kind != "cuda":
        return False
    from mpi4py import MPI

    return ask_for_cuda(ctypes.CDLL(MPI.__file__))


def ask_for_cuda(library: Any) -> bool:
    """Return whether a library of MPI, once it runs, says that it reads memory of CUDA devices.

    Open MPI and MPICH answer `MPIX_Query_cuda_support`, MPICH also `MPIX_GPU_query_support`. Others do not answer.
    """
    if (query := getattr(library, "MPIX_Query_cuda_support", None)) is not None:
        return bool(query() == 1)
    if (query := getattr(library, "MPIX_GPU_query_support", None)) is not None:
        answer = ctypes.c_int(0)
        return bool(query(_MPICH_CUDA, ctypes.byref(answer)) == 0 and answer.value == 1)
    return False


def wait_idly(request: Any) -> None:
    """Wait for ranks that may come minutes later, or measure meanwhile; waits of MPI would burn a core until then."""
    while not request.Test():
        time.sleep(_LOOK_SECONDS)


class MpiBodies:
    """The bytes of values that MPI carries from the memory of a device; used under the lock of the links.

    Args:
        communicator: A communicator of MPI, of which this makes one of its own.
    """

    def __init__(self, communicator: Any) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self.communicator, duplication = communicator.Idup()
        wait_idly(duplication)
        self._tags = itertools.cycle(range(self.communicator.Get_attr(MPI.TAG_UB)))
        self._moving: list[tuple[Any, Any, Callable[[], object]]] = []
        """Requests of MPI, what they send or receive, and what to do at their end."""
        self.has_arrived = False
        """Whether the last `progress` found something sent or received."""

    def send(self, rank: int, data: Any) -> int:
        """Begin to send bytes to a rank, and return the tag to receive them by."""
        tag = next(self._tags)
        self._moving.append((self.communicator.Isend([data, self._mpi.BYTE], rank, tag), data, lambda: None))
        return tag

    def receive(self, rank: int, tag: int, buffer: Any, then: Callable[[], object]) -> None:
        """Begin to receive bytes, and call `then` when they are here."""
        self._moving.append((self.communicator.Irecv([buffer, self._mpi.BYTE], rank, tag), buffer, then))

    @property
    def is_moving(self) -> bool:
        """Return whether bytes are on their way."""
        return bool(self._moving)

    def progress(self) -> None:
        """Let MPI work, and note what is through."""
        moving, self._moving, self.has_arrived = self._moving, [], False
        for item in moving:
            if item[0].Test():
                item[2]()
                self.has_arrived = True
            else:
                self._moving.append(item)
