"""Requests of a session whose devices are ranks, and the carried states that stay there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

from onnxplace.devices import DeviceAddress, DeviceMemory, find_kind
from onnxplace.runtimes.execution import PlacedDevice, Request

# All ranks together are one device for the engine, which has the order of requests and the states.
ALL_RANKS = "ranks"


class RemoteRequest(Request):
    """A request that ranks work on."""

    serial = -1
    """Its number in the order of sending, the same for all ranks; -1 if it is not sent."""
    waiting: frozenset[int] | set[int] = frozenset()
    """The ranks that have not reported its end."""
    home_of_rank: dict[int, str]
    is_cancelled = False
    """Whether its ranks were told to end it."""
    cancel_deadline = 0.0
    """When they have to have ended it."""
    rank_names: Sequence[str] = ()
    """Devices by rank."""

    def describe_progress(self) -> str:
        """Return what has not finished."""
        if self.serial < 0:
            return "it has not begun"
        names = [self.rank_names[rank] for rank in sorted(self.waiting)]
        return f"{', '.join(names)} has not finished" if names else "all devices have finished"


class RemoteState:
    """A carried state that a rank stores, until nothing refers to it."""

    def __init__(
        self, serial: int, name: str, rank: int, shape: tuple[int, ...], free: Callable[[RemoteState], None]
    ) -> None:
        self.serial, self.name, self.rank, self.shape = serial, name, rank, shape
        self._free = free
        self.is_taken = False
        """Whether a request has taken it from its rank."""

    def __del__(self) -> None:
        if not self.is_taken:
            self._free(self)


class RemoteMemory(DeviceMemory):
    """The memory of all ranks together: outputs are here already, and states are read from their ranks."""

    def __init__(self, read_state: Callable[[RemoteState], Any]) -> None:
        super().__init__(DeviceAddress.of("cpu:0"), ())
        self._read_state = read_state

    def feed(self, array: Any, declared: str) -> Any:
        """Return an input unchanged."""
        return array

    def run(
        self, session: Any, inputs: dict[str, Any], outputs: Sequence[str], leaving: Collection[str], options: Any
    ) -> list[Any]:
        """Refuse: segments run on ranks."""
        raise NotImplementedError

    def send(self, value: Any, destination: DeviceMemory | None) -> Any:
        """Return a value or a state unchanged."""
        return value

    def receive(self, parcel: Any, source: DeviceMemory) -> Any:
        """Return a value unchanged."""
        return parcel

    def read(self, parcel: Any) -> Any:
        """Return an output, or a state of its rank, as numpy."""
        return self._read_state(parcel) if isinstance(parcel, RemoteState) else parcel


class RemoteDevice(PlacedDevice):
    """All ranks together."""

    def __init__(self, memory: RemoteMemory) -> None:
        self.id = ALL_RANKS
        self.cores = ()
        self.kind = find_kind("cpu")
        self.memory = memory
