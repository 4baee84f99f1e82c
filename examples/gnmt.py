"""The `gnmt` example: an LSTM encoder-decoder with attention, unrolled over time into primitive ops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import onnx

from _builder import GraphBuilder, float_value, integer_value

MIN_LAYERS = 2  # the first encoder layer doubles the width, and the second one halves it


@dataclass(frozen=True)
class Sizes:
    """Sizes of the whole model; a hidden state is [batch, hidden]."""

    layers: int
    hidden: int
    steps: int
    vocab: int
    batch: int


@dataclass(frozen=True)
class Cell:
    """Weights and initial state of one LSTM layer, shared by all time steps."""

    name: str
    weight: str
    bias: str
    zero_state: str


@dataclass(frozen=True)
class State:
    """Hidden and cell state of one LSTM layer after a step, each [batch, hidden]."""

    hidden: str
    cell: str


@dataclass(frozen=True)
class DecoderState:
    """State between decoder steps: that of each layer, and the attention context."""

    layers: list[State]
    context: str  # [batch, hidden]


@dataclass(frozen=True)
class Decoder:
    """Inputs of every decoder step: encoder memory in both layouts, cells, output projection."""

    memory: str  # [batch, steps, hidden]
    memory_columns: str  # [batch, hidden, steps]
    cells: list[Cell]
    vocabulary_weight: str
    vocabulary_bias: str
    zero_state: str


def gnmt(
    seed: int = 0, *, layers: int = 3, hidden: int = 128, steps: int = 12, vocab: int = 1000, batch: int = 4
) -> onnx.ModelProto:
    """Build a translation model like GNMT with fixed shapes.

    There is a node for each primitive and step.

    Inputs: `source_ids` and `target_ids`, int64 [batch, steps] (the target is the previous word, as in
    training); output: `logits` float32 [batch, steps, vocab].
    """
    if layers < MIN_LAYERS:
        raise ValueError(f"expected at least {MIN_LAYERS} layers, got {layers}")
    sizes = Sizes(layers, hidden, steps, vocab, batch)
    builder = GraphBuilder("gnmt", seed)
    zero_state = builder.constant("zero_state", np.zeros((batch, hidden), np.float32))
    words = _embed_words(builder, "source_ids", "encoder", sizes)
    memory = _add_encoder(builder, words, sizes, zero_state)
    words = _embed_words(builder, "target_ids", "decoder", sizes)
    _unroll_decoder(builder, words, _add_decoder(builder, memory, sizes, zero_state))
    return builder.model(
        [integer_value("source_ids", batch, steps), integer_value("target_ids", batch, steps)],
        [float_value("logits", batch, steps, vocab)],
    )


def _embed_words(builder: GraphBuilder, ids: str, side: str, sizes: Sizes) -> list[str]:
    """Append the word embedding of each time step, [batch, hidden] each."""
    table = builder.random(f"{side}/embedding_table", (sizes.vocab, sizes.hidden), 1.0)
    words: list[str] = []
    for step in range(sizes.steps):
        name = f"{side}/step_{step}/embedding"
        column = builder.node("Gather", [ids, builder.index(step)], f"{name}/ids", axis=1)
        words.append(builder.node("Gather", [table, column], name, axis=0))
    return words


def _add_encoder(builder: GraphBuilder, words: list[str], sizes: Sizes, zero_state: str) -> list[str]:
    """Append the encoder; return the states of its last layer.

    There is one state [batch, hidden] per step; the first layer reads in both directions.
    """
    forward = _add_cell(builder, "encoder/forward_0", sizes.hidden, sizes.hidden, zero_state)
    backward = _add_cell(builder, "encoder/backward_0", sizes.hidden, sizes.hidden, zero_state)
    forward_states = _unroll_layer(builder, forward, enumerate(words))
    backward_states = _unroll_layer(builder, backward, reversed(list(enumerate(words))))
    values = [
        builder.node("Concat", [forward_states[step], backward_states[step]], f"encoder/both_ways/step_{step}", axis=1)
        for step in range(len(words))
    ]
    for layer in range(1, sizes.layers):
        width = 2 * sizes.hidden if layer == 1 else sizes.hidden
        cell = _add_cell(builder, f"encoder/layer_{layer}", width, sizes.hidden, zero_state)
        outputs = _unroll_layer(builder, cell, enumerate(values))
        # Layer 1 narrows its input, so that the residual connections can only start at layer 2.
        values = [
            outputs[step]
            if layer == 1
            else builder.node("Add", [outputs[step], value], f"{cell.name}/step_{step}/residual")
            for step, value in enumerate(values)
        ]
    return values


def _unroll_layer(builder: GraphBuilder, cell: Cell, values: Iterable[tuple[int, str]]) -> dict[int, str]:
    """Unroll a layer over (step, value) pairs; return hidden states by step."""
    state = State(cell.zero_state, cell.zero_state)
    outputs: dict[int, str] = {}
    for step, value in values:
        state = _add_lstm_step(builder, cell, [value], state, step)
        outputs[step] = state.hidden
    return outputs


def _add_decoder(builder: GraphBuilder, memory: list[str], sizes: Sizes, zero_state: str) -> Decoder:
    """Append the decoder's weights, and stack the encoder states for the attention."""
    rows = [
        builder.node("Unsqueeze", [state, builder.integers(1)], f"encoder/memory/step_{step}")
        for step, state in enumerate(memory)
    ]
    stacked = builder.node("Concat", rows, "encoder/memory", axis=1)
    columns = builder.node("Transpose", [stacked], "encoder/memory_columns", perm=[0, 2, 1])
    cells = [
        _add_cell(builder, f"decoder/layer_{layer}", 2 * sizes.hidden, sizes.hidden, zero_state)
        for layer in range(sizes.layers)
    ]
    # The values of the top layer are near 0.2; this deviation scales the logits to about 1.
    weight = builder.random("decoder/vocabulary/weight", (sizes.hidden, sizes.vocab), 5.0 * sizes.hidden**-0.5)
    bias = builder.random("decoder/vocabulary/bias", (sizes.vocab,), 0.02)
    return Decoder(stacked, columns, cells, weight, bias, zero_state)


def _unroll_decoder(builder: GraphBuilder, words: list[str], decoder: Decoder) -> None:
    """Append all decoder steps and the output `logits`, float32 [batch, steps, vocab]."""
    zero = decoder.zero_state
    state = DecoderState([State(zero, zero) for _ in decoder.cells], zero)
    rows: list[str] = []
    for step, word in enumerate(words):
        state, top = _add_decoder_step(builder, decoder, word, state, step)
        name = f"decoder/vocabulary/step_{step}"
        logits = builder.node("Gemm", [top, decoder.vocabulary_weight, decoder.vocabulary_bias], name)
        rows.append(builder.node("Unsqueeze", [logits, builder.integers(1)], f"{name}/row"))
    builder.node("Concat", rows, "logits", axis=1)


def _add_decoder_step(
    builder: GraphBuilder, decoder: Decoder, word: str, previous: DecoderState, step: int
) -> tuple[DecoderState, str]:
    """Append a decoder step; return its state and the top output [batch, hidden]."""
    first = _add_lstm_step(builder, decoder.cells[0], [word, previous.context], previous.layers[0], step)
    context = _add_attention(builder, decoder, first.hidden, f"decoder/attention/step_{step}")
    layers, value = [first], first.hidden
    for cell, state in zip(decoder.cells[1:], previous.layers[1:], strict=True):
        layers.append(_add_lstm_step(builder, cell, [value, context], state, step))
        value = builder.node("Add", [layers[-1].hidden, value], f"{cell.name}/step_{step}/residual")
    return DecoderState(layers, context), value


def _add_attention(builder: GraphBuilder, decoder: Decoder, query: str, name: str) -> str:
    """Append dot attention over the encoder states: query to context, [batch, hidden] each."""
    row = builder.node("Unsqueeze", [query, builder.integers(1)], f"{name}/query")
    scores = builder.node("MatMul", [row, decoder.memory_columns], f"{name}/scores")
    weights = builder.node("Softmax", [scores], f"{name}/softmax", axis=-1)
    mixed = builder.node("MatMul", [weights, decoder.memory], f"{name}/mix")
    return builder.node("Squeeze", [mixed, builder.integers(1)], f"{name}/context")


def _add_cell(builder: GraphBuilder, name: str, inputs: int, hidden: int, zero_state: str) -> Cell:
    """Append LSTM weights [inputs + hidden, 4 * hidden], gates in the order i, f, o, g."""
    weight = builder.random(f"{name}/weight", (inputs + hidden, 4 * hidden), (inputs + hidden) ** -0.5)
    return Cell(name, weight, builder.random(f"{name}/bias", (4 * hidden,), 0.1), zero_state)


def _add_lstm_step(builder: GraphBuilder, cell: Cell, inputs: list[str], state: State, step: int) -> State:
    """Append a time step of an LSTM layer in primitives; return its state."""
    name = f"{cell.name}/step_{step}"
    joined = builder.node("Concat", [*inputs, state.hidden], f"{name}/concat", axis=1)
    gates = builder.node("Gemm", [joined, cell.weight, cell.bias], f"{name}/gates")
    parts = [f"{name}/split/{part}" for part in ("input", "forget", "output", "candidate")]
    builder.node_with_outputs("Split", [gates], parts, f"{name}/split", axis=1, num_outputs=4)
    admit = builder.node("Sigmoid", [parts[0]], f"{name}/input_gate")
    keep = builder.node("Sigmoid", [parts[1]], f"{name}/forget_gate")
    show = builder.node("Sigmoid", [parts[2]], f"{name}/output_gate")
    candidate = builder.node("Tanh", [parts[3]], f"{name}/candidate")
    kept = builder.node("Mul", [keep, state.cell], f"{name}/kept")
    admitted = builder.node("Mul", [admit, candidate], f"{name}/admitted")
    memory = builder.node("Add", [kept, admitted], f"{name}/cell")
    squashed = builder.node("Tanh", [memory], f"{name}/squash")
    return State(builder.node("Mul", [show, squashed], f"{name}/hidden"), memory)
