"""Segments never run a kernel that is less precise than that of the whole model."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import ml_dtypes
import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxplace.bundle.bundle import WHOLE_MODEL_FILE, Bundle
from onnxplace.model.cut_constraints import find_scales_to_protect
from onnxplace.model.loading import load
from tests.support.random_models import run_plain
from tests.support.random_placements import RandomPlacement, compiled_with, placements, run_together

SIZE, BLOCK = 64, 32
KINDS = {
    "int4": (ml_dtypes.int4, -8, 8),
    "uint4": (ml_dtypes.uint4, 0, 16),
    "int8": (np.int8, -128, 128),
    "uint8": (np.uint8, 0, 256),
}
SCALES = ("block", "channel", "tensor")


@dataclass
class Chain:
    """Products in a row, each followed by Tanh, whose second factors are dequantised weights."""

    nodes: list[NodeProto] = field(default_factory=list)
    weights: dict[str, np.ndarray] = field(default_factory=dict)
    values: list[str] = field(default_factory=lambda: ["x"])

    def constant(self, name: str, array: np.ndarray) -> str:
        self.weights.setdefault(name, array)
        return name

    def node(self, op: str, inputs: Sequence[str], output: str, **attributes: object) -> str:
        self.nodes.append(helper.make_node(op, inputs, [output], output, **attributes))
        return output

    def dequantised(self, kind: str, weight: str, scale: str, scales: str, output: str) -> str:
        """Add a dequantised weight, and return its value; equal names share weights and scales."""
        dtype, low, high = KINDS[kind]
        random = np.random.default_rng(len(weight) + ord(weight[-1]))
        shape = {"block": (SIZE // BLOCK, SIZE), "channel": (SIZE,), "tensor": ()}[scales]
        inputs = [
            self.constant(f"{kind}_{weight}", random.integers(low, high, (SIZE, SIZE)).astype(dtype)),
            self.constant(f"{scales}_{scale}", np.full(shape, 1.0 / high / 8, np.float32)),
            self.constant(f"{kind}_{scales}_zero", np.full(shape, (low + high) // 2, dtype)),
        ]
        attributes = {"axis": 0, "block_size": BLOCK} if scales == "block" else {"axis": 1}
        return self.node("DequantizeLinear", inputs, output, **attributes)

    def product(self, factor: str, op: str = "MatMul") -> None:
        number = len(self.values)
        value = self.node(op, [self.values[-1], factor], f"product{number}")
        self.values.append(self.node("Tanh", [value], f"value{number}"))

    def proto(self) -> ModelProto:
        ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [4, SIZE]) for name in ("x", self.values[-1])]
        weights = [numpy_helper.from_array(array, name) for name, array in self.weights.items()]
        graph = helper.make_graph(self.nodes, "chain", ends[:1], ends[1:], weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    def truth(self, x: np.ndarray) -> np.ndarray:
        """Return the result in float64, without quantisers of values."""
        values: dict[str, np.ndarray] = {**self.weights, "x": x.astype(np.float64)}
        for node in self.nodes:
            operands = [values[name] for name in node.input]
            if node.op_type == "DequantizeLinear":
                quantised, scale, zero = (array.astype(np.float64) for array in operands)
                if scale.ndim == 2:
                    scale, zero = scale.repeat(BLOCK, 0), zero.repeat(BLOCK, 0)
                values[node.output[0]] = (quantised - zero) * scale
            else:
                values[node.output[0]] = np.tanh(operands[0]) if node.op_type == "Tanh" else operands[0] @ operands[1]
        return values[self.values[-1]]


def build_shared_chain(kind: str, scales: str, op: str = "MatMul") -> Chain:
    """Return a chain of two weights that two products read each, one of them through dequantisers of their own."""
    chain = Chain()
    first = chain.dequantised(kind, "a", "a", scales, "first")
    for _ in range(2):
        chain.product(first, op)
    for number in range(2):
        chain.product(chain.dequantised(kind, "b", "b", scales, f"own{number}"), op)
    return chain


def build_feeds() -> dict[str, np.ndarray]:
    return {"x": (np.random.default_rng(1).standard_normal((4, SIZE)) / 8).astype(np.float32)}


def find_fused(file: Path | bytes) -> set[str]:
    """Return the outputs of the products that ONNX Runtime fuses into MatMulNBits."""
    with tempfile.TemporaryDirectory() as folder:
        options = onnxruntime.SessionOptions()
        options.optimized_model_filepath = str(Path(folder) / "optimized.onnx")
        options.log_severity_level = 4
        source = file if isinstance(file, bytes) else str(file)
        onnxruntime.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        nodes = onnx.load(options.optimized_model_filepath, load_external_data=False).graph.node
        return {node.output[0] for node in nodes if node.op_type == "MatMulNBits"}


def find_fused_in_segments(bundle: Bundle) -> set[str]:
    return set().union(*(find_fused(bundle.file(segment.file)) for segment in bundle.manifest.segments))


def compute_max_error(outputs: np.ndarray, truth: np.ndarray) -> float:
    return float(np.abs(outputs - truth).max())


CUTS = ((0, 1), (0, 0, 1, 1), (0, 1, 2, 3), (1, 0, 0, 0, 1))


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize(
    ("kind", "scales", "op"),
    [(kind, scales, "MatMul") for kind in KINDS for scales in SCALES] + [("int4", "block", "Gemm")],
)
@pytest.mark.sampled(4)
def test_products_with_shared_weights_are_as_precise_as_uncut(
    tmp_path: Path, kind: str, scales: str, op: str, cut: tuple[int, ...]
):
    chain = build_shared_chain(kind, scales, op)
    truth = chain.truth(build_feeds()["x"])
    bundle = compiled_with(chain.proto(), RandomPlacement(cut), tmp_path)
    uncut = compute_max_error(run_plain(chain.proto().SerializeToString(), [build_feeds()], "all")[0][0], truth)
    assert uncut < 1e-5
    assert compute_max_error(run_together(bundle, [build_feeds()])[0][0], truth) <= 4 * uncut


def test_a_weight_of_one_product_becomes_the_same_kernel_wherever_the_model_is_cut(tmp_path: Path):
    chain = Chain()
    for name in "abcd":
        chain.product(chain.dequantised("int4", name, name, "block", f"factor_{name}"))
    bundle = compiled_with(chain.proto(), RandomPlacement((0, 0, 0, 1, 1, 1)), tmp_path)
    assert len(bundle.manifest.segments) > 1
    products = {f"product{n}" for n in range(1, 5)}
    assert find_fused_in_segments(bundle) == find_fused(bundle.file(WHOLE_MODEL_FILE)) == products
    expected = run_plain(bundle.file(WHOLE_MODEL_FILE), [build_feeds()], "all")[0][0]
    np.testing.assert_array_equal(run_together(bundle, [build_feeds()])[0][0], expected)


@st.composite
def chains(draw: st.DrawFn) -> Chain:
    """Draw products, some of which share weights, scales or dequantisers."""
    chain, factors = Chain(), list[str]()
    for number in range(draw(st.integers(2, 5))):
        if factors and draw(st.booleans()):
            factor = draw(st.sampled_from(factors))
        else:
            kind, scales = draw(st.sampled_from([*KINDS])), draw(st.sampled_from(SCALES))
            weight, scale = draw(st.sampled_from("ab")), draw(st.sampled_from("abcd"))
            factor = chain.dequantised(kind, weight, scale, scales, f"factor{number}")
            factors.append(factor)
        chain.product(factor, draw(st.sampled_from(("MatMul", "Gemm"))))
    return chain


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
@given(chains(), placements(), st.booleans())
@pytest.mark.slow
def test_products_fused_in_a_segment_are_fused_in_the_whole_model(
    chain: Chain, placement: RandomPlacement, optimized: bool
):
    with tempfile.TemporaryDirectory() as folder:
        bundle = compiled_with(chain.proto(), placement, Path(folder), optimized=optimized)
        whole, pieces = find_fused(bundle.file(WHOLE_MODEL_FILE)), find_fused_in_segments(bundle)
        assert whole == find_fused(chain.proto().SerializeToString())
        assert pieces <= whole
        for segment in bundle.manifest.segments:
            nodes = onnx.load(bundle.file(segment.file), load_external_data=False).graph.node
            dequantised = {node.output[0] for node in nodes if node.op_type == "DequantizeLinear"}
            together = {node.output[0] for node in nodes if len(node.input) > 1 and node.input[1] in dequantised}
            assert whole & together <= pieces


QUANTISED = """<ir_version: 10, opset_import: ["": 21]>
graph (float[4, 64] x) => (float[4, 64] y) <float s = {0.01}, float t = {0.02}, int8 z = {0}, uint8 u = {128}> {
    q = QuantizeLinear(x, t, u)
    e = DequantizeLinear(q, t, u)
    d = DequantizeLinear(w, s, z)
    p = MatMul(e, d)
    y = Neg(p)
}"""
REQUANTISED = """<ir_version: 10, opset_import: ["": 21]>
graph (float[4, 64] x) => (uint8[4, 64] y) <float s = {0.01}, float t = {0.02}, int8 z = {0}, uint8 u = {128}> {
    d = DequantizeLinear(w, s, z)
    p = MatMul(x, d)
    r = Relu(p)
    y = QuantizeLinear(r, t, u)
}"""
READ_OTHERWISE = """<ir_version: 10, opset_import: ["": 21]>
graph (float[4, 64] x) => (float[4, 64] y) <float s = {0.01}, float t = {0.01}, int8 z = {0}> {
    d = DequantizeLinear(w, s, z)
    p = MatMul(x, d)
    y = Mul(p, t)
}"""


@pytest.mark.parametrize(
    ("text", "segments"),
    [
        (QUANTISED, [[0, 1], [2, 3, 4]]),
        (REQUANTISED, [[0, 1], [2, 3]]),
        (REQUANTISED, [[0, 1, 2], [3]]),
        (READ_OTHERWISE, [[0, 1], [2]]),
    ],
    ids=["dequantised factor elsewhere", "quantiser behind Relu", "quantiser elsewhere", "an equal constant elsewhere"],
)
def test_the_scale_is_an_input_where_the_node_that_prevents_fusion_is_in_another_segment(
    text: str, segments: list[list[int]]
):
    proto = onnx.parser.parse_model(text)
    array = np.random.default_rng(0).integers(-8, 8, (SIZE, SIZE)).astype(np.int8)
    proto.graph.initializer.append(numpy_helper.from_array(array, "w"))
    assert not find_fused(proto.SerializeToString())
    model = load(proto)
    pieces = [np.array(nodes, dtype=np.int32) for nodes in segments]
    together = [np.arange(len(model.nodes), dtype=np.int32)]
    home = next(number for number, nodes in enumerate(segments) if any(model.nodes[n].input[0] == "w" for n in nodes))
    assert find_scales_to_protect(model, pieces) == [
        frozenset("s") if n == home else frozenset() for n in range(len(pieces))
    ]
    assert find_scales_to_protect(model, together) == [frozenset()]


def test_nodes_that_onnxruntime_folds_do_not_count_as_readers():
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        graph (float[4, 64] x) => (float[4, 64] y) <float s = {0.01}, int8 z = {0}, int64[1] k = {0}> {
            d = DequantizeLinear(w, s, z)
            p = MatMul(x, d)
            f = Cast<to = 1>(w)
            g = ReduceSum(f, k)
            y = Mul(p, g)
        }"""
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((SIZE, SIZE), np.int8), "w"))
    assert find_fused(proto.SerializeToString()) == {"p"}
    pieces = [np.array([0, 1], dtype=np.int32), np.array([2, 3, 4], dtype=np.int32)]
    assert find_scales_to_protect(load(proto), pieces) == [frozenset(), frozenset()]


def test_a_dequantised_weight_of_a_subgraph_stays_where_onnxruntime_can_fuse_it(tmp_path: Path):
    proto = onnx.parser.parse_model(
        """<ir_version: 10, opset_import: ["": 21]>
        graph (float[4, 64] x, bool c) => (float[4, 64] y) {
            v = If(c) <
                then_branch = t () => (float[4, 64] u) <float s = {0.01}, int8 z = {0}> {
                    d = DequantizeLinear(w, s, z)
                    u = MatMul(x, d)
                },
                else_branch = f () => (float[4, 64] o) { o = Neg(x) }
            >
            y = Tanh(v)
        }"""
    )
    array = np.random.default_rng(0).integers(-8, 8, (SIZE, SIZE)).astype(np.int8)
    branch = next(attribute.g for node in proto.graph.node for attribute in node.attribute if node.op_type == "If")
    branch.initializer.append(numpy_helper.from_array(array, "w"))
    requests = [{**build_feeds(), "c": np.array(chosen)} for chosen in (True, False)]
    bundle = compiled_with(proto, RandomPlacement((0, 1)), tmp_path)
    for outputs, expected in zip(run_together(bundle, requests), run_plain(proto.SerializeToString(), requests, "all")):
        np.testing.assert_allclose(outputs[0], expected[0], rtol=1e-6)
