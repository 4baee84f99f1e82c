"""Inputs and outputs of a bundle, described as ONNX Runtime describes those of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from onnxplace.bundle import Bundle, OutputRecord
from onnxplace.feeds import Declared

# How shape inference begins the names that it invents for unknown sizes.
_INVENTED = "unk__"


@dataclass(frozen=True, eq=False)
class NodeArg:
    """An input or output, with the attributes and the text of `onnxruntime.NodeArg`.

    >>> print(NodeArg("x", "tensor(float)", ["batch", 64]))
    NodeArg(name='x', type='tensor(float)', shape=['batch', 64])
    """

    name: str
    type: str
    """ONNX Runtime's name of the type: `tensor(float)`, `seq(tensor(int64))`."""
    shape: list[int | str | None]
    """Sizes, names of symbolic dimensions, and None for an unknown size.

    It is empty for a scalar, for an unknown rank, and for values that are no tensors.
    """


def list_inputs(bundle: Bundle) -> list[NodeArg]:
    """Return the inputs without default values, states among them, which the first run takes."""
    return [_describe(item) for item in bundle.inputs if not item.optional]


def list_overridable(bundle: Bundle) -> list[NodeArg]:
    """Return the inputs with default values."""
    return [_describe(item) for item in bundle.inputs if item.optional]


def list_outputs(bundle: Bundle) -> list[NodeArg]:
    """Return the outputs that a run returns by default, with sizes that the compiler inferred."""
    records = {record.name: record for record in bundle.manifest.outputs}
    return [_describe_output(bundle, records[item.name]) for item in bundle.returned_outputs]


def _describe(item: Declared) -> NodeArg:
    return NodeArg(item.name, item.dtype, list(item.shape or ()))


def _describe_output(bundle: Bundle, record: OutputRecord) -> NodeArg:
    value = bundle.manifest.values.get(record.value)
    if value is None:
        return NodeArg(record.name, record.dtype, list(record.shape or ()))
    return NodeArg(record.name, value.dtype, _merge_shapes(record.shape, value.shape))


def _merge_shapes(
    declared: Sequence[int | str | None] | None, inferred: Sequence[int | str | None] | None
) -> list[int | str | None]:
    """Return a declared shape with the sizes that are only inferred, as ONNX Runtime does."""
    known = [None if isinstance(size, str) and size.startswith(_INVENTED) else size for size in inferred or ()]
    if declared is None:
        return known
    if len(known) != len(declared):
        return list(declared)
    return [size if isinstance(size, int) or name is None else name for name, size in zip(declared, known)]
