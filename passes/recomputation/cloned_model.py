"""Write the model in which some nodes run a second time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np
from onnx import NodeProto

from onnxplace.graph import Bools, Longs, OpGraph
from onnxplace.model import Model, rename_reads
from onnxplace.passes.recomputation.clones import ClonedSchedule, TurnProblem
from onnxplace.passes.recomputation.gates import MIN_OPSET, SPACING_NODES, GateWriter, TensorKind
from onnxplace.passes.recomputation.memory_order import find_branches
from onnxplace.training_step import PARAMETER_KEY, PHASE_KEY

_BACKWARD = "backward"


@dataclass(frozen=True)
class ClonedModel:
    """A model with clones, in the order of its schedule."""

    model: Model
    source: Longs
    """Per node, the node of the model before that it is or repeats; -1 for nodes of gates."""
    is_clone: Bools
    """Per node."""
    value_bytes: Mapping[str, int]
    """By value; those of gates are left out, being small or views."""
    kinds: Mapping[str, TensorKind]
    """By value, where known."""


def write_clones(model: Model, problem: TurnProblem, is_cloned: Bools, kinds: Mapping[str, TensorKind]) -> ClonedModel:
    """Return the model in which these nodes run again behind the turn; O(N + E).

    Each clone waits for a value that is computed shortly before it is needed, where there is one.
    """
    return _Writer(model, problem, is_cloned, kinds).write()


@dataclass(frozen=True)
class _NewNode:
    """A node of the new model."""

    proto: NodeProto
    source: int = -1
    """The node that it is or repeats; -1 for nodes of gates."""
    is_clone: bool = False


class _Writer:
    def __init__(self, model: Model, problem: TurnProblem, is_cloned: Bools, kinds: Mapping[str, TensorKind]) -> None:
        self.model, self.problem, self.graph = model, problem, problem.graph
        self.schedule: ClonedSchedule = problem.apply(is_cloned)
        self.is_cloned = is_cloned & (self.schedule.clone_number >= 0)
        self.kinds = dict(kinds)
        self.bytes = dict(zip(self.graph.value_names, self.graph.value_bytes.tolist()))
        self._used = {*self.graph.value_names, *self.graph.weight_names, *model.initializers, *self.graph.names}
        self.gates = GateWriter(self.kinds, self.unique_name)
        self.position = problem.position
        self.clone_of: dict[str, str] = {}
        self._blocks: list[list[_NewNode]] = [[] for _ in range(len(self.graph))]
        self._producer_position = {
            name: int(self.position[node])
            for name, node in zip(self.graph.value_names, self.graph.producer.tolist())
            if node >= 0
        }

    def write(self) -> ClonedModel:
        for node in np.flatnonzero(self.is_cloned).tolist():
            for value in self.graph.outputs[node].tolist():
                name = self.graph.value_names[value]
                again = self.clone_of[name] = self.unique_name(f"{name}/again")
                self.bytes[again] = self.bytes[name]
                if name in self.kinds:
                    self.kinds[again] = self.kinds[name]
        slots = self._slots()
        late = _late_values(self.graph, self.problem, self.kinds)
        for node in self.problem.order.tolist():
            position = int(self.position[node])
            for clone in slots.get(position, ()):
                self._add_clone(clone, position, late[position], set(slots[position]))
            self._add_node(node, position)
        added = [item for block in self._blocks for item in block]
        nodes = [item.proto for item in added]
        rewritten = self.model.replacing(nodes, {**self.model.initializers, **self.gates.constants})
        return ClonedModel(
            model=replace(rewritten, keeps_order=True),
            source=np.array([item.source for item in added], dtype=np.int64),
            is_clone=np.array([item.is_clone for item in added], dtype=np.bool_),
            value_bytes=MappingProxyType(self.bytes),
            kinds=MappingProxyType(self.kinds),
        )

    def unique_name(self, name: str) -> str:
        """Return a name that nothing in the model has, and take it."""
        unique, number = name, 1
        while unique in self._used:
            number += 1
            unique = f"{name}{number}"
        self._used.add(unique)
        return unique

    def _slots(self) -> dict[int, list[int]]:
        """Return the clones that run directly before each position, in their order."""
        clones = np.flatnonzero(self.is_cloned)
        clones = clones[np.argsort(self.schedule.clone_number[clones])]
        numbers = self.schedule.node_number[self.problem.order]
        slots: dict[int, list[int]] = {}
        for clone in clones.tolist():
            position = int(np.searchsorted(numbers, self.schedule.clone_number[clone]))
            slots.setdefault(position, []).append(clone)
        return slots

    def _add_node(self, index: int, position: int) -> None:
        node = self.model.nodes[index]
        names = {name: self.clone_of[name] for name in self.model.reads[index] if name in self.clone_of}
        if position > self.problem.turn and names:
            node = _copy(node)
            rename_reads(node, names)
        self._blocks[position].append(_NewNode(node, index))

    def _add_clone(self, index: int, position: int, late: str, slot: set[int]) -> None:
        """Add the clone of a node; unless it reads another clone of its slot, a gate holds it back."""
        copy = _copy(self.model.nodes[index])
        copy.name = self.unique_name(f"{copy.name}/again")
        reads, block = self.model.reads[index], self._blocks[position]
        names = {name: self.clone_of[name] for name in reads if name in self.clone_of}
        if late and not slot & set(self.graph.predecessors[index].tolist()):
            gated = [name for name in reads if name not in names and self._can_be_gated(name)]
            if gated:
                names[gated[0]], opening, gate = self.gates.gate(gated[0], late)
                self._blocks[self._producer_position[late]] += [_NewNode(node) for node in opening]
                block += [_NewNode(node) for node in gate]
        rename_reads(copy, names)
        copy.output[:] = [self.clone_of[name] if name else "" for name in copy.output]
        _mark_backward(copy)
        block.append(_NewNode(copy, index, is_clone=True))

    def _can_be_gated(self, name: str) -> bool:
        return self.model.opset >= MIN_OPSET and name in self.kinds and self.kinds[name].can_be_gated


def _late_values(graph: OpGraph, problem: TurnProblem, kinds: Mapping[str, TensorKind]) -> list[str]:
    """Return, per position, a value that opens the gates there; empty if there is none.

    It is computed behind the turn, on the way to many outputs: an update may be on another device or run late.
    """
    is_branch = find_branches(graph)
    late, name, since = list[str](), "", -SPACING_NODES
    for position, node in enumerate(problem.order.tolist()):
        late.append(name)
        if position <= problem.turn or is_branch[node] or position < since + SPACING_NODES:
            continue
        for value in graph.outputs[node].tolist():
            kind = kinds.get(graph.value_names[value])
            if kind is not None and graph.value_bytes[value] > 0:
                name, since = graph.value_names[value], position
    return late


def _copy(node: NodeProto) -> NodeProto:
    copy = NodeProto()
    copy.CopyFrom(node)
    return copy


def _mark_backward(clone: NodeProto) -> None:
    """Note in the metadata of a clone, if it has any, that it belongs to the backward pass, and to no parameter."""
    for entry in [entry for entry in clone.metadata_props if entry.key == PARAMETER_KEY]:
        clone.metadata_props.remove(entry)
    for entry in clone.metadata_props:
        if entry.key == PHASE_KEY:
            entry.value = _BACKWARD
