"""A cost graph in memory, its placement, and formats of files with it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Protocol

from onnxplace.errors import Diagnostic, format_count
from onnxplace.facts import Profile
from onnxplace.graph.op_graph import Floats, Ints
from onnxplace.state import State
from onnxplace.target.target import Link, Target
from onnxplace.utils.quantities import format_object


@dataclass(frozen=True)
class CostGraph:
    """A graph with its costs; the order of nodes breaks ties."""

    name: str
    ids: tuple[Hashable, ...]
    """The id of each node in its file."""
    device_ids: tuple[Hashable, ...]
    profile: Profile
    target: Target
    link: Link
    """The link between each pair of devices; the names of its ends have no meaning."""
    notes: tuple[Diagnostic, ...] = ()
    """Notes on likely mistakes in the file."""

    def __repr__(self) -> str:
        graph = self.profile.graph
        size = f"{format_count(len(graph), 'node')}, {format_count(len(graph.value_bytes), 'value')}"
        return format_object(f"CostGraph {self.name!r}: {size}", *repr(self.target).split("\n  "))

    def state(self) -> State:
        """Return the state that a pipeline of coplace, fuse and a placer starts from."""
        return State(self.target).with_facts(self.profile).with_notes(*self.notes)

    def device_of(self, device: Ints) -> dict[str, Hashable]:
        """Return a placement as device ids by node id."""
        return {str(node): self.device_ids[index] for node, index in zip(self.ids, device.tolist())}


class TimedPlacement(Protocol):
    """A placement of a cost graph with its times, as `onnxplace.driver.place_cost_graph` returns it."""

    @property
    def placer(self) -> str: ...
    @property
    def makespan_seconds(self) -> float: ...
    @property
    def lower_bound_seconds(self) -> float: ...
    @property
    def placement(self) -> Mapping[str, Hashable]:
        """Return the device id of each node id."""
        ...

    @property
    def start_seconds(self) -> Floats:
        """Return when each node starts, in the order of the cost graph."""
        ...

    @property
    def finish_seconds(self) -> Floats: ...


class GraphFormat(ABC):
    """A format of files with cost graphs; its name, an entry point, is what their names end in."""

    @abstractmethod
    def read(self, data: bytes, name: str, where: str, device_count: int | None) -> CostGraph:
        """Return the cost graph in the bytes of a file; raises InputError if there is none.

        `device_count` is the number of devices without memory, for a file that names none.
        """

    @abstractmethod
    def write(self, graph: CostGraph | State, placement: TimedPlacement | None, where: str) -> bytes:
        """Return the bytes of a file with a cost graph, or a state with a Profile, and with its placement.

        Raises InputError for what the format cannot hold.
        """
