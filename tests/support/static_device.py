"""A kind of devices that needs static shapes and may keep compiled models: the CPU's provider, which needs neither.

A compiled model is the segment with the sizes of its inputs, and a binary file beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import onnx

from onnxplace.target import kind_table
from onnxplace.target.device_kinds import DeviceAddress, DeviceKind, Hardware

BINARY = b"compiled by static" * 100


class Static(DeviceKind):
    """A device whose sessions run on the CPU, and are refused where a size is not known."""

    name: ClassVar[str] = "static"
    title: ClassVar[str] = "device of static shapes"
    providers: ClassVar[Mapping[str, str]] = {"cpu": "CPUExecutionProvider"}
    memory: ClassVar[str] = "onnxplace.runtimes.execution.host_memory:HostMemory"
    needs_static_shapes: ClassVar[bool] = True
    operations_per_second: ClassVar[float] = 80e9
    memory_bytes_per_second: ClassVar[float] = 16e9
    kernel_seconds: ClassVar[float] = 4e-6
    link_latency_seconds: ClassVar[float] = 20e-6
    link_bytes_per_second: ClassVar[float] = 10e9

    compiler: ClassVar[str] = ""
    refuses_to_compile: ClassVar[bool] = False
    refused: ClassVar[str] = "nothing"
    """Part of the names of files that cannot be opened."""
    opened: ClassVar[list[str]] = []
    """Names of the files that were opened."""

    def list_hardware(self) -> tuple[Hardware, ...]:
        return tuple(Hardware(index, "Static 1", 1 << 30, 1 << 30) for index in range(2))

    def find_problem(self, address: DeviceAddress) -> str | None:
        return None

    def list_providers(self, address: DeviceAddress) -> list[tuple[str, dict[str, str]]]:
        return []

    def describe_compiler(self, address: DeviceAddress) -> str:
        return self.compiler

    def create_session(
        self, model: str | bytes, options: Any, address: DeviceAddress, provider_options: Mapping[str, str]
    ) -> Any:
        if isinstance(model, str) and self.refused in model:
            raise RuntimeError("[ONNXRuntimeError] : cannot finalise the graph")
        session = super().create_session(model, options, address, provider_options)
        shapes = {item.name: item.shape for item in session.get_inputs() if item.type.startswith("tensor(")}
        if symbolic := {name: shape for name, shape in shapes.items() if not all(isinstance(n, int) for n in shape)}:
            raise RuntimeError(f"sizes are not static: {symbolic}")
        if isinstance(model, str):
            self.opened.append(Path(model).name)
            if ".compiled" in model and _find_binary(model, options).read_bytes() != BINARY:
                raise RuntimeError("the context is of another driver")
            _write_context(model, options, shapes, self.refuses_to_compile)
        return session


def _read_entry(options: Any, name: str) -> str:
    """Return an entry of the configuration of a session, or an empty text."""
    try:
        return str(options.get_session_config_entry(name))
    except RuntimeError:
        return ""


def _find_binary(model: str, options: Any) -> Path:
    """Return the binary file of a compiled model, which is searched as ONNX Runtime's providers do.

    The folder of external weights takes the place of the model's, unless the path of the model is given.
    """
    folder = _read_entry(options, "session.model_external_initializers_file_folder_path")
    path = _read_entry(options, "ep.context_file_path") or (str(Path(folder, Path(model).name)) if folder else model)
    return Path(f"{path}.bin")


def _write_context(model: str, options: Any, shapes: Mapping[str, list[int]], refuses: bool) -> None:
    """Write a compiled model if the options of a session ask for it."""
    if _read_entry(options, "ep.context_enable") != "1":
        return
    path = _read_entry(options, "ep.context_file_path")
    proto = onnx.load(model, load_external_data=False)
    for item in proto.graph.input:
        for dimension, size in zip(item.type.tensor_type.shape.dim, shapes.get(item.name, ())):
            dimension.dim_value = size
    onnx.save(proto, path)
    if refuses:
        raise RuntimeError("this driver cannot write contexts")
    Path(f"{path}.bin").write_bytes(BINARY)


@contextmanager
def static_kind() -> Iterator[type[Static]]:
    """Let `static:0` and `static:1` be devices of this machine."""
    kind_table.BUILTIN_KINDS["static"] = f"{__name__}:Static"
    kind_table.find_kind.cache_clear()
    Static.opened.clear()
    try:
        yield Static
    finally:
        del kind_table.BUILTIN_KINDS["static"]
        kind_table.find_kind.cache_clear()
