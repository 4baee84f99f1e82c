"""What the memory of enqueued devices needs of a driver: streams, events, memory and asynchronous copies."""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from typing import Any


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
