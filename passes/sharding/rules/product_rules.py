"""Rules of matrix products: by batch, rows, columns, and the summed axis."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from onnxplace.passes.sharding.rules.axis_rules import (
    AxisRule,
    Rule,
    all_but_axis,
    by_letters,
    drop_bias_except_first,
    is_per_tensor,
)
from onnxplace.passes.sharding.rules.node_views import LocalNode, NodeView, Shape


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


def multiply(
    view: NodeView,
    factors: tuple[int, int] = (0, 1),
    scalars: Sequence[int] = (),
    rows: Sequence[int] = (),
    columns: Sequence[int] = (),
    is_exact: bool = False,
) -> list[AxisRule]:
    """Return the rules of a product of matrices: batch, rows and columns, and the summed axis of an exact one.

    A result that is rounded, or has a bias, is no summand.

    Args:
        view: The node.
        factors: Positions of the factors.
        scalars: Positions of scales and zero points that have to be single numbers.
        rows: Positions of those that may have a number per row.
        columns: Positions of those, and of biases, that may have a number per column.
        is_exact: Whether sums of parts are the whole result.
    """
    left, right = factors
    rules = product_rules(view.shape(left), view.shape(right), view.result(), left, right)
    if not all(is_per_tensor(view, position) for position in scalars):
        return []
    for name, positions in (("rows", rows), ("columns", columns)):
        vectors = [position for position in positions if not is_per_tensor(view, position)]
        if any(view.rank(position) != 1 for position in vectors):
            return []
        if name in rules:
            rules[name] = replace(rules[name], inputs={**rules[name].inputs, **dict.fromkeys(vectors, 0)})
    return [rule for name, rule in rules.items() if is_exact or name != "sum"]


def gemm(view: NodeView) -> list[AxisRule]:
    """Gemm; the bias is added on the first device only where the summed axis is split."""
    signature = f"{_matrix(view, 'A', 'rk')},{_matrix(view, 'B', 'kc')},rc->rc"
    rules = by_letters(view, signature, "rc")
    # Before opset 11, the bias cannot be omitted.
    if view.opset >= 11 or not view.has(2):
        rules += by_letters(view, signature, "k", edit=drop_bias_except_first(2))
    return rules


def _matrix(view: NodeView, name: str, letters: str) -> str:
    """Return the letters of a factor, which an attribute may transpose."""
    return letters[::-1] if view.attribute(f"trans{name}", 0) else letters


def einsum(view: NodeView) -> list[AxisRule]:
    """Einsum with an explicit result; letters that occur twice in one term stay whole."""
    equation = str(view.attribute("equation", "")).replace(" ", "")
    if "." in equation or "->" not in equation:
        return []
    terms = equation.split("->")[0].split(",")
    letters = [letter for letter in sorted(set("".join(terms))) if all(term.count(letter) < 2 for term in terms)]
    return by_letters(view, equation, "".join(letters))


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


def dynamic_quantize_matmul(view: NodeView) -> list[AxisRule]:
    """DynamicQuantizeMatMul: by columns, and by batch and rows, which share a range."""
    return [replace(rule, shares_range=0 in rule.inputs) for rule in multiply(view, columns=(2, 3, 4))]


def quantised_gemm(view: NodeView) -> list[AxisRule]:
    """QGemm: by rows and columns."""
    if not all(is_per_tensor(view, p) for p in (1, 2, 7, 8)) or (view.has(6) and view.rank(6) != 1):
        return []
    return by_letters(view, f"{_matrix(view, 'A', 'rk')},,,{_matrix(view, 'B', 'kc')},c,c,c->rc", "rc")


def matmul_n_bits(view: NodeView) -> list[AxisRule]:
    """MatMulNBits: by rows, and by columns, which are the first axis of the packed weights, scales and zero points."""

    def set_columns(local: LocalNode) -> None:
        local.set_attribute("N", local.out_shape()[-1])

    rows = [*all_but_axis(-1)(view)]
    if view.attribute("weight_prepacked", 0):
        return rows
    return [*rows, *by_letters(view, "*-,c*,c*,c*,,c->*c", "c", edit=set_columns)]


def mixture_of_experts(view: NodeView) -> list[AxisRule]:
    """MoE: by tokens, and by the inner axis of all experts, whose second products are summed.

    By experts would need other probabilities of the router on each device.
    """
    rules = _tokens(view, "t*,t*->t*")
    if view.attribute("activation_type", "relu") == "swiglu" and view.attribute("swiglu_fusion", 0) == 2:
        return rules  # all gates come before all values
    experts = ",,-i*,-i,--i,,-i*,-i->"
    return [*rules, *by_letters(view, experts, "i", units=view.shape(4)[2], edit=drop_bias_except_first(5))]


def _tokens(view: NodeView, signature: str) -> list[AxisRule]:
    """Return the rule by tokens, or by samples of tokens; probabilities are [tokens, experts]."""
    return by_letters(view, signature, "t", units=view.shape(0)[0])


def quantised_experts(view: NodeView) -> list[AxisRule]:
    """QMoE: by tokens; each kind of device packs its weights in another way."""
    return _tokens(view, f"t*,t*{',' * 13}t*->t*")


PRODUCTS: dict[tuple[str, str], Rule] = {
    ("", "MatMul"): partial(multiply, is_exact=True),
    ("", "MatMulInteger"): partial(multiply, rows=(2,), columns=(3,), is_exact=True),  # sums of integers are exact
    ("", "QLinearMatMul"): partial(multiply, factors=(0, 3), scalars=(1, 2, 6, 7), columns=(4, 5)),
    ("", "Gemm"): gemm,
    ("", "Einsum"): einsum,
    ("com.microsoft", "FusedMatMul"): fused_matmul,
    ("com.microsoft", "TransposeMatMul"): fused_matmul,
    ("com.microsoft", "FusedGemm"): fused_gemm,
    ("com.microsoft", "DynamicQuantizeMatMul"): dynamic_quantize_matmul,
    ("com.microsoft", "MatMulIntegerToFloat"): partial(multiply, scalars=(2, 4), columns=(3, 5, 6)),
    ("com.microsoft", "QGemm"): quantised_gemm,
    ("com.microsoft", "MatMulNBits"): matmul_n_bits,
    ("com.microsoft", "MatMulBnb4"): all_but_axis(-1),  # rows
    ("com.microsoft", "MoE"): mixture_of_experts,
    ("com.microsoft", "QMoE"): quantised_experts,
}
