"""Large models for big_models.py: transformers and unrolled recurrent networks."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

# Attention heads of the transformer.
HEADS = 4


class Builder:
    """Nodes and weights of a model; names are prefixed by the layer."""

    def __init__(self, store: Callable[[str, Sequence[int]], TensorProto]) -> None:
        self.store = store
        self.nodes: list[Any] = []
        self.weights: dict[str, TensorProto] = {}
        self.prefix = ""

    def add(self, op: str, *inputs: str, outputs: int = 1, **attributes: Any) -> str:
        """Append a node and return the name of its first output."""
        name = f"{self.prefix}{op}_{len(self.nodes)}"
        names = [f"{name}:{index}" for index in range(outputs)]
        self.nodes.append(helper.make_node(op, inputs, names, name=name, **attributes))
        return names[0]

    def weight(self, name: str, *shape: int) -> str:
        """Return the name of a weight, created on first use."""
        name = self.prefix + name
        if name not in self.weights:
            self.weights[name] = self.store(name, shape)
        return name

    def constant(self, name: str, values: Sequence[float], kind: type = np.float32) -> str:
        """Return the name of a small constant shared by all layers."""
        self.weights.setdefault(name, numpy_helper.from_array(np.asarray(values, dtype=kind), name))
        return name

    def model(self, inputs: Sequence[Any], output: str) -> ModelProto:
        self.nodes.append(helper.make_node("Identity", [output], ["y"], name="last"))
        outputs = [helper.make_tensor_value_info("y", TensorProto.FLOAT, None)]
        graph = helper.make_graph(self.nodes, "big", inputs, outputs, list(self.weights.values()))
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=10)


def make_weight(name: str, shape: Sequence[int]) -> TensorProto:
    """Return a weight held in the model."""
    count = math.prod(shape)
    return numpy_helper.from_array((np.arange(count, dtype=np.float32) % 7 / 70).reshape(shape), name)


def build_transformer(
    layers: int, width: int, length: int, store: Callable[[str, Sequence[int]], TensorProto]
) -> ModelProto:
    """Return a decoder-like transformer of `layers` x 39 nodes; `batch` is symbolic."""
    builder = Builder(store)
    value, per_head = "x", width // HEADS
    for layer in range(layers):
        builder.prefix = f"layer{layer}/"
        attended = _add_projection(builder, _add_normalisation(builder, value, width, "norm1"), "qkv", width, 3 * width)
        pieces = f"{builder.prefix}split"
        split = builder.constant("thirds", [width] * 3, np.int64)
        builder.nodes.append(
            helper.make_node("Split", [attended, split], [f"{pieces}:{i}" for i in "qkv"], name=pieces, axis=2)
        )
        shape = builder.constant("heads", [0, length, HEADS, per_head], np.int64)
        q, k, v = (
            builder.add(
                "Transpose",
                builder.add("Reshape", f"{pieces}:{i}", shape),
                perm=(0, 2, 3, 1) if i == "k" else (0, 2, 1, 3),
            )
            for i in "qkv"
        )
        scores = builder.add("Div", builder.add("MatMul", q, k), builder.constant("scale", math.sqrt(per_head)))  # type: ignore[arg-type]
        mixed = builder.add(
            "Transpose", builder.add("MatMul", builder.add("Softmax", scores, axis=-1), v), perm=(0, 2, 1, 3)
        )
        flat = builder.add("Reshape", mixed, builder.constant("flat", [0, length, width], np.int64))
        value = builder.add("Add", value, _add_projection(builder, flat, "out", width, width))
        hidden = _add_projection(builder, _add_normalisation(builder, value, width, "norm2"), "up", width, 4 * width)
        gated = builder.add("Mul", hidden, builder.add("Sigmoid", hidden))
        value = builder.add("Add", value, _add_projection(builder, gated, "down", 4 * width, width))
    builder.prefix = ""
    return builder.model([helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", length, width])], value)


def _add_normalisation(builder: Builder, value: str, width: int, name: str) -> str:
    """Layer normalisation as older exporters write it: six nodes."""
    centred = builder.add("Sub", value, builder.add("ReduceMean", value, axes=[-1]))
    spread = builder.add("ReduceMean", builder.add("Mul", centred, centred), axes=[-1])
    scaled = builder.add("Div", centred, builder.add("Sqrt", spread))
    return builder.add("Mul", scaled, builder.weight(f"{name}.scale", width))


def _add_projection(builder: Builder, value: str, name: str, rows: int, columns: int) -> str:
    return builder.add(
        "Add",
        builder.add("MatMul", value, builder.weight(f"{name}.w", rows, columns)),
        builder.weight(f"{name}.b", columns),
    )


def build_recurrent(steps: int, layers: int, width: int) -> ModelProto:
    """Return an unrolled recurrent network of `steps` x `layers` x 8 nodes.

    All steps share their weights.
    """
    builder = Builder(make_weight)
    state = {layer: builder.constant("zeros", np.zeros((1, width))) for layer in range(layers)}  # type: ignore[arg-type]
    out = ""
    for step in range(steps):
        value = builder.add("Gather", "x", builder.constant(f"at{step}", step, np.int64), axis=1)  # type: ignore[arg-type]
        for layer in range(layers):
            builder.prefix = f"cell{layer}."
            weights = builder.weight("in", width, width), builder.weight("again", width, width)
            builder.prefix = f"step{step}/layer{layer}/"
            mixed = builder.add(
                "Add", builder.add("MatMul", value, weights[0]), builder.add("MatMul", state[layer], weights[1])
            )
            gate, new = builder.add("Sigmoid", mixed), builder.add("Tanh", mixed)
            state[layer] = builder.add("Add", state[layer], builder.add("Mul", gate, new))
            value = state[layer]
        out = value
    builder.prefix = ""
    return builder.model([helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", steps, width])], out)
