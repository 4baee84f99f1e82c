"""Builds an ONNX graph node by node, with constants stored once and names that tell where a node comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnxplace.torch.origins import Origin

# Constants up to this size are stored once for the whole graph. Larger ones are rare, and hashing them takes time.
MAX_SHARED_BYTES = 65536


@dataclass
class GraphBuilder:
    """Nodes and constants of a graph in construction.

    Nodes get the origin that is set at the time: phase, module and parameter.
    """

    nodes: list[NodeProto] = field(default_factory=list)
    origins: dict[str, Origin] = field(default_factory=dict)
    """The origin of each node, by the node's name."""
    constants: dict[str, TensorProto] = field(default_factory=dict)
    origin: Origin = field(default_factory=Origin)
    shared_constants: dict[tuple[str, tuple[int, ...], bytes], str] = field(default_factory=dict)
    taken_names: set[str] = field(default_factory=set)
    next_numbers: dict[str, int] = field(default_factory=dict)
    known_results: dict[tuple[object, ...], list[str]] = field(default_factory=dict)
    """The outputs of each node, by what it computes and its origin."""

    @contextmanager
    def within(self, **changes: str) -> Iterator[None]:
        """Set parts of the origin for nodes that are added inside."""
        outer, self.origin = self.origin, replace(self.origin, **changes)
        try:
            yield
        finally:
            self.origin = outer

    def reserve_name(self, wanted: str) -> str:
        """Return the name, or if it is taken, the name with a number."""
        name, number = wanted, self.next_numbers.get(wanted, 1)
        while name in self.taken_names:
            name, number = f"{wanted}_{number}", number + 1
        self.next_numbers[wanted] = number
        self.taken_names.add(name)
        return name

    def add(self, operator: str, inputs: Sequence[str], count: int = 1, **attributes: Any) -> list[str]:
        """Add a node and return the names of its outputs; the first is the name of the node.

        A node that does what another one of the same origin does is that node. Across modules and phases nodes stay
        apart, so that each can be on another device.
        """
        key = (operator, tuple(inputs), count, self.origin, *(f"{k}={attributes[k]}" for k in sorted(attributes)))
        if key in self.known_results:
            return self.known_results[key]
        name = self.reserve_name(f"{self.origin.prefix}{operator}")
        outputs = [name, *(self.reserve_name(f"{name}.{index}") for index in range(1, count))]
        present = {key: value for key, value in attributes.items() if value is not None}
        self.nodes.append(helper.make_node(operator, list(inputs), outputs, name=name, **present))
        self.origins[name] = self.origin
        self.known_results[key] = outputs
        return outputs

    def emit(self, operator: str, *inputs: str, **attributes: Any) -> str:
        """Add a node with one output and return the name of the output."""
        return self.add(operator, inputs, **attributes)[0]

    def constant(self, array: np.ndarray, name: str = "constant") -> str:
        """Return the name of a constant; equal small constants have one name."""
        array = np.asarray(array)
        if array.nbytes > MAX_SHARED_BYTES:
            return self.add_constant(array, name)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self.shared_constants:
            self.shared_constants[key] = self.add_constant(array, name)
        return self.shared_constants[key]

    def add_constant(self, array: np.ndarray, name: str) -> str:
        """Add a constant under a name of its own and return the name."""
        unique = self.reserve_name(name)
        self.constants[unique] = numpy_helper.from_array(np.asarray(array, order="C"), unique)
        return unique

    def integers(self, values: Sequence[int]) -> str:
        """Return a one-dimensional int64 constant."""
        return self.constant(np.array(list(values), dtype=np.int64))

    def rename_values(self, names: Mapping[str, str]) -> None:
        """Give values other names, in all nodes that write or read them."""
        for node in self.nodes:
            node.input[:] = [names.get(name, name) for name in node.input]
            node.output[:] = [names.get(name, name) for name in node.output]

    def drop_unused(self, outputs: Sequence[str]) -> None:
        """Remove nodes and constants that no output depends on."""
        needed = set(outputs)
        kept = []
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                kept.append(node)
                needed.update(filter(None, node.input))
        self.nodes = kept[::-1]
        self.constants = {name: tensor for name, tensor in self.constants.items() if name in needed}

    def is_produced(self, name: str) -> bool:
        """Return whether a node writes this value."""
        return any(name in node.output for node in self.nodes)
