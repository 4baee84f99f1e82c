"""Bound inputs and outputs, with the methods of `onnxruntime.IOBinding`."""

from __future__ import annotations

import ctypes
import math
import operator
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from onnxplace.errors import FeedError, UsageError, format_one_line, format_value, suggest_nearest
from onnxplace.feeds.feeds import Array
from onnxplace.machine.ort_values import to_python
from onnxplace.session.exceptions import also_raise_as, argument_error
from onnxplace.session.run_arguments import to_owned_ort_value
from onnxplace.session.session_arguments import warn_ignored
from onnxplace.utils.ort import import_onnxruntime

# Types of devices that ONNX Runtime knows.
_DEVICE_TYPES = ("cpu", "cuda", "cann", "dml", "webgpu", "gpu", "npu")


class IOBinding:
    """Inputs and outputs of a session, bound to arrays, memory or OrtValues: `session.io_binding()`.

    Buffers are read and written by each `session.run_with_iobinding(binding)`. Inputs and outputs of a bundle lie in
    the memory of the host; its devices copy from and to there, as in `run`.

    >>> binding = session.io_binding()  # doctest: +SKIP
    >>> binding.bind_cpu_input("x", x)  # doctest: +SKIP
    >>> binding.bind_output("y")  # doctest: +SKIP
    >>> session.run_with_iobinding(binding)  # doctest: +SKIP
    >>> binding.copy_outputs_to_cpu()  # doctest: +SKIP
    """

    def __init__(self, session: object, input_names: Collection[str], output_types: dict[str, str]) -> None:
        self.session = session
        """The session that it belongs to."""
        self._input_names, self._types = input_names, output_types
        self._inputs: dict[str, Any] = {}
        self._outputs: dict[str, _Output] = {}

    def bind_cpu_input(self, name: str, arr_on_cpu: Any) -> None:
        """Bind an input to an array, which later runs read again."""
        self._require_input(name)
        self._inputs[name] = arr_on_cpu

    def bind_input(
        self, name: str, device_type: str, device_id: int, element_type: Any, shape: Sequence[int], buffer_ptr: int
    ) -> None:
        """Bind an input to memory of the host, which later runs read again.

        Raises UsageError for memory of another device, and for a type, shape or address that memory cannot have.
        """
        self._require_input(name)
        _require_host(device_type, f"input {name!r}")
        self._inputs[name] = _view_memory(element_type, shape, buffer_ptr, f"input {name!r}")

    def bind_ortvalue_input(self, name: str, ortvalue: Any) -> None:
        """Bind an input to an OrtValue, which later runs read again; raises UsageError for other objects."""
        self._require_input(name)
        _require_ort_value(ortvalue, f"input {name!r}")
        self._inputs[name] = ortvalue

    def bind_output(
        self,
        name: str,
        device_type: str = "cpu",
        device_id: int = 0,
        element_type: Any = None,
        shape: Sequence[int] | None = None,
        buffer_ptr: int | None = None,
    ) -> None:
        """Bind an output to memory of the host; without `buffer_ptr`, each run makes a new value.

        Raises UsageError for memory of another device, and for a type, shape or address that memory cannot have; it is
        a ValueError, too, for memory without type or shape.
        """
        if buffer_ptr is None:
            if device_type not in _DEVICE_TYPES:
                message = f"expected the type of a device, got {format_value(device_type)}"
                raise argument_error(
                    RuntimeError, message, where=f"output {name!r}", hint=f"known: {', '.join(_DEVICE_TYPES)}"
                )
            if device_type != "cpu":
                warn_ignored(f"output {name!r} is not bound to {device_type}: outputs of a bundle lie in host memory")
            self._outputs[name] = _Output()
            return
        _require_host(device_type, f"output {name!r}")
        if element_type is None or shape is None:
            raise argument_error(ValueError, "memory needs element_type and shape", where=f"output {name!r}")
        view = _view_memory(element_type, shape, buffer_ptr, f"output {name!r}")
        self._outputs[name] = _Output(import_onnxruntime().OrtValue.ortvalue_from_numpy(view), view)

    def bind_ortvalue_output(self, name: str, ortvalue: Any) -> None:
        """Bind an output to an OrtValue, whose content each run replaces; raises UsageError for other objects."""
        _require_ort_value(ortvalue, f"output {name!r}")
        self._outputs[name] = _Output(ortvalue)

    def synchronize_inputs(self) -> None:
        """Do nothing: inputs lie in the memory of the host."""

    def synchronize_outputs(self) -> None:
        """Do nothing: outputs are complete when a run returns."""

    def get_outputs(self) -> list[Any]:
        """Return the outputs of the last run as OrtValues, in the order in which they were bound."""
        ready = [(name, output) for name, output in self._outputs.items() if output.ready]
        return [output.to_ort_value(self._types.get(name, "")) for name, output in ready]

    def get_outputs_as_ortvaluevector(self) -> Any:
        """Return the outputs of the last run as an OrtValueVector."""
        vector = import_onnxruntime().capi.onnxruntime_pybind11_state.OrtValueVector()
        for value in self.get_outputs():
            vector.push_back(value._get_c_value())
        return vector

    def copy_outputs_to_cpu(self) -> list[Any]:
        """Return the outputs of the last run as arrays, in the order in which they were bound."""
        return [output.value for output in self._outputs.values() if output.ready]

    def clear_binding_inputs(self) -> None:
        """Forget all inputs."""
        self._inputs.clear()

    def clear_binding_outputs(self) -> None:
        """Forget all outputs."""
        self._outputs.clear()

    def run(self, run: Callable[[list[str], dict[str, Any]], list[Any]]) -> None:
        """Let a session run with the bound inputs; write and keep its outputs."""
        if not self._outputs:
            raise UsageError("F001", "no output is bound", where="IOBinding", hint="binding.bind_output(name)")
        for output in self._outputs.values():
            output.ready = False
        for (name, output), value in zip(self._outputs.items(), run(list(self._outputs), dict(self._inputs))):
            output.fill(name, value)

    def _require_input(self, name: str) -> None:
        if name not in self._input_names:
            raise also_raise_as(
                FeedError("F001", f"the model has no input {name!r}", hint=suggest_nearest(name, self._input_names)),
                RuntimeError,
            )


class _Output:
    """A bound output, and its value in the last run."""

    def __init__(self, bound: Any = None, view: Array | None = None) -> None:
        self._bound, self._view = bound, view
        self.value: Any = None
        self.ready = False
        """Whether the last run has set it."""

    def fill(self, name: str, value: Any) -> None:
        """Keep a value, and write it to what is bound; raises UsageError if it does not fit there."""
        if self._bound is not None:
            place = self._view if self._view is not None else to_python(self._bound)
            if not isinstance(value, np.ndarray) or (place.dtype, place.shape) != (value.dtype, value.shape):
                message = f"the bound value is {_describe(place)}, the result is {_describe(value)}"
                raise UsageError("U054", message, where=f"output {name!r}", hint="bind a value of that type and shape")
            if self._view is not None:
                np.copyto(self._view, value)
            else:
                self._bound.update_inplace(value)
        self.value, self.ready = value, True

    def to_ort_value(self, declared: str) -> Any:
        """Return the value, or what was bound to it, as an OrtValue."""
        return self._bound if self._bound is not None else to_owned_ort_value(self.value, declared)


def _describe(value: Any) -> str:
    return f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _require_host(device_type: str, where: str) -> None:
    if device_type != "cpu":
        message = f"expected memory of the host ('cpu'), got {device_type!r}: a bundle may have several devices"
        hint = "bind an array, or an OrtValue, which is copied; with optimum: use_io_binding=False"
        raise UsageError("U088", message, where=where, hint=hint)


def _require_ort_value(value: Any, where: str) -> None:
    """Raise UsageError, also a TypeError, unless a value is an OrtValue."""
    if not isinstance(value, import_onnxruntime().OrtValue):
        message = f"expected onnxruntime.OrtValue, got {format_value(value)}"
        raise argument_error(TypeError, message, where=where, hint="OrtValue.ortvalue_from_numpy(array)")


def _view_memory(element_type: Any, shape: Sequence[int], address: int, where: str) -> Array:
    """Return an array over memory that its owner keeps; the type is numpy's, or ONNX's number.

    Raises UsageError, also a RuntimeError as in ONNX Runtime, if no memory can be like that.
    """
    kind = element_type
    try:
        if isinstance(element_type, int):  # ONNX's number
            from onnx import helper

            kind = helper.tensor_dtype_to_np_dtype(element_type)
        dtype: np.dtype[Any] = np.dtype(kind)
        sizes = tuple(int(size) for size in shape)
        if dtype.hasobject or any(size < 0 for size in sizes):
            raise ValueError("elements are numbers, and sizes are at least 0")
        if not (count := math.prod(sizes) * dtype.itemsize):
            return np.empty(sizes, dtype)
        if operator.index(address) <= 0:
            raise ValueError("addresses are above 0")
    except (KeyError, TypeError, ValueError) as problem:
        arguments = ", ".join(map(format_value, (element_type, shape, address)))
        message = f"expected the element type, shape and address of memory, got {arguments}: {format_one_line(problem)}"
        raise argument_error(
            RuntimeError, message, where=where, hint="array.dtype, array.shape, array.ctypes.data"
        ) from None
    return np.frombuffer(memoryview((ctypes.c_byte * count).from_address(address)), dtype).reshape(sizes)
