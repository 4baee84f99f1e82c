"""Estimate the cost of nodes by operations, bytes and peak rates.

This is a roofline: Williams, Waterman and Patterson, "Roofline: an insightful visual performance model for multicore
architectures", Communications of the ACM 52(4), 2009. Peaks are assumed, or measured on this machine's processor in
under a second.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from onnx import NodeProto, TensorProto, numpy_helper, parser

from onnxplace.graph.op_graph import Floats
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options, pin_thread
from onnxplace.machine.repeated_runs import RepeatPolicy
from onnxplace.model.cut_constraints import list_quantised_kernels
from onnxplace.model.lowering import value_bytes
from onnxplace.model.model import Model
from onnxplace.model.nested_graphs import iterate_subgraphs
from onnxplace.model.tensors import tensor_size
from onnxplace.target.kind_table import find_kind
from onnxplace.target.product_times import ProductTimes
from onnxplace.target.target import Device

# Operations, moved bytes, and the length of the axis that a product sums over.
Work = tuple[float, int, int | None]


@dataclass(frozen=True)
class PeakRates:
    """The peak rates of a device; per core for CPUs."""

    operations_per_second: float
    bytes_per_second: float
    kernel_seconds: float
    """The least that a kernel takes."""
    type_operations_per_second: Mapping[str, float] = field(default_factory=dict)
    """Of further types of numbers, by the names of `DATA_TYPES` in `onnxplace/target/target.py`."""

    products: Mapping[str, ProductTimes] = field(default_factory=dict)
    """Times of matrix products of the types for which they were measured."""

    def seconds(self, node: NodeProto, types: Mapping[str, int], work: Work, cores: int = 1) -> float:
        """Return the seconds of a node's work on so many cores.

        The type of its first input counts; types without a rate have that of float32.
        """
        operations, moved_bytes, depth = work
        element = types.get(node.input[0], TensorProto.UNDEFINED) if node.input else TensorProto.UNDEFINED
        if node.op_type == "DynamicQuantizeMatMul":  # it quantises its first input itself
            element = TensorProto.INT8
        name = _RATES.get(element, "")
        computing = operations / (self.type_operations_per_second.get(name, self.operations_per_second) * cores)
        moving = moved_bytes / self.bytes_per_second
        if depth is not None and name in self.products:
            return self.products[name].seconds(computing, moving, depth, self.kernel_seconds)
        return max(computing, moving) + self.kernel_seconds


_INTEGERS = (TensorProto.INT8, TensorProto.UINT8)
# Element type -> name of its rate. That of TF32 stands for the type in which a device computes float32.
_RATES: dict[int, str] = {
    TensorProto.FLOAT: "tf32",
    TensorProto.FLOAT16: "float16",
    TensorProto.BFLOAT16: "bfloat16",
    **dict.fromkeys(_INTEGERS, "int8"),
    **dict.fromkeys((TensorProto.FLOAT8E4M3FN, TensorProto.FLOAT8E5M2), "fp8"),
}

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
    typical_rate = typical.operations_per_second * (1 if device.is_host else device.cores)
    operations = device.operations_per_second / cores or typical_rate
    rates = {name: rate / cores for name, rate in device.type_operations_per_second.items()}
    if "tf32" in rates:
        rates["tf32"] = rates.get(device.precision, operations)
    return PeakRates(
        operations_per_second=operations,
        bytes_per_second=device.memory_bytes_per_second or typical.bytes_per_second,
        kernel_seconds=device.kernel_seconds or typical.kernel_seconds,
        type_operations_per_second=rates,
        products={k: v for k, v in device.products.items() if k != "tf32" or device.precision == k},
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
    model: Model,
    shapes: Mapping[str, Sequence[int]],
    cost_class: str,
    peaks: PeakRates | None = None,
    types: Mapping[str, int] | None = None,
) -> Floats:
    """Return seconds per node on a class of device.

    An unknown shape counts as one element. A node with subgraphs costs the sum of their nodes: each iteration of a Loop
    or Scan, the slower branch of an If.

    Args:
        model: The model.
        shapes: Of its values, by name.
        cost_class: Of the device.
        peaks: Of one core, or of the GPU; None for typical ones.
        types: Element types of values whose types ONNX cannot infer.
    """
    known_types = {**(types or {}), **model.element_types}
    sizes = value_bytes(model, shapes, types or {})
    sizes |= {name: tensor_size(tensor) for name, tensor in model.initializers.items()}
    known = {**shapes, **{name: tuple(tensor.dims) for name, tensor in model.initializers.items()}}
    kind, _, detail = cost_class.partition("/")
    cores = int(detail) if kind == "cpu" and detail.isdecimal() else 1
    roof = _Roofline(peaks or typical_peaks(kind), cores, sizes, known, known_types, model.initializers)
    rates = roof.peaks.type_operations_per_second
    kernels = list_quantised_kernels(model, {name for name, kind in known_types.items() if _RATES.get(kind) in rates})
    return np.array([roof.seconds(*kernel) if kernel else 0.0 for kernel in kernels], dtype=np.float64)


@dataclass(frozen=True)
class _Roofline:
    """Peak rates of a device, and sizes and shapes of values."""

    peaks: PeakRates
    cores: int
    sizes: Mapping[str, int]
    shapes: Mapping[str, Sequence[int]]
    types: Mapping[str, int]
    constants: Mapping[str, TensorProto]

    def seconds(self, node: NodeProto, reads: Sequence[str]) -> float:
        """Return the seconds of a node that reads these names."""
        subgraph_seconds = [
            sum(self.seconds(inner, inner.input) for inner in graph.node if inner.op_type != "Constant")
            for graph in iterate_subgraphs(node)
        ]
        if subgraph_seconds:
            return max(subgraph_seconds) * self._count_iterations(node) + self.peaks.kernel_seconds
        return self.peaks.seconds(node, self.types, count_work(node, reads, self.shapes, self.sizes), self.cores)

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


# ------------------------------------------------------------------------------------------------- operations and bytes


Shapes = Mapping[str, Sequence[int]]

# These view a tensor under another shape, or describe it: no bytes move.
_NO_TRAFFIC = {"Reshape", "Squeeze", "Unsqueeze", "Flatten", "Identity", "Shape", "Size", "Constant", "Optional"}
# These read as many bytes of their largest input as they write.
_SELECTIONS = {"Gather", "GatherElements", "GatherND", "Slice", "EmbedLayerNormalization"}
# The position of a convolution's weights among its inputs.
_CONVOLUTION_WEIGHTS = {"Conv": 1, "FusedConv": 1, "ConvInteger": 1, "QLinearConv": 3}
_PRODUCTS = {"MatMul", "FusedMatMul", "MatMulInteger", "QLinearMatMul", "DynamicQuantizeMatMul", "MatMulNBits"}
_RECURRENT_LAYERS = {"LSTM", "GRU", "RNN"}
_ATTENTIONS = {"Attention", "MultiHeadAttention", "GroupQueryAttention"}
# Operations per element of the output, by definition; an exponential or a division counts as 8.
_OPERATIONS_PER_OUTPUT = {
    **dict.fromkeys(("Exp", "Log", "Div", "Sqrt", "Reciprocal", "Pow", "Sin", "Cos"), 8),
    **dict.fromkeys(("Sigmoid", "Tanh", "Erf", "Softplus", "Elu", "Selu", "Celu", "HardSwish", "Mish", "Swish"), 16),
    **dict.fromkeys(("Gelu", "FastGelu", "BiasGelu", "QuickGelu", "BiasSplitGelu"), 20),
    **dict.fromkeys(("Softmax", "LogSoftmax", "Hardmax"), 20),
    **dict.fromkeys(
        ("LayerNormalization", "SkipLayerNormalization", "SimplifiedLayerNormalization", "GroupNormalization"), 10
    ),
    **dict.fromkeys(("RMSNormalization", "SkipSimplifiedLayerNormalization", "InstanceNormalization"), 10),
    **dict.fromkeys(("BatchNormalization", "LRN", "RotaryEmbedding"), 4),
}
_POOLS = {"MaxPool", "AveragePool", "LpPool"}
_REDUCTION_PREFIXES = ("Reduce", "Global", "ArgM", "CumSum")
_SORTS = {"TopK", "Unique", "NonMaxSuppression"}


def count_work(node: NodeProto, reads: Sequence[str], shapes: Shapes, sizes: Mapping[str, int]) -> Work:
    """Return operations, moved bytes and the depth of a node that reads these names."""
    return count_operations(node, shapes), count_moved_bytes(node, reads, sizes), count_depth(node, shapes)


def count_moved_bytes(node: NodeProto, reads: Sequence[str], sizes: Mapping[str, int]) -> int:
    """Return the bytes that a node reads and writes.

    An unknown size counts as zero.
    """
    if node.op_type in _NO_TRAFFIC:
        return 0
    written, read = sum(sizes.get(name, 0) for name in node.output), [sizes.get(name, 0) for name in reads]
    skipped = max(max(read, default=0) - written, 0) if node.op_type in _SELECTIONS else 0
    return written + sum(read) - skipped


def count_operations(node: NodeProto, shapes: Shapes) -> float:
    """Return the floating-point operations of a node.

    Exact for products, convolutions and recurrent layers. Other operators have a fixed number per element, unknown
    ones 1. Zero where no shape is known.
    """
    outputs = float(math.prod(shapes.get(node.output[0], ()))) if node.output else 0.0
    kind = node.op_type
    multiplications = _count_dense(node, shapes, outputs)
    if multiplications is not None:
        return multiplications
    if kind in _POOLS:
        return outputs * math.prod(next((a.ints for a in node.attribute if a.name == "kernel_shape"), ()))
    inputs = float(math.prod(shapes.get(node.input[0], ()))) if node.input else 0.0
    if kind.startswith(_REDUCTION_PREFIXES):
        return inputs
    if kind in _SORTS:
        return inputs * max(math.log2(max(inputs, 2)), 1)
    return outputs * _OPERATIONS_PER_OUTPUT.get(kind, 1)


def count_depth(node: NodeProto, shapes: Shapes) -> int | None:
    """Return the length of the axis that a product sums over; None for other operators, and unknown shapes."""
    kind, first = node.op_type, shapes.get(node.input[0]) if node.input else None
    if first is None or not (kind in _PRODUCTS or (kind in ("Gemm", "QGemm") and len(first) == 2)):
        return None
    is_transposed = len(first) > 1 and any(a.name == "transA" and a.i for a in node.attribute)
    return (first or (1,))[-2 if is_transposed else -1]


def _count_dense(node: NodeProto, shapes: Shapes, outputs: float) -> float | None:
    """Return the operations of products and convolutions, None for others."""
    kind, input_shapes = node.op_type, [shapes.get(name) for name in node.input]
    first, second = (*input_shapes[:2], None, None)[:2]
    depth = count_depth(node, shapes)
    if depth is not None:
        return 2.0 * outputs * depth
    if kind in _ATTENTIONS and first is not None:
        return _count_attention(node, first, second, outputs)
    if kind == "Einsum":
        return _count_einsum(node, input_shapes)
    return _count_layer(kind, input_shapes, outputs)


def _count_layer(kind: str, shapes: Sequence[Sequence[int] | None], outputs: float) -> float | None:
    """Return the operations of convolutions and recurrent layers, None for others."""
    first, second, third = (*shapes[:3], None, None, None)[:3]
    weights = dict(enumerate(shapes)).get(_CONVOLUTION_WEIGHTS.get(kind, -1))
    if weights is not None:
        return 2.0 * outputs * math.prod(weights[1:])
    if first is None or second is None:
        return None
    if kind == "ConvTranspose":
        return 2.0 * math.prod(first) * math.prod(second[1:])  # each element of the input meets each weight
    if kind in _RECURRENT_LAYERS and third is not None:
        return 2.0 * math.prod(first[:2]) * (math.prod(second) + math.prod(third))
    return None


def _count_attention(
    node: NodeProto, query: Sequence[int], second: Sequence[int] | None, outputs: float
) -> float | None:
    """Return the operations of attention, with the projections in it."""
    if len(query) < 3 or second is None:
        return None
    projected = 0.0
    keys = query[-2]
    if node.domain == "com.microsoft" and node.op_type == "Attention":  # its second input holds weights [D, 3 H]
        projected = 2.0 * math.prod(query[:-1]) * math.prod(second)
    elif len(second) >= 3:
        keys = second[-2]
    return projected + 4.0 * outputs * keys


def _count_einsum(node: NodeProto, input_shapes: Sequence[Sequence[int] | None]) -> float | None:
    """Return twice the product of all index sizes, if known.

    An ellipsis hides some of them.
    """
    equation = next((a.s.decode(errors="replace") for a in node.attribute if a.name == "equation"), "").replace(" ", "")
    terms = equation.partition("->")[0].split(",")
    if "." in equation or len(terms) != len(input_shapes):
        return None
    sizes: dict[str, int] = {}
    for term, shape in zip(terms, input_shapes):
        if shape is None or len(shape) != len(term):
            return None
        sizes.update(zip(term, shape))
    return 2.0 * math.prod(sizes.values())
