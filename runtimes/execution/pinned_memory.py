"""Page-locked memory of the host, kept for further copies."""

from __future__ import annotations

import threading
from contextlib import suppress

from onnxplace.runtimes.execution.stream_driver import Driver, DriverError

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
