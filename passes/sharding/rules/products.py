"""Rules of matrix products: by batch, rows, columns, and the summed axis."""

from __future__ import annotations

from onnxplace.passes.sharding.node_views import LocalNode, NodeView
from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule


def _product(view: NodeView, left: int, right: int) -> list[AxisRule]:
    """Rules of a numpy-like product of two inputs, by their positions."""
    a, b, result = view.shape(left), view.shape(right), view.result()
    if len(a) < 2 or len(b) < 2:
        return []
    rules = []
    for axis in range(len(result) - 2):
        inputs = {}
        for position, shape in ((left, a), (right, b)):
            own = axis - (len(result) - len(shape))
            if 0 <= own < len(shape) - 2 and shape[own] == result[axis]:
                inputs[position] = own
        if result[axis] > 1:
            rules.append(AxisRule(inputs, {0: axis}))
    rules.append(AxisRule({left: len(a) - 2}, {0: len(result) - 2}))
    rules.append(AxisRule({right: len(b) - 1}, {0: len(result) - 1}))
    rules.append(AxisRule({left: len(a) - 1, right: len(b) - 2}, {}, "sum"))
    return rules


def matmul(view: NodeView) -> list[AxisRule]:
    """MatMul."""
    return _product(view, 0, 1)


def matmul_integer(view: NodeView) -> list[AxisRule]:
    """MatMulInteger; zero points of rows or columns are split with them, and the summed axis stays whole then."""
    rules = _product(view, 0, 1)
    if not rules:
        return []
    result, kept = view.result(), []
    per_row = view.has(2) and max(view.shape(2), default=1) > 1
    per_column = view.has(3) and max(view.shape(3), default=1) > 1
    for rule in rules:
        axis = rule.outputs.get(0)
        inputs = dict(rule.inputs)
        if axis is None and (view.has(2) or view.has(3)):
            continue
        if per_row and axis != len(result) - 1:
            continue
        if per_column:
            if axis == len(result) - 1 and view.rank(3) == 1:
                inputs[3] = 0
            elif axis != len(result) - 2 or view.rank(3) != 1:
                continue
        kept.append(AxisRule(inputs, rule.outputs, rule.effect))
    return kept


def qlinear_matmul(view: NodeView) -> list[AxisRule]:
    """QLinearMatMul with scales per tensor: rows, columns and batch; its sum is rounded, so it stays whole."""
    if any(view.has(position) and max(view.shape(position), default=1) > 1 for position in (1, 2, 4, 5, 6, 7)):
        return []
    return [rule for rule in _product(view, 0, 3) if rule.effect == "map"]


def _drop_bias_except_first(local: LocalNode) -> None:
    if local.device > 0:
        local.drop_input(2)


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
    if view.opset >= 11 or not view.has(2):
        rules.append(AxisRule({0: column, 1: inner}, {}, "sum", edit=_drop_bias_except_first))
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
