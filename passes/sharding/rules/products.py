"""Rules of matrix products: by batch, rows, columns, and the summed axis."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onnxplace.passes.sharding.node_views import Edit, LocalNode, NodeView, Shape
from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule


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
