"""Find the class labels among the inputs of a training step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from onnx import NodeProto, helper, numpy_helper

from onnxplace.model import Model, read_shape_entries
from onnxplace.training_step import Labels

# What only moves the elements of its first input, or converts them.
_MOVES = frozenset(
    ["Cast", "Flatten", "Gather", "Identity", "Pad", "Reshape", "Slice", "Split", "Squeeze", "Transpose", "Unsqueeze"]
)
_LOSSES = ("NegativeLogLikelihoodLoss", "SoftmaxCrossEntropyLoss")


def find_labels(model: Model) -> tuple[Labels, ...]:
    """Return the inputs whose elements choose a class, with the classes and the values that the loss ignores.

    ONNX counts indices below 0 from the end, and torch refuses them in a loss, `gather` and `scatter`. Labels that the
    model replaces by a condition of its own, other than that for an ignored value, are left to the model.
    """
    producers = {name: node for node in model.nodes for name in node.output}
    return tuple(dict.fromkeys(_iterate_labels(model, producers)))


def _iterate_labels(model: Model, producers: Mapping[str, NodeProto]) -> Iterator[Labels]:
    for node in model.nodes:
        is_loss = node.op_type in _LOSSES
        if not is_loss and node.op_type not in ("GatherElements", "ScatterElements"):
            continue
        attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
        shape = read_shape_entries(kind) if (kind := model.types.get(node.input[0])) is not None else None
        size = shape[1 if is_loss else attributes.get("axis", 0)] if shape else None
        source, ignored = _trace_source(node.input[1], model, producers)
        if source in model.input_names and isinstance(size, int):
            ignored |= {attributes["ignore_index"]} if "ignore_index" in attributes else set()
            yield Labels(input=source, classes=size, ignored=tuple(sorted(ignored)))


def _trace_source(name: str, model: Model, producers: Mapping[str, NodeProto]) -> tuple[str, set[int]]:
    """Return the value whose elements a value has, and those that are replaced on the way."""
    ignored: set[int] = set()
    while (node := producers.get(name)) is not None:
        if node.op_type in _MOVES:
            name = node.input[0]
        elif node.op_type == "Where" and (kept := _read_replacement(node, model, producers)) is not None:
            name = kept[0]
            ignored.add(kept[1])
        else:
            break
    return name, ignored


def _read_replacement(node: NodeProto, model: Model, producers: Mapping[str, NodeProto]) -> tuple[str, int] | None:
    """Return the value of which `Where` replaces all elements of one value, and that one; None for other conditions."""
    condition, chosen, other = producers.get(node.input[0]), node.input[1], node.input[2]
    if condition is not None and condition.op_type == "Not":
        condition, chosen, other = producers.get(condition.input[0]), other, chosen
    if condition is None or condition.op_type != "Equal" or condition.input[0] != other:
        return None
    tensor = model.initializers.get(condition.input[1])
    array = None if tensor is None else numpy_helper.to_array(tensor, str(model.folder or ""))
    return (other, int(array.item())) if array is not None and array.size == 1 and array.dtype.kind == "i" else None
