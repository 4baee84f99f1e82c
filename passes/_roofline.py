"""Estimate what a node costs where nothing can be measured: operations and bytes against assumed peaks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper

from onnxplace._bodies import subgraphs
from onnxplace.graph import Floats
from onnxplace.model import Model, tensor_size, value_bytes

# Operations per second, bytes per second, seconds per kernel; per core for CPUs. Deliberately round: these order
# placements, they do not predict step times.
PEAKS = {"cpu": (40e9, 8e9, 2e-6), "cuda": (15e12, 800e9, 5e-6)}


# Turns of a Loop or Scan whose number nothing tells.
TURNS = 8
# A Loop that may turn more often is one that ends by its condition.
MOST_TURNS = 1_000_000


def estimate(model: Model, shapes: Mapping[str, Sequence[int]], cost_class: str) -> Floats:
    """Return seconds per node on a class of device; an unknown shape counts as one element.

    A node with bodies costs what runs in them: each turn of a Loop or Scan, the dearer branch of an If.
    """
    sizes = value_bytes(model, shapes)
    sizes |= {name: tensor_size(tensor) for name, tensor in model.initializers.items()}
    known = {**shapes, **{name: tuple(tensor.dims) for name, tensor in model.initializers.items()}}
    roof = _Roof(cost_class, sizes, known, model.initializers)
    return np.array([roof.seconds(node, reads) for node, reads in zip(model.nodes, model.reads)], dtype=np.float64)


class _Roof:
    """The peaks of a class of device, and what is known of the values of a model."""

    def __init__(
        self,
        cost_class: str,
        sizes: Mapping[str, int],
        shapes: Mapping[str, Sequence[int]],
        constants: Mapping[str, TensorProto],
    ) -> None:
        kind, _, detail = cost_class.partition("/")
        operations, self.bandwidth, self.launch = PEAKS.get(kind, PEAKS["cpu"])
        self.operations = operations * (int(detail) if kind == "cpu" and detail.isdecimal() else 1)
        self.sizes, self.shapes, self.constants = sizes, shapes, constants

    def seconds(self, node: NodeProto, reads: Sequence[str]) -> float:
        """Return the seconds of a node that reads these names."""
        bodies = [self._body(graph) for graph in subgraphs(node)]
        if bodies:
            return max(bodies) * self._turns(node) + self.launch
        moved = sum(self.sizes.get(name, 0) for name in (*reads, *node.output))
        return max(_operations(node, self.shapes) / self.operations, moved / self.bandwidth) + self.launch

    def _body(self, graph: GraphProto) -> float:
        return sum(self.seconds(node, node.input) for node in graph.node if node.op_type != "Constant")

    def _turns(self, node: NodeProto) -> int:
        """Return how often the body of a Loop or Scan runs, as far as constants and shapes tell."""
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Loop":
            most = self.constants.get(node.input[0])
            if most is None or most.data_location == TensorProto.EXTERNAL:
                return TURNS
            turns = int(numpy_helper.to_array(most).max(initial=0))
            return turns if turns <= MOST_TURNS else TURNS
        if node.op_type == "Scan":
            scanned = attributes["num_scan_inputs"].i
            axes = attributes["scan_input_axes"].ints if "scan_input_axes" in attributes else [0]
            shape = self.shapes.get(node.input[-scanned], ())
            return int(shape[axes[0]]) if -len(shape) <= axes[0] < len(shape) else TURNS
        return 1


def _operations(node: NodeProto, shapes: Mapping[str, Sequence[int]]) -> float:
    """Return the floating-point operations of a node: exact for products and convolutions, one per element else."""
    made = math.prod(shapes.get(node.output[0], ())) if node.output else 0
    if node.op_type in ("MatMul", "FusedMatMul") and node.input[0] in shapes:
        return 2.0 * made * (shapes[node.input[0]] or (1,))[-1]
    if node.op_type == "Gemm" and node.input[0] in shapes:
        transposed = any(a.name == "transA" and a.i for a in node.attribute)
        return 2.0 * made * shapes[node.input[0]][0 if transposed else 1]
    if node.op_type in ("Conv", "ConvTranspose") and node.input[1] in shapes:
        return 2.0 * made * math.prod(shapes[node.input[1]][1:])
    return float(made)
