"""Types that are difficult to pass between devices: shapes, strings, sequences, optionals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.end_to_end.split_checks import ALTERNATING, Check, X, check_elsewhere, parsed
from tests.support.random_models import reference
from tests.support.random_placements import RandomPlacement, assert_same, compiled_with, run_together

# ----------------------------------------------------------------------------------------------------- types and shapes


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


# ---------------------------------------------------------------------------------------- strings, sequences, optionals


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
