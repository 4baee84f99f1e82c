"""Rules of the standard attention operators: by batch, heads and positions."""

from __future__ import annotations

from onnxplace.passes.sharding.node_views import LocalNode, NodeView
from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule

# Positions of the inputs and outputs of Attention (opset 23 and 24).
_QUERY, _KEY, _VALUE, _MASK, _PAST_KEY, _PAST_VALUE, _LENGTHS = range(7)
_RESULT, _PRESENT_KEY, _PRESENT_VALUE, _PRODUCT = range(4)
# Attributes that count the positions of queries, and their values without effect.
_POSITIONAL = (("is_causal", 0), ("left_window_size", -1), ("right_window_size", -1))


def attention(view: NodeView) -> list[AxisRule]:
    """Attention of opset 23: by batch, heads and query positions, with 4 axes or with heads in the last of 3."""
    return [_attention_batch(view), *_attention_heads(view), *_attention_queries(view)]


def _mask_axis(view: NodeView, axis_from_end: int, size: int) -> dict[int, int]:
    """Return the axis of the mask that goes with an axis of the scores [batch, heads, query, key], if it has it."""
    if not view.has(_MASK) or view.rank(_MASK) < axis_from_end or size <= 1:
        return {}
    axis = view.rank(_MASK) - axis_from_end
    return {_MASK: axis} if view.shape(_MASK)[axis] == size else {}


def _attention_batch(view: NodeView) -> AxisRule:
    inputs = {p: 0 for p in (_QUERY, _KEY, _VALUE, _PAST_KEY, _PAST_VALUE, _LENGTHS) if view.has(p)}
    inputs |= _mask_axis(view, 4, view.shape(_QUERY)[0])
    return AxisRule(inputs, dict.fromkeys(view.present_outputs(), 0))


def _attention_heads(view: NodeView) -> list[AxisRule]:
    is_flat = view.rank(_QUERY) == 3
    heads = int(view.attribute("q_num_heads", 0)) if is_flat else view.shape(_QUERY)[1]
    shared = int(view.attribute("kv_num_heads", 0)) if is_flat else view.shape(_KEY)[1]
    if not heads or not shared or heads % shared:
        return []
    axis = 2 if is_flat else 1
    masked = _mask_axis(view, 3, heads)
    outputs = {position: 1 if position else axis for position in view.present_outputs()}

    def scale_heads(local: LocalNode) -> None:
        if is_flat:
            part, whole = local.out_shape()[2], view.result()[2]
            local.set_attribute("q_num_heads", heads * part // whole)
            if shared > 1:
                local.set_attribute("kv_num_heads", shared * part // whole)

    if shared == 1:  # every device has the one head of keys and values, and would return it whole
        if not {_PRESENT_KEY, _PRESENT_VALUE}.isdisjoint(outputs):
            return []
        return [AxisRule({_QUERY: axis, **masked}, outputs, units=heads, edit=scale_heads)]
    inputs = dict.fromkeys((_QUERY, _KEY, _VALUE), axis) | masked
    inputs |= {position: 1 for position in (_PAST_KEY, _PAST_VALUE) if view.has(position)}
    return [AxisRule(inputs, outputs, units=shared, edit=scale_heads)]


def _attention_queries(view: NodeView) -> list[AxisRule]:
    """Return the rule by query positions: without causal masks, which count positions from the first query."""
    outputs = view.present_outputs()
    if any(view.attribute(name, default) != default for name, default in _POSITIONAL) or view.has(_LENGTHS):
        return []
    if not {_PRESENT_KEY, _PRESENT_VALUE}.isdisjoint(outputs):
        return []
    axis = view.rank(_QUERY) - 2
    inputs = {_QUERY: axis, **_mask_axis(view, 2, view.shape(_QUERY)[axis])}
    return [AxisRule(inputs, {position: 2 if position == _PRODUCT else axis for position in outputs})]


def rotary_embedding(view: NodeView) -> list[AxisRule]:
    """RotaryEmbedding: by batch, heads and positions, with the caches or the position ids."""
    caches, ids = (1, 2), 3
    is_flat = view.rank() == 3
    heads_axis, positions_axis = (2, 1) if is_flat else (1, 2)
    heads = int(view.attribute("num_heads", 0)) if is_flat else view.shape(0)[1]
    along = {ids: 0} if view.has(ids) else dict.fromkeys(caches, 0)
    if any(view.rank(position) != (2 if view.has(ids) else 3) for position in caches) or not heads:
        return []

    def scale_heads(local: LocalNode) -> None:
        if is_flat:
            local.set_attribute("num_heads", heads * local.out_shape()[2] // view.result()[2])

    return [
        AxisRule({0: 0, **along}, {0: 0}),
        AxisRule({0: positions_axis, **dict.fromkeys(along, 1)}, {0: positions_axis}),
        AxisRule({0: heads_axis}, {0: heads_axis}, units=heads, edit=scale_heads),
    ]


ATTENTION: dict[tuple[str, str], Rule] = {
    ("", "Attention"): attention,
    ("", "RotaryEmbedding"): rotary_embedding,
}
