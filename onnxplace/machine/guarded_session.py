"""Sessions of execution providers that are not safe for threads."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from onnxplace.devices import ProviderLock

T = TypeVar("T")


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of a session, without a reference to it."""

    name: str
    type: str
    shape: list[Any]


class GuardedSession:
    """A session whose calls hold the lock of its provider, and which is freed while it is held.

    It has those of ONNX Runtime's methods that onnxplace uses. Only the lock refers to the session itself, so that no
    frame, exception or cycle of a caller can keep it and free it at another time.
    """

    def __init__(self, session: Any, lock: ProviderLock) -> None:
        self.lock = lock
        self._inputs = _copy_infos(session.get_inputs())
        self._outputs = _copy_infos(session.get_outputs())
        self._overridable = _copy_infos(session.get_overridable_initializers())
        self._providers = list(session.get_providers())
        self._owned = lock.own(self, session)

    def get_inputs(self) -> list[TensorInfo]:
        """Return the required inputs."""
        return self._inputs

    def get_outputs(self) -> list[TensorInfo]:
        """Return the outputs."""
        return self._outputs

    def get_overridable_initializers(self) -> list[TensorInfo]:
        """Return the optional inputs."""
        return self._overridable

    def get_providers(self) -> list[str]:
        """Return the names of its execution providers, the preferred one first."""
        return self._providers

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any], options: Any = None) -> list[Any]:
        """Return outputs as numpy arrays."""
        return self.call(lambda session: list(session.run(names, feeds, options)))

    def run_with_ort_values(self, names: Sequence[str], feeds: Mapping[str, Any], options: Any = None) -> list[Any]:
        """Return outputs as OrtValues in the host's memory."""
        return self.call(lambda session: list(session.run_with_ort_values(names, feeds, options)))

    def end_profiling(self) -> str:
        """Return the path of the profile."""
        return self.call(lambda session: str(session.end_profiling()))

    def call(self, function: Callable[[Any], T]) -> T:
        """Call a function with the session, which it must not return, while this thread holds the lock."""
        return self.lock.call(lambda: function(self._owned[0]))

    def own(self, handle: object, value: object) -> list[Any]:
        """Let the lock own a value on the device for a handle; it is freed before this session.

        Returns a list that ends with the value, as `ProviderLock.own` does.
        """
        return self.lock.own(handle, self._owned[0], value)


def _copy_infos(items: Sequence[Any]) -> list[TensorInfo]:
    return [TensorInfo(item.name, item.type, list(item.shape)) for item in items]
