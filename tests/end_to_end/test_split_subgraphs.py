"""Subgraphs, functions and external weights that are difficult to split."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from onnx import ModelProto, TensorProto, external_data_helper, helper

from onnxplace.bundle.bundle import Bundle
from onnxplace.model.loading import load
from tests.end_to_end.split_checks import ALTERNATING, TRUE_AND_FALSE, Check, X, parsed, weight
from tests.support.random_models import Feeds, run_plain
from tests.support.random_placements import assert_same, compiled_with, run_together

# ------------------------------------------------------------------------------------------------- graphs inside graphs


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


# ----------------------------------------------------------------------------------------------------- weights in files


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
