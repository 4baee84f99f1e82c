"""A driver in plain Python whose streams are as late as they may be, and devices of it, which run on the CPU provider.

Work is executed when a wait demands it, or at a random time before that, in a random order that the streams allow.
Memory is poisoned when it is allocated and when it is freed, both in the order of the stream. So a missing wait, a
missing reference or a wrong order gives wrong numbers.

ONNX Runtime knows the shapes of outputs when a run is enqueued. To know them too, the driver keeps a second world in
which everything is executed at once: its shadow. That is also a legal order, so only shapes are taken from there.
"""

from __future__ import annotations

import ctypes
import random
import threading
import weakref
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import numpy as np
import onnxruntime

from onnxplace.runtimes.execution.device_streams import DeviceTensor, Driver, DriverError, RunOutput
from onnxplace.runtimes.execution.stream_memory import SessionPlaces, StreamMemory
from onnxplace.target import kind_table
from onnxplace.target.device_kinds import DeviceAddress, DeviceKind, Hardware

# Negative and far from what tests compute with, in every type.
POISON = 0xCB
# Freed memory is kept this long, so that a late read finds poison and not memory of something else.
MAX_QUARANTINE_BYTES = 64 << 20


class Buffer:
    """Memory in both worlds."""

    def __init__(self, size: int, device: int | None) -> None:
        self.size = size
        self.device = device
        """None for page-locked memory of the host."""
        self.is_free = False
        self.actual = np.full(max(size, 1), POISON, np.uint8)
        self.shadow = self.actual.copy()
        self.address = self.actual.ctypes.data

    def translate(self, address: int, is_shadow: bool) -> int:
        return self.shadow.ctypes.data + address - self.address if is_shadow else address

    def poison(self, is_shadow: bool) -> None:
        (self.shadow if is_shadow else self.actual)[:] = POISON


class Work:
    """A piece of work on a stream."""

    def __init__(self, stream: Stream, execute: Callable[[bool], None], after: Work | None) -> None:
        self.stream = stream
        self.execute = execute
        """Takes whether to do it in the shadow world."""
        self.after = after
        """Work of another stream that must be over."""
        self.is_over = False
        self.failure: DriverError | None = None


class Stream:
    def __init__(self, device: int) -> None:
        self.device = device
        self.pending: deque[Work] = deque()
        self.last: Work | None = None


class FakeDriver(Driver):
    """An asynchronous driver for any number of devices.

    Args:
        seed: Of all choices.
        has_peer_access: Whether devices read the memory of others.
        eagerness: Probability that a call executes one more piece of pending work.
        has_places: Whether sessions read some inputs and leave some outputs in the host's memory.
    """

    def __init__(
        self, seed: int = 0, has_peer_access: bool = True, eagerness: float = 0.3, has_places: bool = True
    ) -> None:
        self.has_places = has_places
        self.random = random.Random(seed)
        self.has_peer_access = has_peer_access
        self.eagerness = eagerness
        self.fail_at_run: int | None = None
        """Number of the run, counted from now, that fails when it is executed."""
        self.memory_limit: int | None = None
        """Bytes that `allocate` gives on each device."""
        self.counts: dict[str, int] = {}
        """Calls by method."""
        self.used_bytes: dict[int, int] = {}
        self.longest_queue = 0
        """The most work that was enqueued and not executed at a time."""
        self.violations: list[str] = []
        """Writes to memory that was freed, which may be in use for something else."""
        self.lock = threading.RLock()
        self._buffers: dict[int, Buffer] = {}
        self._addresses: list[int] = []
        self._freed: deque[Buffer] = deque()
        self._streams: list[Stream] = []
        self._is_executing = False
        self._depth = 0
        """How many calls of the thread that has the lock are under way."""
        self._failures: dict[Stream, DriverError] = {}
        """Of streams, which do not recover."""

    # -- the interface of drivers ----------------------------------------------------------------------

    def create_stream(self, device: int) -> Stream:
        with self.lock:
            self._streams.append(Stream(device))
            return self._streams[-1]

    def get_handle(self, stream: Stream) -> int:
        return id(stream)

    def record(self, stream: Stream) -> Work | None:
        with self._calling("record"):
            return stream.last

    def wait(self, stream: Stream, event: Work | None) -> None:
        with self._calling("wait"):
            self.push(stream, lambda is_shadow: None, event)

    def is_complete(self, event: Work | None) -> bool:
        with self._calling("is_complete"):
            return event is None or self._check(event)

    def synchronize(self, event: Work | None) -> None:
        with self._calling("synchronize"):
            while event is not None and not self._check(event):
                self._execute(self._find_needed(event) if self.random.random() < 0.7 else self._choose())

    def allocate(self, device: int, size: int, stream: Stream) -> int:
        with self._calling("allocate"):
            assert stream.device == device
            if self.memory_limit is not None and self.used_bytes.get(device, 0) + size > self.memory_limit:
                raise DriverError("allocate: out of memory")
            self.used_bytes[device] = self.used_bytes.get(device, 0) + size
            return self.add_buffer(size, device, stream).address

    def free(self, address: int, stream: Stream) -> None:
        with self._calling("free"):
            buffer = self.find(address)
            assert buffer.address == address
            self.used_bytes[stream.device] -= buffer.size
            self.free_buffer(buffer, stream)

    def allocate_host(self, size: int) -> int:
        with self._calling("allocate_host"):
            return self.add_buffer(size, None, None).address

    def free_host(self, address: int) -> None:
        with self._calling("free_host"):
            buffer = self.find(address)
            buffer.poison(is_shadow=True)
            buffer.poison(is_shadow=False)
            self._retire(buffer)

    def write_host(self, address: int, source: int, size: int) -> None:
        with self._calling("write_host"):
            buffer = self.find(address)
            assert buffer.device is None
            ctypes.memmove(address, source, size)
            ctypes.memmove(buffer.translate(address, True), source, size)

    def copy_to_device(self, destination: int, source: int, size: int, stream: Stream) -> None:
        with self._calling("copy_to_device"):
            assert self.find(source).device is None
            assert self.find(destination).device == stream.device
            self._push_copy(destination, source, size, stream)

    def copy_to_host(self, destination: int, source: int, size: int, stream: Stream) -> None:
        with self._calling("copy_to_host"):
            assert self.find(source).device == stream.device
            assert self.find(destination).device is None
            self._push_copy(destination, source, size, stream)

    def copy_to_peer(
        self, destination: int, to_device: int, source: int, from_device: int, size: int, stream: Stream
    ) -> None:
        with self._calling("copy_to_peer"):
            assert self.has_peer_access
            assert stream.device == to_device != from_device
            if size:
                assert self.find(source).device == from_device
                assert self.find(destination).device == to_device
                self._push_copy(destination, source, size, stream)

    def enable_peer_access(self, device: int, peer: int) -> bool:
        return self.has_peer_access

    # -- work ------------------------------------------------------------------------------------

    def push(self, stream: Stream, execute: Callable[[bool], None], after: Work | None = None) -> None:
        """Enqueue work, and do it in the shadow world."""
        with self.lock:
            execute(True)
            work = Work(stream, execute, after)
            stream.pending.append(work)  # before it can be waited for, in case an exception is set from outside
            stream.last = work
            self.longest_queue = max(self.longest_queue, sum(len(item.pending) for item in self._streams))

    @contextmanager
    def _calling(self, name: str) -> Iterator[None]:
        """Count a call, hold the lock, and execute some work."""
        with self.lock:
            is_nested = self._depth > 0  # by garbage collection during another call: what that iterates must not change
            self._depth += 1
            try:
                self.counts[name] = self.counts.get(name, 0) + 1
                while not is_nested and not self._is_executing and self.random.random() < self.eagerness:
                    if (work := self._choose()) is None:
                        break
                    self._execute(work)
                yield
            finally:
                self._depth -= 1

    def _choose(self) -> Work | None:
        """Return random work that may be executed now; None if there is none."""
        heads = [stream.pending[0] for stream in self._streams if stream.pending]
        ready = [work for work in heads if work.after is None or work.after.is_over]
        return self.random.choice(ready) if ready else None

    def _find_needed(self, work: Work) -> Work:
        """Return work that must be executed before `work`, or itself, and that may be executed now."""
        head = work.stream.pending[0]
        return head if head.after is None or head.after.is_over else self._find_needed(head.after)

    def _execute(self, work: Work | None) -> None:
        if work is None:
            return
        assert work.stream.pending.popleft() is work
        self._is_executing = True
        try:
            before = self._failures.get(work.stream)
            work.failure = before or (work.after.failure if work.after is not None else None)
            if work.failure is None:
                work.execute(False)
        except Exception as problem:  # noqa: BLE001 - a device reports all errors later
            work.failure = problem if isinstance(problem, DriverError) else DriverError(f"{type(problem)}: {problem}")
        except BaseException:  # set from outside, in a thread; a real device would go on
            work.execute(False)
            raise
        finally:
            self._is_executing = False
            work.is_over = True
            if work.failure is not None:
                self._failures[work.stream] = work.failure
            work.execute, work.after = lambda is_shadow: None, None

    @staticmethod
    def _check(work: Work) -> bool:
        if work.is_over and work.failure is not None:
            raise work.failure
        return work.is_over

    def _push_copy(self, destination: int, source: int, size: int, stream: Stream) -> None:
        to, origin = self.find(destination), self.find(source)
        assert destination + size <= to.address + max(to.size, 1)
        assert source + size <= origin.address + max(origin.size, 1)

        def copy(is_shadow: bool) -> None:
            if to.is_free and not is_shadow:
                self.violations.append(f"a copy of {size} bytes to memory that was freed, from device {origin.device}")
            ctypes.memmove(to.translate(destination, is_shadow), origin.translate(source, is_shadow), size)

        self.push(stream, copy)

    # -- memory ------------------------------------------------------------------------------------

    def add_buffer(self, size: int, device: int | None, stream: Stream | None) -> Buffer:
        """Return new memory, which holds garbage from a point of a stream on."""
        with self.lock:
            buffer = Buffer(size, device)
            self._buffers[buffer.address] = buffer
            self._addresses = sorted(self._buffers)
            if stream is not None:
                self.push(stream, buffer.poison)
            return buffer

    def free_buffer(self, buffer: Buffer, stream: Stream) -> None:
        """Let memory hold garbage from a point of a stream on."""

        def free(is_shadow: bool) -> None:
            buffer.poison(is_shadow)
            if not is_shadow:
                self._retire(buffer)

        with self.lock:
            self.push(stream, free)

    def find(self, address: int) -> Buffer:
        """Return the memory that contains an address."""
        with self.lock:
            position = bisect_right(self._addresses, address) - 1
            buffer = self._buffers[self._addresses[position]] if position >= 0 else None
            if buffer is None or address >= buffer.address + max(buffer.size, 1):
                raise DriverError(f"no memory at {address:#x}")
            return buffer

    def drain(self) -> None:
        """Execute all that is enqueued."""
        with self.lock:
            while (work := self._choose()) is not None:
                self._execute(work)

    def _retire(self, buffer: Buffer) -> None:
        if buffer.is_free:
            return
        buffer.is_free = True
        self._freed.append(buffer)
        while sum(item.size for item in list(self._freed)) > MAX_QUARANTINE_BYTES:
            del self._buffers[self._freed.popleft().address]
            self._addresses = sorted(self._buffers)


class ArenaBlock:
    """Memory of an output, as a session's arena would own it: dropped, it is reused by later work of the stream."""

    def __init__(self, driver: FakeDriver, buffer: Buffer, stream: Stream) -> None:
        self.driver, self.buffer, self.stream = driver, buffer, stream

    def __del__(self) -> None:
        self.driver.free_buffer(self.buffer, self.stream)


class FakeMemory(StreamMemory):
    """The memory of a device of the driver in use; runs are those of the CPU provider, executed late."""

    def open_driver(self) -> FakeDriver:
        assert _drivers, "use_fake_driver was not called"
        return _drivers[-1]

    def find_places(self, session: Any, name: str) -> SessionPlaces:
        """Let some inputs and outputs be on the host, as shapes are for CUDA's provider."""
        if not self.driver.has_places:
            return SessionPlaces(name)
        choose = self.driver.random.random
        inputs = {item.name for item in session.get_inputs() if choose() < 0.1}
        outputs = {item.name for item in session.get_outputs() if choose() < 0.1}
        return SessionPlaces(name, frozenset(inputs), frozenset(outputs))

    def enqueue(
        self, session: Any, inputs: Mapping[str, Any], outputs: Sequence[str], places: SessionPlaces, options: Any
    ) -> list[Any]:
        driver, stream = self.driver, self.computing.stream
        # Without references to the inputs: a driver knows addresses, and holds nothing.
        device = {
            name: (item.element_type, list(item.shape), item.address, driver.find(item.address))
            for name, item in inputs.items()
            if isinstance(item, DeviceTensor)
        }
        host = {name: weakref.ref(item) for name, item in inputs.items() if name not in device}

        def compute(is_shadow: bool) -> list[Any]:
            binding = session.io_binding()
            for name, (kind, shape, address, buffer) in device.items():
                assert buffer.device == self.device
                binding.bind_input(name, "cpu", 0, kind, shape, buffer.translate(address, is_shadow))
            for name, reference in host.items():
                item = reference()
                assert item is not None, "a host's value was freed before a run that reads it"
                binding.bind_ortvalue_input(name, item)
            for name in outputs:
                binding.bind_output(name, "cpu")
            session.run_with_iobinding(binding, options if is_shadow else None)
            return list(binding.get_outputs())

        predicted = compute(True)  # raises what ONNX Runtime refuses when it enqueues a run
        with driver.lock:
            results = [self._make_output(value, name in places.host_outputs) for name, value in zip(outputs, predicted)]
            targets = [item if isinstance(item, onnxruntime.OrtValue) else item.owner.buffer for item in results]
            fails = driver.fail_at_run == 0
            driver.fail_at_run = None if driver.fail_at_run is None else driver.fail_at_run - 1

            def run(is_shadow: bool) -> None:
                if fails and not is_shadow:
                    raise DriverError("an illegal memory access was encountered")
                for target, value in zip(targets, predicted if is_shadow else compute(False)):
                    size = value.tensor_size_in_bytes()
                    if isinstance(target, Buffer):
                        assert size == target.size, "it read an input that was not complete"
                        address = target.translate(target.address, is_shadow)
                        ctypes.memmove(address, value.data_ptr(), size)
                    elif not is_shadow:
                        ctypes.memmove(target.data_ptr(), value.data_ptr(), size)

            driver.push(stream, run)
        return results

    def _make_output(self, value: Any, is_on_host: bool) -> Any:
        size, shape, kind = value.tensor_size_in_bytes(), value.shape(), value.element_type()
        if is_on_host:
            output = onnxruntime.OrtValue.ortvalue_from_shape_and_type(shape, kind)
            ctypes.memset(output.data_ptr(), POISON, size)
            return output
        buffer = self.driver.add_buffer(size, self.device, self.computing.stream)
        owner = ArenaBlock(self.driver, buffer, self.computing.stream)
        return RunOutput(buffer.address, size, kind, value.data_type(), tuple(shape), owner)


class FakeGpu(DeviceKind):
    """A GPU that is the CPU provider behind a driver of streams."""

    name = "fake"
    title = "fake GPU"
    providers: ClassVar[Mapping[str, str]] = {"cpu": "CPUExecutionProvider"}
    memory = "tests.support.fake_streams:FakeMemory"
    is_divisible = True
    operations_per_second = 40e9
    memory_bytes_per_second = 8e9
    kernel_seconds = 2e-6
    link_latency_seconds = 45e-6
    link_bytes_per_second = 10e9

    def list_hardware(self) -> tuple[Hardware, ...]:
        return tuple(Hardware(index, "fake", 1 << 30, 1 << 30) for index in range(3))

    def find_problem(self, address: DeviceAddress) -> str | None:
        return None

    def list_providers(self, address: DeviceAddress) -> list[tuple[str, dict[str, str]]]:
        return []


_drivers: list[FakeDriver] = []


@contextmanager
def register_fake_kind() -> Iterator[None]:
    """Let devices `fake:N` exist."""
    before = dict(kind_table.BUILTIN_KINDS)
    kind_table.BUILTIN_KINDS["fake"] = f"{__name__}:FakeGpu"
    try:
        yield
    finally:
        if "fake" not in before:
            kind_table.BUILTIN_KINDS.pop("fake", None)
        kind_table.find_kind.cache_clear()


@contextmanager
def use_fake_driver(driver: FakeDriver) -> Iterator[FakeDriver]:
    """Let devices that are opened have this driver; at the end, nothing may have written to memory that was freed."""
    _drivers.append(driver)
    try:
        yield driver
        driver.drain()
        assert not driver.violations
    finally:
        _drivers.remove(driver)
