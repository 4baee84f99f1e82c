"""A cost graph in memory: the graph, its costs, its devices, and the ids of its file."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from onnxplace.errors import Diagnostic, format_count
from onnxplace.facts import Profile
from onnxplace.graph import Ints
from onnxplace.state import State
from onnxplace.target import Link, Target
from onnxplace.utils import format_object


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
