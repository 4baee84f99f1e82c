"""The table of sharding rules: one entry per operator, by domain and name."""

from onnxplace.passes.sharding.rules.attention import ATTENTION
from onnxplace.passes.sharding.rules.axis_rules import Rule
from onnxplace.passes.sharding.rules.convolutions import CONVOLUTIONS
from onnxplace.passes.sharding.rules.fused_attention import FUSED_ATTENTION
from onnxplace.passes.sharding.rules.fused_products import FUSED_PRODUCTS
from onnxplace.passes.sharding.rules.gathers import GATHERS
from onnxplace.passes.sharding.rules.pointwise import POINTWISE
from onnxplace.passes.sharding.rules.products import PRODUCTS
from onnxplace.passes.sharding.rules.recurrent import RECURRENT
from onnxplace.passes.sharding.rules.reductions import REDUCTIONS
from onnxplace.passes.sharding.rules.shapes import SHAPES

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
