"""The `transformer` example: a BERT-like text encoder with a padding mask."""

from __future__ import annotations

import onnx

from _builder import GraphBuilder, float_value, integer_value
from transformer_block import StackSizes, transformer_blocks

MASKED_SCORE = 10000.0  # taken off the attention scores of padding, before the softmax


def transformer(
    seed: int = 0,
    *,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 4,
    vocab: int = 1000,
    positions: int = 512,
) -> onnx.ModelProto:
    """Transformer encoder: token ids and mask, int64 [batch, seq], to token and sentence features.

    The sequence may be up to `positions` tokens long; the mask is 1 for a token, 0 for padding.
    """
    builder = GraphBuilder("transformer", seed)
    embedded = _embedding(builder, hidden, vocab, positions)
    mask = _additive_mask(builder)
    encoded = transformer_blocks(builder, embedded, StackSizes(layers, hidden, heads), "encoder", mask)
    states = builder.node("Identity", [encoded], "last_hidden_state")
    _pooled(builder, states, hidden)
    return builder.model(
        [integer_value("input_ids", "batch", "seq"), integer_value("attention_mask", "batch", "seq")],
        [float_value("last_hidden_state", "batch", "seq", hidden), float_value("pooled", "batch", hidden)],
    )


def _embedding(builder: GraphBuilder, hidden: int, vocab: int, positions: int) -> str:
    """Token embedding plus position embedding: float32 [batch, seq, hidden]."""
    table = builder.random("embedding/token_table", (vocab, hidden), 1.0)
    tokens = builder.node("Gather", [table, "input_ids"], "embedding/tokens", axis=0)
    length = builder.node("Shape", ["input_ids"], "embedding/length", start=1, end=2)
    table = builder.random("embedding/position_table", (positions, hidden), 0.5)
    slices = [table, builder.integers(0), length, builder.integers(0)]
    return builder.node("Add", [tokens, builder.node("Slice", slices, "embedding/positions")], "embedding/add")


def _additive_mask(builder: GraphBuilder) -> str:
    """Attention mask as a term of the scores: 0 for a token, very low for padding, [batch, 1, 1, seq]."""
    kept = builder.node("Cast", ["attention_mask"], "mask/to_float", to=onnx.TensorProto.FLOAT)
    kept = builder.node("Unsqueeze", [kept, builder.integers(1, 2)], "mask/broadcast")
    padding = builder.node("Sub", [builder.scalar(1.0), kept], "mask/padding")
    return builder.node("Mul", [padding, builder.scalar(-MASKED_SCORE)], "mask/scores")


def _pooled(builder: GraphBuilder, states: str, hidden: int) -> None:
    """Sentence features from the first token: the output `pooled`, float32 [batch, hidden]."""
    first = builder.node("Gather", [states, builder.index(0)], "pooler/first_token", axis=1)
    weight = builder.matrix("pooler/dense/weight", hidden, hidden)
    bias = builder.random("pooler/dense/bias", (hidden,), 0.02)
    dense = builder.node("Gemm", [first, weight, bias], "pooler/dense")
    builder.node("Tanh", [dense], "pooled")
