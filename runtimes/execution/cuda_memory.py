"""The memory of NVIDIA GPUs: ONNX Runtime enqueues runs on our stream, and we copy. Not run on a GPU yet."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from onnxplace.runtimes.execution.bound_runs import detach_value
from onnxplace.runtimes.execution.cuda_driver import open_cuda_driver
from onnxplace.runtimes.execution.stream_driver import Driver
from onnxplace.runtimes.execution.stream_memory import RunOutput, SessionPlaces, StreamMemory
from onnxplace.runtimes.execution.stream_values import DeviceTensor


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
