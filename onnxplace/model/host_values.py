"""Which nodes belong together because of what their values are: quantised units, and values that only a host holds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto, TensorProto, TypeProto

from onnxplace.graph import Ints
from onnxplace.model.model import Model

QUANTIZE, DEQUANTIZE = "QuantizeLinear", "DequantizeLinear"
_DOMAINS = ("", "ai.onnx", "com.microsoft")


def join_quantised_units(model: Model, unit: Ints) -> Ints:
    """Return dense units, joined where an operator computes between DequantizeLinear and QuantizeLinear nodes.

    ONNX Runtime makes one kernel of `DequantizeLinear -> operator -> QuantizeLinear` if it sees all of it. An
    operator's unit is itself, the dequantisers of its inputs and the quantisers of its outputs; between the quantiser
    of one and the dequantiser of the next, the model may be cut.
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
            maker = producer.get(name)
            if maker is not None and _one_unit(model.nodes[maker], node):
                first, second = sorted((find(int(unit[maker])), find(int(unit[index]))))
                parent[second] = first
    joined = np.array([find(int(item)) for item in unit], dtype=np.int64)
    return np.unique(joined, return_inverse=True)[1].astype(np.int32)


def _one_unit(maker: NodeProto, reader: NodeProto) -> bool:
    """Return whether a node that reads what another one makes is of its quantised unit."""
    if is_quantization_node(reader, DEQUANTIZE):
        return False
    return is_quantization_node(maker, DEQUANTIZE) or (
        is_quantization_node(reader, QUANTIZE) and not is_quantization_node(maker, QUANTIZE)
    )


def is_quantization_node(node: NodeProto, op_type: str) -> bool:
    """Return whether a node is a QuantizeLinear, or a DequantizeLinear, as asked."""
    return node.op_type == op_type and node.domain in _DOMAINS


@dataclass(frozen=True)
class HostValue:
    """A value that lives in host memory whatever its device, with the nodes that make and read it."""

    name: str
    kind: str
    """`sequence`, `optional`, `map`, `string`."""
    nodes: Ints


def find_host_values(model: Model) -> Iterator[HostValue]:
    """Yield the values that a GPU cannot hold: sequences, optionals, maps, and tensors of strings."""
    kinds = {name: kind for name, found in model.types.items() if (kind := host_kind(found))}
    if not kinds:
        return
    touched: dict[str, list[int]] = defaultdict(list)
    for index, (node, reads) in enumerate(zip(model.nodes, model.reads)):
        for name in (*reads, *node.output):
            if name in kinds:
                touched[name].append(index)
    for name, nodes in touched.items():
        yield HostValue(name, kinds[name], np.array(nodes, dtype=np.int32))


def host_kind(kind: TypeProto) -> str:
    """Return what keeps values of a type in host memory, "" for nothing."""
    which: str = kind.WhichOneof("value") or ""
    if which == "tensor_type":
        return "string" if kind.tensor_type.elem_type == TensorProto.STRING else ""
    return which.removesuffix("_type") if which in ("sequence_type", "optional_type", "map_type") else ""
