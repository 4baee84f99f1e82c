"""Gates: nodes that make a clone wait for a late value, without copying anything.

ONNX has no dependencies besides values. A clone reads the same values as its original, so a scheduler may run both at
once. A gate is a Reshape to a shape of zeros, which keep all sizes; the zeros are computed from the number of elements
of a late value. Runtimes return the memory of the input as the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto, TypeProto, helper, numpy_helper

# Late values nearer to each other than so many nodes open the same gates.
SPACING_NODES = 16
# Operators broadcast from this version on.
MIN_OPSET = 7


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

    @property
    def can_be_gated(self) -> bool:
        """Return whether a gate can hold it back."""
        return self.rank > 0 and self.element not in (TensorProto.UNDEFINED, TensorProto.STRING)


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
