"""Families of neural networks as cost graphs, drawn from a seed: what placers learn from and are tested on.

    >>> graph = ARCHITECTURES["transformer"](200, 0)
    >>> graph.name
    'transformer_200_0'

A seed draws the structure and the sizes of tensors, and layers are added one by one (`LayerGraph`); the costs follow
from the sizes. An operator takes a launch, and then as long as its arithmetic or its memory traffic, whichever is
longer. A backward pass can be added: one node for each node, in reverse order. Graphs have about as many nodes as
requested, since only whole cells and layers are added.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol

import numpy as np

from onnxplace.cost_graph.cost_graphs import assemble_cost_graph
from onnxplace.cost_graph.data import CostGraph
from onnxplace.graph.op_graph import Csr, Ints, OpGraph

# A GPU that reaches 6 TFLOP/s in float32 and 500 GB/s, with 5 us for each launch.
OPERATIONS_PER_SECOND, MEMORY_BYTES_PER_SECOND, LAUNCH_SECONDS = 6e12, 500e9, 5e-6
# Bytes of an element.
ELEMENT_BYTES = 4
# Two devices of 8 GiB. A transfer takes 25 us, and a microsecond for 7600 bytes: the link of Placeto's simulator
# (Addanki et al. 2019).
MACHINE = MappingProxyType(
    {
        "devices": [{"id": index, "memory_bytes": 8 << 30} for index in range(2)],
        "comm": {"coef_us_per_byte": 1 / 7600, "intercept_us": 25},
    }
)
# A backward node with weights computes the gradients of its inputs and of its weights.
WEIGHT_GRADIENT_FACTOR = 2


@dataclass(frozen=True)
class _LayerCosts:
    """An operator with one output."""

    op: str
    inputs: tuple[int, ...]
    """Layers whose outputs it reads, each once."""
    elements: int
    """Elements of its output."""
    operations: float
    weight: Hashable
    """The weight that it reads; None for none. Layers that read the same weight share it."""
    weight_elements: int


@dataclass
class LayerGraph:
    """A graph under construction; nodes are added in topological order.

    >>> graph = LayerGraph()
    >>> hidden = graph.add("Embedding", (), 256)
    >>> _ = graph.product(hidden, 4, 64, 32)
    >>> len(graph.build("small").ids)
    2
    """

    layers: list[_LayerCosts] = field(default_factory=list)

    def __len__(self) -> int:
        return len(self.layers)

    def add(
        self,
        op: str,
        inputs: Sequence[int],
        elements: int,
        operations: float = 0.0,
        weight_elements: int = 0,
        weight: Hashable = None,
    ) -> int:
        """Add an operator and return its index.

        Args:
            op: Its type.
            inputs: The layers that it reads.
            elements: Of its output.
            operations: Its floating-point operations; pointwise operators may leave them out.
            weight_elements: Of its weight.
            weight: A name for a weight that several layers share; by default, it is the layer's own.
        """
        key = (weight if weight is not None else ("layer", len(self))) if weight_elements else None
        self.layers.append(_LayerCosts(op, tuple(dict.fromkeys(inputs)), elements, operations, key, weight_elements))
        return len(self) - 1

    def product(self, source: int, rows: int, inner: int, columns: int, weight: Hashable = None) -> int:
        """Add a matrix product of a layer's output [rows, inner] with a weight [inner, columns]."""
        return self.add("MatMul", (source,), rows * columns, 2.0 * rows * inner * columns, inner * columns, weight)

    def pointwise(self, op: str, *inputs: int) -> int:
        """Add an operator whose output has the size of its first input."""
        return self.add(op, inputs, self.layers[inputs[0]].elements)

    def build(self, name: str, backward: bool = False) -> CostGraph:
        """Return the cost graph, with a backward pass if asked for.

        Then all nodes that read one weight are a group, as the variables of a training step are on one device.
        """
        nodes = [_forward_node(layer, index, self.layers) for index, layer in enumerate(self.layers)]
        if backward:
            nodes += _backward_nodes(self.layers)
        weights = {key: index for index, key in enumerate(dict.fromkeys(node.weight for node in nodes if node.weight))}
        group = [weights[node.weight] if backward and node.weight else -1 for node in nodes]
        seconds = np.array([node.seconds for node in nodes])
        is_backward = np.arange(len(nodes)) >= len(self)
        graph = _assemble_graph(nodes, {key: index for key, index in weights.items() if key is not None})
        given = np.array(group, dtype=np.int32)
        return assemble_cost_graph(name, range(len(nodes)), graph, seconds, MACHINE, given, is_backward)


@dataclass(frozen=True)
class _Node:
    """A node of the cost graph."""

    op: str
    reads: tuple[tuple[int, int], ...]
    """Values as (node, output)."""
    output_bytes: tuple[int, ...]
    seconds: float
    weight: Hashable
    weight_bytes: int
    workspace_bytes: int = 0


def _forward_node(layer: _LayerCosts, index: int, layers: Sequence[_LayerCosts]) -> _Node:
    moved_elements = layer.elements + layer.weight_elements + sum(layers[source].elements for source in layer.inputs)
    return _Node(
        op=layer.op,
        reads=tuple((source, 0) for source in layer.inputs),
        output_bytes=(layer.elements * ELEMENT_BYTES,),
        seconds=_estimate_seconds(layer.operations, moved_elements),
        weight=layer.weight,
        weight_bytes=layer.weight_elements * ELEMENT_BYTES,
    )


def _backward_nodes(layers: Sequence[_LayerCosts]) -> list[_Node]:
    """Return a node per layer in reverse order, with a value per input: its gradient.

    It reads the gradients of its output, and the outputs of the layers that its layer reads.
    """
    count = len(layers)
    readers: list[list[tuple[int, int]]] = [[] for _ in layers]
    for index, layer in enumerate(layers):
        for position, source in enumerate(layer.inputs):
            readers[source].append((2 * count - 1 - index, position))
    nodes = []
    for index in reversed(range(count)):
        layer = layers[index]
        factor = WEIGHT_GRADIENT_FACTOR if layer.weight_elements else 1
        inputs = [layers[source].elements for source in layer.inputs]
        moved_elements = factor * (sum(inputs) + layer.weight_elements) + layer.elements
        nodes.append(
            _Node(
                op=f"{layer.op}Gradient",
                reads=(*readers[index], *((source, 0) for source in layer.inputs)) or ((index, 0),),
                output_bytes=tuple(elements * ELEMENT_BYTES for elements in inputs),
                seconds=_estimate_seconds(factor * layer.operations, moved_elements),
                weight=layer.weight,
                weight_bytes=layer.weight_elements * ELEMENT_BYTES,
                workspace_bytes=layer.weight_elements * ELEMENT_BYTES,
            )
        )
    return nodes


def _estimate_seconds(operations: float, elements: int) -> float:
    traffic_seconds = elements * ELEMENT_BYTES / MEMORY_BYTES_PER_SECOND
    return LAUNCH_SECONDS + max(operations / OPERATIONS_PER_SECOND, traffic_seconds)


def _assemble_graph(nodes: Sequence[_Node], weights: dict[Hashable, int]) -> OpGraph:
    first_value = np.concatenate([[0], np.cumsum([len(node.output_bytes) for node in nodes])]).astype(np.int64)
    producer: Ints = np.repeat(np.arange(len(nodes), dtype=np.int32), np.diff(first_value))
    weight_bytes = np.zeros(len(weights), dtype=np.int64)
    for node in nodes:
        if node.weight is not None:
            weight_bytes[weights[node.weight]] = node.weight_bytes
    names = tuple(f"{node.op}_{index}" for index, node in enumerate(nodes))
    return OpGraph(
        names=names,
        ops=tuple(node.op for node in nodes),
        value_names=tuple(f"{names[node]}:{value - first_value[node]}" for value, node in enumerate(producer.tolist())),
        value_bytes=np.array([size for node in nodes for size in node.output_bytes], dtype=np.int64),
        producer=producer,
        is_output=np.zeros(len(producer), dtype=bool),
        alias=np.full(len(producer), -1, dtype=np.int32),
        inputs=Csr.of([[int(first_value[source]) + output for source, output in node.reads] for node in nodes]),
        weight_names=tuple(f"weight_{index}" for index in range(len(weights))),
        weight_bytes=weight_bytes,
        weights=Csr.of([[] if node.weight is None else [weights[node.weight]] for node in nodes]),
        workspace_bytes=np.array([node.workspace_bytes for node in nodes], dtype=np.int64),
    )


Random = np.random.Generator
# Blocks of a convolutional cell, as in NASNet (Zoph et al. 2018) and ENAS (Pham et al. 2018).
CELL_BLOCKS = 5
# What a block of a convolutional cell applies to each of its two inputs: operator and size of its window.
BLOCK_OPS = (("Identity", 1), ("AveragePool", 3), ("MaxPool", 3), ("SeparableConv", 3), ("SeparableConv", 5))
ACTIVATIONS = ("Tanh", "Relu", "Sigmoid", "Identity")
# Tokens that a model of language tells apart.
VOCABULARY = 8_000


class Architecture(Protocol):
    """A family of graphs."""

    __name__: str
    __doc__: str | None

    def __call__(self, nodes: int, seed: int, backward: bool = False) -> CostGraph:
        """Return the graph of a seed with about `nodes` nodes, with a backward pass if asked for."""


def _draw_architecture(draw: Callable[[LayerGraph, int, Random], None]) -> Architecture:
    """Make a family of a function that adds the layers of a network to an empty graph."""

    def make(nodes: int, seed: int, backward: bool = False) -> CostGraph:
        graph = LayerGraph()
        draw(graph, nodes // 2 if backward else nodes, np.random.default_rng(seed))
        return graph.build(f"{draw.__name__}_{nodes}_{seed}{'_backward' if backward else ''}", backward)

    make.__name__, make.__doc__ = draw.__name__, draw.__doc__
    return make


def _draw(rng: Random, *choices: int) -> int:
    return int(rng.choice(choices))


def _draw_multiple(rng: Random, unit: int, first: int, last: int) -> int:
    """Draw a multiple of `unit` from `first` to `last` units."""
    return unit * int(rng.integers(first, last + 1))


# ---------------------------------------------------------------------------------------------- convolutional cells


@dataclass(frozen=True)
class _Image:
    """An activation [batch, channels, side, side]."""

    node: int
    side: int
    channels: int


@dataclass(frozen=True)
class _CellBlock:
    """A block of a convolutional cell: two inputs, and what is applied to each."""

    inputs: tuple[int, int]
    """0 and 1: the two cells before; from 2: the blocks before."""
    ops: tuple[int, int]


@_draw_architecture
def convolutional_cells(graph: LayerGraph, nodes: int, rng: Random) -> None:
    """Image classifier of random cells, as an architecture search draws them (NASNet, ENAS)."""
    batch, channels = _draw_multiple(rng, 16, 4, 16), _draw_multiple(rng, 8, 2, 6)
    normal, reduction = _draw_cell(rng), _draw_cell(rng)
    period = _draw(rng, 2, 3)
    stem = graph.add("Conv", (), batch * channels * 32 * 32, 2.0 * batch * 27 * channels * 32 * 32, 27 * channels)
    before = current = _Image(stem, 32, channels)
    cells = 0
    while cells == 0 or len(graph) < nodes - CELL_BLOCKS * 4:
        cells += 1
        reduces = cells % period == 0 and current.side > 4
        before, current = (
            current,
            _add_cell(graph, reduction if reduces else normal, before, current, batch, reduces, channels),
        )
        channels *= 2 if reduces else 1
    pooled = graph.add("GlobalAveragePool", (current.node,), batch * current.channels)
    graph.pointwise("SoftmaxCrossEntropyLoss", graph.product(pooled, batch, current.channels, 10))


def _draw_cell(rng: Random) -> list[_CellBlock]:
    return [
        _CellBlock(
            (int(rng.integers(block + 2)), int(rng.integers(block + 2))),
            (int(rng.integers(len(BLOCK_OPS))), int(rng.integers(len(BLOCK_OPS)))),
        )
        for block in range(CELL_BLOCKS)
    ]


def _add_cell(
    graph: LayerGraph, cell: list[_CellBlock], before: _Image, current: _Image, batch: int, reduces: bool, channels: int
) -> _Image:
    """Add a cell; a reduction halves the side and doubles the channels. Its output joins the blocks nothing reads."""
    side, width = (current.side // 2, 2 * channels) if reduces else (current.side, channels)
    size = batch * width * side * side
    inputs = [
        graph.add(
            "Conv",
            (image.node,),
            size,
            2.0 * size * image.channels,
            image.channels * width,
        )
        for image in (before, current)
    ]
    for block in cell:
        branches = [
            _add_branch(graph, inputs[source], *BLOCK_OPS[op], size=size, width=width)
            for source, op in zip(block.inputs, block.ops)
        ]
        inputs.append(graph.pointwise("Add", *branches))
    read_blocks = {source for block in cell for source in block.inputs}
    ends = [inputs[index] for index in range(2, len(inputs)) if index not in read_blocks]
    joined = graph.add("Concat", ends, size * len(ends))
    return _Image(joined, side, width * len(ends))


def _add_branch(graph: LayerGraph, source: int, op: str, window: int, *, size: int, width: int) -> int:
    if op == "Identity":
        return source
    if op != "SeparableConv":
        return graph.add(op, (source,), size, float(size * window * window))
    window_size = window * window
    deep = graph.add("DepthwiseConv", (source,), size, 2.0 * size * window_size, width * window_size)
    mixed = graph.add("Conv", (deep,), size, 2.0 * size * width, width * width)
    return graph.add("BatchNormalization", (mixed,), size, 4.0 * size, 2 * width)


# ---------------------------------------------------------------------------------------------- recurrent networks


@_draw_architecture
def recurrent_cells(graph: LayerGraph, nodes: int, rng: Random) -> None:
    """Language model of a random recurrent cell, unrolled, as an architecture search draws it (ENAS)."""
    batch, hidden, states = _draw_multiple(rng, 16, 4, 16), _draw_multiple(rng, 64, 4, 14), int(rng.integers(6, 13))
    parents = [int(rng.integers(state)) for state in range(1, states)]
    activations = [ACTIVATIONS[rng.integers(len(ACTIVATIONS))] for _ in range(states)]
    ends = [state for state in range(states) if state not in parents]
    previous, step = graph.add("Zeros", (), batch * hidden), 0
    while step == 0 or len(graph) < nodes - 3 * states:
        word = graph.add("Gather", (), batch * hidden, 0, VOCABULARY * hidden, "embedding")
        joined = graph.add("Concat", (word, previous), 2 * batch * hidden)
        outputs: list[int] = []
        for state in range(states):
            source, inner = (outputs[parents[state - 1]], hidden) if state else (joined, 2 * hidden)
            gates = graph.product(source, batch, inner, 2 * hidden, weight=("state", state))
            active = graph.add(activations[state], (gates,), batch * hidden)
            outputs.append(graph.add("Gate", (active, source if state else previous), batch * hidden))
        previous = graph.add("Mean", [outputs[state] for state in ends], batch * hidden)
        graph.pointwise("Softmax", graph.product(previous, batch, hidden, VOCABULARY, weight="logits"))
        step += 1


@_draw_architecture
def encoder_decoder(graph: LayerGraph, nodes: int, rng: Random) -> None:
    """Translator: recurrent layers that read, and ones that write and attend to what was read (NMT)."""
    batch, hidden, layers = _draw_multiple(rng, 16, 2, 8), _draw_multiple(rng, 64, 4, 16), int(rng.integers(1, 5))
    shorter = _draw(rng, 0, 1, 2)
    # A step to read has a word and 2 nodes per layer; one to write also has 6 for attention and words.
    steps = max(1, round((nodes - 1) / (4 * layers + 8)))
    states = _add_recurrence(graph, "encoder", batch, hidden, layers, max(1, steps - shorter))
    memory = graph.add("Concat", states, len(states) * batch * hidden)
    before: list[int] = []
    context = memory
    for _ in range(steps):
        word = graph.add("Gather", (), batch * hidden, 0, VOCABULARY * hidden, "decoder.words")
        joined = graph.add("Concat", (word, context) if before else (word,), batch * hidden * (1 + bool(before)))
        before = _add_recurrent_step(graph, "decoder", batch, hidden, joined, before, layers)
        scores = graph.add("Scores", (before[-1], memory), len(states) * batch, 2.0 * batch * hidden * len(states))
        weights = graph.pointwise("Softmax", scores)
        context = graph.add("Context", (weights, memory), batch * hidden, 2.0 * batch * hidden * len(states))
        mixed = graph.add("Concat", (context, before[-1]), 2 * batch * hidden)
        graph.pointwise("Softmax", graph.product(mixed, batch, 2 * hidden, VOCABULARY, weight="logits"))


def _add_recurrence(graph: LayerGraph, name: str, batch: int, hidden: int, layers: int, steps: int) -> list[int]:
    """Add recurrent layers over words; return the output of the last layer in each step."""
    outputs: list[int] = []
    before: list[int] = []
    for _ in range(steps):
        word = graph.add("Gather", (), batch * hidden, 0, VOCABULARY * hidden, f"{name}.words")
        before = _add_recurrent_step(graph, name, batch, hidden, word, before, layers)
        outputs.append(before[-1])
    return outputs


def _add_recurrent_step(
    graph: LayerGraph, name: str, batch: int, hidden: int, source: int, before: list[int], layers: int
) -> list[int]:
    """Add one step of LSTM layers; return the output of each layer."""
    outputs: list[int] = []
    for layer in range(layers):
        inputs = (source, before[layer]) if before else (source,)
        inner = sum(graph.layers[item].elements for item in inputs) // batch
        widest = 3 * hidden if layer == 0 and name == "decoder" else 2 * hidden
        gates = graph.add(
            "MatMul",
            inputs,
            4 * batch * hidden,
            2.0 * batch * inner * 4 * hidden,
            4 * widest * hidden,
            f"{name}.{layer}",
        )
        source = graph.add("LSTMCell", (gates, before[layer]) if before else (gates,), batch * hidden)
        outputs.append(source)
    return outputs


# ---------------------------------------------------------------------------------------------- transformers


@dataclass(frozen=True)
class _Width:
    """Sizes of a transformer's activations [rows, hidden]."""

    rows: int
    sequence: int
    hidden: int
    heads: int
    """Heads, or groups of heads, that are separate nodes."""


@_draw_architecture
def transformer(graph: LayerGraph, nodes: int, rng: Random) -> None:
    """Transformer with its heads as nodes, one after the other or next to its dense layers, perhaps with experts."""
    sequence, batch = _draw_multiple(rng, 32, 1, 4), _draw_multiple(rng, 4, 1, 4)
    width = _Width(sequence * batch, sequence, _draw_multiple(rng, 256, 2, 5), _draw(rng, 2, 4, 8))
    experts, is_parallel = _draw(rng, 1, 2, 4), bool(rng.integers(3))
    current = graph.add("Gather", (), width.rows * width.hidden, 0, VOCABULARY * width.hidden)
    layers = 0
    while layers == 0 or len(graph) < nodes - 3 * width.heads - 6:
        layers += 1
        current = _add_transformer_layer(graph, current, width, experts, is_parallel)
    last = graph.add("Gather", (graph.pointwise("LayerNormalization", current),), batch * width.hidden)
    graph.pointwise("Softmax", graph.product(last, batch, width.hidden, VOCABULARY))


def _add_transformer_layer(graph: LayerGraph, current: int, width: _Width, experts: int, is_parallel: bool) -> int:
    """Add attention and dense layers; if they are parallel, both read the same activation."""
    attended = _add_attention(graph, graph.pointwise("LayerNormalization", current), width)
    if is_parallel:
        dense = _add_experts(graph, graph.pointwise("LayerNormalization", current), width, experts)
        return graph.pointwise("Add", current, attended, dense)
    current = graph.pointwise("Add", current, attended)
    dense = _add_experts(graph, graph.pointwise("LayerNormalization", current), width, experts)
    return graph.pointwise("Add", current, dense)


def _add_attention(graph: LayerGraph, source: int, width: _Width) -> int:
    rows, hidden, part = width.rows, width.hidden, width.hidden // width.heads
    query, key, value = (graph.product(source, rows, hidden, hidden) for _ in range(3))
    # Each node of heads stands for heads of 64 columns.
    scores_elements = rows * width.sequence * max(1, part // 64)
    heads = []
    for _ in range(width.heads):
        scores = graph.add("Scores", (query, key), scores_elements, 2.0 * rows * width.sequence * part)
        weights = graph.pointwise("Softmax", scores)
        heads.append(graph.add("Context", (weights, value), rows * part, 2.0 * rows * width.sequence * part))
    return graph.product(graph.add("Concat", heads, rows * hidden), rows, hidden, hidden)


def _add_experts(graph: LayerGraph, source: int, width: _Width, experts: int) -> int:
    """Add dense layers: one pair, or several that share the rows."""
    rows, hidden = width.rows // experts, width.hidden
    outputs = []
    for _ in range(experts):
        part = graph.add("Gather", (source,), rows * hidden) if experts > 1 else source
        wide = graph.pointwise("Gelu", graph.product(part, rows, hidden, 4 * hidden))
        outputs.append(graph.product(wide, rows, 4 * hidden, hidden))
    return graph.add("Concat", outputs, width.rows * hidden) if experts > 1 else outputs[0]


@_draw_architecture
def two_towers(graph: LayerGraph, nodes: int, rng: Random) -> None:
    """Residual network for images and transformer for texts, whose results are compared (CLIP)."""
    batch, channels, side = _draw_multiple(rng, 8, 2, 8), _draw_multiple(rng, 16, 2, 4), _draw(rng, 28, 56)
    sequence, hidden = _draw_multiple(rng, 16, 1, 4), _draw_multiple(rng, 256, 1, 3)
    share = float(rng.uniform(0.35, 0.65))
    image = _add_residual_tower(graph, batch, channels, side, int(share * nodes))
    width = _Width(batch * sequence, sequence, hidden, _draw(rng, 2, 4))
    text = graph.add("Gather", (), width.rows * hidden, 0, VOCABULARY * hidden)
    layers = 0
    while layers == 0 or len(graph) < nodes - 2 * width.heads - 8:
        layers += 1
        text = _add_transformer_layer(graph, text, width, 1, False)
    first = graph.add("ReduceMean", (text,), batch * hidden)
    projected = [
        graph.product(first, batch, hidden, 512),
        graph.product(image, batch, graph.layers[image].elements // batch, 512),
    ]
    graph.add("MatMul", projected, batch * batch, 2.0 * batch * batch * 512)


def _add_residual_tower(graph: LayerGraph, batch: int, channels: int, side: int, nodes: int) -> int:
    """Add bottleneck-free residual blocks; every fourth block halves the side. Returns a vector per image."""
    size = batch * channels * side * side
    current, blocks = graph.add("Conv", (), size, 2.0 * size * 147, 147 * channels), 0
    while blocks == 0 or len(graph) < nodes - 5:
        blocks += 1
        shortcut, inner = current, channels
        if blocks % 4 == 0 and side > 4:
            side, channels = side // 2, 2 * channels
            size = batch * channels * side * side
            shortcut = graph.add("Conv", (current,), size, 2.0 * size * inner, inner * channels)
        for source_channels in (inner, channels):
            current = graph.add(
                "Conv", (current,), size, 2.0 * size * 9 * source_channels, 9 * source_channels * channels
            )
            current = graph.add("BatchNormalization", (current,), size, 4.0 * size, 2 * channels)
        current = graph.pointwise("Add", current, shortcut)
    return graph.add("GlobalAveragePool", (current,), batch * channels)


ARCHITECTURES: Mapping[str, Architecture] = MappingProxyType(
    {make.__name__: make for make in (convolutional_cells, recurrent_cells, encoder_decoder, transformer, two_towers)}
)
"""Family -> function of a number of nodes, a seed, and whether there is a backward pass."""
