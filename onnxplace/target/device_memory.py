"""The interface of device memories: how values get in, out and across while a bundle runs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Sequence
from typing import Any

from onnxplace.target.device_kinds import DeviceAddress


class DeviceMemory(ABC):
    """The memory of one device of an open bundle.

    One thread at a time works for a device, and only it calls these methods, except `fetch`, `read` and `settle`,
    and `finish` after the last request.

    A value is whatever the class makes of it: a numpy array, an OrtValue, or one with the event after which it is
    complete. Values are never altered after they are computed. A *sent value* is one on its way: what `send` of one
    device returns and `receive` of another takes.
    """

    is_asynchronous: bool = False
    """Whether runs and copies are only enqueued, so that their order is kept by the device and not by its thread."""
    runs_ahead: bool = False
    """Whether a program may end before its enqueued work has; a request then ends when its checkpoints are settled."""

    def __init__(self, address: DeviceAddress, cores: Sequence[int]) -> None:
        self.address = address
        self.cores = cores

    def session_entries(self) -> dict[str, str]:
        """Return entries for the configuration of sessions on this device."""
        return {}

    def provider_options(self) -> dict[str, str]:
        """Return additional options of this device's execution provider."""
        return {}

    def run_entries(self) -> dict[str, str]:
        """Return entries for the configuration of each run of a bundle that uses this device."""
        return {}

    def adopt(self, session: Any, name: str) -> None:  # noqa: B027 - most memories need no table of sessions
        """Note a session that will run on this device, and its name in error messages, such as `segment cuda0-001`."""

    @abstractmethod
    def feed(self, array: Any, declared: str) -> Any:
        """Return an input of the model as a value on this device; it may share the array's memory.

        Args:
            array: A numpy array, or a list of arrays for a sequence.
            declared: ONNX Runtime's name of its type, such as `tensor(float)`.
        """

    @abstractmethod
    def run(
        self, session: Any, inputs: dict[str, Any], outputs: Sequence[str], leaving: Collection[str], options: Any
    ) -> list[Any]:
        """Run a session whose inputs and outputs are tensors; return its outputs as values of this device.

        Args:
            session: A session of ONNX Runtime.
            inputs: Values of this device by name.
            outputs: Names of all outputs.
            leaving: Names of those outputs that no other segment of this device reads.
            options: ONNX Runtime's RunOptions.
        """

    def run_unbound(self, call: Callable[[], Sequence[Any]]) -> list[Any]:
        """Call a function that runs a session with values that cannot be bound; all of them are on the host."""
        return list(call())

    def to_host(self, value: Any) -> Any:
        """Return a value of this device as an OrtValue, array or list in the host's memory."""
        return value

    @abstractmethod
    def send(self, value: Any, destination: DeviceMemory | None) -> Any:
        """Return a value of this device as it is sent to another device; None stands for the caller of the model."""

    @abstractmethod
    def receive(self, sent: Any, source: DeviceMemory) -> Any:
        """Return a sent value of another device as one on this device."""

    def fetch(self, sent: Any) -> Any:
        """Return a sent value of this device, sent to another one, as it lies in the host's memory; for any thread.

        It may wait. A memory that `runs_ahead` returns a value that shares no memory with others, where it is a tensor.
        """
        return sent

    @abstractmethod
    def read(self, sent: Any) -> Any:
        """Return a sent value of this device, sent to the caller, as a numpy array; may wait; for any thread."""

    def keep(self, value: Any) -> Any:
        """Return a value that outlives its request, as carried states do, also where it refers to memory of feeds."""
        return value

    def free(self, value: Any) -> None:  # noqa: B027 - most memories free a value when nothing refers to it any more
        """Note that the program does not use a value any more."""

    def checkpoint(self) -> Any:
        """Return what `settle` takes to wait for all that was enqueued so far; only if it `runs_ahead`."""
        return None

    def settle(self, checkpoint: Any) -> None:  # noqa: B027 - synchronous devices have nothing to wait for
        """Wait for a checkpoint if there is one, and drop what is held for work that is over; for any thread.

        Raises ExecutionError, which names segment and device, if work before it failed.
        """

    def finish(self) -> None:  # noqa: B027 - synchronous devices have nothing to wait for
        """Wait until everything that was enqueued is complete; raises the error of an enqueued run or copy."""

    def open_weight_pool(self, size: int) -> Any:
        """Return memory on the device for weights that stream; None if its runs read them in the host's memory."""
        return None

    def close(self) -> None:  # noqa: B027 - most memories are freed with their values
        """Free what the memory itself holds."""
