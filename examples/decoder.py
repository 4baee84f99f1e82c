"""The `decoder` example: a GPT-like decoder that caches the keys and values of past tokens.

    python examples/decoder.py

compiles it for two CPU devices with `--state 'present.*=past.*'`, so that the cache of each layer stays on its device.
It generates the same tokens as one ONNX Runtime session.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray

from _builder import GraphBuilder, float_value, integer_value
from transformer_block import StackSizes, add_transformer_blocks

LATER_SCORE = 10000.0  # subtracted from the attention scores of later tokens, before the softmax

Feeds = dict[str, NDArray[Any]]


def decoder(
    seed: int = 0,
    *,
    layers: int = 4,
    hidden: int = 128,
    heads: int = 4,
    vocab: int = 500,
    positions: int = 256,
) -> onnx.ModelProto:
    """Build a transformer decoder with a cache of keys and values.

    It maps new tokens, int64 [batch, seq], and the cache to logits [batch, seq, vocab] and the longer cache. The cache
    has for each layer the inputs `past.<layer>.key` and `.value`, float32 [batch, heads, past, hidden / heads], and the
    outputs `present.<layer>.key` and `.value`. There may be up to `positions` tokens, past and new.
    """
    sizes = StackSizes(layers, hidden, heads)
    builder = GraphBuilder("decoder", seed)
    value, mask = _add_embedding(builder, hidden, vocab, positions)
    value = add_transformer_blocks(builder, value, sizes, "decoder", mask, cached=True)
    builder.node("MatMul", [value, builder.matrix("head/weight", hidden, vocab)], "logits")
    cached = [f"{layer}.{part}" for layer in range(layers) for part in ("key", "value")]
    return builder.model(
        [
            integer_value("tokens", "batch", "seq"),
            *(float_value(f"past.{name}", "batch", heads, "past", sizes.head_width) for name in cached),
        ],
        [
            float_value("logits", "batch", "seq", vocab),
            *(float_value(f"present.{name}", "batch", heads, "past + seq", sizes.head_width) for name in cached),
        ],
    )


def _add_embedding(builder: GraphBuilder, hidden: int, vocab: int, positions: int) -> tuple[str, str]:
    """Append the embedding, float32 [batch, seq, hidden], and the mask, [seq, past + seq].

    The mask hides later tokens.
    """
    table = builder.random("embedding/token_table", (vocab, hidden), 1.0)
    tokens = builder.node("Gather", [table, "tokens"], "embedding/tokens", axis=0)
    past = builder.node("Shape", ["past.0.key"], "embedding/past", start=2, end=3)
    length = builder.node("Shape", ["tokens"], "embedding/length", start=1, end=2)
    total = builder.node("Add", [past, length], "embedding/total")
    table = builder.random("embedding/position_table", (positions, hidden), 0.5)
    slices = [table, past, total, builder.integers(0)]
    embedded = builder.node("Add", [tokens, builder.node("Slice", slices, "embedding/positions")], "embedding/add")
    numbers = builder.constant("mask/numbers", np.arange(positions, dtype=np.int64))
    columns = builder.node("Slice", [numbers, builder.integers(0), total], "mask/columns")
    rows = builder.node("Slice", [numbers, past, total], "mask/rows")
    rows = builder.node("Unsqueeze", [rows, builder.integers(1)], "mask/rows_upright")
    later = builder.node("Greater", [columns, rows], "mask/later")
    later = builder.node("Cast", [later], "mask/to_float", to=onnx.TensorProto.FLOAT)
    return embedded, builder.node("Mul", [later, builder.scalar(-LATER_SCORE)], "mask/scores")


def generate(step: Callable[[Feeds], NDArray[np.float32]], prompt: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    """Generate `count` tokens after each row of the prompt; return them.

    `step` maps new tokens, named `tokens`, to logits [batch, seq, vocab]; the likeliest token follows.
    """
    tokens, generated = prompt, []
    for _ in range(count):
        tokens = step({"tokens": tokens})[:, -1:].argmax(axis=-1)
        generated.append(tokens)
    return np.concatenate(generated, axis=1)


def main() -> None:
    """Generate with a bundle on two CPU devices and with one session; compare."""
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")  # before ONNX Runtime is imported
    import onnxruntime

    import onnxplace

    model, prompt = decoder(), np.array([[7, 42, 99, 3], [1, 2, 3, 4]])
    with tempfile.TemporaryDirectory() as folder:
        bundle = onnxplace.compile(
            model,
            Path(folder) / "decoder.bundle",
            devices="cpu:0,cpu:1",
            shape={"batch": 2, "seq": 1, "past": 64},
            state=["present.*=past.*"],
            objective="throughput",  # puts layers on both; for a single sequence, one of two equal devices is as fast
        )
        empty = bundle.zero_states(batch=2, past=0)
        with onnxplace.InferenceSession(bundle) as session:
            initial_cache: Feeds = dict(empty)

            def run_split(feeds: Feeds) -> NDArray[np.float32]:
                logits: NDArray[np.float32] = session.run(None, {**feeds, **initial_cache})[0]
                initial_cache.clear()  # from now on the session carries the cache
                return logits

            tokens = generate(run_split, prompt, 16)
        states = bundle.manifest.states
        print(f"{len(states)} states stay on {', '.join(sorted({state.device for state in states}))}")
    reference = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    cache: Feeds = dict(empty)

    def run_unsplit(feeds: Feeds) -> NDArray[np.float32]:
        outputs: list[NDArray[np.float32]] = reference.run(None, {**feeds, **cache})
        cache.update(zip(cache, outputs[1:]))
        return outputs[0]

    expected = generate(run_unsplit, prompt, 16)
    print(f"bundle:      {tokens.tolist()}\none session: {expected.tolist()}")
    if not np.array_equal(tokens, expected):
        raise SystemExit("the tokens differ")


if __name__ == "__main__":
    main()
