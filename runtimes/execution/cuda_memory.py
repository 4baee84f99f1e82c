"""The memory of NVIDIA GPUs: ONNX Runtime enqueues runs on our stream, and we copy. Not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from typing import Any

from onnxplace.errors import ExecutionError
from onnxplace.runtimes.execution.device_streams import DeviceTensor, Driver, DriverError, RunOutput
from onnxplace.runtimes.execution.host_memory import detach_value
from onnxplace.runtimes.execution.stream_memory import SessionPlaces, StreamMemory

# CUDA's streams, events and copies, by NVIDIA's Python package cuda-bindings. Not run on a GPU yet.

# Freed memory that CUDA's pool of a device keeps for later copies, instead of returning it at the next wait.
KEPT_POOL_BYTES = 256 << 20


class CudaHandle:
    """A stream or an event of a GPU; it is destroyed, after its work, with its last reference."""

    def __init__(self, driver: CudaDriver, pointer: Any, destroy: str, device: int) -> None:
        self.pointer, self.device = pointer, device
        self._driver, self._destroy = driver, destroy

    def __del__(self) -> None:
        with suppress(DriverError):  # a finalizer has no caller to tell
            self._driver.call(self._destroy, self.pointer)


class CudaDriver(Driver):
    """CUDA's runtime API. Each method names the function of it that it calls, whose manual says what it guarantees."""

    def __init__(self) -> None:
        from cuda.bindings import driver, runtime

        self.runtime: Any = runtime
        self._uint64: Any = driver.cuuint64_t
        self._pools: dict[int, Any] = {}

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a function; return its result, None if it has none. Raises DriverError with CUDA's name of the error."""
        error, *results = getattr(self.runtime, name)(*arguments)
        self._check(name, error)
        return results[0] if results else None

    def create_stream(self, device: int) -> CudaHandle:
        """`cudaStreamCreateWithFlags`: a stream that does not wait for the default stream."""
        self._use(device)
        pointer = self.call("cudaStreamCreateWithFlags", self.runtime.cudaStreamNonBlocking)
        return CudaHandle(self, pointer, "cudaStreamDestroy", device)

    def get_handle(self, stream: CudaHandle) -> int:
        """Return the value of `cudaStream_t`."""
        return int(stream.pointer)

    def record(self, stream: CudaHandle) -> CudaHandle:
        """`cudaEventRecord`."""
        self._use(stream.device)
        # Without a time. Waiting threads sleep instead of spinning: devices' threads need the cores.
        flags = self.runtime.cudaEventDisableTiming | self.runtime.cudaEventBlockingSync
        pointer = self.call("cudaEventCreateWithFlags", flags)
        event = CudaHandle(self, pointer, "cudaEventDestroy", stream.device)
        self.call("cudaEventRecord", pointer, stream.pointer)
        return event

    def wait(self, stream: CudaHandle, event: CudaHandle) -> None:
        """`cudaStreamWaitEvent`."""
        self.call("cudaStreamWaitEvent", stream.pointer, event.pointer, 0)

    def is_complete(self, event: CudaHandle) -> bool:
        """`cudaEventQuery`."""
        (error,) = self.runtime.cudaEventQuery(event.pointer)
        if error == self.runtime.cudaError_t.cudaErrorNotReady:
            return False
        self._check("cudaEventQuery", error)
        return True

    def synchronize(self, event: CudaHandle) -> None:
        """`cudaEventSynchronize`, which releases the GIL."""
        self.call("cudaEventSynchronize", event.pointer)

    def allocate(self, device: int, size: int, stream: CudaHandle) -> int:
        """`cudaMallocAsync`, from the device's default pool."""
        self._find_pool(device)
        return int(self.call("cudaMallocAsync", size, stream.pointer))

    def free(self, address: int, stream: CudaHandle) -> None:
        """`cudaFreeAsync`."""
        self.call("cudaFreeAsync", address, stream.pointer)

    def allocate_host(self, size: int) -> int:
        """`cudaHostAlloc`, for all devices."""
        return int(self.call("cudaHostAlloc", size, self.runtime.cudaHostAllocPortable))

    def free_host(self, address: int) -> None:
        """`cudaFreeHost`."""
        self.call("cudaFreeHost", address)

    def copy_to_device(self, destination: int, source: int, size: int, stream: CudaHandle) -> None:
        """`cudaMemcpyAsync`."""
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.call("cudaMemcpyAsync", destination, source, size, kind, stream.pointer)

    def copy_to_host(self, destination: int, source: int, size: int, stream: CudaHandle) -> None:
        """`cudaMemcpyAsync`."""
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.call("cudaMemcpyAsync", destination, source, size, kind, stream.pointer)

    def copy_to_peer(
        self, destination: int, to_device: int, source: int, from_device: int, size: int, stream: CudaHandle
    ) -> None:
        """`cudaMemcpyPeerAsync`."""
        if size:
            self.call("cudaMemcpyPeerAsync", destination, to_device, source, from_device, size, stream.pointer)

    def enable_peer_access(self, device: int, peer: int) -> bool:
        """`cudaDeviceEnablePeerAccess`, and `cudaMemPoolSetAccess` for the memory of `cudaMallocAsync`."""
        if not self.call("cudaDeviceCanAccessPeer", device, peer):
            return False
        self._use(device)
        (error,) = self.runtime.cudaDeviceEnablePeerAccess(peer, 0)
        enabled = (self.runtime.cudaError_t.cudaSuccess, self.runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled)
        if error not in enabled:
            return False
        if error != self.runtime.cudaError_t.cudaSuccess:
            self.runtime.cudaGetLastError()  # or the next call of another library would report it
        access = self.runtime.cudaMemAccessDesc()
        access.location.type = self.runtime.cudaMemLocationType.cudaMemLocationTypeDevice
        access.location.id = device
        access.flags = self.runtime.cudaMemAccessFlags.cudaMemAccessFlagsProtReadWrite
        self.call("cudaMemPoolSetAccess", self._find_pool(peer), [access], 1)
        return True

    def _check(self, name: str, error: Any) -> None:
        """Raise DriverError unless a function succeeded."""
        if error != self.runtime.cudaError_t.cudaSuccess:
            _, text = self.runtime.cudaGetErrorString(error)
            raise DriverError(f"{name}: {error.name}: {text.decode()}")

    def _use(self, device: int) -> None:
        """`cudaSetDevice`: for this thread, where ONNX Runtime may have set another one since."""
        self.call("cudaSetDevice", device)

    def _find_pool(self, device: int) -> Any:
        """`cudaDeviceGetDefaultMemPool`; on first use, let it keep freed memory."""
        if device not in self._pools:
            supported = self.runtime.cudaDeviceAttr.cudaDevAttrMemoryPoolsSupported
            if not self.call("cudaDeviceGetAttribute", supported, device):
                message = f"GPU {device} has no memory pools, which copies between devices need"
                hint = "use another GPU, or a driver that offers them: some virtual GPUs do not"
                raise ExecutionError("R001", message, where=f"cuda:{device}", hint=hint)
            pool = self.call("cudaDeviceGetDefaultMemPool", device)
            threshold = self.runtime.cudaMemPoolAttr.cudaMemPoolAttrReleaseThreshold
            self.call("cudaMemPoolSetAttribute", pool, threshold, self._uint64(KEPT_POOL_BYTES))
            self._pools[device] = pool
        return self._pools[device]


@cache
def open_cuda_driver() -> CudaDriver:
    """Return the driver of this process.

    Raises ExecutionError without cuda-bindings.
    """
    try:
        return CudaDriver()
    except ImportError as problem:
        message = f"expected NVIDIA's Python package cuda-bindings, which copies values of GPUs: {problem}"
        raise ExecutionError("R001", message, hint="pip install cuda-bindings, or 'onnxplace[gpu]'") from None


class CudaMemory(StreamMemory):
    """The memory of a GPU, or of a logical device on it, with ONNX Runtime's CUDA or TensorRT provider."""

    binding_type = "cuda"
    """ONNX Runtime's name of the place where tensors are bound."""

    def open_driver(self) -> Driver:
        """Return CUDA, one for all GPUs of the process."""
        return open_cuda_driver()

    def provider_options(self) -> dict[str, str]:
        """Let all sessions of the device compute on one stream, so that they follow one another without waiting."""
        return {"user_compute_stream": str(self.driver.get_handle(self.computing.stream))}

    def run_entries(self) -> dict[str, str]:
        """Let runs return once they are enqueued."""
        return {"disable_synchronize_execution_providers": "1"}

    def find_places(self, session: Any, name: str) -> SessionPlaces:
        """Ask ONNX Runtime which inputs and outputs nodes on the host read and compute, such as shapes."""
        return SessionPlaces(
            name,
            _list_host_names(session.get_inputs(), session.get_input_memory_infos()),
            _list_host_names(session.get_outputs(), session.get_output_memory_infos()),
        )

    def enqueue(
        self, session: Any, inputs: Mapping[str, Any], outputs: Sequence[str], places: SessionPlaces, options: Any
    ) -> list[Any]:
        """Enqueue a run with ONNX Runtime's I/O binding; it allocates the outputs, whose shapes it knows then."""
        binding = session.io_binding()
        for name, value in inputs.items():
            if isinstance(value, DeviceTensor):
                place = (self.binding_type, self.device, value.element_type, list(value.shape), value.address)
                binding.bind_input(name, *place)
            else:
                binding.bind_ortvalue_input(name, value)
        for name in outputs:
            binding.bind_output(
                name, *(("cpu", 0) if name in places.host_outputs else (self.binding_type, self.device))
            )
        session.run_with_iobinding(binding, options)
        values = [detach_value(value) for value in binding.get_outputs()]
        return [
            value if name in places.host_outputs else _describe_output(value, session)
            for name, value in zip(outputs, values)
        ]


def _describe_output(value: Any, session: Any) -> RunOutput:
    size = value.tensor_size_in_bytes()
    return RunOutput(
        address=value.data_ptr() if size else 0,
        size=size,
        element_type=value.element_type(),
        data_type=value.data_type(),
        shape=tuple(value.shape()),
        # The session's arena owns the memory, so the session must not end before.
        owner=(value, session),
    )


def _list_host_names(items: Sequence[Any], memory_infos: Sequence[Any]) -> frozenset[str]:
    """Return the names of inputs or outputs in the host's memory: `Cpu`, or page-locked as `CudaPinned`."""
    names = [info.name.lower() for info in memory_infos]
    return frozenset(item.name for item, name in zip(items, names) if name.startswith("cpu") or "pinned" in name)
