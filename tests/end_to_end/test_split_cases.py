"""Difficult cases of splitting: small models, split between every two nodes and run."""

from __future__ import annotations

import numpy as np

import onnxplace
from onnxplace.bundle.bundle import WEIGHTS_FILE
from tests.end_to_end.split_checks import Check, X, parsed, weight

# ---------------------------------------------------------------------------------------------- one node and its values


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


# --------------------------------------------------------------------------------------------- inputs, outputs, weights


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
