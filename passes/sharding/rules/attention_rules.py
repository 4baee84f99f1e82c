"""Rules of attention: by batch, heads and positions. First the standard operators, then those of ONNX Runtime."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule, by_letters, scale_attributes
from onnxplace.passes.sharding.rules.node_views import NodeView

# Positions of the inputs and outputs of Attention (opset 23 and 24).
_QUERY, _KEY, _LENGTHS = 0, 1, 6
_PRESENT_KEY, _PRESENT_VALUE = 1, 2
# Attributes that count the positions of queries, and their values without effect.
_POSITIONAL = (("is_causal", 0), ("left_window_size", -1), ("right_window_size", -1))


def standard_attention(view: NodeView) -> list[AxisRule]:
    """Attention of opset 23: by batch, heads and query positions, with 4 axes or with heads in the last of 3."""
    batch = by_letters(view, "b*,b*,b*,b---,b*,b*,b->b*,b*,b*,b*", "b")
    return [*batch, *_split_heads(view), *_split_queries(view)]


def _split_heads(view: NodeView) -> list[AxisRule]:
    is_flat = view.rank(_QUERY) == 3
    heads = int(view.attribute("q_num_heads", 0)) if is_flat else view.shape(_QUERY)[1]
    shared = int(view.attribute("kv_num_heads", 0)) if is_flat else view.shape(_KEY)[1]
    if not heads or not shared or heads % shared:
        return []

    edit = scale_attributes(view, ("q_num_heads", "kv_num_heads") if is_flat else (), 2)
    own = "--h" if is_flat else "-h--"
    signature = f"{own},{own},{own},-h--,-h--,-h--->{own},-h--,-h--,-h--"
    together = by_letters(view, signature, "h", units=shared, edit=edit) if shared > 1 else []
    keys = {("in", position): (2 if is_flat and position < 3 else 1, shared) for position in (1, 2, 4, 5)}
    keys |= {("out", position): (1, shared) for position in (_PRESENT_KEY, _PRESENT_VALUE)}
    queries = by_letters(view, f"{own},,,-h--->{own},,,-h--", "h", units=heads, edit=edit)
    return [*together, *(replace(rule, shared=keys) for rule in queries)]


def _split_queries(view: NodeView) -> list[AxisRule]:
    """Return the rule by query positions: without causal masks, which count positions from the first query."""
    if any(view.attribute(name, default) != default for name, default in _POSITIONAL) or view.has(_LENGTHS):
        return []
    if not {_PRESENT_KEY, _PRESENT_VALUE}.isdisjoint(view.present_outputs()):
        return []
    own = "-q-" if view.rank(_QUERY) == 3 else "--q-"
    return by_letters(view, f"{own},,,--q-->{own},,,--q-", "q")


def standard_rotary_embedding(view: NodeView) -> list[AxisRule]:
    """RotaryEmbedding: by batch, heads and positions, with the caches or the position ids."""
    is_flat, has_ids = view.rank() == 3, view.has(3)
    heads = int(view.attribute("num_heads", 0)) if is_flat else view.shape(0)[1]
    if any(view.rank(position) != (2 if has_ids else 3) for position in (1, 2)) or not heads:
        return []

    edit = scale_attributes(view, ("num_heads",) if is_flat else (), 2)
    own, cache = "bph" if is_flat else "bhp-", "--" if has_ids else "bp-"
    signature = f"{own},{cache},{cache},bp->{own}"
    return [*by_letters(view, signature, "bp"), *by_letters(view, signature, "h", units=heads, edit=edit)]


def _batch_inputs(view: NodeView, positions: Iterable[int]) -> dict[int, int]:
    """Return axis 0 of the inputs that have the batch there, instead of 1."""
    batch = view.shape(0)[0]
    return {p: 0 for p in positions if view.has(p) and view.rank(p) > 0 and view.shape(p)[0] == batch}


def _mask_of_batch(view: NodeView, position: int) -> tuple[dict[int, int], dict[int, int]] | None:
    """Return (axis, fused) of a mask of keys: per sample, as lengths, or as ends and starts; None for other forms."""
    if not view.has(position):
        return {}, {}
    batch, shape = view.shape(0)[0], view.shape(position)
    if shape and shape[0] == batch:
        return {position: 0}, {}
    if shape == (2 * batch,):
        return {position: 0}, {position: 2}
    return ({}, {}) if len(shape) > 1 and shape[0] == 1 else None


def _fused_attention(view: NodeView, mask: int, past: int, per_column: Sequence[int]) -> list[AxisRule]:
    """Return the rules of an attention that multiplies its input by fused weights q|k|v itself.

    Args:
        view: The node, with weights [input, q|k|v] at position 1.
        mask: Position of the mask.
        past: Position of the past [2, batch, heads, positions, size].
        per_column: Positions of vectors over q|k|v.
    """
    heads, sizes = int(view.attribute("num_heads", 0)), view.attribute("qkv_hidden_sizes")
    outputs = {position: 1 if position else 0 for position in view.present_outputs()}
    with_past = {past: 1} if view.has(past) else {}
    rules = []
    masked = _mask_of_batch(view, mask)
    if masked is not None:
        inputs = {0: 0, **masked[0], **with_past, **_batch_inputs(view, _bias_of_scores(view))}
        rules.append(AxisRule(inputs, outputs, fused=masked[1]))
    if heads and (not sizes or len(set(sizes)) == 1):
        columns = {1: 1, **{p: 0 for p in per_column if view.has(p) and max(view.shape(p), default=1) > 1}}
        inputs = {**columns, **dict.fromkeys(with_past, 2)}
        inputs |= {p: 1 for p in _bias_of_scores(view) if view.has(p) and view.shape(p)[1] == heads > 1}
        outputs = dict.fromkeys(outputs, 2)
        edit = scale_attributes(view, ("num_heads", "qkv_hidden_sizes"), 2)
        rules.append(AxisRule(inputs, outputs, units=heads, fused=dict.fromkeys(columns, 3), edit=edit))
    return rules


def _bias_of_scores(view: NodeView) -> tuple[int, ...]:
    return (5,) if view.op == "Attention" else ()


def attention(view: NodeView) -> list[AxisRule]:
    """Attention with fused weights; without a past that shares its buffer with the result."""
    if view.has(6) or view.attribute("past_present_share_buffer", 0):
        return []
    return _fused_attention(view, mask=3, past=4, per_column=(2,))


def quantised_attention(view: NodeView) -> list[AxisRule]:
    """QAttention, with scales of weights per tensor or per column."""
    if view.attribute("past_present_share_buffer", 0):
        return []
    return _fused_attention(view, mask=5, past=8, per_column=(2, 4, 7))


def multi_head_attention(view: NodeView) -> list[AxisRule]:
    """MultiHeadAttention with separate queries, keys and values."""
    heads, outputs, past = int(view.attribute("num_heads", 0)), view.present_outputs(), [*filter(view.has, (6, 7))]
    is_separate = all(map(view.has, (1, 2))) and not any(map(view.has, (8, 9)))
    if not is_separate or not heads or view.rank(0) != 3:
        return []
    rules = _by_batch(view, (0, 1, 2, 5, *past))
    if _can_cut_bias(view):
        rules.append(_by_heads(view, heads, past))
    if not view.attribute("unidirectional", 0) and not past and outputs == [0]:
        rules.append(_by_positions(view))
    return rules


def _by_batch(view: NodeView, positions: Sequence[int]) -> list[AxisRule]:
    """Inputs at these positions are cut by batch, with the mask if it has a batch; there may be no such rule."""
    masked = _mask_of_batch(view, 4)
    if masked is None or masked[1]:
        return []
    return [AxisRule({**_batch_inputs(view, positions), **masked[0]}, dict.fromkeys(view.present_outputs(), 0))]


def _can_cut_bias(view: NodeView) -> bool:
    """Return whether biases of queries, keys and values are equal parts, or there are none."""
    size = view.shape(0)[2]
    are_equal = all(view.rank(p) == 4 or view.shape(p)[2] == size for p in (1, 2))
    return not view.has(3) or (are_equal and view.shape(3) == (3 * size,))


def _by_heads(view: NodeView, heads: int, past: Sequence[int]) -> AxisRule:
    """Keys and values are [batch, positions, heads * size] or [batch, heads, positions, size]."""
    inputs = {0: 2, **{p: 2 if view.rank(p) == 3 else 1 for p in (1, 2)}, **dict.fromkeys(past, 1)}
    inputs |= {3: 0} if view.has(3) else {}
    inputs |= {5: 1} if view.has(5) and view.shape(5)[1] == heads > 1 else {}
    fused = {3: 3} if view.has(3) else {}
    edit = scale_attributes(view, ("num_heads",), 2)
    return AxisRule(inputs, {p: 1 if p else 2 for p in view.present_outputs()}, units=heads, fused=fused, edit=edit)


def _by_positions(view: NodeView) -> AxisRule:
    """Queries are cut by position, with masks and biases that have a row for each."""
    positions = view.shape(0)[1]
    inputs = {0: 1}
    inputs |= {4: 1} if view.has(4) and view.rank(4) == 3 and view.shape(4)[1] == positions else {}
    inputs |= {5: 2} if view.has(5) and view.shape(5)[2] == positions else {}
    return AxisRule(inputs, {0: 1})


def group_query_attention(view: NodeView) -> list[AxisRule]:
    """GroupQueryAttention: by batch, and by heads of keys with their groups of queries.

    Queries, keys and values in one packed input can be cut by heads only if they have the same number of heads.
    """
    heads, shared = (int(view.attribute(name, 0)) for name in ("num_heads", "kv_num_heads"))
    outputs = view.present_outputs()
    batch = AxisRule(_batch_inputs(view, (0, 1, 2, 3, 4, 5, 9, 10)), dict.fromkeys(outputs, 0))
    has_scales = any(view.has(p) and max(view.shape(p), default=1) > 1 for p in (12, 13))
    is_packed = not view.has(1)
    if not heads or not shared or has_scales or (is_packed and heads != shared):
        return [batch]
    return [batch, *_by_heads_of_keys(view, heads, shared, is_packed)]


def _by_heads_of_keys(view: NodeView, heads: int, shared: int, is_packed: bool) -> list[AxisRule]:
    """Each of the `shared` heads of keys goes with its queries; or several devices have the same head of keys."""
    queries = {0: 2}
    queries |= {10: 1} if view.has(10) and view.shape(10)[1] == heads > 1 else {}
    queries |= {11: 0} if view.has(11) else {}
    keys = {p: 2 if p < 3 else 1 for p in ((3, 4) if is_packed else (1, 2, 3, 4)) if view.has(p)}
    present = {p: 1 for p in view.present_outputs() if p}
    edit = scale_attributes(view, ("num_heads", "kv_num_heads"), 2)
    fused = {0: 3} if is_packed else {}
    together = AxisRule({**queries, **keys}, {0: 2, **present}, units=shared, fused=fused, edit=edit)
    if is_packed:
        return [together]
    places = {("in", p): (axis, shared) for p, axis in keys.items()} | {("out", p): (1, shared) for p in present}
    return [together, AxisRule(queries, {0: 2}, units=heads, edit=edit, shared=places)]


def rotary_embedding(view: NodeView) -> list[AxisRule]:
    """RotaryEmbedding: by batch, heads and positions; position ids may be one offset for all."""
    if view.attribute("is_packed_batching", 0):
        return []
    is_flat = view.rank() == 3
    heads_axis = 2 if is_flat else 1
    whole, half_size = view.shape(0)[heads_axis], view.shape(2)[1]
    heads = int(view.attribute("num_heads", 0)) or (whole // (2 * half_size) if is_flat else whole)
    if not heads or whole % heads:
        return []
    own = "bph" if is_flat else "bhp-"
    signature = f"{own},{'bp' if view.rank(1) == 2 else '-'}->{own}"
    by_heads = by_letters(view, signature, "h", units=heads, edit=scale_attributes(view, ("num_heads",), heads_axis))
    by_positions = by_letters(view, signature, "p") if view.rank(1) == 2 else []
    return [*by_letters(view, signature, "b"), *by_heads, *by_positions]


ATTENTION: dict[tuple[str, str], Rule] = {
    ("", "Attention"): standard_attention,
    ("", "RotaryEmbedding"): standard_rotary_embedding,
    ("com.microsoft", "Attention"): attention,
    ("com.microsoft", "QAttention"): quantised_attention,
    ("com.microsoft", "MultiHeadAttention"): multi_head_attention,
    ("com.microsoft", "GroupQueryAttention"): group_query_attention,
    ("com.microsoft", "RotaryEmbedding"): rotary_embedding,
}
