"""Builds an ONNX graph node by node, with constants stored once and names that tell where a node comes from."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

# ---------------------------------------------------------------------------------------------- where a node comes from


FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


@dataclass(frozen=True)
class Origin:
    """The phase, module and parameter of a node, as its metadata says.

    >>> Origin(BACKWARD, "layers.0").prefix
    'layers.0/backward/'
    """

    phase: str = FORWARD
    """`forward`, `backward` or `update`."""
    module: str = ""
    """The path of the innermost module, as in `named_modules`; empty for the module itself and for the loss."""
    parameter: str = ""
    """The only parameter whose gradient or update the node computes."""
    micro_batch: str = ""
    """The number of the micro-batch with gradient accumulation; else empty."""

    @property
    def prefix(self) -> str:
        """The beginning of the names of nodes."""
        parts = [
            self.parameter if self.phase == UPDATE else self.module,
            f"micro_batch_{self.micro_batch}" if self.micro_batch else "",
            self.phase if self.phase != FORWARD else "",
        ]
        return "".join(f"{part}/" for part in parts if part)

    def describe(self) -> dict[str, str]:
        """Return the metadata of a node, without empty entries."""
        entries = {"phase": self.phase, "module": self.module, "parameter": self.parameter}
        return {f"onnxplace.{key}": text for key, text in entries.items() if text}


# ------------------------------------------------------------------------------------------------------------ the graph


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

    def find_needed(self, values: Iterable[str]) -> set[str]:
        """Return some values and all that they depend on."""
        needed = set(values)
        for node in reversed(self.nodes):
            if needed.intersection(node.output):
                needed.update(filter(None, node.input))
        return needed

    def drop_unused(self, outputs: Iterable[str]) -> None:
        """Remove nodes and constants that no output depends on."""
        needed = self.find_needed(outputs)
        self.nodes = [node for node in self.nodes if needed.intersection(node.output)]
        self.constants = {name: tensor for name, tensor in self.constants.items() if name in needed}

    def is_produced(self, name: str) -> bool:
        """Return whether a node writes this value."""
        return any(name in node.output for node in self.nodes)


# -------------------------------------------------------------------------------------------------- owners of gradients


def mark_owners(builder: GraphBuilder, gradients: Mapping[str, str]) -> None:
    """Set the parameter of backward nodes whose results only reach the gradient of one parameter.

    Args:
        builder: the graph of the step, complete.
        gradients: the value that is the gradient of each parameter.
    """
    names = list(gradients)
    # Bits of the parameters whose gradients depend on a value.
    reached: dict[str, int] = {}
    for index, name in enumerate(names):
        reached[gradients[name]] = reached.get(gradients[name], 0) | 1 << index
    for node in reversed(builder.nodes):
        origin = builder.origins[node.name]
        if origin.phase != BACKWARD:
            continue
        owners = 0
        for output in node.output:
            owners |= reached.get(output, 0)
        for value in filter(None, node.input):
            reached[value] = reached.get(value, 0) | owners
        if owners.bit_count() == 1:
            builder.origins[node.name] = replace(origin, parameter=names[owners.bit_length() - 1])
