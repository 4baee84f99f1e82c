"""Estimate the cost of nodes by operations, bytes and peak rates.

This is a roofline: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures", Communications of the ACM 52(4), 2009. Peaks are assumed, or measured on this machine's processor in
under a second.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import GraphProto, NodeProto, TensorProto, numpy_helper, parser

from onnxplace.devices import find_kind
from onnxplace.graph import Floats
from onnxplace.machine import RepeatPolicy, make_session_options, open_session, pin_thread
from onnxplace.model import Model, iterate_subgraphs, tensor_size, value_bytes
from onnxplace.passes.profiling.node_work import count_moved_bytes, count_operations
from onnxplace.target import Device


@dataclass(frozen=True)
class PeakRates:
    """The peak rates of a device; per core for CPUs."""

    operations_per_second: float
    bytes_per_second: float
    kernel_seconds: float
    """The least that a kernel takes."""


# The calibration: a product of square matrices, a copy larger than all caches, and how often each is run.
MATRIX_SIDE, COPY_BYTES, TRIES = 512, 64 << 20, 5

# Iterations of a Loop or Scan whose number is unknown.
DEFAULT_ITERATIONS = 8
# A Loop with a larger limit is one that ends by its condition.
MAX_ITERATIONS = 1_000_000


def typical_peaks(kind: str) -> PeakRates:
    """Return the typical peaks of a kind of devices; of one core for CPUs."""
    rates = find_kind(kind)
    return PeakRates(rates.operations_per_second, rates.memory_bytes_per_second, rates.kernel_seconds)


def device_peaks(device: Device) -> PeakRates:
    """Return the peaks of a device: its own where its target gives them, else typical ones of its kind."""
    typical = typical_peaks(device.kind)
    cores = device.cores if device.is_host else 1
    return PeakRates(
        operations_per_second=device.operations_per_second / cores or typical.operations_per_second,
        bytes_per_second=device.memory_bytes_per_second or typical.bytes_per_second,
        kernel_seconds=device.kernel_seconds or typical.kernel_seconds,
    )


def measure_peaks(core: int) -> PeakRates:
    """Measure the peak rates of one core: a few products and copies."""
    square = f"float[{MATRIX_SIDE}, {MATRIX_SIDE}]"
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    peak ({square} a, {square} b) => ({square} c) {{ c = MatMul(a, b) }}"""
    matrix = np.ones((MATRIX_SIDE, MATRIX_SIDE), dtype=np.float32)
    source, copy = np.ones(COPY_BYTES, dtype=np.uint8), np.empty(COPY_BYTES, dtype=np.uint8)
    with pin_thread((core,)):
        session = open_session(parser.parse_model(text).SerializeToString(), make_session_options((core,)))
        policy = RepeatPolicy(TRIES, 0.0, 0.0)
        products = policy.run(lambda: session.run(None, {"a": matrix, "b": matrix}), pool=False)[0]
        copies = policy.run(lambda: np.copyto(copy, source), pool=False)[0]
    operations, copied_bytes = 2.0 * MATRIX_SIDE**3, 2.0 * COPY_BYTES
    return PeakRates(
        operations / products.computing_seconds.min(),
        copied_bytes / copies.computing_seconds.min(),
        typical_peaks("cpu").kernel_seconds,
    )


def estimate_seconds(
    model: Model, shapes: Mapping[str, Sequence[int]], cost_class: str, peaks: PeakRates | None = None
) -> Floats:
    """Return seconds per node on a class of device.

    An unknown shape counts as one element. A node with subgraphs costs the sum of their nodes: each iteration of a Loop
    or Scan, the slower branch of an If.

    Args:
        model: The model.
        shapes: Of its values, by name.
        cost_class: Of the device.
        peaks: Of one core, or of the GPU; None for typical ones.
    """
    sizes = value_bytes(model, shapes)
    sizes |= {name: tensor_size(tensor) for name, tensor in model.initializers.items()}
    known = {**shapes, **{name: tuple(tensor.dims) for name, tensor in model.initializers.items()}}
    roof = _Roofline(cost_class, peaks, sizes, known, model.initializers)
    return np.array([roof.seconds(node, reads) for node, reads in zip(model.nodes, model.reads)], dtype=np.float64)


class _Roofline:
    """Peak rates of a device, and sizes and shapes of values."""

    def __init__(
        self,
        cost_class: str,
        peaks: PeakRates | None,
        sizes: Mapping[str, int],
        shapes: Mapping[str, Sequence[int]],
        constants: Mapping[str, TensorProto],
    ) -> None:
        kind, _, detail = cost_class.partition("/")
        peaks = peaks or typical_peaks(kind)
        self.bandwidth, self.launch = peaks.bytes_per_second, peaks.kernel_seconds
        self.operations = peaks.operations_per_second * (int(detail) if kind == "cpu" and detail.isdecimal() else 1)
        self.sizes, self.shapes, self.constants = sizes, shapes, constants

    def seconds(self, node: NodeProto, reads: Sequence[str]) -> float:
        """Return the seconds of a node that reads these names."""
        subgraph_seconds = [self._subgraph_seconds(graph) for graph in iterate_subgraphs(node)]
        if subgraph_seconds:
            return max(subgraph_seconds) * self._count_iterations(node) + self.launch
        moved_bytes = count_moved_bytes(node, reads, self.sizes)
        return max(count_operations(node, self.shapes) / self.operations, moved_bytes / self.bandwidth) + self.launch

    def _subgraph_seconds(self, graph: GraphProto) -> float:
        return sum(self.seconds(node, node.input) for node in graph.node if node.op_type != "Constant")

    def _count_iterations(self, node: NodeProto) -> int:
        """Return how often a node's subgraph runs, if known.

        Constants and shapes may tell.
        """
        attributes = {attribute.name: attribute for attribute in node.attribute}
        if node.op_type == "Loop" and node.input:
            limit = self.constants.get(node.input[0])
            if limit is None or limit.data_location == TensorProto.EXTERNAL or limit.data_type != TensorProto.INT64:
                return DEFAULT_ITERATIONS
            iterations = int(numpy_helper.to_array(limit).max(initial=0))
            return iterations if iterations <= MAX_ITERATIONS else DEFAULT_ITERATIONS
        if node.op_type == "Scan" and "num_scan_inputs" in attributes:
            scanned = attributes["num_scan_inputs"].i
            axes = attributes["scan_input_axes"].ints if "scan_input_axes" in attributes else [0]
            if not 0 < scanned <= len(node.input) or not axes:
                return DEFAULT_ITERATIONS
            shape = self.shapes.get(node.input[-scanned], ())
            return int(shape[axes[0]]) if -len(shape) <= axes[0] < len(shape) else DEFAULT_ITERATIONS
        return 1
