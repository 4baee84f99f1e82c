"""Values on their way from rank to rank: each has tags of its own, and is expected before it is sent.

A value is a header, which contains the bytes of a small value; those of a larger one are a message of their own. The
programs of a bundle say which values cross, so a rank receives headers before it needs the values. Memory for larger
values is taken when their header is here: buffers that are taken and freed in turn stay in the caches of the core. Ten
buffers of 1 MiB in turn made a hop take 530 us, one took 150 us.

Ranks follow requests in one order, and MPI keeps the order of messages with one tag. So a header whose request has
ended here belongs to one that was cancelled, and is dropped with its bytes.
"""

from __future__ import annotations

import math
import struct
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from onnxplace.bundle import Manifest
from onnxplace.feeds import numpy_type
from onnxplace.machine import is_native_type
from onnxplace.runtimes.ranks.data_planes import DeviceArray
from onnxplace.runtimes.ranks.frames import MAX_JOINED_BYTES
from onnxplace.runtimes.ranks.message_bus import MessageBus
from onnxplace.runtimes.ranks.values import flatten

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
    """How many bytes its header may contain."""


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
            name: Of a value that has a channel.
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
