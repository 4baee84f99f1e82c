"""Difficult cases of splitting: small models, split between every two nodes and run."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
from onnx import ModelProto, TensorProto, external_data_helper, helper, numpy_helper, parser

import onnxplace
from onnxplace.bundle import WEIGHTS_FILE, WHOLE_MODEL_FILE, Bundle
from onnxplace.model import load
from tests.end_to_end.test_split_property import RandomPlacement, assert_same, compiled_with, run_together
from tests.support.random_models import Feeds, reference, run_plain

X = np.array([[1, -2, 3], [-4, 5, -6]], dtype=np.float32)
HEADER = '<ir_version: 9, opset_import: ["": 18]>'
ALTERNATING = RandomPlacement((0, 1))

Check = Callable[..., list[Bundle]]


@pytest.fixture
def check(tmp_path: Path) -> Check:
    """Compile a model with nodes alternating between two devices, plain and optimised; compare all outputs."""

    def run(
        model: str | ModelProto,
        *feeds: Feeds,
        dimensions: Mapping[str, int] = MappingProxyType({}),
        optimized: tuple[bool, ...] = (False, True),
    ) -> list[Bundle]:
        proto = parsed(model)
        expected = reference(proto, feeds)
        bundles = []
        for choice in optimized:
            folder = tmp_path / str(choice)
            bundle = compiled_with(proto, ALTERNATING, folder, optimized=choice, dimensions=dimensions)
            assert_same(run_together(bundle, feeds), expected)
            assert_same(run_plain(bundle.file(WHOLE_MODEL_FILE), feeds), expected)
            bundles.append(bundle)
        return bundles

    return run


def parsed(model: str | ModelProto) -> ModelProto:
    """Return a model from ONNX text, with the usual header unless it has its own."""
    if isinstance(model, ModelProto):
        return model
    return parser.parse_model(model if model.lstrip().startswith("<") else HEADER + model)


def check_elsewhere(model: str, folder: Path, feeds: Feeds) -> None:
    """Compile and compare like `check`, with the bundle in a process of its own, which may crash."""
    bundle = compiled_with(parsed(model), ALTERNATING, folder, optimized=False)
    inputs, outputs = folder / "given.npz", folder / "made.npz"
    np.savez(inputs, **feeds)
    command = [sys.executable, "-m", "onnxplace", "run", bundle.path, "--inputs", inputs, "--outputs", outputs]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    with np.load(outputs) as results:
        assert_same([results[item.name] for item in bundle.outputs], reference(parsed(model), [feeds])[0])


def weight(array: np.ndarray, name: str) -> TensorProto:
    return numpy_helper.from_array(array, name)


# --- one node and its values ------------------------------------------------------------------------------------------


def test_operands_are_broadcast_across_devices(check: Check):
    bundles = check(
        """graph (float[2, 3] x, float[3] r, float[2, 1] c) => (float[2, 3] y) {
            a = Neg(r)
            b = Add(x, a)
            d = Mul(c, b)
            y = Sub(d, a)
        }""",
        {"x": X, "r": X[0], "c": X[:, :1]},
    )
    assert [len(bundle.manifest.segments) for bundle in bundles] == [4, 4]


def test_a_value_may_be_read_twice_by_one_node(check: Check):
    check(
        """graph (float[2, 3] x) => (float[2, 3] y) {
            a = Neg(x)
            b = Mul(a, a)
            y = Sub(b, b)
        }""",
        {"x": X},
    )


def test_outputs_of_one_node_go_to_different_devices(check: Check):
    check(
        """graph (float[2, 3] x) => (float[2, 2] y, float[2, 1] z) <int64[2] sizes = {1, 2}> {
            a, b = Split<axis = 1>(x, sizes)
            c = Mul(a, b)
            d = Neg(a)
            y = Sub(c, d)
            z = Abs(a)
        }""",
        {"x": X},
    )


def test_an_output_without_readers_stays_on_its_device(check: Check):
    for bundle in check(
        """graph (float[2, 3] x) => (int64[2, 2] y) <int64[1] k = {2}> {
            a = Neg(x)
            top, where = TopK(a, k)
            y = Neg(where)
        }""",
        {"x": X},
    ):
        assert "top" not in bundle.manifest.values


def test_an_optional_output_without_a_name_is_omitted(check: Check):
    check(
        """graph (float[2, 3] x) => (float[2, 3] y) {
            a, "" = Dropout(x)
            b, mask = Dropout(a)
            c = Where(mask, a, b)
            y = Neg(c)
        }""",
        {"x": X},
    )


def test_an_optional_input_without_a_name_is_omitted(check: Check):
    check(
        """graph (float[2, 3] x) => (float[1, 3] y, float[1, 1] z)
        <float one = {1}, int64[1] i = {0}, int64[1] j = {1}> {
            a = Clip(x, "", one)
            b = Slice(a, i, j, "", j)
            y = Neg(b)
            z = ReduceSum(a, "")
        }""",
        {"x": X},
    )


def test_nodes_may_have_equal_names_or_none(check: Check):
    check(
        """graph (float[2, 3] x) => (float[2, 3] y) {
            [same] a = Neg(x)
            [same] b = Abs(a)
            c = Add(a, b)
            [same_1] d = Neg(c)
            y = Mul(d, x)
        }""",
        {"x": X},
    )


def test_nodes_inside_a_subgraph_may_have_equal_names(check: Check):
    check(
        """graph (float[2, 3] x, bool c) => (float[2, 3] y) {
            a = Neg(x)
            b = If(c) <
                then_branch = t () => (float[2, 3] u) { [same] s = Abs(a) [same] u = Neg(s) },
                else_branch = e () => (float[2, 3] v) { v = Neg(a) }
            >
            y = Neg(b)
        }""",
        {"x": X, "c": np.array(True)},
    )


def test_nodes_may_be_listed_in_any_order(check: Check):
    check(
        """graph (float[2, 3] x) => (float[2, 3] y) {
            y = Sub(b, a)
            b = Abs(a)
            a = Neg(x)
        }""",
        {"x": X},
    )


def test_a_node_may_have_no_inputs(check: Check):
    check(
        """graph (float[2] x) => (float[2] y, float[2] r) {
            r = RandomUniform<shape = [2], seed = 1.0>()
            y = Neg(x)
        }""",
        {"x": X[0, :2]},
    )


# --- inputs, outputs, weights -----------------------------------------------------------------------------------------


def test_a_model_may_have_no_nodes_at_all(check: Check):
    check("graph (float[2, 3] x) => (float[2, 3] x) {}", {"x": X})


def test_a_model_may_have_only_unused_nodes(check: Check):
    check("graph (float[2, 3] x) => (float[2, 3] x) { y = Neg(x) }", {"x": X}, optimized=(True,))


def test_an_input_may_also_be_an_output(check: Check):
    check(
        """graph (float[2, 3] x, int64[2] n) => (float[2, 3] x, float[2, 3] y, int64[2] n) {
            a = Neg(x)
            y = Add(a, x)
        }""",
        {"x": X, "n": np.array([1, 2])},
    )


def test_an_output_may_be_read_by_nodes(check: Check):
    check(
        """graph (float[2, 3] x) => (float[2, 3] a, float[2, 3] y, float[2, 3] b) {
            a = Neg(x)
            b = Abs(a)
            c = Add(a, b)
            y = Mul(c, a)
        }""",
        {"x": X},
    )


def test_an_output_may_be_listed_twice(check: Check):
    check(
        """graph (float[2, 3] x) => (float[2, 3] y, float[2, 3] y) {
            a = Neg(x)
            y = Abs(a)
        }""",
        {"x": X},
    )


def test_a_large_weight_that_both_devices_read_is_stored_once(check: Check):
    model = parsed(
        """graph (float[2, 3] x) => (float[2, 128] y) {
            a = MatMul(x, w)
            b = Neg(x)
            c = MatMul(b, w)
            y = Sub(a, c)
        }"""
    )
    model.graph.initializer.append(weight(np.arange(384, dtype=np.float32).reshape(3, 128), "w"))
    for bundle in check(model, {"x": X}):
        assert (bundle.path / "segments" / WEIGHTS_FILE).stat().st_size == 384 * 4


def test_a_weight_may_be_an_output(check: Check):
    check(
        """graph (float[2, 3] x) => (float[3] w, float[2, 3] y, float[2] u)
        <float[3] w = {1, 2, 3}, float[2] u = {4, 5}> {
            a = Add(x, w)
            y = Mul(a, w)
        }""",
        {"x": X},
    )


def test_a_weight_that_is_an_output_may_share_its_inner_name_with_a_subgraph(check: Check):
    check(
        """graph (float[2, 3] x, bool c) => (float[3] w, float[2, 3] y) <float[3] w = {1, 2, 3}> {
            a = Neg(x)
            y = If(c) <
                then_branch = t () => (float[2, 3] u) { "w/returned" = Add(a, w) u = Neg("w/returned") },
                else_branch = e () => (float[2, 3] v) { v = Neg(a) }
            >
        }""",
        {"x": X, "c": np.array(True)},
    )


OVERRIDABLE = """graph (float[2, 3] x, float[3] w) => (float[2, 3] y) <float[3] w = {1, 2, 3}> {
    a = Add(x, w)
    b = Neg(w)
    c = Mul(a, b)
    y = Sub(c, w)
}"""


def test_a_weight_that_is_also_an_input_may_be_fed_or_not(check: Check):
    check(OVERRIDABLE, {"x": X}, {"x": X, "w": X[0]}, {"x": X})


def test_a_large_weight_that_is_also_an_input_may_be_fed_or_not(check: Check):
    model = parsed(
        """graph (float[2, 3] x, float[3, 128] w) => (float[2, 128] y) {
            a = MatMul(x, w)
            b = Neg(x)
            c = MatMul(b, w)
            y = Sub(a, c)
        }"""
    )
    array = np.arange(384, dtype=np.float32).reshape(3, 128)
    model.graph.initializer.append(weight(array, "w"))
    check(model, {"x": X}, {"x": X, "w": -array})


def test_a_weight_that_is_also_an_input_may_be_an_output(check: Check):
    model = parsed(OVERRIDABLE)
    model.graph.output.append(model.graph.input[1])
    check(model, {"x": X}, {"x": X, "w": X[0]})


def test_a_shape_that_is_only_a_default_may_be_fed(check: Check):
    check(
        """graph (float[2, 3] x, int64[2] shape) => (float[r, c] y) <int64[2] shape = {2, 3}> {
            a = Reshape(x, shape)
            b = Neg(a)
            y = Abs(b)
        }""",
        {"x": X},
        {"x": X, "shape": np.array([3, 2])},
    )


def test_before_ir_version_4_weights_are_listed_as_inputs_but_cannot_be_fed(check: Check):
    for bundle in check(
        """<ir_version: 3, opset_import: ["": 13]>
        graph (float[2, 3] x, float[3] w) => (float[2, 3] y) <float[3] w = {1, 2, 3}> {
            a = Add(x, w)
            y = Mul(a, w)
        }""",
        {"x": X},
    ):
        assert [item.name for item in bundle.inputs] == ["x"]


def test_a_model_may_consist_of_constants(check: Check):
    check(
        """graph () => (float[2] y, int64[1] n, float[2] k) <int64[1] shape = {2}> {
            k = Constant<value = float[2] {1, 2}>()
            z = ConstantOfShape(shape)
            y = Add(k, z)
            n = Shape(y)
        }""",
        {},
    )


def test_folding_writes_no_large_weights(check: Check):
    for bundle in check(
        """graph (float[1] x) => (float[1000, 1000] y) <int64[2] shape = {1000, 1000}> {
            a = ConstantOfShape(shape)
            b = Neg(x)
            y = Add(a, b)
        }""",
        {"x": X[0, :1]},
    ):
        assert (bundle.path / "segments" / WEIGHTS_FILE).stat().st_size < 65536


def test_folded_constants_may_be_outputs_and_read_on_both_devices(check: Check):
    check(
        """graph (float[2, 3] x) => (float[2, 3] y, float[3] c) {
            a = Constant<value = float[3] {1, 2, 3}>()
            b = Add(a, a)
            c = Mul(b, a)
            d = Add(x, b)
            y = Sub(d, c)
        }""",
        {"x": X},
    )


def test_unused_nodes_do_no_harm(check: Check):
    check(
        """graph (float[2, 3] x) => (float[2, 3] y) {
            y = Neg(x)
            a = Abs(x)
        }""",
        {"x": X},
    )


def test_feeds_are_neither_changed_nor_returned(check: Check):
    fed = X.copy()
    (bundle, _) = check(
        "graph (float[2, 3] x) => (float[2, 3] x, float[2, 3] y) { a = Identity(x) y = Identity(a) }", {"x": fed}
    )
    with onnxplace.InferenceSession(bundle) as session:
        for returned in session.run(None, {"x": fed}):
            returned += 1
    np.testing.assert_array_equal(fed, X)


def test_results_outlive_the_session_and_later_requests(check: Check):
    (bundle, _) = check("graph (float[2, 3] x) => (float[2, 3] y) { a = Neg(x) y = Neg(a) }", {"x": X})
    with onnxplace.InferenceSession(bundle) as session:
        first = session.run(None, {"x": X})[0]
        session.run(None, {"x": 2 * X})
    np.testing.assert_array_equal(first, X)


def test_inputs_may_lie_in_memory_in_any_order(check: Check):
    check(
        "graph (float[2, 3] x) => (float[2, 3] y) { a = Neg(x) y = Abs(a) }",
        {"x": np.asfortranarray(X)},
        {"x": np.tile(X, 2)[:, ::2]},
    )


# --- types and shapes -------------------------------------------------------------------------------------------------


def test_values_of_many_types_cross(check: Check):
    check(
        """graph (float[2, 3] x) => (bool[2, 3] b, int64[2, 3] y) {
            h = Cast<to = 10>(x)
            d = Cast<to = 11>(h)
            i = Cast<to = 6>(d)
            b = Cast<to = 9>(i)
            u = Cast<to = 2>(b)
            y = Cast<to = 7>(u)
        }""",
        {"x": X},
    )


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(16, id="bfloat16"),
        pytest.param(17, id="float8e4m3fn"),
        pytest.param(19, id="float8e5m2"),
    ],
)
def test_values_of_types_that_numpy_lacks_cross(check: Check, dtype: int):
    check(
        f"""<ir_version: 9, opset_import: ["": 19]>
        graph (float[2, 3] x) => (float[2, 3] y) {{
            a = Cast<to = {dtype}>(x)
            b = Identity(a)
            y = Cast<to = 1>(b)
        }}""",
        {"x": X},
    )


FOUR_BITS = """<ir_version: 10, opset_import: ["": 21]>
graph (float[2, 3] x) => (float[2, 3] y, int4[2, 3] a) <float s = {1}, int4 z = {0}> {
    a = QuantizeLinear(x, s, z)
    b = DequantizeLinear(a, s, z)
    y = Neg(b)
}"""


def test_values_of_four_bits_cross(check: Check):
    model = parsed(FOUR_BITS)
    del model.graph.output[1]
    check(model, {"x": X})


def test_values_of_four_bits_may_be_returned(tmp_path: Path):
    bundle = compiled_with(parsed(FOUR_BITS), ALTERNATING, tmp_path)
    (outputs,) = run_together(bundle, [{"x": X}])  # ONNX Runtime itself does not return them
    np.testing.assert_array_equal(outputs[1].astype(np.float32), X)


def test_nan_and_infinity_cross(check: Check):
    check(
        """graph (float[2, 3] x) => (float[2, 3] y) {
            a = Neg(x)
            b = Add(a, x)
            y = Mul(b, a)
        }""",
        {"x": np.array([[np.nan, np.inf, -np.inf], [-0.0, 1, 2]], dtype=np.float32)},
    )


def test_scalars_and_empty_tensors_cross(check: Check):
    check(
        """graph (float s, float[0, 3] e) => (float[0, 3] y, float z, int64 n) {
            a = Neg(s)
            b = Neg(e)
            y = Add(a, b)
            z = ReduceSum<keepdims = 0>(y)
            n = Size(b)
        }""",
        {"s": np.array(2, dtype=np.float32), "e": np.zeros((0, 3), dtype=np.float32)},
    )


def test_views_cross(check: Check):
    check(
        """graph (float[2, 3] x) => (float[6] r, float[2, 3] y) <int64[1] flat = {-1}, int64[1] zero = {0}> {
            r = Reshape(x, flat)
            u = Unsqueeze(r, zero)
            s = Squeeze(u, zero)
            i = Identity(s)
            n = Shape(x)
            y = Reshape(i, n)
        }""",
        {"x": X},
    )


def test_symbolic_dimensions_may_be_any_size_at_run_time(check: Check):
    feeds = [{"x": np.resize(X, (n, 3)), "z": np.resize(X, (n,))} for n in (2, 5, 0, 1)]
    check(
        """graph (float[N, 3] x, float[N] z) => (float[N, 3] y, float[M] m)
        <int64[2] shape = {-1, 3}, int64[1] flat = {-1}> {
            a = Neg(x)
            m = Reshape(a, flat)
            b = Reshape(m, shape)
            n = Shape(x)
            c = Expand(b, n)
            y = Add(c, x)
        }""",
        *feeds,
        dimensions={"N": 2},
    )


def test_values_of_data_dependent_shapes_cross(check: Check):
    check(
        """graph (float[2, 3] x) => (int64[2, n] y, int64[2] s) {
            a = Clip(x)
            b = NonZero(a)
            y = Neg(b)
            s = Shape(y)
        }""",
        {"x": X},
        {"x": 0 * X},
        {"x": np.eye(2, 3, dtype=np.float32)},
    )


def test_a_wrong_declared_output_shape_does_no_harm_to_readers(check: Check):
    check(
        """graph (float[2, 3] x) => (int64[2, 1] b, int64[2, 1] y) {
            a = Neg(x)
            b = NonZero(a)
            y = Neg(b)
        }""",
        {"x": X},
    )


def test_types_unknown_to_shape_inference_are_determined(check: Check):
    check(
        """<ir_version: 9, opset_import: ["": 18, "com.microsoft": 1]>
        graph (float[2, 3] x) => (float[2, 2] y) {
            a = com.microsoft.FusedMatMul<transB = 1>(x, x)
            b = com.microsoft.FusedMatMul<transA = 1>(a, a)
            y = Neg(b)
        }""",
        {"x": X},
    )


def test_the_default_domain_has_two_names(check: Check):
    check(
        """<ir_version: 9, opset_import: ["ai.onnx": 18]>
        graph (float[2, 3] x) => (float[2, 3] y) {
            a = Neg(x)
            y = Abs(a)
        }""",
        {"x": X},
    )


def test_a_weight_may_be_an_output_of_a_model_without_the_default_domain(check: Check):
    check(
        """<ir_version: 9, opset_import: ["com.microsoft": 1]>
        graph (float[2, 3] x) => (float[2, 2] y, float[1] w) <float[1] w = {1}> {
            a = com.microsoft.FusedMatMul<transB = 1>(x, x)
            y = com.microsoft.FusedMatMul(a, a)
        }""",
        {"x": X},
    )


# --- strings, sequences, optionals ------------------------------------------------------------------------------------


def test_strings_cross(check: Check):
    check(
        """graph (float[2, 3] x) => (float[2, 3] y, int64[1] n) <string[2] s = {"a", "b"}> {
            y = Neg(x)
            a = Identity(s)
            b = Concat<axis = 0>(a, s)
            n = Shape(b)
        }""",
        {"x": X},
    )


def test_strings_may_be_fed_and_returned(check: Check):
    check(
        """graph (string[2] s, float[2, 3] x) => (string[2] t, float[2, 3] y) {
            a = Identity(s)
            t = Identity(a)
            y = Neg(x)
        }""",
        {"s": np.array(["a", "bc"], dtype=object), "x": X},
    )


def test_results_computed_from_strings_are_kept(check: Check):
    check(
        """<ir_version: 9, opset_import: ["": 19]>
        graph (float[2, 3] x) => (float[2, 3] y, bool[2, 3] e) <string[1] one = {"1"}> {
            y = Neg(x)
            a = Cast<to = 8>(x)
            e = Equal(a, one)
        }""",
        *[{"x": X * n} for n in range(8)],
    )


def test_sequences_cross(check: Check):
    check(
        """graph (float[2, 3] x) => (float[2, 3] y, float[4, 3] c, int64 n) <int64 zero = {0}> {
            a = Neg(x)
            s = SequenceConstruct(a, x)
            y = SequenceAt(s, zero)
            c = ConcatFromSequence<axis = 0>(s)
            n = SequenceLength(s)
        }""",
        {"x": X},
    )


def test_sequences_may_be_returned(check: Check):
    check(
        """graph (float[2, 3] x) => (seq(float) s, seq(float) t) {
            a = Neg(x)
            s = SequenceConstruct(a, x)
            t = SequenceInsert(s, a)
        }""",
        {"x": X},
    )


def test_sequences_may_be_fed(check: Check):
    check(
        """graph (seq(float[2, 3]) s) => (float[2, 3] y) <int64 zero = {0}> {
            a = SequenceAt(s, zero)
            y = Neg(a)
        }""",
        {"s": [X, X + 1]},
    )


def test_empty_sequences_may_be_fed(check: Check):
    check(
        """graph (seq(float[2, 3]) s) => (int64 y) {
            a = SequenceLength(s)
            y = Neg(a)
        }""",
        {"s": []},
        {"s": [X]},
    )


def test_optionals_may_be_fed(check: Check):
    check(
        """graph (optional(float[2, 3]) o) => (float[2, 3] y) {
            a = OptionalGetElement(o)
            y = Neg(a)
        }""",
        {"o": X},
    )


def test_results_computed_next_to_maps_are_kept(tmp_path: Path):
    model = parsed(
        """<ir_version: 9, opset_import: ["": 18, "ai.onnx.ml": 1]>
        graph (float[1, 2] x) => (seq(map(int64, float)) m, int64[1, 2] y) {
            a = Neg(x)
            m = ai.onnx.ml.ZipMap<classlabels_int64s = [1, 2]>(a)
            y = Cast<to = 7>(a)
        }"""
    )
    feeds = [{"x": X[:1, :2] * n} for n in range(8)]
    bundle = compiled_with(model, RandomPlacement((0, 1, 1)), tmp_path)
    assert bundle.manifest.segments[1].outputs == ("m", "y")
    assert_same(run_together(bundle, feeds), reference(model, feeds))


def test_maps_may_be_returned(check: Check):
    check(
        """<ir_version: 9, opset_import: ["": 18, "ai.onnx.ml": 1]>
        graph (float[1, 2] x) => (seq(map(int64, float)) m) {
            a = Neg(x)
            m = ai.onnx.ml.ZipMap<classlabels_int64s = [1, 2]>(a)
        }""",
        {"x": X[:1, :2]},
    )


def test_optionals_cross(check: Check):
    check(
        """graph (float[2, 3] x) => (float[2, 3] y, bool h) {
            a = Neg(x)
            o = Optional(a)
            g = OptionalGetElement(o)
            h = OptionalHasElement(o)
            y = Neg(g)
        }""",
        {"x": X},
    )


def test_an_optional_without_a_value_crosses(tmp_path: Path):
    check_elsewhere(
        """graph (float[2, 3] x) => (bool h, float[2, 3] y) {
            o = Optional<type: type_proto = float[2, 3]>()
            h = OptionalHasElement(o)
            y = Neg(x)
        }""",
        tmp_path,
        {"x": X},
    )


# --- graphs inside graphs ---------------------------------------------------------------------------------------------


TRUE_AND_FALSE: tuple[Feeds, ...] = ({"x": X, "c": np.array(True)}, {"x": X, "c": np.array(False)})


def test_branches_may_capture_values_and_weights(check: Check):
    check(
        """graph (float[2, 3] x, bool c) => (float[2, 3] y) <float[3] w = {1, 2, 3}> {
            a = Neg(x)
            b = Abs(x)
            d = If(c) <
                then_branch = t () => (float[2, 3] u) { h = Add(a, w) u = Mul(h, b) },
                else_branch = e () => (float[2, 3] u) { h = Sub(b, x) u = Mul(h, w) }
            >
            y = Add(d, a)
        }""",
        *TRUE_AND_FALSE,
    )


def test_branches_may_read_only_captures_through_another_branch(check: Check):
    check(
        """graph (float[2, 3] x, bool c) => (float[2, 3] y) {
            a = Neg(x)
            n = Not(c)
            y = If(c) <
                then_branch = t () => (float[2, 3] u) {
                    u = If(n) <
                        then_branch = tt () => (float[2, 3] p) { p = Identity(x) },
                        else_branch = te () => (float[2, 3] q) { q = Abs(a) }
                    >
                },
                else_branch = e () => (float[2, 3] v) { v = Identity(a) }
            >
        }""",
        *TRUE_AND_FALSE,
    )


def test_branches_may_have_results_of_different_shape_and_rank(check: Check):
    check(
        """graph (float[2, 3] x, bool c) => (float y) {
            a = Neg(x)
            b = If(c) <
                then_branch = t () => (float[2, 3] u) { u = Abs(a) },
                else_branch = e () => (float v) { v = ReduceSum<keepdims = 0>(a) }
            >
            d = Neg(b)
            y = ReduceSum<keepdims = 0>(d)
        }""",
        *TRUE_AND_FALSE,
    )


def test_loops_may_capture_values_and_weights(check: Check):
    check(
        """graph (float[2, 3] x) => (float[2, 3] y, float[3, 2, 3] every) <int64 m = {3}, float[3] w = {1, 2, 3}> {
            a = Neg(x)
            b = Abs(x)
            last, every = Loop(m, "", a) <
                body = body (int64 i, bool go, float[2, 3] v) => (bool on, float[2, 3] n, float[2, 3] s) {
                    on = Identity(go)
                    h = Mul(b, w)
                    n = Add(v, h)
                    s = Sub(n, x)
                }
            >
            y = Neg(last)
        }""",
        {"x": X},
    )


def test_loop_carried_values_may_grow(check: Check):
    check(
        """graph (float[2, 3] x, int64 m) => (float[n, 3] y) {
            a = Neg(x)
            last = Loop(m, "", a) <body = body (int64 i, bool go, float[k, 3] v) => (bool on, float[l, 3] n) {
                on = Identity(go)
                n = Concat<axis = 0>(v, x)
            }>
            b = Neg(last)
            y = Abs(b)
        }""",
        {"x": X, "m": np.array(3)},
        {"x": X, "m": np.array(0)},
    )


def test_scans_may_capture_values(check: Check):
    check(
        """graph (float[2, 3] x, float[3] w) => (float[3] t, float[2, 3] y) {
            z = Mul(w, w)
            a = Neg(x)
            t, b = Scan<num_scan_inputs = 1, body = body (float[3] s, float[3] e) => (float[3] so, float[3] o) {
                so = Add(s, e)
                o = Mul(so, z)
            }>(w, a)
            y = Neg(b)
        }""",
        {"x": X, "w": X[0]},
    )


FUNCTION = """
<domain: "local", opset_import: ["": 18, "local": 1]> inner (p) => (q) { h = Abs(p) q = Neg(h) }
<domain: "local", opset_import: ["": 18, "local": 1]> outer <k> (p, c) => (q, r) {
    h = local.inner(p)
    q = If(c) <
        then_branch = t () => (u) { u = local.inner(h) },
        else_branch = e () => (v) { v = Sub(p, h) }
    >
    r = Cast<to: int = @k>(q)
}"""


def test_functions_are_split_like_their_nodes(check: Check):
    check(
        """<ir_version: 9, opset_import: ["": 18, "local": 1]>
        graph (float[2, 3] x, bool c) => (float[2, 3] y, int64[2, 3] r, int32[2, 3] s) {
            h = Neg(x)
            a, i = local.outer<k = 6>(h, c)
            y, r = local.outer<k = 7>(a, c)
            s = Neg(i)
        }"""
        + FUNCTION,
        *TRUE_AND_FALSE,
    )


def test_functions_may_be_called_in_branches(check: Check):
    check(
        """<ir_version: 9, opset_import: ["": 18, "local": 1]>
        graph (float[2, 3] x, bool c) => (float[2, 3] y) {
            h = Neg(x)
            a = If(c) <
                then_branch = t () => (float[2, 3] u) { u = local.inner(h) },
                else_branch = e () => (float[2, 3] v) { v = Abs(h) }
            >
            y = Neg(a)
        }"""
        + FUNCTION,
        *TRUE_AND_FALSE,
    )


def test_functions_may_use_another_opset_than_the_model(check: Check):
    check(
        """<ir_version: 9, opset_import: ["": 18, "local": 1]>
        graph (float[2, 3] x) => (float[2, 3] y) { a = local.f(x) y = Neg(a) }
        <domain: "local", opset_import: ["": 17]> f (p) => (q) { q = Abs(p) }""",
        {"x": X},
    )


def test_functions_may_use_a_domain_that_the_model_does_not_import(check: Check):
    check(
        """<ir_version: 9, opset_import: ["": 18, "local": 1]>
        graph (float[2, 3] x) => (float[2, 2] y) { a = local.f(x) y = Neg(a) }
        <domain: "local", opset_import: ["com.microsoft": 1]> f (p) => (q) {
            q = com.microsoft.FusedMatMul<transB = 1>(p, p)
        }""",
        {"x": X},
    )


# --- weights in files -------------------------------------------------------------------------------------------------


def saved_outside(tensors: list[TensorProto], folder: Path) -> None:
    """Move the bytes of tensors to `folder/data.bin`."""
    with (folder / "data.bin").open("ab") as file:
        for tensor in tensors:
            external_data_helper.set_external_data(tensor, "data.bin", file.tell(), len(tensor.raw_data))
            file.write(tensor.raw_data)
            tensor.ClearField("raw_data")


def check_file(model: ModelProto, folder: Path, *feeds: Feeds) -> Bundle:
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    bundle = compiled_with(path, ALTERNATING, folder)
    assert_same(run_together(bundle, feeds), run_plain(path, feeds))
    return bundle


def test_weights_in_an_external_file_are_read(tmp_path: Path):
    model = parsed("graph (float[2, 3] x) => (float[2, 3] y) { a = Mul(x, w) b = Add(a, w) y = Neg(b) }")
    model.graph.initializer.append(weight(X, "w"))
    saved_outside(list(model.graph.initializer), tmp_path)
    check_file(model, tmp_path, {"x": X})


def test_weights_of_a_subgraph_in_an_external_file_are_read(tmp_path: Path):
    model = parsed(
        """graph (float[2, 3] x, bool c) => (float[2, 3] y) {
            a = Neg(x)
            y = If(c) <
                then_branch = t () => (float[2, 3] u) { u = Mul(a, w) },
                else_branch = e () => (float[2, 3] v) { v = Neg(a) }
            >
        }"""
    )
    branch = next(a.g for a in model.graph.node[1].attribute if a.name == "then_branch")
    branch.initializer.append(weight(X, "w"))
    saved_outside(list(branch.initializer), tmp_path)
    check_file(model, tmp_path, *TRUE_AND_FALSE)


def test_constants_in_an_external_file_are_read(tmp_path: Path):
    node = helper.make_node("Constant", [], ["w"], value=weight(X, "w"))
    model = parsed("graph (float[2, 3] x) => (float[2, 3] y) { a = Mul(x, w) y = Add(a, w) }")
    model.graph.node.insert(0, node)
    saved_outside([model.graph.node[0].attribute[0].t], tmp_path)
    check_file(model, tmp_path, {"x": X})


def test_a_long_vector_is_not_mistaken_for_a_shape(tmp_path: Path):
    """The shape inference of onnx would follow each of its elements, and run out of memory."""
    text = "g (float[8000000] x) => (float[8000000] y) { a = Relu(x) b = Neg(a) c = Add(a, b) y = Mul(c, b) }"
    (tmp_path / "long.onnx").write_bytes(parsed(text).SerializeToString())
    types = load(tmp_path / "long.onnx").types
    assert [types[name].tensor_type.shape.dim[0].dim_value for name in "abcy"] == [8_000_000] * 4
