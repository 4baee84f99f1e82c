"""The table of sharding rules: one entry per operator, by domain and name."""

from onnxplace.passes.sharding.rules.attention_rules import ATTENTION
from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule
from onnxplace.passes.sharding.rules.convolution_rules import CONVOLUTIONS
from onnxplace.passes.sharding.rules.elementwise_rules import ELEMENTWISE
from onnxplace.passes.sharding.rules.moving_rules import MOVES
from onnxplace.passes.sharding.rules.node_views import NodeView
from onnxplace.passes.sharding.rules.product_rules import PRODUCTS
from onnxplace.passes.sharding.rules.recurrent_rules import RECURRENT
from onnxplace.passes.sharding.rules.reduction_rules import REDUCTIONS

RULES: dict[tuple[str, str], Rule] = {
    **ELEMENTWISE,
    **PRODUCTS,
    **CONVOLUTIONS,
    **REDUCTIONS,
    **RECURRENT,
    **MOVES,
    **ATTENTION,
}
"""(domain, operator) -> its rule; the domain of the standard operators is empty."""


def list_axis_rules(view: NodeView) -> list[AxisRule]:
    """Return the axis rules of a node; none without a rule, or if an input is omitted or computed that it needs."""
    rule = RULES.get((view.node.domain if view.node.domain != "ai.onnx" else "", view.op))
    if rule is None:
        return []
    try:
        return list(rule(view))
    except (LookupError, TypeError, ValueError):
        return []
