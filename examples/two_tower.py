"""The `two-tower` example: a CLIP-like pair of encoders, one for images and one for texts."""

from __future__ import annotations

import onnx

from _builder import GraphBuilder, float_value, integer_value
from transformer_block import StackSizes, add_transformer_blocks

LOGIT_SCALE = 1 / 0.07  # the initial value of CLIP


def two_tower(
    seed: int = 0,
    *,
    layers: int = 4,
    hidden: int = 256,
    heads: int = 4,
    embedding: int = 128,
    image_size: int = 224,
    patch_size: int = 16,
    text_length: int = 64,
    vocab: int = 4000,
) -> onnx.ModelProto:
    """Build two transformer towers and the similarity matrix of their embeddings.

    Inputs: `pixels` float32 [images, 3, image_size, image_size] and `token_ids` int64
    [texts, text_length]; outputs: `similarity` [images, texts] and the two unit-length embeddings.
    """
    builder = GraphBuilder("two_tower", seed)
    sizes = StackSizes(layers, hidden, heads)
    patches = _add_patch_tokens(builder, hidden, image_size, patch_size)
    image = add_transformer_blocks(builder, patches, sizes, "image")
    _add_unit_embedding(builder, image, hidden, embedding, "image")
    words = _add_word_tokens(builder, hidden, text_length, vocab)
    text = add_transformer_blocks(builder, words, sizes, "text")
    _add_unit_embedding(builder, text, hidden, embedding, "text")
    _add_similarity(builder)
    return builder.model(
        [
            float_value("pixels", "images", 3, image_size, image_size),
            integer_value("token_ids", "texts", text_length),
        ],
        [
            float_value("similarity", "images", "texts"),
            float_value("image_embedding", "images", embedding),
            float_value("text_embedding", "texts", embedding),
        ],
    )


def _add_patch_tokens(builder: GraphBuilder, hidden: int, image_size: int, patch_size: int) -> str:
    """Append one token for each square patch: float32 [images, patches, hidden]."""
    if image_size % patch_size:
        raise ValueError(f"the image size {image_size} is not a multiple of the patch size {patch_size}")
    shape = (hidden, 3, patch_size, patch_size)
    kernel = builder.random("image/patch_embedding/weight", shape, (3 * patch_size**2) ** -0.5)
    bias = builder.random("image/patch_embedding/bias", (hidden,), 0.02)
    sides = [patch_size, patch_size]
    convolution = [f"image/{part}" for part in ("patch_embedding", "flatten", "tokens_first", "add_positions")]
    grid = builder.node("Conv", ["pixels", kernel, bias], convolution[0], kernel_shape=sides, strides=sides)
    flat = builder.node("Reshape", [grid, builder.integers(0, hidden, -1)], convolution[1])
    tokens = builder.node("Transpose", [flat], convolution[2], perm=[0, 2, 1])
    positions = builder.random("image/positions", ((image_size // patch_size) ** 2, hidden), 0.5)
    return builder.node("Add", [tokens, positions], convolution[3])


def _add_word_tokens(builder: GraphBuilder, hidden: int, text_length: int, vocab: int) -> str:
    """Append token embeddings plus positions: float32 [texts, text_length, hidden]."""
    table = builder.random("text/token_table", (vocab, hidden), 1.0)
    tokens = builder.node("Gather", [table, "token_ids"], "text/token_embedding", axis=0)
    positions = builder.random("text/positions", (text_length, hidden), 0.5)
    return builder.node("Add", [tokens, positions], "text/add_positions")


def _add_unit_embedding(builder: GraphBuilder, tokens: str, hidden: int, embedding: int, tower: str) -> None:
    """Append the output `<tower>_embedding`: the mean token, projected, of length 1."""
    mean = builder.node("ReduceMean", [tokens, builder.integers(1)], f"{tower}/pool", keepdims=0)
    weight = builder.matrix(f"{tower}/projection/weight", hidden, embedding)
    projected = builder.node("MatMul", [mean, weight], f"{tower}/projection")
    length = builder.node("ReduceL2", [projected, builder.integers(-1)], f"{tower}/length", keepdims=1)
    builder.node("Div", [projected, length], f"{tower}_embedding")


def _add_similarity(builder: GraphBuilder) -> None:
    """Append the output `similarity`: scaled cosines, float32 [images, texts]."""
    columns = builder.node("Transpose", ["text_embedding"], "similarity/text_columns", perm=[1, 0])
    cosines = builder.node("MatMul", ["image_embedding", columns], "similarity/cosines")
    builder.node("Mul", [cosines, builder.scalar(LOGIT_SCALE)], "similarity")
