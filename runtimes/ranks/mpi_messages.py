"""Messages between ranks by MPI: frames, heartbeats, and the values of programs.

Frames and heartbeats may come at any time, and say themselves what they are: each look takes all that are here. Values
come when the program says so, with a tag and a buffer of their own. They have a communicator of their own, so that no
look takes them for frames. Both are seen only when a thread looks: MPI has no thread of its own.

One lock guards all calls of MPI, so any thread may send and look for messages. Sends return at once; their buffers are
kept until they are through. Nothing waits inside MPI: its own waits would burn a core.
"""

from __future__ import annotations

import ctypes
import math
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np
from onnx import helper

from onnxplace.bundle import Manifest
from onnxplace.devices import DeviceMemory
from onnxplace.feeds import numpy_type
from onnxplace.machine import is_native_array, is_native_type
from onnxplace.runtimes.execution import DeviceTensor, PlacedDevice, StreamValue
from onnxplace.runtimes.ranks.frames import MAX_JOINED_BYTES, Frame, PackedFrame, flatten

# Tags of messages; those of values have a communicator of their own.
_FRAME, _HEARTBEAT = 1, 2
# A time that a thread was held up counts as at most this much silence of others.
MAX_STEP_SECONDS = 0.1
_LOOK_SECONDS = 1e-3
# Shorter messages leave at once; longer ones may wait for looks of both ends.
_EAGER_BYTES = 16 << 10


class MessageBus:
    """The messages of one rank.

    Args:
        communicator: A communicator of MPI.
        on_frame: Called with the source's rank and a frame, in the order of sending, by any thread, under the lock.
    """

    def __init__(self, communicator: Any, on_frame: Callable[[int, PackedFrame], None]) -> None:
        from mpi4py import MPI

        self._mpi = MPI
        self._communicator, self._value_communicator = _duplicate(communicator), _duplicate(communicator)
        self.rank: int = self._communicator.rank
        self.size: int = self._communicator.size
        self.max_tag: int = self._value_communicator.Get_attr(MPI.TAG_UB)
        self._on_frame = on_frame
        self.lock = threading.RLock()
        """Guards all calls of MPI."""
        self._status = MPI.Status()
        self._sending: deque[tuple[Any, Any, bool]] = deque()
        """Sends that are not known to be through: the request of MPI, what is sent, and whether it is long."""
        self._long_sends = 0
        self._arrivals: dict[int, deque[tuple[Any, Any]]] = {rank: deque() for rank in range(self.size)}
        """Frames on their way, by sender: their memory and the request of MPI."""
        self._open_arrivals = 0
        self.is_unattended = threading.Event()
        """Set when the thread that looks for messages begins to compute while some are on their way."""
        self.silent_seconds = [0.0] * self.size
        """Time since the last message of each rank."""
        self._aged = time.monotonic()

    # -- sending ------------------------------------------------------------------------------------

    def send(self, rank: int, frame: Frame | PackedFrame) -> None:
        """Send a frame to another rank."""
        packed = frame.pack() if isinstance(frame, Frame) else frame
        with self.lock:
            self._send(rank, _FRAME, packed.join())

    def send_value(self, rank: int, tag: int, data: Any) -> None:
        """Begin to send bytes of a value; they must not be altered any more."""
        with self.lock:
            self._keep(self._value_communicator.Isend([data, self._mpi.BYTE], rank, tag), data)

    def receive_value(self, rank: int, tag: int, buffer: Any) -> Any:
        """Begin to receive bytes of a value, and return the request of MPI; under the lock, as all calls of it."""
        return self._value_communicator.Irecv([buffer, self._mpi.BYTE], rank, tag)

    def send_heartbeat(self, rank: int) -> None:
        """Tell a rank that this one is alive."""
        with self.lock:
            self._send(rank, _HEARTBEAT, np.empty(0, np.uint8))

    def _send(self, rank: int, tag: int, data: Any) -> None:
        self._keep(self._communicator.Isend([data, self._mpi.BYTE], rank, tag), data)

    def _keep(self, request: Any, data: Any) -> None:
        """Keep what is sent until it is through."""
        is_long = (data.nbytes if hasattr(data, "nbytes") else len(data)) > _EAGER_BYTES
        self._long_sends += is_long
        self._sending.append((request, data, is_long))

    @property
    def is_sending(self) -> bool:
        """Return whether messages are not through."""
        return bool(self._sending)

    @property
    def is_moving(self) -> bool:
        """Return whether long messages are on their way, from here or to here."""
        return self._long_sends > 0 or self._open_arrivals > 0

    # -- receiving ------------------------------------------------------------------------------------

    def progress(self) -> bool:
        """Look for messages, and let MPI work; return whether something arrived.

        Does nothing if another thread does it.
        """
        if not self.lock.acquire(blocking=False):
            return False
        try:
            # Drop what is sent, in order; a send that is through behind a slow one is dropped later.
            while self._sending and self._sending[0][0].Test():
                self._long_sends -= self._sending.popleft()[2]
            arrived = False
            while (message := self._communicator.Improbe(status=self._status)) is not None:
                arrived = True
                self._accept(message, self._status.source, self._status.tag, self._status.Get_count(self._mpi.BYTE))
            if self._open_arrivals:
                self._hand_over()
            return arrived
        finally:
            self.lock.release()

    def _hand_over(self) -> None:
        """Hand over the frames that are here, in the order of sending of each rank."""
        for source, arrivals in self._arrivals.items():
            while arrivals and arrivals[0][1].Test():
                self._open_arrivals -= 1
                self._on_frame(source, PackedFrame.split(arrivals.popleft()[0]))

    def add_silence(self) -> None:
        """Add the time since the last call to the silence of all ranks."""
        now = time.monotonic()
        elapsed, self._aged = min(now - self._aged, MAX_STEP_SECONDS), now
        for rank in range(self.size):
            self.silent_seconds[rank] += elapsed

    def _accept(self, message: Any, source: int, tag: int, size: int) -> None:
        """Begin to receive a message: a frame, or a heartbeat, whose arrival is all that it says."""
        self.silent_seconds[source] = 0.0
        data = np.empty(size, np.uint8)
        request = message.Irecv([data, self._mpi.BYTE])
        if tag == _FRAME:
            self._arrivals[source].append((data, request))
            self._open_arrivals += 1
            return
        while not request.Test():  # it is empty, and here already
            pass


def _duplicate(communicator: Any) -> Any:
    """Return a duplicate; the other ranks may come minutes later, and waits of MPI would burn a core until then."""
    duplicate, duplication = communicator.Idup()
    while not duplication.Test():
        time.sleep(_LOOK_SECONDS)
    return duplicate


# How values of a device travel between ranks: through the host's memory, or read by MPI where they are.
#
# A data plane turns a value of a device into what MPI sends, and what has arrived into a value. Another one, such as
# NCCL for GPUs on both ends, would be a further class here; `choose_plane` is the only place that knows all of them.

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
        return value if is_native_array(value) else self._memory.read(self._memory.send(value, None))

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


# Values on their way from rank to rank: each has tags of its own, and is expected before it is sent.
#
# A value is a header, which contains the bytes of a small value; those of a larger one are a message of their own. The
# programs of a bundle say which values cross, so a rank receives headers before it needs the values. Memory for larger
# values is taken when their header is here: buffers that are taken and freed in turn stay in the caches of the core.
# Ten buffers of 1 MiB in turn made a hop take 530 us, one took 150 us.
#
# Ranks follow requests in one order, and MPI keeps the order of messages with one tag. So a header whose request has
# ended here belongs to one that was cancelled, and is dropped with its bytes.

# Values that a rank expects at once.
EXPECTED_VALUES = 2
# Each value has a tag for headers, and one for bytes.
_TAGS = 2
# Number of the request in the order of the driver, number of dimensions, and whether the bytes are in this message.
_HEADER = struct.Struct("<qii")
_MAX_DIMENSIONS = 64
_MAX_HEADER_BYTES = _HEADER.size + 8 * _MAX_DIMENSIONS


@dataclass(frozen=True)
class _Declaration:
    """A value that crosses, as the manifest says."""

    tag: int
    dtype: np.dtype[Any]
    joined_bytes: int
    """Number of bytes that its header may contain."""


class Channel:
    """A value of another rank that is expected; used under the lock of the bus.

    Args:
        bus: The messages of this rank.
        source: The other rank.
        declaration: The value.
    """

    def __init__(self, bus: MessageBus, source: int, declaration: _Declaration) -> None:
        self._bus, self._source, self._declaration = bus, source, declaration
        self._header: Any = None
        self._header_request: Any = None
        self._body_request: Any = None
        self._serial = -1
        self._value: Any = None

    def expect(self) -> None:
        """Begin to receive the next value, unless that has begun."""
        if self._header is None:
            self._header = np.empty(_MAX_HEADER_BYTES + self._declaration.joined_bytes, np.uint8)
            self._header_request = self._bus.receive_value(self._source, self._declaration.tag, self._header)

    def look(self, serial: int) -> bool:
        """Return whether the value of a request is here; what was sent for earlier requests is dropped."""
        while self._has_arrived():
            # Of a later request: this one was cancelled by its sender, whose value will not come.
            if self._serial >= serial:
                return self._serial == serial
            self._reset()
            self.expect()
        return False

    @property
    def is_arriving(self) -> bool:
        """Return whether a value is on its way."""
        return self._body_request is not None

    def take(self) -> Any:
        """Return the value that is here."""
        value = self._value
        self._reset()
        return value

    def close(self) -> None:
        """Receive nothing any more."""
        for request in (self._header_request, self._body_request):
            if request is not None:
                request.Cancel()
                request.Free()
        self._reset()

    def _has_arrived(self) -> bool:
        """Return whether a value is here, of whatever request."""
        if self._header_request is not None:
            if not self._header_request.Test():
                return False
            self._header_request = None
            self._read_header()
        if self._body_request is not None:
            if not self._body_request.Test():
                return False
            self._body_request = None
        return self._value is not None

    def _read_header(self) -> None:
        """Read the header, and begin to receive the bytes if it does not contain them."""
        self._serial, rank, is_joined = _HEADER.unpack_from(self._header)
        shape = struct.unpack_from(f"<{rank}q", self._header, _HEADER.size)
        dtype = self._declaration.dtype
        if is_joined:
            self._value = np.ndarray(shape, dtype, self._header, _HEADER.size + 8 * rank)
        else:
            self._value = np.empty(shape, dtype)
            body = flatten(self._value)
            self._body_request = self._bus.receive_value(self._source, self._declaration.tag + 1, body)

    def _reset(self) -> None:
        self._value = self._header = self._header_request = self._body_request = None
        self._serial = -1


class ValueChannels:
    """The values that a rank sends and receives.

    Args:
        bus: The messages of this rank.
        manifest: That of the bundle.
    """

    def __init__(self, bus: MessageBus, manifest: Manifest) -> None:
        self._bus = bus
        self._declarations = _declare_values(manifest, bus.max_tag)
        self._channels: dict[tuple[str, int], Channel] = {}
        self._expected: deque[Channel] = deque()

    def __contains__(self, name: str) -> bool:
        """Return whether a value is sent by a channel; others need frames."""
        return name in self._declarations

    def send(self, rank: int, serial: int, name: str, array: Any) -> None:
        """Begin to send an array.

        Args:
            rank: The receiver.
            serial: Number of the request.
            name: Name of a value that has a channel.
            array: It must not be altered any more; one in the memory of a device has more bytes than a header may.
        """
        declaration = self._declarations[name]
        is_joined = array.nbytes <= declaration.joined_bytes
        header = _HEADER.pack(serial, array.ndim, is_joined) + struct.pack(f"<{array.ndim}q", *array.shape)
        if is_joined:
            self._bus.send_value(rank, declaration.tag, header + array.tobytes())
        else:
            self._bus.send_value(rank, declaration.tag, header)
            self._bus.send_value(rank, declaration.tag + 1, array if isinstance(array, DeviceArray) else flatten(array))

    def expect(self, values: Iterable[tuple[str, int]]) -> None:
        """Set the values that a request receives, in their order, and begin to receive the first of them.

        Args:
            values: Names and ranks.
        """
        channels = deque[Channel]()
        for value in values:
            if value[0] not in self._declarations:
                continue
            if (channel := self._channels.get(value)) is None:
                channel = Channel(self._bus, value[1], self._declarations[value[0]])
                self._channels[value] = channel
            channels.append(channel)
        with self._bus.lock:
            self._expected = channels
            self._expect_next()

    def _expect_next(self) -> None:
        """Begin to receive the next values."""
        for channel in islice(self._expected, EXPECTED_VALUES):
            channel.expect()

    def look(self, serial: int) -> None:
        """Receive what a request expects next, so that it moves while the request computes; for any thread."""
        with self._bus.lock:
            for channel in islice(self._expected, EXPECTED_VALUES):
                channel.look(serial)

    @property
    def is_arriving(self) -> bool:
        """Return whether one of the values that a request expects next is on its way."""
        return any(channel.is_arriving for channel in islice(self._expected, EXPECTED_VALUES))

    def find(self, name: str, rank: int) -> Channel:
        """Return the channel of the next value that a request receives, and begin to receive the one after."""
        channel = self._channels[name, rank]
        with self._bus.lock:
            assert self._expected[0] is channel, "values are received in the order of the program"
            self._expect_next()
            self._expected.popleft()
        return channel

    def close(self) -> None:
        """Receive nothing any more."""
        with self._bus.lock:
            for channel in self._channels.values():
                channel.close()
        self._channels.clear()


def _declare_values(manifest: Manifest, max_tag: int) -> dict[str, _Declaration]:
    """Return the values that channels can send, by name: tensors of types that numpy has, as far as there are tags."""
    sent = sorted({step.value for program in manifest.programs.values() for step in program if step.op == "send"})
    declarations = {}
    for tag, name in zip(range(0, max_tag - _TAGS, _TAGS), sent):
        record = manifest.values[name]
        if is_native_type(record.dtype) and (dtype := numpy_type(record.dtype)) is not None:
            declarations[name] = _Declaration(tag, dtype, _find_joined_bytes(record.shape, dtype))
    return declarations


def _find_joined_bytes(shape: Sequence[int | str | None] | None, dtype: np.dtype[Any]) -> int:
    """Return how many bytes of a value its header may contain: all those of a value that is small for sure."""
    if shape is None or not all(isinstance(size, int) for size in shape):
        return MAX_JOINED_BYTES
    size = math.prod(int(size or 0) for size in shape) * dtype.itemsize
    return size if size <= MAX_JOINED_BYTES else 0
