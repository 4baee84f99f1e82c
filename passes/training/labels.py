"""Find the class labels among the inputs of a training step."""

from __future__ import annotations

from collections.abc import Mapping

from onnx import NodeProto, TypeProto, helper, numpy_helper

from onnxplace.model import Model, read_shape_entries
from onnxplace.training_step import Labels

# What only moves the elements of its first input, or converts them.
_MOVES = "Cast Flatten Gather Identity Pad Reshape Slice Split Squeeze Transpose Unsqueeze"
# Operator whose second input are classes -> the axis of classes in its first input, if no attribute says it.
_CHOICES = {"GatherElements": 0, "NegativeLogLikelihoodLoss": 1, "ScatterElements": 0, "SoftmaxCrossEntropyLoss": 1}


def find_labels(model: Model) -> tuple[Labels, ...]:
    """Return the inputs whose elements choose a class, with the classes and the values that the loss ignores.

    ONNX counts indices below 0 from the end, and torch refuses them in a loss, `gather` and `scatter`. Labels that the
    model replaces by a condition of its own, other than that for an ignored value, are left to the model.
    """
    producers = {name: node for node in model.nodes for name in node.output}
    labels: dict[Labels, None] = {}
    for node in model.nodes:
        if node.op_type in _CHOICES:
            attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
            shape = read_shape_entries(model.types.get(node.input[0], TypeProto()))
            size = shape[attributes.get("axis", _CHOICES[node.op_type])] if shape else None
            source, ignored = _trace_source(node.input[1], model, producers)
            if source in model.input_names and isinstance(size, int):
                ignored |= {value for name, value in attributes.items() if name == "ignore_index"}
                labels[Labels(input=source, classes=size, ignored=tuple(sorted(ignored)))] = None
    return tuple(labels)


def _trace_source(name: str, model: Model, producers: Mapping[str, NodeProto]) -> tuple[str, set[int]]:
    """Return the value whose elements a value has, and those that are replaced on the way."""
    ignored: set[int] = set()
    while (node := producers.get(name)) is not None:
        if node.op_type == "Where" and (replacement := _read_replacement(node, model, producers)) is not None:
            name = replacement[0]
            ignored.add(replacement[1])
        elif node.op_type in _MOVES.split():
            name = node.input[0]
        else:
            break
    return name, ignored


def _read_replacement(node: NodeProto, model: Model, producers: Mapping[str, NodeProto]) -> tuple[str, int] | None:
    """Return the value of which `Where` replaces all elements of one value, and that one; None for other conditions."""
    condition, _, kept = producers.get(node.input[0]), *node.input[1:]
    if condition is not None and condition.op_type == "Not":
        condition, kept = producers.get(condition.input[0]), node.input[1]
    if condition is None or condition.op_type != "Equal" or condition.input[0] != kept:
        return None
    tensor = model.initializers.get(condition.input[1])
    array = None if tensor is None else numpy_helper.to_array(tensor, str(model.folder or ""))
    return (kept, int(array.item())) if array is not None and array.size == 1 and array.dtype.kind == "i" else None
