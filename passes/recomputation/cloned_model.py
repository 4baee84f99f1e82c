"""Write the model in which some nodes run a second time, and its profile.

ONNX has no dependencies besides values. A clone reads the same values as its original, so a scheduler may run both at
once. A gate makes it wait for a late value, without copying anything: a Reshape to a shape of zeros, which keep all
sizes; the zeros are computed from the number of elements of the late value. Runtimes return the memory of the input as
the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field, replace
from types import MappingProxyType

import numpy as np
from onnx import NodeProto, TensorProto, TypeProto, helper, numpy_helper

from onnxplace.facts import Profile
from onnxplace.graph import Bools, Ints, Longs, OpGraph
from onnxplace.model import Model, build_op_graph, rename_reads
from onnxplace.passes.recomputation.clone_choice import ClonedSchedule, TurnProblem
from onnxplace.passes.recomputation.memory_order import find_branches
from onnxplace.training_step import PARAMETER_KEY, PHASE_KEY

# Late values nearer to each other than so many nodes open the same gates.
SPACING_NODES = 16
# Operators broadcast from this version on.
MIN_OPSET = 7

_BACKWARD = "backward"

# A node of a gate: it computes a few numbers, or returns a view.
GATE_SECONDS = 2e-6


@dataclass(frozen=True)
class TensorKind:
    """Element type and number of dimensions of a tensor."""

    element: int
    rank: int

    @staticmethod
    def of(kind: TypeProto) -> TensorKind | None:
        """Return the kind of a type; None if it is no tensor of known rank."""
        if not kind.HasField("tensor_type") or not kind.tensor_type.HasField("shape"):
            return None
        return TensorKind(kind.tensor_type.elem_type, len(kind.tensor_type.shape.dim))


@dataclass
class GateWriter:
    """Writes the nodes of gates."""

    kinds: Mapping[str, TensorKind]
    unique_name: Callable[[str], str]
    constants: dict[str, TensorProto] = field(default_factory=dict)
    """Initializers that gates need, by name."""
    _sizes: dict[str, str] = field(default_factory=dict)
    _constants_by_rank: dict[int, str] = field(default_factory=dict)
    _zeros: dict[tuple[str, int], str] = field(default_factory=dict)
    _gated: dict[tuple[str, str], str] = field(default_factory=dict)

    def gate(self, value: str, late: str) -> tuple[str, list[NodeProto], list[NodeProto]]:
        """Return `value` behind a gate that `late` opens, new nodes to run after `late`, and those of the gate."""
        if (value, late) in self._gated:
            return self._gated[value, late], [], []
        opening = list[NodeProto]()
        zeros = self._make_zeros(late, self.kinds[value].rank, opening)
        result = self._gated[value, late] = self.unique_name(f"{value}/gated")
        gate = helper.make_node("Reshape", [value, zeros], [result], name=self.unique_name(f"{value}/gate"))
        return result, opening, [gate]

    def _make_zeros(self, late: str, rank: int, nodes: list[NodeProto]) -> str:
        """Return the name of `rank` zeros that depend on a value."""
        if (late, rank) in self._zeros:
            return self._zeros[late, rank]
        if late not in self._sizes:
            self._sizes[late] = self.unique_name(f"{late}/size")
            nodes.append(helper.make_node("Size", [late], [self._sizes[late]], name=self._sizes[late]))
        zeros = self.unique_name(f"{late}/zeros")
        nodes.append(helper.make_node("Mul", [self._sizes[late], self._constant(rank)], [zeros], name=zeros))
        self._zeros[late, rank] = zeros
        return zeros

    def _constant(self, rank: int) -> str:
        """Return the name of an initializer of `rank` zeros."""
        if rank not in self._constants_by_rank:
            name = self._constants_by_rank[rank] = self.unique_name(f"gate/zeros{rank}")
            self.constants[name] = numpy_helper.from_array(np.zeros(rank, dtype=np.int64), name)
        return self._constants_by_rank[rank]


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
        self.is_cloned, self.position = is_cloned & (self.schedule.clone_number >= 0), problem.position
        self.kinds = dict(kinds)
        self.bytes = dict(zip(self.graph.value_names, self.graph.value_bytes.tolist()))
        self._used = {*self.graph.value_names, *self.graph.weight_names, *model.initializers, *self.graph.names}
        self.gates = GateWriter(self.kinds, self.unique_name)
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
            node = deepcopy(node)
            rename_reads(node, names)
        self._blocks[position].append(_NewNode(node, index))

    def _add_clone(self, index: int, position: int, late: str, slot: set[int]) -> None:
        """Add the clone of a node; unless it reads another clone of its slot, a gate holds it back."""
        copy = deepcopy(self.model.nodes[index])
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
        """Return whether a gate can hold a value back."""
        kind = self.kinds.get(name, TensorKind(TensorProto.UNDEFINED, 0))
        is_fit = kind.rank > 0 and kind.element not in (TensorProto.UNDEFINED, TensorProto.STRING)
        return self.model.opset >= MIN_OPSET and is_fit


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


def _mark_backward(clone: NodeProto) -> None:
    """Note in the metadata of a clone, if it has any, that it belongs to the backward pass, and to no parameter."""
    for entry in [entry for entry in clone.metadata_props if entry.key == PARAMETER_KEY]:
        clone.metadata_props.remove(entry)
    for entry in clone.metadata_props:
        if entry.key == PHASE_KEY:
            entry.value = _BACKWARD


def clone_profile(profile: Profile, cloned: ClonedModel) -> Profile:
    """Return the profile of a model with clones."""
    source, is_new = cloned.source, (cloned.source < 0) | cloned.is_clone
    graph = build_op_graph(cloned.model, cloned.value_bytes)
    return replace(
        profile.rewritten(graph, source, _number_units(profile.unit, cloned), GATE_SECONDS, 1.0),
        user_groups=None if profile.user_groups is None else np.where(is_new, -1, profile.user_groups[source]),
        backward=None if profile.backward is None else is_new | profile.backward[source],
        training=None if profile.training is None else profile.training.spread(source, is_new),
    )


def _number_units(unit: Ints, cloned: ClonedModel) -> Ints:
    """Return the kernel of each node: clones of the nodes of one kernel are one kernel if they are neighbours."""
    numbers: dict[tuple[int, bool, int], int] = {}
    result, last = list[int](), (-1, False, -1)
    for index, (source, is_clone) in enumerate(zip(cloned.source.tolist(), cloned.is_clone.tolist())):
        kernel = int(unit[source]) if source >= 0 else -1 - index
        run = last[2] if last[:2] == (kernel, True) else index
        last = (kernel, is_clone, run if is_clone else -1)
        result.append(numbers.setdefault(last, len(numbers)))
    return np.array(result, dtype=np.int32)
