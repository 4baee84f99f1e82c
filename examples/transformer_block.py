"""The pre-LN transformer block of `transformer`, `decoder` and `two-tower`."""

from __future__ import annotations

from dataclasses import dataclass

from _builder import GraphBuilder


@dataclass(frozen=True)
class StackSizes:
    """Sizes of a stack of transformer blocks; the attention heads split the model width evenly."""

    layers: int
    width: int
    heads: int

    def __post_init__(self) -> None:
        """Raise ValueError unless the heads divide the width."""
        if self.width % self.heads:
            raise ValueError(f"the width {self.width} is not a multiple of the {self.heads} heads")

    @property
    def head_width(self) -> int:
        """Return the number of features in one attention head."""
        return self.width // self.heads


def add_transformer_blocks(
    builder: GraphBuilder, value: str, sizes: StackSizes, name: str, mask: str = "", cached: bool = False
) -> str:
    """Append blocks and a layer normalisation: [batch, tokens, width] to the same.

    `mask` names a value that is added to the attention scores [batch, heads, tokens, tokens], or is empty. If `cached`,
    each layer reads `past.<layer>.key` and `.value` [batch, heads, past, head width], attends to these tokens too, and
    returns `present.<layer>.key` and `.value` with the new tokens appended.
    """
    for layer in range(sizes.layers):
        value = _add_block(builder, value, sizes, f"{name}/block_{layer}", mask, f"{layer}" if cached else "")
    return builder.layer_norm(value, sizes.width, f"{name}/final_norm")


def _add_block(builder: GraphBuilder, value: str, sizes: StackSizes, name: str, mask: str, cache: str) -> str:
    """Append a block: attention and a two-layer perceptron, each with a residual."""
    normed = builder.layer_norm(value, sizes.width, f"{name}/attention_norm")
    attended = _add_attention(builder, normed, sizes, f"{name}/attention", mask, cache)
    value = builder.node("Add", [value, attended], f"{name}/attention_residual")
    normed = builder.layer_norm(value, sizes.width, f"{name}/mlp_norm")
    hidden = builder.linear(normed, sizes.width, 4 * sizes.width, f"{name}/mlp/expand")
    hidden = _add_gelu(builder, hidden, f"{name}/mlp/gelu")
    hidden = builder.linear(hidden, 4 * sizes.width, sizes.width, f"{name}/mlp/contract")
    return builder.node("Add", [value, hidden], f"{name}/mlp_residual")


def _add_attention(builder: GraphBuilder, value: str, sizes: StackSizes, name: str, mask: str, cache: str) -> str:
    """Append multi-head self-attention: [batch, tokens, width] to the same."""
    query = _add_heads(builder, value, sizes, f"{name}/q", [0, 2, 1, 3])
    key = _add_heads(builder, value, sizes, f"{name}/k", [0, 2, 1, 3] if cache else [0, 2, 3, 1])
    content = _add_heads(builder, value, sizes, f"{name}/v", [0, 2, 1, 3])
    if cache:
        key = builder.node("Concat", [f"past.{cache}.key", key], f"present.{cache}.key", axis=2)
        content = builder.node("Concat", [f"past.{cache}.value", content], f"present.{cache}.value", axis=2)
        key = builder.node("Transpose", [key], f"{name}/k_columns", perm=[0, 1, 3, 2])
    scores = builder.node("MatMul", [query, key], f"{name}/scores")
    scores = builder.node("Mul", [scores, builder.scalar(sizes.head_width**-0.5)], f"{name}/scale")
    if mask:
        scores = builder.node("Add", [scores, mask], f"{name}/add_mask")
    weights = builder.node("Softmax", [scores], f"{name}/softmax", axis=-1)
    mixed = builder.node("MatMul", [weights, content], f"{name}/mix")
    mixed = builder.node("Transpose", [mixed], f"{name}/tokens_first", perm=[0, 2, 1, 3])
    mixed = builder.node("Reshape", [mixed, builder.integers(0, 0, sizes.width)], f"{name}/merge_heads")
    return builder.linear(mixed, sizes.width, sizes.width, f"{name}/out_proj")


def _add_heads(builder: GraphBuilder, value: str, sizes: StackSizes, name: str, order: list[int]) -> str:
    """Append a projection and split it into heads, with axes in `order`.

    [batch, tokens, width] becomes [batch, tokens, heads, -] before the transposition.
    """
    projected = builder.linear(value, sizes.width, sizes.width, f"{name}_proj")
    # A zero copies the dimension of the input, so that batch and tokens stay symbolic.
    shape = builder.integers(0, 0, sizes.heads, sizes.head_width)
    split = builder.node("Reshape", [projected, shape], f"{name}_split_heads")
    return builder.node("Transpose", [split], f"{name}_heads_first", perm=order)


def _add_gelu(builder: GraphBuilder, value: str, name: str) -> str:
    """Append a GELU in primitives: x * (1 + erf(x / sqrt(2))) / 2."""
    scaled = builder.node("Mul", [value, builder.scalar(0.5**0.5)], f"{name}/scale")
    error = builder.node("Erf", [scaled], f"{name}/erf")
    gate = builder.node("Add", [error, builder.scalar(1.0)], f"{name}/add_one")
    doubled = builder.node("Mul", [value, gate], f"{name}/gate")
    return builder.node("Mul", [doubled, builder.scalar(0.5)], f"{name}/halve")
