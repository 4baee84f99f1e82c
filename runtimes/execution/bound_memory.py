"""The memory of a GPU that ONNX Runtime alone can reach: values stay there, and cross through the host.

WebGPU's is like this. Runs return before their work is done, and only reading a value back waits for it.
"""

from __future__ import annotations

import traceback
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from onnx import parser

from onnxplace.devices import DeviceAddress, DeviceMemory, find_kind
from onnxplace.machine import make_session_options, open_session
from onnxplace.runtimes.execution.bound_runs import run_bound
from onnxplace.runtimes.execution.ort_values import (
    is_copyable_tensor,
    is_native_type,
    to_ort_value,
    to_ort_value_if_possible,
    to_python,
)

_PROBE = '<ir_version: 8, opset_import: ["": 17]> probe (float[1] x) => (float[1] y) { y = Neg(x) }'


class BoundValue:
    """A tensor on the device; it is freed while its thread holds the lock of the device's kind.

    It keeps the session that made it: WebGPU's provider, which ends with its session, frees the tensor.
    """

    def __init__(self, value: Any, session: Any, memory: BoundMemory) -> None:
        self.value = value
        self._session = session
        self._memory = memory

    def count_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return int(self.value.tensor_size_in_bytes())

    def shape(self) -> list[int]:
        """Return the sizes of its dimensions."""
        return list(self.value.shape())

    def __del__(self) -> None:
        with self._memory.kind.hold_lock():
            self.value = None
            self._session = None


class BoundMemory(DeviceMemory):
    """Memory that only sessions reach: outputs are bound to it, and inputs are uploaded by the runs that read them."""

    is_asynchronous = True

    def __init__(self, address: DeviceAddress, cores: Sequence[int]) -> None:
        super().__init__(address, cores)
        self.kind = find_kind(address.kind)
        self._binding = self.kind.binding(address)
        model = parser.parse_model(_PROBE).SerializeToString()
        self._probe = open_session(model, make_session_options(()), self.address)

    def feed(self, array: Any, declared: str) -> Any:
        """Return an input as an OrtValue in the host's memory."""
        return to_ort_value(array, declared)

    def run(
        self, session: Any, inputs: dict[str, Any], outputs: Sequence[str], leaving: Collection[str], options: Any
    ) -> list[Any]:
        """Run a session.

        Outputs that no other segment of the device reads go to the host at once. So do those of types that numpy lacks:
        only `numpy()` brings values back.
        """
        types = {item.name: item.type for item in session.get_outputs()}
        bound = {name for name in outputs if name not in leaving and is_native_type(types[name])}
        homes = {name: self._binding if name in bound else ("cpu", 0) for name in outputs}
        with self.kind.hold_lock():
            values = {name: self._unwrap(value) for name, value in inputs.items()}
            try:
                results = run_bound(session, values, homes, options)
            except BaseException as problem:
                # These frames hold the binding. Garbage collection would free it later, without the lock, and after
                # its session.
                traceback.clear_frames(problem.__traceback__)
                raise
            finally:
                values.clear()
            return [
                BoundValue(value, session, self) if name in bound else value for name, value in zip(outputs, results)
            ]

    def run_unbound(self, call: Any) -> list[Any]:
        """Run a session with values that cannot be bound, while this thread holds the lock."""
        with self.kind.hold_lock():
            return list(call())

    def send(self, value: Any, destination: DeviceMemory | None) -> Any:
        """Return a value as it lies in the host's memory, after everything that was enqueued before it."""
        if not isinstance(value, BoundValue):
            return value
        with self.kind.hold_lock():
            return np.array(value.value.numpy())

    def receive(self, parcel: Any, source: DeviceMemory) -> Any:
        """Return a parcel as an OrtValue in the host's memory, which runs upload."""
        return to_ort_value_if_possible(source.read(parcel) if is_copyable_tensor(parcel) else parcel)

    def read(self, parcel: Any) -> Any:
        """Return a parcel as numpy; `send` has brought it to the host."""
        return to_python(parcel)

    def to_host(self, value: Any) -> Any:
        """Return a value of any type in the host's memory."""
        return self.send(value, None)

    def keep(self, value: Any) -> Any:
        """Return a value of the device itself, and a copy of others, which may refer to memory of feeds."""
        return value if isinstance(value, BoundValue) else to_ort_value_if_possible(np.array(to_python(value)))

    def finish(self) -> None:
        """Wait for everything that was enqueued: run a node whose result goes to the host."""
        with self.kind.hold_lock():
            if self._probe is not None:
                self._probe.run(None, {"x": np.zeros(1, dtype=np.float32)})

    def close(self) -> None:
        """Wait for everything that was enqueued: a process that ends before may crash."""
        self.finish()
        with self.kind.hold_lock():
            self._probe = None

    @staticmethod
    def _unwrap(value: Any) -> Any:
        return value.value if isinstance(value, BoundValue) else to_ort_value_if_possible(value)
