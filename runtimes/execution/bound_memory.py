"""The memory of a GPU that ONNX Runtime alone can reach: values stay there, and cross through the host.

WebGPU's is like this. Runs return before their work is done, and only reading a value back waits for it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from onnx import parser

from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import GuardedSession, make_session_options
from onnxplace.machine.ort_values import (
    is_copyable_tensor,
    is_native_type,
    to_fed_value,
    to_ort_value_if_possible,
    to_python,
)
from onnxplace.runtimes.execution.host_memory import run_bound
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.device_memory import DeviceMemory
from onnxplace.target.kind_table import find_kind

_PROBE = '<ir_version: 8, opset_import: ["": 17]> probe (float[1] x) => (float[1] y) { y = Neg(x) }'


class BoundValue:
    """A tensor on the device, which is freed while the lock of its provider is held, and before its session.

    WebGPU's provider, which ends with its session, frees the tensor.
    """

    def __init__(self, value: Any, session: GuardedSession) -> None:
        self._owned = session.own(self, value)

    @property
    def value(self) -> Any:
        """Return the OrtValue; keep it no longer than the lock."""
        return self._owned[-1]

    def count_bytes(self) -> int:
        """Return the bytes of the tensor."""
        return int(self.value.tensor_size_in_bytes())

    def shape(self) -> list[int]:
        """Return the sizes of its dimensions."""
        return list(self.value.shape())


class BoundMemory(DeviceMemory):
    """Memory that only sessions reach: outputs are bound to it, and inputs are uploaded by the runs that read them."""

    is_asynchronous = True

    def __init__(self, address: DeviceAddress, cores: Sequence[int]) -> None:
        super().__init__(address, cores)
        kind = find_kind(address.kind)
        if kind.lock is None:
            raise AssertionError(f"{kind.name} has no lock; {type(self).__name__} is for providers that need one")
        self._lock = kind.lock
        self._binding = kind.binding(address)
        model = parser.parse_model(_PROBE).SerializeToString()
        self._probe = open_session(model, make_session_options(()), self.address)

    def feed(self, array: Any, declared: str) -> Any:
        """Return an input in the host's memory."""
        return to_fed_value(array, declared)

    def run(
        self,
        session: GuardedSession,
        inputs: dict[str, Any],
        outputs: Sequence[str],
        leaving: Collection[str],
        options: Any,
    ) -> list[Any]:
        """Run a session.

        Outputs that no other segment of the device reads go to the host at once. So do those of types that numpy lacks:
        only `numpy()` brings values back.
        """
        types = {item.name: item.type for item in session.get_outputs()}
        bound = {name for name in outputs if name not in leaving and is_native_type(types[name])}
        homes = {name: self._binding if name in bound else ("cpu", 0) for name in outputs}

        def compute(raw_session: Any) -> list[Any]:
            values = {name: self._unwrap(value) for name, value in inputs.items()}
            results = run_bound(raw_session, values, homes, options)
            return [BoundValue(value, session) if name in bound else value for name, value in zip(outputs, results)]

        return list(session.call(compute))

    def send(self, value: Any, destination: DeviceMemory | None) -> Any:
        """Return a value as it lies in the host's memory, after everything that was enqueued before it."""
        if not isinstance(value, BoundValue):
            return value
        return self._lock.call(lambda: np.array(value.value.numpy()))

    def receive(self, sent: Any, source: DeviceMemory) -> Any:
        """Return a sent value as an OrtValue in the host's memory, which runs upload."""
        if source.runs_ahead:  # the copy was enqueued when the value was sent
            return to_ort_value_if_possible(source.fetch(sent))
        return to_ort_value_if_possible(source.read(sent) if is_copyable_tensor(sent) else sent)

    def read(self, sent: Any) -> Any:
        """Return a sent value as numpy; `send` has brought it to the host."""
        return to_python(sent)

    def to_host(self, value: Any) -> Any:
        """Return a value of any type in the host's memory."""
        return self.send(value, None)

    def keep(self, value: Any) -> Any:
        """Return a value of the device itself, and a copy of others, which may refer to memory of feeds."""
        return value if isinstance(value, BoundValue) else to_ort_value_if_possible(np.array(to_python(value)))

    def finish(self) -> None:
        """Wait for everything that was enqueued: run a node whose result goes to the host."""
        if (probe := self._probe) is not None:
            probe.run(None, {"x": np.zeros(1, dtype=np.float32)})

    def close(self) -> None:
        """Wait for everything that was enqueued: a process that ends before may crash."""
        self.finish()
        self._probe = None

    @staticmethod
    def _unwrap(value: Any) -> Any:
        return value.value if isinstance(value, BoundValue) else to_ort_value_if_possible(value)
