"""Nodes that belong together because of their values.

These are quantised units, and the users of values that only a host can hold.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, TypeProto

from onnxplace.graph import Ints
from onnxplace.model.model import Model

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
# Domains that define these two operators.
_DOMAINS = ("", "ai.onnx", "com.microsoft")


def join_quantised_units(model: Model, unit: Ints) -> Ints:
    """Return units, joined where an operator computes between DequantizeLinear and QuantizeLinear nodes.

    ONNX Runtime makes one kernel of `DequantizeLinear -> operator -> QuantizeLinear` if one segment has all of it.
    An operator's unit is itself, the dequantisers of its inputs and the quantisers of its outputs. The model may be
    cut between the quantiser of one unit and the dequantiser of the next.

    Args:
        model: The model.
        unit: The unit of each node.

    Returns:
        The unit of each node, numbered from 0 without gaps.
    """
    producer = {name: index for index, node in enumerate(model.nodes) for name in node.output if name}
    parent = list(range(int(unit.max(initial=-1)) + 1))

    def find(item: int) -> int:
        while parent[item] != item:
            parent[item] = parent[parent[item]]
            item = parent[item]
        return item

    for index, node in enumerate(model.nodes):
        for name in node.input:
            source = producer.get(name)
            if source is not None and _share_unit(model.nodes[source], node):
                first, second = sorted((find(int(unit[source])), find(int(unit[index]))))
                parent[second] = first
    joined = np.array([find(int(item)) for item in unit], dtype=np.int64)
    return np.unique(joined, return_inverse=True)[1].astype(np.int32)


def _share_unit(producer: NodeProto, reader: NodeProto) -> bool:
    """Return whether producer and reader are of one quantised unit."""
    if is_quantization_node(reader, DEQUANTIZE):
        return False
    return is_quantization_node(producer, DEQUANTIZE) or (
        is_quantization_node(reader, QUANTIZE) and not is_quantization_node(producer, QUANTIZE)
    )


def is_quantization_node(node: NodeProto, op_type: str) -> bool:
    """Return whether a node is of type `op_type`.

    The type is `QUANTIZE` or `DEQUANTIZE`, in any domain that defines it.
    """
    return node.op_type == op_type and node.domain in _DOMAINS


@dataclass(frozen=True)
class HostValue:
    """A value in host memory, whatever its device.

    Its producer and readers belong together.
    """

    name: str
    kind: str
    """`sequence`, `optional`, `map`, `string`."""
    nodes: Ints
    """Indices of its producer and readers, ascending."""


def find_host_values(model: Model) -> Iterator[HostValue]:
    """Yield the values that a GPU cannot hold.

    These are sequences, optionals, maps, and tensors of strings.
    """
    kinds = {name: kind for name, proto in model.types.items() if (kind := classify_host_value(proto))}
    if not kinds:
        return
    users: dict[str, list[int]] = defaultdict(list)
    for index, (node, reads) in enumerate(zip(model.nodes, model.reads)):
        for name in (*reads, *node.output):
            if name in kinds:
                users[name].append(index)
    for name, nodes in users.items():
        yield HostValue(name, kinds[name], np.array(nodes, dtype=np.int32))


def classify_host_value(kind: TypeProto) -> str:
    """Return the kind of a type that a GPU cannot hold.

    Returns "" for other types.
    """
    which: str = kind.WhichOneof("value") or ""
    if which == "tensor_type":
        return "string" if kind.tensor_type.elem_type == TensorProto.STRING else ""
    return which.removesuffix("_type") if which in ("sequence_type", "optional_type", "map_type") else ""
