"""How long sharding takes on large graphs, and its gaps: python benchmarks/sharding_scale.py [NODES ...].

The graphs are synthetic: layers of one kind, until there are enough nodes. `fan` is random and wide: no exact method
solves it. Markdown on stdout: seconds of each step, and by how much the choice exceeds its lower bound.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper, numpy_helper

from onnxplace.model.loading import load
from onnxplace.passes.profiling.roofline import typical_peaks
from onnxplace.passes.sharding.apply.sharded_model import write_sharded_model
from onnxplace.passes.sharding.choose.layout_choice import ChoiceProblem
from onnxplace.passes.sharding.rules.layouts import Division
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts, WorkCosts
from onnxplace.passes.sharding.space.strategy_space import build_space
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts

WIDTH, HEADS, TOKENS = 64, 8, 128
COLUMNS = ("graph", "nodes", "ways", "facts s", "strategies s", "choice s", "rewriting s", "of one device", "gap")


class Graph:
    """A model under construction."""

    def __init__(self) -> None:
        self.nodes: list[NodeProto] = []
        self._weights: list[TensorProto] = []
        self._vectors: dict[tuple[int, ...], str] = {}

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        name = f"v{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], name=f"{name}_{op}", **attributes))
        return name

    def weight(self, *shape: int) -> str:
        name = f"w{len(self._weights)}"
        data = bytes(4 * math.prod(shape))
        self._weights.append(TensorProto(name=name, data_type=TensorProto.FLOAT, dims=shape, raw_data=data))
        return name

    def ints(self, *values: int) -> str:
        if values not in self._vectors:
            self._vectors[values] = f"i{len(self._vectors)}"
            self._weights.append(numpy_helper.from_array(np.array(values, np.int64), self._vectors[values]))
        return self._vectors[values]

    def linear(self, value: str, inner: int, outer: int) -> str:
        return self.add("Add", self.add("MatMul", value, self.weight(inner, outer)), self.weight(outer))

    def attend(self, value: str, memory: str, mask: str) -> str:
        """Add an attention of some heads, and its sum with the value, normalised."""
        shape, order = self.ints(1, TOKENS, HEADS, WIDTH // HEADS), [0, 2, 1, 3]
        query, key, content = (
            self.add("Transpose", self.add("Reshape", self.linear(item, WIDTH, WIDTH), shape), perm=order)
            for item in (value, memory, memory)
        )
        scores = self.add("MatMul", query, self.add("Transpose", key, perm=[0, 1, 3, 2]))
        weights = self.add("Softmax", self.add("Add", scores, mask), axis=-1)
        mixed = self.add("Transpose", self.add("MatMul", weights, content), perm=order)
        merged = self.add("Reshape", mixed, self.ints(1, TOKENS, WIDTH))
        return self.normalise(value, self.linear(merged, WIDTH, WIDTH))

    def normalise(self, value: str, change: str) -> str:
        total = self.add("Add", value, change)
        return self.add("LayerNormalization", total, self.weight(WIDTH), self.weight(WIDTH), axis=-1)

    def feed_forward(self, value: str) -> str:
        inner = self.add("Relu", self.linear(value, WIDTH, 4 * WIDTH))
        return self.normalise(value, self.linear(inner, 4 * WIDTH, WIDTH))

    def convolve(self, value: str, inner: int, outer: int, kernel: int) -> str:
        pads, weight = [kernel // 2] * 4, self.weight(outer, inner, kernel, kernel)
        return self.add("Relu", self.add("Conv", value, weight, self.weight(outer), pads=pads))

    def model(self, shape: Sequence[int], outputs: Sequence[str]) -> ModelProto:
        inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in outputs]
        graph = helper.make_graph(self.nodes, "graph", inputs, results, self._weights)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def make_transformer(count: int) -> ModelProto:
    """Return encoder layers that share a computed mask."""
    graph, value = Graph(), "x"
    mask = graph.add("Tanh", graph.weight(1, 1, TOKENS, TOKENS))
    while len(graph.nodes) < count:
        value = graph.feed_forward(graph.attend(value, value, mask))
    return graph.model((1, TOKENS, WIDTH), [value])


def make_detr(count: int) -> ModelProto:
    """Return decoder layers that all read one memory, positions and a mask."""
    graph = Graph()
    mask, positions = graph.add("Tanh", graph.weight(1, 1, TOKENS, TOKENS)), graph.add("Tanh", graph.weight(TOKENS, 1))
    memory = graph.feed_forward(graph.attend("x", "x", mask))
    value = graph.add("Tanh", graph.weight(1, TOKENS, WIDTH))
    while len(graph.nodes) < count:
        query = graph.add("Add", value, positions)
        value = graph.attend(query, query, mask)
        value = graph.attend(graph.add("Add", value, positions), graph.add("Add", memory, positions), mask)
        value = graph.feed_forward(value)
    return graph.model((1, TOKENS, WIDTH), [value])


def make_densenet(count: int) -> ModelProto:
    """Return blocks whose convolutions read all earlier ones of the block."""
    graph, value, growth = Graph(), "x", 8
    while len(graph.nodes) < count:
        features = [value]
        for index in range(24):
            merged = graph.add("Concat", *features, axis=1)
            narrow = graph.convolve(merged, 16 + index * growth, 4 * growth, 1)
            features.append(graph.convolve(narrow, 4 * growth, growth, 3))
        value = graph.convolve(graph.add("Concat", *features, axis=1), 16 + 24 * growth, 16, 1)
    return graph.model((1, 16, 28, 28), [value])


def make_inception(count: int) -> ModelProto:
    """Return cells of four branches of convolutions and a pool."""
    graph, value = Graph(), "x"
    while len(graph.nodes) < count:
        pooled = graph.add("AveragePool", value, kernel_shape=[3, 3], pads=[1] * 4)
        first, second = graph.convolve(value, 32, 8, 1), graph.convolve(value, 32, 8, 1)
        branches = [graph.convolve(value, 32, 8, 1), graph.convolve(first, 8, 8, 3), graph.convolve(pooled, 32, 8, 1)]
        branches.append(graph.convolve(graph.convolve(second, 8, 8, 3), 8, 8, 3))
        value = graph.add("Concat", *branches, axis=1)
    return graph.model((1, 32, 28, 28), [value])


def make_fan(count: int) -> ModelProto:
    """Return sixteen lanes, each of which reads a random other one at every step."""
    graph, random = Graph(), Random(0)
    lanes = [graph.add("Relu", "x") for _ in range(16)]
    while len(graph.nodes) < count:
        mixed = [graph.add("Add", lane, random.choice(lanes)) for lane in lanes]
        lanes = [graph.linear(lane, 32, 32) if random.random() < 0.6 else graph.add("Relu", lane) for lane in mixed]
    return graph.model((1, 64, 32), lanes)


GRAPHS: dict[str, Callable[[int], ModelProto]] = {
    "transformer": make_transformer,
    "detr": make_detr,
    "densenet": make_densenet,
    "inception": make_inception,
    "fan": make_fan,
}


def measure(name: str, count: int, ways: int, latency_seconds: float) -> tuple[object, ...]:
    """Return the row of a graph: seconds of each step, and the quality of the choice."""
    model = load(GRAPHS[name](count))
    times = [time.perf_counter()]
    facts = TensorFacts.of(model)
    times.append(time.perf_counter())
    space = build_space(facts, Division((1.0,) * ways))
    times.append(time.perf_counter())
    peaks = typical_peaks("cpu")
    costs = ExchangeCosts(
        count=ways,
        latency_seconds=latency_seconds,
        seconds_per_byte=1e-10,
        segment_seconds=latency_seconds,
        copy_seconds_per_byte=1 / peaks.bytes_per_second,
        kernel_seconds=peaks.kernel_seconds,
    )
    work = WorkCosts(space, (peaks,) * ways)
    seconds = np.array([[work.whole_seconds(index) for index in range(len(model.nodes))]] * ways)
    problem = ChoiceProblem(space, work.table(seconds, costs), costs)
    choice = problem.solve()
    assert choice is not None
    times.append(time.perf_counter())
    write_sharded_model(space, choice, costs)
    times.append(time.perf_counter())
    steps = [f"{end - start:.2f}" for start, end in pairwise(times)]
    share, gap = choice.seconds / float(seconds[0].sum()), choice.seconds / choice.lower_bound_seconds - 1
    return name, len(model.nodes), ways, *steps, f"{share:.2f}", f"{gap:.2%}"


def main() -> None:
    """Print a table of all graphs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("nodes", type=int, nargs="*", default=[1000, 20_000])
    parser.add_argument("--graphs", nargs="*", choices=list(GRAPHS), default=list(GRAPHS))
    parser.add_argument("--ways", type=int, default=2)
    parser.add_argument("--latency", type=float, default=1e-6, help="seconds of a message, and of a cut")
    options = parser.parse_args()
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for count in options.nodes:
        for name in options.graphs:
            row = measure(name, count, options.ways, options.latency)
            print(f"| {' | '.join(map(str, row))} |", flush=True)


if __name__ == "__main__":
    main()
