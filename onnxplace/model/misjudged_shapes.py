"""Shapes that ONNX infers in another way than ONNX Runtime computes them: neither is relied on.

Found by comparing both for all windows of one to three entries, with strides, dilations, paddings and every `auto_pad`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest

from onnx import NodeProto, helper

Entries = Sequence[int | str | None] | None
"""Sizes and symbols per axis, None for unknown ones."""


def find_misjudged_values(
    nodes: Sequence[NodeProto], reads: Sequence[Sequence[str]], shapes: Mapping[str, Entries]
) -> set[str]:
    """Return the values whose inferred shapes may be wrong, with all that is computed from them.

    Args:
        nodes: In topological order.
        reads: What each node reads, captured values included.
        shapes: Inferred shape by value, as far as it is known.
    """
    misjudged = set[str]()
    for node, names in zip(nodes, reads):
        if not misjudged.isdisjoint(names) or (node.domain in ("", "ai.onnx") and _is_misjudged(node, shapes)):
            misjudged.update(filter(None, node.output))
    return misjudged


def _is_misjudged(node: NodeProto, shapes: Mapping[str, Entries]) -> bool:
    if node.op_type not in ("Concat", "PRelu", "ConvTranspose", "MaxPool", "AveragePool", "LpPool"):
        return False
    inputs = [shapes.get(name) for name in node.input]
    attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
    if node.op_type == "Concat":  # ONNX Runtime ignores the other sizes of empty inputs
        others = {None if shape is None else _without(shape, attributes.get("axis", 1)) for shape in inputs}
        return len(others) > 1 and any(shape is not None and 0 in shape for shape in inputs)
    if node.op_type == "PRelu":  # ONNX infers the shape of x, also where the slope is larger
        if inputs[0] is None or inputs[1] is None:
            return False
        pairs = zip_longest(reversed(inputs[0]), reversed(inputs[1]), fillvalue=1)
        return len(inputs[1]) > len(inputs[0]) or any(slope not in (1, size) for size, slope in pairs)
    is_padded = attributes.get("auto_pad", b"NOTSET").startswith(b"SAME")
    if node.op_type == "ConvTranspose":
        return is_padded and any(attributes.get("output_padding", ()))
    is_rounded_up = bool(attributes.get("ceil_mode", 0))
    if is_padded:
        return is_rounded_up or max(attributes.get("dilations", (1,))) > 1
    result = shapes.get(node.output[0])
    if not is_rounded_up or inputs[0] is None or result is None:
        return False
    # ONNX Runtime has no last window that begins behind the input.
    return any(
        isinstance(count, int) and isinstance(size, int) and (count - 1) * stride >= size + before
        for size, count, stride, before in zip(
            inputs[0][2:], result[2:], _per_axis(attributes, "strides", 1), _per_axis(attributes, "pads", 0)
        )
    )


def _without(shape: Sequence[int | str | None], axis: int) -> tuple[int | str | None, ...]:
    kept = list(shape)
    del kept[axis : axis + 1 or None]
    return tuple(kept)


def _per_axis(attributes: Mapping[str, Sequence[int]], name: str, default: int) -> Sequence[int]:
    """Return an attribute of spatial axes; of paddings, those before each axis come first."""
    return attributes.get(name) or [default] * len(attributes["kernel_shape"])
