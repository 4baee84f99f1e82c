"""Shapes, element types, constants and fixed axes of a model's values, as far as sharding may rely on them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Any

from numpy.typing import NDArray
from onnx import TensorProto, numpy_helper

from onnxplace.errors import OnnxplaceError
from onnxplace.feeds.dimensions import complete_dimensions, symbols_of_dimension
from onnxplace.model.model import Model, find_misjudged_values
from onnxplace.model.nested_graphs import has_subgraphs
from onnxplace.model.tensors import is_known_shape, packed_size, read_shape_entries
from onnxplace.passes.sharding.rules.node_views import NodeView, Shape
from onnxplace.passes.sharding.space.known_shapes import infer_all_shapes, infer_with_runtime

# Larger constants hold no shapes, axes or paddings.
_MAX_CONSTANT_ELEMENTS = 64
# How other sizes of symbolic dimensions are drawn: a * size + b, and c more per further dimension. An axis that has
# the same size for all is fixed: not min(size, 2), for which the first ones are. Multiples keep sizes equal, or the sum
# of others, that a model only takes so; but they also keep ratios, so that each dimension is doubled alone, too.
_OTHER_SIZES = ((0, 1, 0), (0, 2, 1), (2, 3, 1), (11, 17, 1), (2, 0, 0), (3, 0, 0))
# Not max(size, 1000) either: each dimension once has this size. Several at a time would make vectors of millions of
# elements, each of which inference follows (14 GB for a mixture of experts).
_LARGE_SIZE = 4_099
# Large sizes may be impossible, such as more tokens than positions: so many of the others must be possible.
_MIN_OTHER_SIZES = 2

# Slice and Concat do not take these types; before this opset, Concat took floats only.
_UNCUT_TYPES = ("FLOAT8", "FLOAT4", "INT4", "UINT4", "INT2", "UINT2", "UNDEFINED")
_MIN_CONCAT_OPSET = 4


@dataclass(frozen=True)
class TensorFacts:
    """What sharding knows of the values of a model; values of unknown shape are never split."""

    model: Model
    shapes: Mapping[str, Shape]
    """By value and initializer, at the sizes that the model is compiled for."""
    fixed: Mapping[str, tuple[bool, ...]]
    """Per axis, whether its size is the same whatever the symbolic dimensions are."""
    types: Mapping[str, int]
    """Element type by value and initializer."""
    constants: Mapping[str, NDArray[Any]]
    """Small integer initializers, and scales of Resize."""
    others: Sequence[Mapping[str, Shape]] = ()
    """Shapes at other sizes of the symbolic dimensions, as far as the model takes them; weights are left out."""
    entries: Mapping[str, tuple[int | None, ...]] = field(default_factory=dict)
    """Entries of targets that a Concat puts together of constants and of computed sizes, which are None."""

    @staticmethod
    def of(model: Model) -> TensorFacts:
        """Collect the facts of a model with bound dimensions."""
        shapes = infer_all_shapes(model)
        drawn = [] if _has_fixed_inputs(model) else _draw_other_sizes(model)
        others = [_infer_at(model, sizes) for sizes in drawn]
        # Nothing is cut by rules at size 0, but an axis that is empty there varies.
        empty = [_infer_at(model, dict.fromkeys(drawn[0], 0))] if drawn else []
        fixed = _find_fixed_axes(model, shapes, drawn, [*others, *empty])
        types = {**infer_with_runtime(model, model.input_shapes()).types, **model.element_types}
        for name, tensor in model.constants.items():
            shapes[name] = tuple(tensor.dims)
            fixed[name] = (True,) * len(tensor.dims)
        constants = read_constants(model)
        return TensorFacts(model, shapes, fixed, types, constants, others, _read_entries(model, shapes, constants))

    def can_split(self, name: str) -> bool:
        """Return whether a value has a type that Slice and Concat take; weights are cut before the model runs."""
        if name in self.is_weight:
            return True
        kind = TensorProto.DataType.Name(self.types.get(name, TensorProto.UNDEFINED))
        if self.model.opset < _MIN_CONCAT_OPSET:
            return self.model.opset > 0 and kind in ("FLOAT", "DOUBLE", "FLOAT16")
        return not kind.startswith(_UNCUT_TYPES)

    @cached_property
    def is_weight(self) -> frozenset[str]:
        """Return the initializers that the caller cannot override."""
        return frozenset(self.model.constants)

    def bytes(self, name: str) -> int:
        """Return the bytes of a value, 0 for an unknown size."""
        kind = self.types.get(name, TensorProto.UNDEFINED)
        if name not in self.shapes or kind in (TensorProto.STRING, TensorProto.UNDEFINED):
            return 0
        return packed_size(kind, self.shapes[name])

    def view(self, index: int) -> NodeView | None:
        """Return what rules see of a node; None if a shape is unknown, or for a node with subgraphs."""
        node = self.model.nodes[index]
        if has_subgraphs(node):
            return None
        shapes = self.shapes
        if any(name and name not in shapes for name in (*node.input, *node.output)):
            return None
        return NodeView(
            node=node,
            inputs=tuple(shapes[name] if name else None for name in node.input),
            outputs=tuple(shapes[name] if name else None for name in node.output),
            opset=self.model.opset,
            constants={i: self.constants[name] for i, name in enumerate(node.input) if name in self.constants},
            element_types=tuple(self.types.get(name, 0) for name in node.output if name),
            entries=self.entries.get(node.input[1], ()) if node.op_type == "Reshape" and len(node.input) > 1 else (),
        )

    def list_other_shapes(self, names: Sequence[str]) -> list[tuple[Shape | None, ...]] | None:
        """Return the shapes of a node's values at each other size; None for an omitted value.

        Nothing if the shapes are always the same. None if the model takes too few other sizes to tell what varies.
        """
        if all(all(self.fixed[name]) for name in names if name):
            return []
        own = tuple(self.shapes[name] if name else None for name in names)
        listed = [
            tuple(other.get(name, self.shapes[name]) if name else None for name in names)
            for other in self.others
            if all(name in other or name in self.is_weight for name in names if name)
        ]
        different = [shapes for shapes in dict.fromkeys(listed) if shapes != own]
        for position, name in enumerate(names):
            columns = zip(*(shape for shapes in (own, *different) if (shape := shapes[position]) is not None))
            # An axis that may vary, but does not, could be broadcast at other sizes.
            if name and any(len({*column}) < 2 and not fixed for column, fixed in zip(columns, self.fixed[name])):
                return None
        return different if len(different) >= _MIN_OTHER_SIZES else None


def read_constants(model: Model) -> dict[str, NDArray[Any]]:
    """Return the small integer initializers, the scales of Resize, and numbers that multiply or divide."""
    constants = {}
    scales = {name for node in model.nodes if node.op_type in ("Resize", "Upsample") for name in node.input[1:3]}
    factors = {name for node in model.nodes if node.op_type in ("Mul", "Div") for name in node.input}
    for name, tensor in model.constants.items():
        count = math.prod(tensor.dims)
        is_small = count <= _MAX_CONSTANT_ELEMENTS
        is_read = tensor.data_type in (TensorProto.INT64, TensorProto.INT32) or name in scales
        is_read |= count == 1 and name in factors
        if is_small and is_read and tensor.data_location != TensorProto.EXTERNAL:
            constants[name] = numpy_helper.to_array(tensor)
    return constants


def _read_entries(
    model: Model, shapes: Mapping[str, Shape], constants: Mapping[str, NDArray[Any]]
) -> dict[str, tuple[int | None, ...]]:
    """Return what is known of the targets of Reshape that a Concat puts together."""
    targets = {node.input[1] for node in model.nodes if node.op_type == "Reshape" and len(node.input) > 1}
    entries = {}
    for node in model.nodes:
        if node.op_type == "Concat" and node.output[0] in targets and shapes.keys() >= {*node.input}:
            pieces = [
                constants[name].reshape(-1).tolist() if name in constants else [None] * math.prod(shapes[name])
                for name in node.input
            ]
            entries[node.output[0]] = tuple(entry for piece in pieces for entry in piece)
    return entries


def _has_fixed_inputs(model: Model) -> bool:
    return all(is_known_shape(read_shape_entries(value.type)) for value in model.inputs)


def _find_fixed_axes(
    model: Model,
    shapes: Mapping[str, Shape],
    drawn: Sequence[Mapping[str, int]],
    others: Sequence[Mapping[str, Shape]],
) -> dict[str, tuple[bool, ...]]:
    """Return, per value, which axes keep their size when symbolic dimensions change.

    An axis is fixed if shape inference says so, or finds one size for all of several very different sizes. Sizes at
    which the value is not known say nothing: [N, 6] is added to [8, 6] where N is 1, or 8. So each dimension must
    change at one where it is.

    Args:
        model: The model, with bound dimensions.
        shapes: By value, at the bound sizes.
        drawn: Other sizes.
        others: Shapes at these, then at further ones.
    """
    if _has_fixed_inputs(model):
        return {name: (True,) * len(shape) for name, shape in shapes.items()}
    declared = {name: read_shape_entries(kind) for name, kind in model.types.items()}
    # An empty input of a Concat may have any other sizes at some of these.
    weights = {name: tuple(tensor.dims) for name, tensor in model.initializers.items()}
    judged = [find_misjudged_values(model.nodes, model.reads, {**weights, **other}) for other in others[: len(drawn)]]
    doubtful = set[str]().union(*judged)
    fixed = {}
    for name, shape in shapes.items():
        entries, inferred = declared.get(name), [other[name] for other in others if name in other]
        known = [sizes for sizes, other in zip(drawn, others) if name in other]
        is_judged = len(known) >= _MIN_OTHER_SIZES and name not in doubtful
        varies = is_judged and all(any(sizes[key] != model.dimensions[key] for sizes in known) for key in known[0])
        fixed[name] = tuple(
            (entries is not None and len(entries) == len(shape) and entries[axis] == size)
            or (varies and all(len(other) == len(shape) and other[axis] == size for other in inferred))
            for axis, size in enumerate(shape)
        )
    return fixed


def _draw_other_sizes(model: Model) -> list[dict[str, int]]:
    """Return other sizes of the symbolic dimensions, by name."""
    bound = {name: size for name, size in sorted(model.dimensions.items()) if symbols_of_dimension(name) == [name]}
    drawn = [
        {name: factor * size + offset + step * index for index, (name, size) in enumerate(bound.items())}
        for factor, offset, step in _OTHER_SIZES
    ]
    alone = [{**bound, name: other} for name, size in bound.items() for other in (2 * size or 2, _LARGE_SIZE)]
    return [dict(items) for items in dict.fromkeys(tuple(sizes.items()) for sizes in (*drawn, *alone))]


def _infer_at(model: Model, sizes: Mapping[str, int]) -> dict[str, Shape]:
    """Return the shapes at other sizes of the symbolic dimensions; empty if there are none."""
    try:
        dimensions = complete_dimensions(model.dimensions, sizes)
        other = replace(model, dimensions=MappingProxyType(dict(dimensions)), samples=MappingProxyType({}))
        return infer_all_shapes(other)
    except OnnxplaceError:
        return {}
