"""CUDA without a GPU: the calls of its driver against NVIDIA's package, and its binding with the CPU provider.

Nothing here shows that it works on a GPU. It shows that each function exists, takes these arguments, and gets what the
ones before it returned.
"""

import ctypes
import inspect
import re
import textwrap

import numpy as np
import onnxruntime
import pytest

import onnxplace
from onnxplace.runtimes.execution import cuda_memory
from onnxplace.runtimes.execution.cuda_memory import CudaDriver, CudaMemory
from onnxplace.runtimes.execution.device_streams import Driver, DriverError
from onnxplace.runtimes.execution.stream_memory import StreamMemory
from onnxplace.runtimes.onnxruntime import OnnxRuntime
from onnxplace.target import kind_table
from onnxplace.target.cuda import Cuda
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.testing.runtime_contract import check_runtime
from tests.support.fake_streams import FakeGpu

# ------------------------------------------------------------------------------------------------------- the driver


class RecordedRuntime:
    """NVIDIA's module with functions that only check and note their arguments."""

    def __init__(self, module):
        self.module = module
        self.calls = []
        self.errors = {}
        """Errors by function."""

    def __getattr__(self, name):
        real = getattr(self.module, name)
        # `cudaGetErrorString` needs no driver.
        if not callable(real) or inspect.isclass(real) or name == "cudaGetErrorString":
            return real

        def call(*arguments):
            declared = re.match(rf"{name}\((.*?)\)", real.__doc__.splitlines()[0])[1]
            parameters = [text for text in re.sub(r"\[[^\]]*\]", "", declared).split(",") if text.strip()]
            assert len(arguments) == len(parameters), f"{name}({declared}) got {arguments}"
            self.calls.append((name, arguments))
            if name in self.errors:
                return (self.errors[name],)
            success = self.module.cudaError_t.cudaSuccess
            return (success, 1000 + len(self.calls)) if _returns_something(real) else (success,)

        return call


def _returns_something(function):
    """Return whether a function returns more than an error, by its documentation."""
    returned = re.search(r"Returns\n *-+\n(.*?)(See Also|$)", function.__doc__, re.DOTALL)[1]
    return len(re.findall(r"^\S", textwrap.dedent(returned), re.MULTILINE)) > 1


@pytest.fixture
def driver():
    runtime = pytest.importorskip("cuda.bindings.runtime", exc_type=ImportError)
    driver = CudaDriver()
    driver.runtime = RecordedRuntime(runtime)
    return driver


def list_calls(driver):
    return [name for name, _ in driver.runtime.calls]


def test_streams_and_events_are_created_used_and_destroyed(driver):
    first, second = driver.create_stream(0), driver.create_stream(1)
    assert driver.get_handle(first) == first.pointer
    event = driver.record(first)
    driver.wait(second, event)
    assert driver.is_complete(event)
    driver.synchronize(event)
    pointers = first.pointer, event.pointer
    driver.runtime.calls.clear()
    del first, event
    assert driver.runtime.calls == [("cudaStreamDestroy", pointers[:1]), ("cudaEventDestroy", pointers[1:])]


def test_events_and_streams_are_made_on_their_device(driver):
    stream = driver.create_stream(3)
    driver.runtime.calls.clear()
    event = driver.record(stream)
    assert driver.runtime.calls[0] == ("cudaSetDevice", (3,))
    assert driver.runtime.calls[-1] == ("cudaEventRecord", (event.pointer, stream.pointer))


def test_memory_and_copies_use_the_stream(driver):
    stream = driver.create_stream(0)
    address, pinned = driver.allocate(0, 100, stream), driver.allocate_host(100)
    kinds = driver.runtime.cudaMemcpyKind
    driver.runtime.calls.clear()
    driver.copy_to_device(address, pinned, 100, stream)
    driver.copy_to_host(pinned, address, 100, stream)
    driver.copy_to_peer(7, 1, address, 0, 100, stream)
    driver.copy_to_peer(7, 1, address, 0, 0, stream)
    driver.free(address, stream)
    driver.free_host(pinned)
    assert driver.runtime.calls == [
        ("cudaMemcpyAsync", (address, pinned, 100, kinds.cudaMemcpyHostToDevice, stream.pointer)),
        ("cudaMemcpyAsync", (pinned, address, 100, kinds.cudaMemcpyDeviceToHost, stream.pointer)),
        ("cudaMemcpyPeerAsync", (7, 1, address, 0, 100, stream.pointer)),
        ("cudaFreeAsync", (address, stream.pointer)),
        ("cudaFreeHost", (pinned,)),
    ]


def test_peer_access_includes_the_memory_of_pools(driver):
    assert driver.enable_peer_access(0, 1)
    (access,) = next(arguments[1] for name, arguments in driver.runtime.calls if name == "cudaMemPoolSetAccess")
    assert access.location.id == 0
    driver.runtime.errors["cudaDeviceEnablePeerAccess"] = driver.runtime.cudaError_t.cudaErrorPeerAccessAlreadyEnabled
    assert driver.enable_peer_access(0, 1)
    driver.runtime.errors["cudaDeviceEnablePeerAccess"] = driver.runtime.cudaError_t.cudaErrorPeerAccessUnsupported
    assert not driver.enable_peer_access(0, 1)


def test_errors_have_cudas_name_and_text(driver):
    stream = driver.create_stream(0)
    event = driver.record(stream)
    driver.runtime.errors["cudaEventSynchronize"] = driver.runtime.cudaError_t.cudaErrorIllegalAddress
    with pytest.raises(DriverError, match="cudaErrorIllegalAddress: an illegal memory access was encountered"):
        driver.synchronize(event)
    driver.runtime.errors["cudaEventQuery"] = driver.runtime.cudaError_t.cudaErrorNotReady
    assert not driver.is_complete(event)
    driver.runtime.errors["cudaEventQuery"] = driver.runtime.cudaError_t.cudaErrorIllegalAddress
    with pytest.raises(DriverError, match="cudaErrorIllegalAddress"):
        driver.is_complete(event)


def test_a_machine_without_a_driver_gets_cudas_reason():
    runtime = pytest.importorskip("cuda.bindings.runtime", exc_type=ImportError)
    if runtime.cudaGetDeviceCount()[0] == runtime.cudaError_t.cudaSuccess:
        pytest.skip("there is a GPU")
    with pytest.raises(DriverError, match=r"cudaSetDevice: cudaError(InsufficientDriver|NoDevice)"):
        CudaDriver().create_stream(0)


def test_without_the_package_the_error_says_what_to_install(monkeypatch):
    def refuse(self):
        raise ImportError("No module named 'cuda'")

    monkeypatch.setattr(CudaDriver, "__init__", refuse)
    cuda_memory.open_cuda_driver.cache_clear()
    with pytest.raises(onnxplace.ExecutionError, match=r"cuda-bindings.*\n.*onnxplace\[gpu\]"):
        CudaMemory(DeviceAddress.of("cuda:0"), ())


def test_the_kind_names_this_memory():
    assert kind_table.import_memory(Cuda()) is CudaMemory


# ------------------------------------------------------------------------------------------------------- the binding


class DirectDriver(Driver):
    """A driver that does everything at once, in the host's memory."""

    def __init__(self):
        self.memory = {}

    def create_stream(self, device):
        return object()

    def get_handle(self, stream):
        return id(stream)

    def record(self, stream):
        return None

    def wait(self, stream, event):
        pass

    def is_complete(self, event):
        return True

    def synchronize(self, event):
        pass

    def allocate(self, device, size, stream):
        return self.allocate_host(size)

    def free(self, address, stream):
        self.free_host(address)

    def allocate_host(self, size):
        array = np.empty(size, np.uint8)
        self.memory[array.ctypes.data] = array
        return array.ctypes.data

    def free_host(self, address):
        del self.memory[address]

    def copy_to_device(self, destination, source, size, stream):
        ctypes.memmove(destination, source, size)

    copy_to_host = copy_to_device

    def copy_to_peer(self, destination, to_device, source, from_device, size, stream):
        ctypes.memmove(destination, source, size)

    def enable_peer_access(self, device, peer):
        return True


class DirectMemory(CudaMemory):
    """CUDA's memory whose tensors are bound to the CPU provider."""

    binding_type = "cpu"

    def open_driver(self):
        return _DRIVER

    def find_places(self, session, name):
        places = super().find_places(session, name)
        assert places.host_inputs == {item.name for item in session.get_inputs()}, "the CPU provider's are on the host"
        return type(places)(name)


_DRIVER = DirectDriver()


class DirectGpu(FakeGpu):
    name = "direct"
    memory = f"{__name__}:DirectMemory"


@pytest.fixture
def direct_kind(monkeypatch):
    import_path = kind_table.import_by_path
    own = {"direct kind": DirectGpu, DirectGpu.memory: DirectMemory}
    monkeypatch.setitem(kind_table.BUILTIN_KINDS, "direct", "direct kind")
    monkeypatch.setattr(kind_table, "import_by_path", lambda path: own[path] if path in own else import_path(path))
    yield
    kind_table.find_kind.cache_clear()


@pytest.mark.parametrize("devices", [("direct:0", "direct:1"), ("direct:0", "direct:0/1")], ids=",".join)
def test_bound_runs_satisfy_the_contract(direct_kind, devices):
    check_runtime(OnnxRuntime, devices=devices)


def test_sessions_compute_on_the_stream_of_their_device_and_runs_do_not_wait():
    memory = DirectMemory(DeviceAddress.of("direct:0"), ())
    assert memory.provider_options() == {"user_compute_stream": str(id(memory.computing.stream))}
    options = onnxruntime.RunOptions()
    for key, value in memory.run_entries().items():
        options.add_run_config_entry(key, value)
    assert options.get_run_config_entry("disable_synchronize_execution_providers") == "1"
    assert issubclass(CudaMemory, StreamMemory)
