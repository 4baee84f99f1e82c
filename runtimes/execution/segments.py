"""Devices and open segments as workers use them: move values to a device, and call a segment."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxplace.bundle import Bundle, SegmentRecord
from onnxplace.errors import BundleError, ModelError
from onnxplace.feeds import Array
from onnxplace.machine import import_onnxruntime, make_session_options, open_session, pin_thread
from onnxplace.runtimes.execution.arena import return_freed_memory, shared_arena_options
from onnxplace.runtimes.execution.ort_values import (
    is_absent,
    is_copyable_tensor,
    is_native_array,
    is_native_type,
    to_ort_value,
    to_ort_value_if_possible,
    to_python,
)


class PlacedDevice:
    """A device as workers use it: moves values there."""

    def __init__(self, device_id: str, cores: Sequence[int]) -> None:
        self.id = device_id
        self.cores = cores
        kind, _, index = device_id.partition(":")
        self.kind, self.index = kind, int(index)

    def receive(self, value: Any) -> Any:
        """Return a copy of a value on this device; values other than plain tensors are shared, as they never change."""
        if not (is_native_array(value) or is_copyable_tensor(value)):
            return value
        if self.kind == "cpu":
            copied = np.array(to_python(value))
            return copied if is_native_array(copied) else to_ort_value(copied)
        return import_onnxruntime().OrtValue.ortvalue_from_numpy(
            to_ort_value_if_possible(value).numpy(), self.kind, self.index
        )

    def feed(self, array: Array, declared: str) -> Any:
        """Return an input on this device; on a CPU it shares the caller's memory during the request."""
        if self.kind == "cpu" and is_native_array(array):
            return array if array.flags.c_contiguous else array.copy()
        value = to_ort_value(array, declared)
        return value if self.kind == "cpu" else self.receive(value)


class OpenSegment:
    """A segment's session, called with values that stay on the device."""

    def __init__(self, record: SegmentRecord, session: Any, device: PlacedDevice) -> None:
        self.record = record
        self._session = session
        self._device = device
        types = [item.type for item in (*session.get_inputs(), *session.get_outputs())]
        self.owns_buffers = all(kind.startswith("tensor(") and kind != "tensor(string)" for kind in types)
        """Whether all inputs and outputs are tensors whose bytes ONNX Runtime owns."""
        self._maps = any("map(" in kind for kind in types)  # these exist only as Python objects
        self._native = device.kind == "cpu" and all(is_native_type(kind) for kind in types)
        self._names = list(record.outputs)

    def run(self, values: dict[str, Any], kept_alive: list[Any], options: Any) -> None:
        """Compute this segment's outputs from `values` and add them there.

        Args:
            values: values on the device, by name.
            kept_alive: receives feeds that an optional or a sequence may still refer to after `values` drops them.
            options: ONNX Runtime's RunOptions.
        """
        if self._native:  # the cheapest call, with no more copies than the others
            inputs = {name: values[name] for name in self.record.inputs if name in values}
            arrays = {name: value if is_native_array(value) else to_python(value) for name, value in inputs.items()}
            values.update(zip(self._names, self._session.run(self._names, arrays, options)))
            return
        feeds = {name: to_ort_value_if_possible(values[name]) for name in self.record.inputs if name in values}
        outputs = self._run_bound(feeds, options) if self.owns_buffers else self._run_unbound(feeds, options)
        if not self.owns_buffers:
            kept_alive.append(feeds)
        values.update(zip(self.record.outputs, outputs))

    def _run_bound(self, feeds: Mapping[str, Any], options: Any) -> list[Any]:
        binding = self._session.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, value)
        for name in self.record.outputs:
            binding.bind_output(name, self._device.kind, self._device.index)
        self._session.run_with_iobinding(binding, options)
        return list(binding.get_outputs())

    def _run_unbound(self, feeds: Mapping[str, Any], options: Any) -> list[Any]:
        """Run with sequences, maps, optionals or strings, which cannot be bound."""
        # Passing an empty optional back as an OrtValue crashes the process, so it is passed as a Python object.
        if self._maps or any(is_absent(value) for value in feeds.values()):
            arrays = {name: to_python(value) for name, value in feeds.items()}
            return list(self._session.run(self._names, arrays, options))
        return list(self._session.run_with_ort_values(self._names, dict(feeds), options))


def open_segment(bundle: Bundle, record: SegmentRecord, device: PlacedDevice) -> OpenSegment:
    """Open a segment on its device.

    Raises BundleError if its file changed since the compile or contradicts the manifest, and ModelError if ONNX Runtime
    refuses it although it did not change.
    """
    with pin_thread(device.cores):
        options = make_session_options(
            device.cores, entries={**bundle.session_entries, **shared_arena_options(device.kind)}
        )
        options.enable_mem_pattern = (
            device.kind != "cpu"
        )  # it allocates the memory of a run a second time, as one block
        try:
            session = open_session(bundle.file(record.file), options, device.id, f"segment {record.id}")
        except ModelError:
            bundle.check_files(record.file)  # larger files were not hashed when the bundle was opened
            raise
    _require_declared_interface(bundle, record, session)
    return_freed_memory(record.weights_bytes)
    return OpenSegment(record, session, device)


def _require_declared_interface(bundle: Bundle, record: SegmentRecord, session: Any) -> None:
    """Raise BundleError unless a session has the inputs and outputs that the manifest declares."""
    values, inputs = bundle.manifest.values, {item.name: item for item in bundle.manifest.inputs}
    defaults = session.get_overridable_initializers()  # some exist only to keep ONNX Runtime from folding them
    for kind, names, items, optional in (
        ("inputs", record.inputs, session.get_inputs(), defaults),
        ("outputs", record.outputs, session.get_outputs(), ()),
    ):
        actual = {item.name: item for item in (*items, *optional)}
        required = {item.name for item in items if kind == "inputs"}
        if not required <= set(names) <= set(actual):
            raise _wrong_segment_error(
                record, f"its {kind} are {_format_names(actual)}, the manifest says {_format_names(names)}"
            )
        for name in names:
            declared = [(item.dtype, item.shape) for item in (values.get(name), inputs.get(name)) if item is not None]
            for dtype, shape in declared:
                if not _is_compatible(dtype, shape, item := actual[name]):
                    message = f"{name!r} is {item.type} {item.shape}, the manifest says {dtype} {shape}"
                    raise _wrong_segment_error(record, message)


def _is_compatible(dtype: str, shape: Sequence[int | str | None] | None, item: Any) -> bool:
    """Return whether a type and shape of the manifest are possible for a session's input or output."""
    if dtype != item.type:
        return False
    if shape is None or not dtype.startswith("tensor(") or not item.shape:
        return True  # an empty list means a scalar or an unknown shape
    sizes = list(zip(shape, item.shape))
    return len(shape) == len(item.shape) and all(a == b for a, b in sizes if isinstance(a, int) and isinstance(b, int))


def _format_names(names: Any) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"


def _wrong_segment_error(record: SegmentRecord, message: str) -> BundleError:
    hint = "the file belongs to another segment or was altered; compile the model again"
    return BundleError("N012", message, where=f"segment {record.id} ({record.file})", hint=hint)
