"""What a sharding rule sees of a node: operator, attributes, shapes and constants, but no names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from numpy.typing import NDArray
from onnx import NodeProto, helper

from onnxplace.passes.sharding.rules.layouts import Division, Layout

Shape = tuple[int, ...]


def split_words(text: str) -> list[str]:
    """Return the words of a text, for long lists of operators."""
    return text.split()


@dataclass(frozen=True)
class NodeView:
    """A node as rules see it. Nodes with equal views have equal strategies."""

    node: NodeProto
    inputs: tuple[Shape | None, ...]
    """Shape of each input, None for an omitted one."""
    outputs: tuple[Shape | None, ...]
    """Shape of each output, None for an omitted one."""
    opset: int
    """Version of the standard operators."""
    constants: Mapping[int, NDArray[Any]] = field(default_factory=dict)
    """Input position -> value, for small integer constants, scales of Resize, and numbers that multiply or divide."""
    element_types: tuple[int, ...] = ()
    """Element type of each output."""
    entries: tuple[int | None, ...] = ()
    """Entries of the target of a Reshape that is put together of constants and computed sizes, which are None."""

    @property
    def op(self) -> str:
        return self.node.op_type

    def has(self, position: int) -> bool:
        """Return whether the node has this input."""
        return position < len(self.inputs) and self.inputs[position] is not None

    def shape(self, position: int) -> Shape:
        """Return the shape of an input; raises LookupError if it is omitted."""
        if not self.has(position):
            raise LookupError(f"no input {position}")
        shape = self.inputs[position]
        assert shape is not None
        return shape

    def result(self, position: int = 0) -> Shape:
        """Return the shape of an output; raises LookupError if it is omitted."""
        shape = self.outputs[position]
        if shape is None:
            raise LookupError(f"no output {position}")
        return shape

    def rank(self, position: int = 0) -> int:
        """Return the rank of an input."""
        return len(self.shape(position))

    def attribute(self, name: str, default: Any = None) -> Any:
        """Return the value of an attribute; texts as str."""
        for attribute in self.node.attribute:
            if attribute.name == name:
                value = helper.get_attribute_value(attribute)
                return value.decode() if isinstance(value, bytes) else value
        return default

    def target_entry(self, axis: int) -> int | None:
        """Return an entry of the target of a Reshape, None if it is computed."""
        known = self.constants[1].reshape(-1).tolist() if 1 in self.constants else self.entries
        return known[axis] if axis < len(known) else None

    def axis(self, default: int, rank: int | None = None) -> int:
        """Return the attribute `axis`, from 0; raises LookupError for a scalar."""
        rank = self.rank() if rank is None else rank
        if rank == 0:
            raise LookupError("a scalar has no axes")
        return int(self.attribute("axis", default)) % rank

    def present_outputs(self) -> list[int]:
        """Return the positions of the outputs that are not omitted."""
        return [position for position, shape in enumerate(self.outputs) if shape is not None]


@dataclass
class LocalNode:
    """A device's copy of a node, for edits: its names are already those of the device's parts."""

    proto: NodeProto
    view: NodeView
    device: int
    """Position in the group: not the number of its part, which several devices may have (`ranges`)."""
    inputs: tuple[Shape | None, ...]
    """Shapes of the device's parts."""
    outputs: tuple[Shape | None, ...]
    layouts: tuple[Layout | None, ...]
    """Layout of each output."""
    make_ints: Callable[[Sequence[int]], str]
    """Adds a constant vector of 64-bit integers and returns its name."""
    make_override: Callable[[str, int, int, int], str]
    """Adds a node that replaces one entry of a vector: (name, length, index, entry) -> name of the result."""

    make_zeros: Callable[[str], str]
    """Adds a node that makes zeros of the shape of a value, and returns its name."""
    make_node: Callable[..., str]
    """Adds a node of the device before its copy: (operator, inputs, attributes) -> name of the result."""
    division: Division

    def set_attribute(self, name: str, value: Any) -> None:
        """Set an attribute, or remove it if `value` is None."""
        for index, attribute in enumerate(self.proto.attribute):
            if attribute.name == name:
                del self.proto.attribute[index]
                break
        if value is not None:
            self.proto.attribute.append(helper.make_attribute(name, value))

    def set_input(self, position: int, name: str) -> None:
        """Replace an input; missing ones before it become omitted."""
        while len(self.proto.input) <= position:
            self.proto.input.append("")
        self.proto.input[position] = name

    def drop_input(self, position: int) -> None:
        """Omit an optional input."""
        if position < len(self.proto.input):
            self.proto.input[position] = ""
        while self.proto.input and not self.proto.input[-1]:
            del self.proto.input[-1]

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """The rows [low, high) of the first output's split axis that the device has; several devices may have them."""
        position = self.view.present_outputs()[0]
        layout = self.layouts[position]
        assert layout is not None
        return self.division.ranges(layout, self.view.result(position)[layout.axis], self.device)

    def take_part(self, value: str, axis: int) -> str:
        """Return the device's part of a whole value whose axis is cut as the first of the outputs is."""
        bounds = [[self.make_ints([number]) for number in (*ends, axis)] for ends in self.ranges]
        pieces = [self.make_node("Slice", [value, *ends]) for ends in bounds]
        return pieces[0] if len(pieces) == 1 else self.make_node("Concat", pieces, axis=axis)

    def override_entry(self, position: int, first_axis: int, axis: int, size: int) -> None:
        """Set the entry of an axis in an input that holds sizes of the axes from `first_axis` on."""
        index = axis - first_axis
        if position in self.view.constants:
            values = self.view.constants[position].reshape(-1).tolist()
            values[index] = size
            self.set_input(position, self.make_ints(values))
        else:
            length = self.view.shape(position)[0]
            self.set_input(position, self.make_override(self.proto.input[position], length, index, size))

    def out_shape(self) -> Shape:
        """Return the local shape of the first output."""
        shape = self.outputs[0]
        assert shape is not None
        return shape


Edit = Callable[[LocalNode], None]
"""Adapts a device's copy of a node to its parts."""
