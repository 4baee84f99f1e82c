"""The memory of CPU devices: numpy arrays, and OrtValues for types that numpy lacks."""

from __future__ import annotations

import ctypes
import sys
import threading
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

import numpy as np

from onnxplace.machine.ort_values import (
    is_copyable_tensor,
    is_native_array,
    is_native_type,
    to_fed_value,
    to_ort_value,
    to_ort_value_if_possible,
    to_python,
)
from onnxplace.target.device_memory import DeviceMemory
from onnxplace.utils.ort import import_onnxruntime

# One memory arena for all sessions on the CPU.
#
# An arena keeps its peak memory. With an arena per session, a device with many segments would hold the sum of their
# peaks, instead of the memory needed at a time.

# Freed memory is returned after sessions with this many bytes of weights: it takes about 8 ms of CPU, and smaller
# sessions free little. The next ones take that without new pages, which are a seventh of opening a small bundle.
MIN_TRIMMED_BYTES = 8 << 20


# Of the threads that open sessions, one registers it.
_arena_lock = threading.Lock()


@cache
def register_shared_arena() -> None:
    """Create the arena of sessions with the entry `session.use_env_allocators`, limited to the machine's memory.

    It outlives its sessions, for the next ones.

    Without a limit, a request for more doubles the size of the arena's next block until it would hold that request. The
    next small one then reserves as much as the system gives, with a table of 3 % of it that is really used.
    """
    import psutil

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a container without statistics of its swap space
        limit = int(psutil.virtual_memory().total + psutil.swap_memory().total)
    runtime = import_onnxruntime()
    memory = runtime.OrtMemoryInfo("Cpu", runtime.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, runtime.OrtMemType.DEFAULT)
    runtime.create_and_register_allocator(memory, runtime.OrtArenaCfg({"max_mem": limit}))


def return_freed_memory(weights_bytes: int) -> None:
    """Return memory to the system that opening or closing sessions freed; only glibc needs it.

    ONNX Runtime rewrites weights of convolutions when it opens a session. glibc keeps up to one and a half times their
    size for later, for each thread that opened some.
    """
    if weights_bytes >= MIN_TRIMMED_BYTES and sys.platform == "linux":
        with suppress(OSError, AttributeError):  # another C library
            ctypes.CDLL(None).malloc_trim(0)


# Run a session whose inputs and outputs are tensors with ONNX Runtime's I/O binding.


def run_bound(
    session: Any, inputs: Mapping[str, Any], outputs: Mapping[str, tuple[str, int]], options: Any
) -> list[Any]:
    """Run a session and return its outputs as OrtValues, each of which keeps nothing else alive.

    Args:
        session: A session of ONNX Runtime.
        inputs: OrtValues by name.
        outputs: type and number of the device of each output, by name.
        options: ONNX Runtime's RunOptions.
    """
    binding = session.io_binding()
    for name, value in inputs.items():
        binding.bind_ortvalue_input(name, value)
    for name, (kind, index) in outputs.items():
        binding.bind_output(name, kind, index)
    session.run_with_iobinding(binding, options)
    return [detach_value(value) for value in binding.get_outputs()]


def detach_value(value: Any) -> Any:
    """Return an output of a binding without the binding, which holds all inputs and outputs of its run."""
    runtime = import_onnxruntime()
    vector = runtime.capi._pybind_state.OrtValueVector()
    vector.push_back(value._ortvalue)
    return runtime.OrtValue(vector[0])


class HostMemory(DeviceMemory):
    """Memory of the host.

    A received value is copied, as if devices had their own memories: links cost what they would cost, and a device
    reads from memory near its cores. Devices on the same cores share values.
    """

    def session_entries(self) -> dict[str, str]:
        """Let all sessions share one arena."""
        with _arena_lock:
            register_shared_arena()
        return {"session.use_env_allocators": "1"}

    def feed(self, array: Any, declared: str) -> Any:
        """Return an input; it shares the caller's memory during the request."""
        if is_native_type(declared) and type(array) is np.ndarray:
            return array if array.flags.c_contiguous else array.copy()
        return to_fed_value(array, declared)

    def run(
        self, session: Any, inputs: dict[str, Any], outputs: Sequence[str], leaving: Collection[str], options: Any
    ) -> list[Any]:
        """Run a session and wait for its outputs."""
        values = {name: to_ort_value_if_possible(value) for name, value in inputs.items()}
        return run_bound(session, values, dict.fromkeys(outputs, ("cpu", 0)), options)

    def send(self, value: Any, destination: DeviceMemory | None) -> Any:
        """Return the value itself: the destination copies it."""
        return value

    def receive(self, sent: Any, source: DeviceMemory) -> Any:
        """Return a copy, for other cores; values other than plain tensors are shared, as they never change."""
        if source.runs_ahead:  # the copy was enqueued when the value was sent
            return source.fetch(sent)
        return self.keep(sent) if set(self.cores).isdisjoint(source.cores) else sent

    def read(self, sent: Any) -> Any:
        """Return a value as numpy."""
        return to_python(sent)

    def keep(self, value: Any) -> Any:
        """Return a copy: sequences and optionals may refer to memory of feeds."""
        if not (is_native_array(value) or is_copyable_tensor(value)):
            return value
        copied = np.array(to_python(value))
        return copied if is_native_array(copied) else to_ort_value(copied)


class IsolatedMemory(HostMemory):
    """Memory of the host for a device whose sessions are in their own process, which copies their inputs."""

    _sessions: tuple[Any, ...] = ()

    def session_entries(self) -> dict[str, str]:
        """Return nothing: the shared arena is that of this process."""
        return {}

    def adopt(self, session: Any, name: str) -> None:
        """Note a session, to close it."""
        self._sessions += (session,)

    def close(self) -> None:
        """Close all sessions, to which the tracebacks of errors may still refer."""
        for session in self._sessions:
            session.close()

    def receive(self, sent: Any, source: DeviceMemory) -> Any:
        """Return the value itself: each run copies its inputs into the process."""
        return source.fetch(sent) if source.runs_ahead else sent

    def run(
        self, session: Any, inputs: dict[str, Any], outputs: Sequence[str], leaving: Collection[str], options: Any
    ) -> list[Any]:
        """Run a session and wait for its outputs."""
        results = session.run(outputs, {name: to_python(value) for name, value in inputs.items()}, options)
        return [item if is_native_array(item) else to_ort_value(item) for item in results]
