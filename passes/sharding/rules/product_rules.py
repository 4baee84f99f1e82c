"""Rules of matrix products: by batch, rows, columns, and the summed axis."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from onnxplace.passes.sharding.node_views import Edit, LocalNode, NodeView, Shape
from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule, other_axes, split_same


def product_rules(a: Shape, b: Shape, result: Shape, left: int, right: int) -> dict[str, AxisRule]:
    """Return the rules of a numpy-like product: `batch N`, `rows`, `columns` and `sum`, as far as there are such axes.

    Args:
        a: Shape of the first factor; a vector is a row without its axis.
        b: Shape of the second factor; a vector is a column without its axis.
        result: Shape of the product.
        left: Input position of the first factor.
        right: Input position of the second factor.
    """
    if not a or not b:
        return {}
    has_rows, has_columns = len(a) > 1, len(b) > 1
    rules = {}
    batch_rank = len(result) - has_rows - has_columns
    for axis in range(batch_rank):
        inputs = {}
        for position, shape in ((left, a), (right, b)):
            own = axis - (batch_rank - (len(shape) - 2))
            if len(shape) > 2 and own >= 0 and shape[own] == result[axis]:
                inputs[position] = own
        if result[axis] > 1:
            rules[f"batch {axis}"] = AxisRule(inputs, {0: axis})
    if has_rows:
        rules["rows"] = AxisRule({left: len(a) - 2}, {0: len(result) - 1 - has_columns})
    if has_columns:
        rules["columns"] = AxisRule({right: len(b) - 1}, {0: len(result) - 1})
    rules["sum"] = AxisRule({left: len(a) - 1, right: max(len(b) - 2, 0)}, {}, "sum")
    return rules


def add_inputs(rules: dict[str, AxisRule], name: str, more: Mapping[int, int]) -> None:
    """Split more inputs (position -> axis) in the rule of this name, if there is one."""
    if name in rules:
        rules[name] = replace(rules[name], inputs={**rules[name].inputs, **more})


def is_per_tensor(view: NodeView, position: int) -> bool:
    """Return whether a scale or zero point is omitted, or a single number."""
    return not view.has(position) or max(view.shape(position), default=1) <= 1


def matmul(view: NodeView) -> list[AxisRule]:
    """MatMul."""
    return [*product_rules(view.shape(0), view.shape(1), view.result(), 0, 1).values()]


def matmul_integer(view: NodeView) -> list[AxisRule]:
    """MatMulInteger: zero points of rows or columns are split with them; sums of integers are exact."""
    rules = product_rules(view.shape(0), view.shape(1), view.result(), 0, 1)
    for position, name in ((2, "rows"), (3, "columns")):
        if not is_per_tensor(view, position):
            if view.rank(position) != 1:
                return []
            add_inputs(rules, name, {position: 0})
    return [*rules.values()]


def qlinear_matmul(view: NodeView) -> list[AxisRule]:
    """QLinearMatMul: rows, columns with their scales, and batch; its sum is rounded, so it stays whole."""
    if not all(is_per_tensor(view, position) for position in (1, 2, 6, 7)):
        return []
    rules = product_rules(view.shape(0), view.shape(3), view.result(), 0, 3)
    for position in (4, 5):
        if not is_per_tensor(view, position):
            if view.rank(position) != 1:
                return []
            add_inputs(rules, "columns", {position: 0})
    return [rule for name, rule in rules.items() if name != "sum"]


def drop_bias_except_first(position: int) -> Edit:
    """Return the edit by which only the first device adds a bias to its summand."""

    def edit(local: LocalNode) -> None:
        if local.device > 0:
            local.drop_input(position)

    return edit


def gemm(view: NodeView) -> list[AxisRule]:
    """Gemm; the bias is added on the first device only where the summed axis is split."""
    row, column = (1, 0) if view.attribute("transA", 0) else (0, 1)
    inner, width = (1, 0) if view.attribute("transB", 0) else (0, 1)

    def bias(axis: int) -> dict[int, int]:
        if not view.has(2):
            return {}
        shape = view.shape(2)
        own = axis - (2 - len(shape))
        return {2: own} if own >= 0 and shape[own] == view.result()[axis] > 1 else {}

    rules = [AxisRule({0: row, **bias(0)}, {0: 0}), AxisRule({1: width, **bias(1)}, {0: 1})]
    # Before opset 11, the bias cannot be omitted.
    if view.opset >= 11 or not view.has(2):
        rules.append(AxisRule({0: column, 1: inner}, {}, "sum", edit=drop_bias_except_first(2)))
    return rules


def einsum(view: NodeView) -> list[AxisRule]:
    """Einsum with an explicit result; letters that occur twice in one term stay whole."""
    equation = str(view.attribute("equation", "")).replace(" ", "")
    if "." in equation or "->" not in equation:
        return []
    left, result = equation.split("->")
    terms = left.split(",")
    rules = []
    for letter in sorted(set(left) - {","}):
        if any(term.count(letter) > 1 for term in terms):
            continue
        inputs = {position: term.index(letter) for position, term in enumerate(terms) if letter in term}
        if letter in result:
            rules.append(AxisRule(inputs, {0: result.index(letter)}))
        else:
            rules.append(AxisRule(inputs, {}, "sum"))
    return rules


PRODUCTS: dict[tuple[str, str], Rule] = {
    ("", "MatMul"): matmul,
    ("", "MatMulInteger"): matmul_integer,
    ("", "QLinearMatMul"): qlinear_matmul,
    ("", "Gemm"): gemm,
    ("", "Einsum"): einsum,
}


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
