"""What nodes of a model lead to, and what they come from, as labels."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from onnx import TypeProto

from onnxplace.graph import Bools, Ints, OpGraph
from onnxplace.model import FLOAT_TYPES, Model, is_scalar
from onnxplace.passes.training.role_kernels import MANY, NONE, label_ends, label_origins

# Operators whose results have the elements of an input at the places that it has them: those of an optimiser's updates.
ELEMENTWISE = frozenset(
    {
        *("Abs", "Add", "Cast", "Clip", "Div", "Exp", "Expand", "Identity", "Log", "Max", "Mean", "Min", "Mul"),
        *("Neg", "Pow", "Reciprocal", "Sign", "Sqrt", "Sub", "Sum", "Where"),
    }
)

# Of the largest floating-point type of ONNX.
MAX_NUMBER_BYTES = 8


@dataclass(frozen=True)
class Flow:
    """The flow of data in a model with carried states."""

    model: Model
    graph: OpGraph

    @cached_property
    def index(self) -> dict[str, int]:
        """Return the index of each value by name."""
        return {name: value for value, name in enumerate(self.graph.value_names)}

    @cached_property
    def states(self) -> tuple[str, ...]:
        """Return the inputs of the states."""
        return tuple(self.model.states)

    @cached_property
    def state_inputs(self) -> Ints:
        return np.array([self.index[name] for name in self.states], dtype=np.int32)

    @cached_property
    def state_outputs(self) -> Ints:
        return np.array([self.find_output(name) for name in self.model.states.values()], dtype=np.int32)

    def find_output(self, name: str) -> int:
        """Return the value of an output."""
        return self.index[self.model.sources.get(name, name)]

    @cached_property
    def is_scalar(self) -> Bools:
        """Return which values are known to be one number."""
        types, names = self.model.types, self.graph.value_names
        result = np.zeros(len(names), dtype=bool)
        # Larger values are more than a number; no size is known of those with 0 bytes.
        small = np.flatnonzero(self.graph.value_bytes <= MAX_NUMBER_BYTES)
        result[small] = [bool(is_scalar(types.get(names[value]))) for value in small.tolist()]
        return result

    def has_float_type(self, name: str) -> bool:
        """Return whether a value is a tensor of floating-point numbers, as far as that is known."""
        kind = self.model.types.get(name, TypeProto())
        return kind.WhichOneof("value") is None or kind.tensor_type.elem_type in FLOAT_TYPES

    @cached_property
    def is_elementwise(self) -> Bools:
        """Return which nodes compute element by element."""
        return np.array([op in ELEMENTWISE for op in self.graph.ops], dtype=bool)

    def label_ends(self, ends: Ints, labels: Ints, *, cut: bool) -> tuple[Ints, Ints]:
        """Return, per node and per value, which of some values it leads to.

        Args:
            ends: Indices of values.
            labels: Of the ends.
            cut: Whether single numbers that lead to several ends connect them.
        """
        graph = self.graph
        value_label = np.full(len(graph.value_names), NONE, dtype=np.int32)
        value_label[ends] = labels
        result: tuple[Ints, Ints] = label_ends(
            graph.order, graph.inputs.starts, graph.inputs.items, graph.outputs.starts, graph.outputs.items,
            value_label, self.is_scalar if cut else np.zeros(len(value_label), dtype=bool),
        )  # fmt: skip
        return result

    def leads_to(self, ends: Ints) -> tuple[Bools, Bools]:
        """Return which nodes and which values some values depend on, themselves included."""
        node_label, value_label = self.label_ends(ends, np.zeros(len(ends), dtype=np.int32), cut=False)
        return node_label != NONE, value_label != NONE

    def label_origins(self, node_label: Ints, values: Ints, labels: Ints, carries: Bools | None = None) -> Ints:
        """Return, per node, which labelled nodes and values without producer it comes from.

        `carries`: the nodes that pass on what they come from, by default all.
        """
        graph = self.graph
        value_label = np.full(len(graph.value_names), NONE, dtype=np.int32)
        value_label[values] = labels
        carries = np.ones(len(graph), dtype=bool) if carries is None else carries
        result: Ints = label_origins(
            graph.order, graph.producer, graph.inputs.starts, graph.inputs.items, node_label, value_label, carries
        )
        return result

    def comes_from(self, nodes: Bools, values: Ints) -> Bools:
        """Return which nodes depend on some nodes or on some values without producer; those nodes are not included."""
        labels = np.where(nodes, 0, NONE).astype(np.int32)
        origin = self.label_origins(labels, values, np.zeros(len(values), dtype=np.int32))
        result: Bools = origin != NONE
        return result


__all__ = ["MANY", "NONE", "Flow"]
