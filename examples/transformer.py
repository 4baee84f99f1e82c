"""The `transformer` example: a BERT-like text encoder with a padding mask."""

from __future__ import annotations

import onnx

from _builder import GraphBuilder, float_value, integer_value
from transformer_block import StackSizes, add_transformer_blocks

MASKED_SCORE = 10000.0  # subtracted from the attention scores of padding, before the softmax


def transformer(
    seed: int = 0,
    *,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 4,
    vocab: int = 1000,
    positions: int = 512,
) -> onnx.ModelProto:
    """Build a transformer encoder with token and sentence features.

    Its inputs are token ids and a mask, int64 [batch, seq]. The sequence may be up to `positions` tokens long; the mask
    is 1 for a token, 0 for padding.
    """
    builder = GraphBuilder("transformer", seed)
    embedded = _add_embedding(builder, hidden, vocab, positions)
    mask = _add_mask(builder)
    encoded = add_transformer_blocks(builder, embedded, StackSizes(layers, hidden, heads), "encoder", mask)
    states = builder.node("Identity", [encoded], "last_hidden_state")
    _add_pooler(builder, states, hidden)
    return builder.model(
        [integer_value("input_ids", "batch", "seq"), integer_value("attention_mask", "batch", "seq")],
        [float_value("last_hidden_state", "batch", "seq", hidden), float_value("pooled", "batch", hidden)],
    )


def _add_embedding(builder: GraphBuilder, hidden: int, vocab: int, positions: int) -> str:
    """Append token and position embeddings: float32 [batch, seq, hidden]."""
    table = builder.random("embedding/token_table", (vocab, hidden), 1.0)
    tokens = builder.node("Gather", [table, "input_ids"], "embedding/tokens", axis=0)
    length = builder.node("Shape", ["input_ids"], "embedding/length", start=1, end=2)
    table = builder.random("embedding/position_table", (positions, hidden), 0.5)
    slices = [table, builder.integers(0), length, builder.integers(0)]
    return builder.node("Add", [tokens, builder.node("Slice", slices, "embedding/positions")], "embedding/add")


def _add_mask(builder: GraphBuilder) -> str:
    """Append the mask as a term of the scores, [batch, 1, 1, seq].

    It is 0 for a token, and very low for padding.
    """
    mask = builder.node("Cast", ["attention_mask"], "mask/to_float", to=onnx.TensorProto.FLOAT)
    mask = builder.node("Unsqueeze", [mask, builder.integers(1, 2)], "mask/broadcast")
    padding = builder.node("Sub", [builder.scalar(1.0), mask], "mask/padding")
    return builder.node("Mul", [padding, builder.scalar(-MASKED_SCORE)], "mask/scores")


def _add_pooler(builder: GraphBuilder, states: str, hidden: int) -> None:
    """Append sentence features of the first token: output `pooled`, float32 [batch, hidden]."""
    first = builder.node("Gather", [states, builder.index(0)], "pooler/first_token", axis=1)
    weight = builder.matrix("pooler/dense/weight", hidden, hidden)
    bias = builder.random("pooler/dense/bias", (hidden,), 0.02)
    dense = builder.node("Gemm", [first, weight, bias], "pooler/dense")
    builder.node("Tanh", [dense], "pooled")
