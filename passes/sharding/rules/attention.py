"""Rules of attention: by batch and heads."""

from __future__ import annotations

from onnxplace.passes.sharding.node_views import LocalNode, NodeView
from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule, split_same

# Positions of the inputs of Attention (opset 23 and 24).
_QUERY, _KEY, _VALUE, _MASK, _PAST_KEY, _PAST_VALUE, _LENGTHS = range(7)


def attention(view: NodeView) -> list[AxisRule]:
    """Attention of opset 23: by batch and by heads, with 4 axes or with heads in the last of 3."""
    return [_attention_batch(view), *_attention_heads(view)]


def _attention_batch(view: NodeView) -> AxisRule:
    inputs = {p: 0 for p in (_QUERY, _KEY, _VALUE, _PAST_KEY, _PAST_VALUE, _LENGTHS) if view.has(p)}
    batch = view.shape(_QUERY)[0]
    if view.has(_MASK) and view.rank(_MASK) == 4 and view.shape(_MASK)[0] == batch:
        inputs[_MASK] = 0
    return AxisRule(inputs, dict.fromkeys(view.present_outputs(), 0))


def _attention_heads(view: NodeView) -> list[AxisRule]:
    is_flat = view.rank(_QUERY) == 3
    heads = int(view.attribute("q_num_heads", 0)) if is_flat else view.shape(_QUERY)[1]
    shared = int(view.attribute("kv_num_heads", 0)) if is_flat else view.shape(_KEY)[1]
    if not heads or not shared or heads % shared:
        return []
    axis = 2 if is_flat else 1
    inputs = dict.fromkeys((_QUERY, _KEY, _VALUE), axis)
    inputs |= {position: 1 for position in (_PAST_KEY, _PAST_VALUE) if view.has(position)}
    if view.has(_MASK) and view.rank(_MASK) >= 3 and view.shape(_MASK)[-3] == heads and heads > 1:
        inputs[_MASK] = view.rank(_MASK) - 3
    outputs = {position: axis if position == 0 else 1 for position in view.present_outputs()}

    def scale_heads(local: LocalNode) -> None:
        if is_flat:
            part, whole = local.out_shape()[2], view.result()[2]
            local.set_attribute("q_num_heads", heads * part // whole)
            local.set_attribute("kv_num_heads", shared * part // whole)

    return [AxisRule(inputs, outputs, units=shared, edit=scale_heads)]


def rotary_embedding(view: NodeView) -> list[AxisRule]:
    """RotaryEmbedding with 4 axes: by heads, and by batch with caches of three axes."""
    if view.rank() != 4:
        return []
    rules = split_same(view, (1,))
    if all(view.rank(position) == 3 and view.shape(position)[0] == view.shape(0)[0] for position in (1, 2)):
        rules += split_same(view, (0,), inputs=(0, 1, 2))
    return rules


ATTENTION: dict[tuple[str, str], Rule] = {
    ("", "Attention"): attention,
    ("", "RotaryEmbedding"): rotary_embedding,
}
