"""Rules of the matrix products of ONNX Runtime (com.microsoft): fused, quantised, and mixtures of experts."""

from __future__ import annotations

from collections.abc import Sequence

from onnxplace.passes.sharding.node_views import LocalNode, NodeView, Shape
from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule, other_axes, split_same
from onnxplace.passes.sharding.rules.products import (
    add_inputs,
    drop_bias_except_first,
    gemm,
    is_per_tensor,
    product_rules,
)


def fused_matmul(view: NodeView) -> list[AxisRule]:
    """FusedMatMul: a MatMul of transposed matrices, times a number."""
    shapes: list[Shape] = []
    axes = {}
    for position, letter in enumerate("AB"):
        shape = view.shape(position)
        if len(shape) < 2 or view.attribute(f"transBatch{letter}", 0):
            return []
        is_transposed = bool(view.attribute(f"trans{letter}", 0))
        shapes.append((*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape)
        last = len(shape) - 1
        axes[position] = {last: last - 1, last - 1: last} if is_transposed else {}
    rules = product_rules(shapes[0], shapes[1], view.result(), 0, 1)
    return [
        AxisRule({p: axes[p].get(axis, axis) for p, axis in rule.inputs.items()}, rule.outputs, rule.effect)
        for rule in rules.values()
    ]


def fused_gemm(view: NodeView) -> list[AxisRule]:
    """FusedGemm: a Gemm with an activation; so never a summand."""
    return [rule for rule in gemm(view) if rule.effect == "map"]


def _quantised_product(view: NodeView, factors: tuple[int, int], per_column: Sequence[int]) -> list[AxisRule]:
    """Return the rules of a product whose result is rounded, or has a bias: batch, rows and columns.

    Args:
        view: The node.
        factors: Positions of the factors.
        per_column: Positions of scales, zero points and biases that may have a number per column.
    """
    left, right = factors
    rules = product_rules(view.shape(left), view.shape(right), view.result(), left, right)
    for position in per_column:
        if not is_per_tensor(view, position):
            if view.rank(position) != 1:
                return []
            add_inputs(rules, "columns", {position: 0})
    return [rule for name, rule in rules.items() if name != "sum"]


def dynamic_quantize_matmul(view: NodeView) -> list[AxisRule]:
    """DynamicQuantizeMatMul: by columns; the scale of its first factor is that of all rows."""
    rules = _quantised_product(view, (0, 1), (2, 3, 4))
    return [rule for rule in rules if 0 not in rule.inputs]


def matmul_integer_to_float(view: NodeView) -> list[AxisRule]:
    """MatMulIntegerToFloat, with one scale for the first factor."""
    if not is_per_tensor(view, 2) or not is_per_tensor(view, 4):
        return []
    return _quantised_product(view, (0, 1), (3, 5, 6))


def quantised_gemm(view: NodeView) -> list[AxisRule]:
    """QGemm: by rows and columns."""
    if not all(is_per_tensor(view, p) for p in (1, 2, 7, 8)):
        return []
    row, width = 1 if view.attribute("transA", 0) else 0, 0 if view.attribute("transB", 0) else 1
    columns = {p: 0 for p in (4, 5) if not is_per_tensor(view, p)}
    if view.has(6) and view.rank(6) != 1:
        return []
    bias = {6: 0} if view.has(6) and not is_per_tensor(view, 6) else {}
    return [AxisRule({0: row}, {0: 0}), AxisRule({3: width, **columns, **bias}, {0: 1})]


def matmul_n_bits(view: NodeView) -> list[AxisRule]:
    """MatMulNBits: by rows, and by columns, which are the first axis of the packed weights, scales and zero points."""
    if view.attribute("weight_prepacked", 0):
        return _rows(view)
    last = view.rank() - 1
    packed = {p: 0 for p in (1, 2, 3, 5) if view.has(p)}

    def set_columns(local: LocalNode) -> None:
        local.set_attribute("N", local.out_shape()[last])

    return [*_rows(view), AxisRule(packed, {0: last}, edit=set_columns)]


def _rows(view: NodeView) -> list[AxisRule]:
    return split_same(view, other_axes(view, -1))


def mixture_of_experts(view: NodeView) -> list[AxisRule]:
    """MoE: by tokens, and by the inner axis of all experts, whose second products are summed.

    By experts would need other probabilities of the router on each device.
    """
    rules = _tokens(view, (1,))
    if view.attribute("activation_type", "relu") == "swiglu" and view.attribute("swiglu_fusion", 0) == 2:
        return rules  # all gates come before all values
    inner = {**{p: 1 for p in (2, 3, 6, 7) if view.has(p)}, 4: 2}
    return [*rules, AxisRule(inner, {}, "sum", units=view.shape(4)[2], edit=drop_bias_except_first(5))]


def _tokens(view: NodeView, routers: Sequence[int]) -> list[AxisRule]:
    """Return the rule by tokens, or by samples of tokens; probabilities are [tokens, experts]."""
    inputs = {0: 0, **{p: 0 for p in routers if view.has(p)}}
    return [AxisRule(inputs, {0: 0}, units=view.shape(0)[0])]


def quantised_experts(view: NodeView) -> list[AxisRule]:
    """QMoE: by tokens; devices pack its weights in ways of their own."""
    return _tokens(view, (1, 14))


FUSED_PRODUCTS: dict[tuple[str, str], Rule] = {
    ("com.microsoft", "FusedMatMul"): fused_matmul,
    ("com.microsoft", "TransposeMatMul"): fused_matmul,
    ("com.microsoft", "FusedGemm"): fused_gemm,
    ("com.microsoft", "DynamicQuantizeMatMul"): dynamic_quantize_matmul,
    ("com.microsoft", "MatMulIntegerToFloat"): matmul_integer_to_float,
    ("com.microsoft", "QGemm"): quantised_gemm,
    ("com.microsoft", "MatMulNBits"): matmul_n_bits,
    ("com.microsoft", "MatMulBnb4"): _rows,
    ("com.microsoft", "MoE"): mixture_of_experts,
    ("com.microsoft", "QMoE"): quantised_experts,
}
