"""Build cost graphs layer by layer: the costs of each operator follow from the sizes of its tensors.

An operator takes a launch, and then as long as its arithmetic or its memory traffic, whichever is longer. A backward
pass can be added: one node for each node, in reverse order.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np

from onnxplace.cost_graph import CostGraph, assemble_cost_graph
from onnxplace.graph import Csr, Ints, OpGraph

# A GPU that reaches 6 TFLOP/s in float32 and 500 GB/s, with 5 us for each launch.
OPERATIONS_PER_SECOND, MEMORY_BYTES_PER_SECOND, LAUNCH_SECONDS = 6e12, 500e9, 5e-6
# Bytes of an element.
ELEMENT_BYTES = 4
# Two devices of 8 GiB. A transfer takes 25 us, and a microsecond for 7600 bytes: the link of Placeto's simulator
# (Addanki et al. 2019).
MACHINE = MappingProxyType(
    {
        "devices": [{"id": index, "memory_bytes": 8 << 30} for index in range(2)],
        "comm": {"coef_us_per_byte": 1 / 7600, "intercept_us": 25},
    }
)
# A backward node with weights computes the gradients of its inputs and of its weights.
WEIGHT_GRADIENT_FACTOR = 2


@dataclass(frozen=True)
class _Layer:
    """An operator with one output."""

    op: str
    inputs: tuple[int, ...]
    """Layers whose outputs it reads, each once."""
    elements: int
    """Of its output."""
    operations: float
    weight: Hashable
    """The weight that it reads; None for none. Layers that read the same weight share it."""
    weight_elements: int


@dataclass
class LayerGraph:
    """A graph under construction; nodes are added in topological order.

    >>> graph = LayerGraph()
    >>> hidden = graph.add("Embedding", (), 256)
    >>> _ = graph.product(hidden, 4, 64, 32)
    >>> len(graph.build("small").ids)
    2
    """

    layers: list[_Layer] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.layers)

    def add(
        self,
        op: str,
        inputs: Sequence[int],
        elements: int,
        operations: float = 0.0,
        weight_elements: int = 0,
        weight: Hashable = None,
    ) -> int:
        """Add an operator and return its index.

        Args:
            op: Its type.
            inputs: The layers that it reads.
            elements: Of its output.
            operations: Its floating-point operations; pointwise operators may leave them out.
            weight_elements: Of its weight.
            weight: A name for a weight that several layers share; by default, it is the layer's own.
        """
        key = (weight if weight is not None else ("layer", len(self))) if weight_elements else None
        self.layers.append(_Layer(op, tuple(dict.fromkeys(inputs)), elements, operations, key, weight_elements))
        return len(self) - 1

    def product(self, source: int, rows: int, inner: int, columns: int, weight: Hashable = None) -> int:
        """Add a matrix product of a layer's output [rows, inner] with a weight [inner, columns]."""
        return self.add("MatMul", (source,), rows * columns, 2.0 * rows * inner * columns, inner * columns, weight)

    def pointwise(self, op: str, *inputs: int) -> int:
        """Add an operator whose output has the size of its first input."""
        return self.add(op, inputs, self.layers[inputs[0]].elements)

    def build(self, name: str, backward: bool = False) -> CostGraph:
        """Return the cost graph, with a backward pass if asked for.

        Then all nodes that read one weight are a group, as the variables of a training step are on one device.
        """
        nodes = [_forward_node(layer, index, self.layers) for index, layer in enumerate(self.layers)]
        if backward:
            nodes += _backward_nodes(self.layers)
        weights = {key: index for index, key in enumerate(dict.fromkeys(node.weight for node in nodes if node.weight))}
        group = [weights[node.weight] if backward and node.weight else -1 for node in nodes]
        seconds = np.array([node.seconds for node in nodes])
        is_backward = np.arange(len(nodes)) >= len(self)
        graph = _assemble_graph(nodes, {key: index for key, index in weights.items() if key is not None})
        given = np.array(group, dtype=np.int32)
        return assemble_cost_graph(name, range(len(nodes)), graph, seconds, MACHINE, given, is_backward)


@dataclass(frozen=True)
class _Node:
    """A node of the cost graph."""

    op: str
    reads: tuple[tuple[int, int], ...]
    """Values as (node, output)."""
    output_bytes: tuple[int, ...]
    seconds: float
    weight: Hashable
    weight_bytes: int
    workspace_bytes: int = 0


def _forward_node(layer: _Layer, index: int, layers: Sequence[_Layer]) -> _Node:
    moved_elements = layer.elements + layer.weight_elements + sum(layers[source].elements for source in layer.inputs)
    return _Node(
        op=layer.op,
        reads=tuple((source, 0) for source in layer.inputs),
        output_bytes=(layer.elements * ELEMENT_BYTES,),
        seconds=_estimate_seconds(layer.operations, moved_elements),
        weight=layer.weight,
        weight_bytes=layer.weight_elements * ELEMENT_BYTES,
    )


def _backward_nodes(layers: Sequence[_Layer]) -> list[_Node]:
    """Return a node per layer in reverse order, with a value per input: its gradient.

    It reads the gradients of its output, and the outputs of the layers that its layer reads.
    """
    count = len(layers)
    readers: list[list[tuple[int, int]]] = [[] for _ in layers]
    for index, layer in enumerate(layers):
        for position, source in enumerate(layer.inputs):
            readers[source].append((2 * count - 1 - index, position))
    nodes = []
    for index in reversed(range(count)):
        layer = layers[index]
        factor = WEIGHT_GRADIENT_FACTOR if layer.weight_elements else 1
        inputs = [layers[source].elements for source in layer.inputs]
        moved_elements = factor * (sum(inputs) + layer.weight_elements) + layer.elements
        nodes.append(
            _Node(
                op=f"{layer.op}Gradient",
                reads=(*readers[index], *((source, 0) for source in layer.inputs)) or ((index, 0),),
                output_bytes=tuple(elements * ELEMENT_BYTES for elements in inputs),
                seconds=_estimate_seconds(factor * layer.operations, moved_elements),
                weight=layer.weight,
                weight_bytes=layer.weight_elements * ELEMENT_BYTES,
                workspace_bytes=layer.weight_elements * ELEMENT_BYTES,
            )
        )
    return nodes


def _estimate_seconds(operations: float, elements: int) -> float:
    traffic_seconds = elements * ELEMENT_BYTES / MEMORY_BYTES_PER_SECOND
    return LAUNCH_SECONDS + max(operations / OPERATIONS_PER_SECOND, traffic_seconds)


def _assemble_graph(nodes: Sequence[_Node], weights: dict[Hashable, int]) -> OpGraph:
    first_value = np.concatenate([[0], np.cumsum([len(node.output_bytes) for node in nodes])]).astype(np.int64)
    producer: Ints = np.repeat(np.arange(len(nodes), dtype=np.int32), np.diff(first_value))
    weight_bytes = np.zeros(len(weights), dtype=np.int64)
    for node in nodes:
        if node.weight is not None:
            weight_bytes[weights[node.weight]] = node.weight_bytes
    names = tuple(f"{node.op}_{index}" for index, node in enumerate(nodes))
    return OpGraph(
        names=names,
        ops=tuple(node.op for node in nodes),
        value_names=tuple(f"{names[node]}:{value - first_value[node]}" for value, node in enumerate(producer.tolist())),
        value_bytes=np.array([size for node in nodes for size in node.output_bytes], dtype=np.int64),
        producer=producer,
        is_output=np.zeros(len(producer), dtype=bool),
        alias=np.full(len(producer), -1, dtype=np.int32),
        inputs=Csr.of([[int(first_value[source]) + output for source, output in node.reads] for node in nodes]),
        weight_names=tuple(f"weight_{index}" for index in range(len(weights))),
        weight_bytes=weight_bytes,
        weights=Csr.of([[] if node.weight is None else [weights[node.weight]] for node in nodes]),
        workspace_bytes=np.array([node.workspace_bytes for node in nodes], dtype=np.int64),
    )
