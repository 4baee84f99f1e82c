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
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnxplace.facts import Profile
from onnxplace.graph.op_graph import Bools, Ints, Longs, OpGraph, number_densely
from onnxplace.model.lowering import build_op_graph
from onnxplace.model.model import Model
from onnxplace.model.nested_graphs import rename_reads
from onnxplace.model_metadata import PARAMETER_KEY, PHASE_KEY
from onnxplace.passes.recomputation.clone_choice import ClonedSchedule, TurnProblem
from onnxplace.passes.recomputation.memory_order import find_branches
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.names import claim_name

# Late values nearer to each other than so many nodes open the same gates.
SPACING_NODES = 16
# Operators broadcast from this version on.
MIN_OPSET = 7

_BACKWARD = "backward"

# A node of a gate: it computes a few numbers, or returns a view.
GATE_SECONDS = 2e-6


def find_ranks(model: Model) -> dict[str, int]:
    """Return the number of dimensions of each tensor, where it is known and a gate can be made of it."""
    tensors = {name: kind.tensor_type for name, kind in model.types.items() if kind.HasField("tensor_type")}
    return {
        name: len(kind.shape.dim)
        for name, kind in tensors.items()
        if kind.HasField("shape") and kind.elem_type not in (TensorProto.UNDEFINED, TensorProto.STRING)
    }


@dataclass
class GateWriter:
    """Writes the nodes of gates."""

    ranks: Mapping[str, int]
    unique_name: Callable[[str], str]
    constants: dict[str, TensorProto] = field(default_factory=dict)
    """Initializers that gates need, by name."""
    _names: dict[tuple[object, ...], str] = field(default_factory=dict)

    def gate(self, value: str, late: str) -> tuple[str, list[NodeProto], list[NodeProto]]:
        """Return `value` behind a gate that `late` opens, new nodes to run after `late`, and those of the gate.

        What an earlier gate has already, such as the size of `late`, serves this one too.
        """
        rank, opening, gate = self.ranks[value], list[NodeProto](), list[NodeProto]()
        size, is_new = self._name(f"{late}/size")
        if is_new:
            opening.append(helper.make_node("Size", [late], [size], name=size))
        zeros, is_new = self._name(f"{late}/zeros", rank)
        if is_new:
            constant, is_new = self._name(f"gate/zeros{rank}")
            if is_new:
                self.constants[constant] = numpy_helper.from_array(np.zeros(rank, dtype=np.int64), constant)
            opening.append(helper.make_node("Mul", [size, constant], [zeros], name=zeros))
        gated, is_new = self._name(f"{value}/gated", late)
        if is_new:
            name = self.unique_name(f"{value}/gate")
            gate.append(helper.make_node("Reshape", [value, zeros], [gated], name=name))
        return gated, opening, gate

    def _name(self, text: str, *key: object) -> tuple[str, bool]:
        """Return the name for a text and what else tells it from others, and whether it is new."""
        is_new = (text, *key) not in self._names
        if is_new:
            self._names[text, *key] = self.unique_name(text)
        return self._names[text, *key], is_new


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
    ranks: Mapping[str, int]
    """By value, as `find_ranks` returns them."""


def write_clones(model: Model, problem: TurnProblem, is_cloned: Bools, ranks: Mapping[str, int]) -> ClonedModel:
    """Return the model in which these nodes run again behind the turn; O(N + E).

    Each clone waits for a value that is computed shortly before it is needed, where there is one.
    """
    return _Writer(model, problem, is_cloned, ranks).write()


@dataclass(frozen=True)
class _NewNode:
    """A node of the new model."""

    proto: NodeProto
    source: int = -1
    """The node that it is or repeats; -1 for nodes of gates."""
    is_clone: bool = False


class _Writer:
    def __init__(self, model: Model, problem: TurnProblem, is_cloned: Bools, ranks: Mapping[str, int]) -> None:
        self.model, self.problem, self.graph = model, problem, problem.graph
        self.schedule: ClonedSchedule = problem.apply(is_cloned)
        self.is_cloned, self.position = is_cloned & (self.schedule.clone_number >= 0), problem.position
        self.ranks = dict(ranks)
        self.bytes = dict(zip(self.graph.value_names, self.graph.value_bytes.tolist()))
        self._used = {*self.graph.value_names, *self.graph.weight_names, *model.initializers, *self.graph.names}
        self.gates = GateWriter(self.ranks, self.unique_name)
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
                if name in self.ranks:
                    self.ranks[again] = self.ranks[name]
        slots = self._slots()
        late = _late_values(self.graph, self.problem, self.ranks)
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
            ranks=MappingProxyType(self.ranks),
        )

    def unique_name(self, name: str) -> str:
        """Return a name that nothing in the model has, and take it."""
        return claim_name(name, self._used)

    def _slots(self) -> dict[int, list[int]]:
        """Return the clones that run directly before each position, in their order."""
        clones = np.flatnonzero(self.is_cloned)
        clones = clones[np.argsort(self.schedule.clone_number[clones])]
        numbers = self.schedule.node_number[self.problem.order]
        positions = np.searchsorted(numbers, self.schedule.clone_number[clones])
        return group_pairs(zip(positions.tolist(), clones.tolist()))

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
            gated = [name for name in reads if name not in names and self.ranks.get(name, 0) > 0]
            if gated and self.model.opset >= MIN_OPSET:
                names[gated[0]], opening, gate = self.gates.gate(gated[0], late)
                self._blocks[self._producer_position[late]] += [_NewNode(node) for node in opening]
                block += [_NewNode(node) for node in gate]
        rename_reads(copy, names)
        copy.output[:] = [self.clone_of[name] if name else "" for name in copy.output]
        _mark_backward(copy)
        block.append(_NewNode(copy, index, is_clone=True))


def _late_values(graph: OpGraph, problem: TurnProblem, ranks: Mapping[str, int]) -> list[str]:
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
            if graph.value_names[value] in ranks and graph.value_bytes[value] > 0:
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
    kernels, last = list[tuple[int, bool, int]](), (-1, False, -1)
    for index, (source, is_clone) in enumerate(zip(cloned.source.tolist(), cloned.is_clone.tolist())):
        kernel = int(unit[source]) if source >= 0 else -1 - index
        run = last[2] if last[:2] == (kernel, True) else index
        last = (kernel, is_clone, run if is_clone else -1)
        kernels.append(last)
    return number_densely(kernels)
