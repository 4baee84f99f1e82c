"""Estimate what a node costs where nothing can be measured: operations and bytes against peaks (a roofline).

Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore architectures",
Communications of the ACM 52(4), 2009. Peaks are assumed, or measured on this machine's processor in a blink.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper, parser

from onnxplace.graph import Floats
from onnxplace.machine import RepeatPolicy, open_session, pin_thread, session_options
from onnxplace.model import Model, subgraphs, tensor_size, value_bytes
from onnxplace.passes.profiling.node_work import bytes_moved, operations


@dataclass(frozen=True)
class PeakRates:
    """What a device does at its best; per core for CPUs."""

    operations_per_second: float
    bytes_per_second: float
    kernel_seconds: float
    """What each kernel costs at least."""


# Deliberately round: these order placements, they do not predict step times.
TYPICAL_PEAKS = {"cpu": PeakRates(40e9, 8e9, 2e-6), "cuda": PeakRates(15e12, 800e9, 5e-6)}
# Of the calibration: a product of square matrices, and a copy beyond all caches.
SIDE, COPY_BYTES, TRIES = 512, 64 << 20, 5

# Turns of a Loop or Scan whose number nothing tells.
TURNS = 8
# A Loop that may turn more often is one that ends by its condition.
MAX_TURNS = 1_000_000


def measure_peaks(core: int) -> PeakRates:
    """Return what one core of this machine does: the best of a few products with ONNX Runtime, and of a few copies."""
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    peak (float[{SIDE}, {SIDE}] a, float[{SIDE}, {SIDE}] b) => (float[{SIDE}, {SIDE}] c) {{ c = MatMul(a, b) }}"""
    matrix = np.ones((SIDE, SIDE), dtype=np.float32)
    source, copy = np.ones(COPY_BYTES, dtype=np.uint8), np.empty(COPY_BYTES, dtype=np.uint8)
    with pin_thread((core,)):
        session = open_session(parser.parse_model(text).SerializeToString(), session_options((core,)))
        product = RepeatPolicy(TRIES, 0.0, 0.0).run(lambda: session.run(None, {"a": matrix, "b": matrix}), pool=False)[
            0
        ]
        copied = RepeatPolicy(TRIES, 0.0, 0.0).run(lambda: np.copyto(copy, source), pool=False)[0]
    operations, passed = 2.0 * SIDE**3, 2.0 * COPY_BYTES
    return PeakRates(operations / product.own.min(), passed / copied.own.min(), TYPICAL_PEAKS["cpu"].kernel_seconds)


def estimate_seconds(
    model: Model, shapes: Mapping[str, Sequence[int]], cost_class: str, peaks: PeakRates | None = None
) -> Floats:
    """Return seconds per node on a class of device; an unknown shape counts as one element.

    `peaks` are those of one core, or of the GPU; without, they are assumed.

    A node with bodies costs what runs in them: each turn of a Loop or Scan, the dearer branch of an If.
    """
    sizes = value_bytes(model, shapes)
    sizes |= {name: tensor_size(tensor) for name, tensor in model.initializers.items()}
    known = {**shapes, **{name: tuple(tensor.dims) for name, tensor in model.initializers.items()}}
    roof = _Roof(cost_class, peaks, sizes, known, model.initializers)
    return np.array([roof.seconds(node, reads) for node, reads in zip(model.nodes, model.reads)], dtype=np.float64)


class _Roof:
    """The peaks of a class of device, and what is known of the values of a model."""

    def __init__(
        self,
        cost_class: str,
        peaks: PeakRates | None,
        sizes: Mapping[str, int],
        shapes: Mapping[str, Sequence[int]],
        constants: Mapping[str, TensorProto],
    ) -> None:
        kind, _, detail = cost_class.partition("/")
        peaks = peaks or TYPICAL_PEAKS.get(kind, TYPICAL_PEAKS["cpu"])
        self.bandwidth, self.launch = peaks.bytes_per_second, peaks.kernel_seconds
        self.operations = peaks.operations_per_second * (int(detail) if kind == "cpu" and detail.isdecimal() else 1)
        self.sizes, self.shapes, self.constants = sizes, shapes, constants

    def seconds(self, node: NodeProto, reads: Sequence[str]) -> float:
        """Return the seconds of a node that reads these names."""
        bodies = [self._body(graph) for graph in subgraphs(node)]
        if bodies:
            return max(bodies) * self._turns(node) + self.launch
        moved = bytes_moved(node, reads, self.sizes)
        return max(operations(node, self.shapes) / self.operations, moved / self.bandwidth) + self.launch

    def _body(self, graph: GraphProto) -> float:
        return sum(self.seconds(node, node.input) for node in graph.node if node.op_type != "Constant")

    def _turns(self, node: NodeProto) -> int:
        """Return how often the body of a Loop or Scan runs, as far as constants and shapes tell."""
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Loop" and node.input:
            most = self.constants.get(node.input[0])
            if most is None or most.data_location == TensorProto.EXTERNAL or most.data_type != TensorProto.INT64:
                return TURNS
            turns = int(numpy_helper.to_array(most).max(initial=0))
            return turns if turns <= MAX_TURNS else TURNS
        if node.op_type == "Scan" and "num_scan_inputs" in attributes:
            scanned = attributes["num_scan_inputs"].i
            axes = attributes["scan_input_axes"].ints if "scan_input_axes" in attributes else [0]
            if not 0 < scanned <= len(node.input) or not axes:
                return TURNS
            shape = self.shapes.get(node.input[-scanned], ())
            return int(shape[axes[0]]) if -len(shape) <= axes[0] < len(shape) else TURNS
        return 1
