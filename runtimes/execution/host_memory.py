"""The memory of CPU devices: numpy arrays, and OrtValues for types that numpy lacks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from onnxplace.devices import DeviceMemory
from onnxplace.machine import (
    is_copyable_tensor,
    is_native_array,
    is_native_type,
    to_ort_value,
    to_ort_value_if_possible,
    to_python,
)
from onnxplace.runtimes.execution.arena import register_shared_arena
from onnxplace.runtimes.execution.bound_runs import run_bound


class HostMemory(DeviceMemory):
    """Memory of the host.

    A received value is copied, as if devices had memories of their own: links cost what they would cost, and a device
    reads from memory near its cores.
    """

    def session_entries(self) -> dict[str, str]:
        """Let all sessions share one arena."""
        register_shared_arena()
        return {"session.use_env_allocators": "1"}

    def feed(self, array: Any, declared: str) -> Any:
        """Return an input; it shares the caller's memory during the request."""
        if is_native_type(declared) and type(array) is np.ndarray:
            return array if array.flags.c_contiguous else array.copy()
        return to_ort_value(array, declared)

    def run(
        self, session: Any, inputs: dict[str, Any], outputs: Sequence[str], leaving: Collection[str], options: Any
    ) -> list[Any]:
        """Run a session and wait for its outputs."""
        values = {name: to_ort_value_if_possible(value) for name, value in inputs.items()}
        return run_bound(session, values, dict.fromkeys(outputs, ("cpu", 0)), options)

    def send(self, value: Any, destination: DeviceMemory | None) -> Any:
        """Return the value itself: the destination copies it."""
        return value

    def receive(self, parcel: Any, source: DeviceMemory) -> Any:
        """Return a copy; values other than plain tensors are shared, as they never change."""
        if source.runs_ahead:  # the copy was enqueued when the value was sent
            return source.fetch(parcel)
        if not (is_native_array(parcel) or is_copyable_tensor(parcel)):
            return parcel
        copied = np.array(to_python(parcel))
        return copied if is_native_array(copied) else to_ort_value(copied)

    def read(self, parcel: Any) -> Any:
        """Return a value as numpy."""
        return to_python(parcel)

    def keep(self, value: Any) -> Any:
        """Return a copy: sequences and optionals may refer to memory of feeds."""
        return self.receive(value, self)
