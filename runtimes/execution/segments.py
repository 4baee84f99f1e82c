"""The devices and segments of a bundle as workers use them: how values get there, and how a segment is called."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from onnxplace.bundle import Bundle, SegmentRecord
from onnxplace.errors import BundleError, ModelError
from onnxplace.feeds import Array
from onnxplace.machine import import_onnxruntime, open_session, pin_thread, session_options
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
    """A device as the workers use it: how values get there and back."""

    def __init__(self, device_id: str, cores: Sequence[int]) -> None:
        self.id = device_id
        self.cores = cores
        kind, _, index = device_id.partition(":")
        self.kind, self.index = kind, int(index)

    def receive(self, value: Any) -> Any:
        """Return a copy of a value on this device. What is no plain tensor is shared: it cannot change."""
        if not (is_native_array(value) or is_copyable_tensor(value)):
            return value
        if self.kind == "cpu":
            copied = np.array(to_python(value))
            return copied if is_native_array(copied) else to_ort_value(copied)
        return import_onnxruntime().OrtValue.ortvalue_from_numpy(
            to_ort_value_if_possible(value).numpy(), self.kind, self.index
        )

    def feed(self, array: Array, declared: str) -> Any:
        """Return an input on this device; on a CPU it shares the caller's memory for the time of the request."""
        if self.kind == "cpu" and is_native_array(array):
            return array if array.flags.c_contiguous else array.copy()
        value = to_ort_value(array, declared)
        return value if self.kind == "cpu" else self.receive(value)


class OpenSegment:
    """A segment's session, and how to call it with values that stay on the device."""

    def __init__(self, record: SegmentRecord, session: Any, device: PlacedDevice) -> None:
        self.record = record
        self._session = session
        self._device = device
        types = [item.type for item in (*session.get_inputs(), *session.get_outputs())]
        self.plain = all(kind.startswith("tensor(") and kind != "tensor(string)" for kind in types)
        """Whether all it takes and gives are tensors whose bytes ONNX Runtime owns."""
        self._maps = any("map(" in kind for kind in types)  # these have no form but Python's
        self._native = device.kind == "cpu" and all(is_native_type(kind) for kind in types)
        self._names = list(record.outputs)

    def run(self, values: dict[str, Any], held: list[Any], options: Any) -> None:
        """Compute this segment's outputs from `values` and add them there; `options` are ONNX Runtime's of the run.

        `held` keeps what an optional or a sequence may go on looking at after `values` has let go of it.
        """
        if self._native:  # the cheapest call, and no more copies than any other
            given = {name: values[name] for name in self.record.inputs if name in values}
            arrays = {name: value if is_native_array(value) else to_python(value) for name, value in given.items()}
            values.update(zip(self._names, self._session.run(self._names, arrays, options)))
            return
        feeds = {name: to_ort_value_if_possible(values[name]) for name in self.record.inputs if name in values}
        outputs = self._bound(feeds, options) if self.plain else self._unbound(feeds, options)
        if not self.plain:
            held.append(feeds)
        values.update(zip(self.record.outputs, outputs))

    def _bound(self, feeds: Mapping[str, Any], options: Any) -> list[Any]:
        binding = self._session.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, value)
        for name in self.record.outputs:
            binding.bind_output(name, self._device.kind, self._device.index)
        self._session.run_with_iobinding(binding, options)
        return list(binding.get_outputs())

    def _unbound(self, feeds: Mapping[str, Any], options: Any) -> list[Any]:
        """Sequences, maps, optionals and strings cannot be bound."""
        # Handing back an optional that holds nothing ends the process, unless it goes through Python.
        if self._maps or any(is_absent(value) for value in feeds.values()):
            arrays = {name: to_python(value) for name, value in feeds.items()}
            return list(self._session.run(self._names, arrays, options))
        return list(self._session.run_with_ort_values(self._names, dict(feeds), options))


def open_segment(bundle: Bundle, record: SegmentRecord, device: PlacedDevice) -> OpenSegment:
    """Open a segment on its device.

    Raises BundleError if its file is not what the compiler wrote, or another one than the manifest describes, and
    ModelError if ONNX Runtime refuses it all the same.
    """
    with pin_thread(device.cores):
        options = session_options(device.cores, entries={**bundle.session_entries, **shared_arena_options(device.kind)})
        options.enable_mem_pattern = device.kind != "cpu"  # it takes the memory of a run once more, in one piece
        try:
            session = open_session(bundle.file(record.file), options, device.id, f"segment {record.id}")
        except ModelError:
            bundle.check_files(record.file)  # larger files were not hashed when the bundle was opened
            raise
    _require_declared_interface(bundle, record, session)
    return_freed_memory(record.weights_bytes)
    return OpenSegment(record, session, device)


def _require_declared_interface(bundle: Bundle, record: SegmentRecord, session: Any) -> None:
    """Raise BundleError unless a session takes and gives what the manifest says of its segment."""
    values, inputs = bundle.manifest.values, {item.name: item for item in bundle.manifest.inputs}
    defaults = session.get_overridable_initializers()  # some are only to keep ONNX Runtime from folding them
    for what, names, items, more in (
        ("inputs", record.inputs, session.get_inputs(), defaults),
        ("outputs", record.outputs, session.get_outputs(), ()),
    ):
        declared = {item.name: item for item in (*items, *more)}
        needed = {item.name for item in items if what == "inputs"}
        if not needed <= set(names) <= set(declared):
            raise _wrong_segment_error(
                record, f"its {what} are {_format_names(declared)}, the manifest says {_format_names(names)}"
            )
        for name in names:
            told = [(item.dtype, item.shape) for item in (values.get(name), inputs.get(name)) if item is not None]
            for dtype, shape in told:
                if not _is_compatible(dtype, shape, item := declared[name]):
                    message = f"{name!r} is {item.type} {item.shape}, the manifest says {dtype} {shape}"
                    raise _wrong_segment_error(record, message)


def _is_compatible(dtype: str, shape: Sequence[int | str | None] | None, item: Any) -> bool:
    """Return whether a type and shape of the manifest can be those of a session's input or output."""
    if dtype != item.type:
        return False
    if shape is None or not dtype.startswith("tensor(") or not item.shape:
        return True  # an empty list stands for a scalar, and for a shape that is not known
    sizes = list(zip(shape, item.shape))
    return len(shape) == len(item.shape) and all(a == b for a, b in sizes if isinstance(a, int) and isinstance(b, int))


def _format_names(names: Any) -> str:
    return ", ".join(map(repr, sorted(names))) or "none"


def _wrong_segment_error(record: SegmentRecord, message: str) -> BundleError:
    hint = "the file belongs to another segment, or was altered; compile the model again"
    return BundleError("N012", message, where=f"segment {record.id} ({record.file})", hint=hint)
