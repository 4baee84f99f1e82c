"""The table of sharding rules: one entry per operator, by domain and name."""

from onnxplace.passes.sharding.rules.attention_rules import ATTENTION, FUSED_ATTENTION
from onnxplace.passes.sharding.rules.axis_rules import Rule
from onnxplace.passes.sharding.rules.convolution_rules import CONVOLUTIONS
from onnxplace.passes.sharding.rules.elementwise_rules import POINTWISE
from onnxplace.passes.sharding.rules.moving_rules import GATHERS, SHAPES
from onnxplace.passes.sharding.rules.product_rules import FUSED_PRODUCTS, PRODUCTS
from onnxplace.passes.sharding.rules.reduction_rules import RECURRENT, REDUCTIONS

RULES: dict[tuple[str, str], Rule] = {
    **POINTWISE,
    **PRODUCTS,
    **CONVOLUTIONS,
    **REDUCTIONS,
    **SHAPES,
    **GATHERS,
    **ATTENTION,
    **RECURRENT,
    **FUSED_PRODUCTS,
    **FUSED_ATTENTION,
}
"""(domain, operator) -> its rule; the domain of the standard operators is empty."""
