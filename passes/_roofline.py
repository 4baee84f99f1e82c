"""Estimate what a node costs where nothing can be measured: operations and bytes against assumed peaks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from onnx import NodeProto

from onnxplace.graph import Floats
from onnxplace.model import Model, tensor_size, value_bytes

# Operations per second, bytes per second, seconds per kernel; per core for CPUs. Deliberately round: these order
# placements, they do not predict step times.
PEAKS = {"cpu": (40e9, 8e9, 2e-6), "cuda": (15e12, 800e9, 5e-6)}


def estimate(model: Model, shapes: Mapping[str, Sequence[int]], cost_class: str) -> Floats:
    """Return seconds per node on a class of device; an unknown shape counts as one element."""
    kind, _, detail = cost_class.partition("/")
    operations, bandwidth, launch = PEAKS.get(kind, PEAKS["cpu"])
    cores = int(detail) if kind == "cpu" and detail.isdecimal() else 1
    sizes = value_bytes(model, shapes)
    sizes |= {name: tensor_size(tensor) for name, tensor in model.initializers.items()}
    known = {**shapes, **{name: tuple(tensor.dims) for name, tensor in model.initializers.items()}}
    return np.array(
        [
            max(
                _operations(node, known) / (operations * cores),
                sum(sizes.get(name, 0) for name in (*reads, *node.output)) / bandwidth,
            )
            + launch
            for node, reads in zip(model.nodes, model.reads)
        ],
        dtype=np.float64,
    )


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
