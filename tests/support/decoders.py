"""Decoders as exporters write them, made of the example decoder: names, masks and positions of optimum and others."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from decoder import LATER_SCORE, decoder

SIZES = {"layers": 2, "hidden": 32, "heads": 2, "vocab": 300, "positions": 256}
LAYERS = SIZES["layers"]


def rename(model: onnx.ModelProto, choose: Callable[[str], str], symbols: dict[str, str]) -> onnx.ModelProto:
    """Rename inputs and outputs, and symbolic sizes, of a model in place."""
    names = {value.name: choose(value.name) for value in (*model.graph.input, *model.graph.output)}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        node.output[:] = [names.get(name, name) for name in node.output]
    for value in (*model.graph.input, *model.graph.output):
        value.name = names[value.name]
        for size in value.type.tensor_type.shape.dim:
            if size.dim_param:
                size.dim_param = symbols.get(size.dim_param, size.dim_param)
    return model


def optimum_decoder(total: str = "past_sequence_length + sequence_length", **sizes: int) -> onnx.ModelProto:
    """Return a decoder with the inputs and names of optimum's exports, all of which it reads.

    These are `input_ids`, `attention_mask` [batch_size, `total`], `position_ids`, `past_key_values.N.key` and `.value`.
    """
    model = decoder(**{**SIZES, **sizes})
    symbols = {"batch": "batch_size", "seq": "sequence_length", "past": "past_sequence_length"} | {"past + seq": total}
    rename(model, lambda n: "input_ids" if n == "tokens" else n.replace("past.", "past_key_values."), symbols)
    graph, inputs = model.graph, list(model.graph.input)
    mask = helper.make_tensor_value_info("attention_mask", TensorProto.INT64, ["batch_size", total])
    positions = helper.make_tensor_value_info("position_ids", TensorProto.INT64, ["batch_size", "sequence_length"])
    del graph.input[:]
    graph.input.extend([inputs[0], mask, positions, *inputs[1:]])
    nodes = list(graph.node)
    del graph.node[:]
    for node in nodes:
        if node.name == "embedding/positions":
            node = helper.make_node("Gather", [node.input[0], "position_ids"], node.output, node.name, axis=0)
        elif node.name == "mask/scores":
            node.output[0] = "mask/later_scores"
            graph.initializer.extend(
                [
                    numpy_helper.from_array(np.array([1, 2]), "mask/axes"),
                    numpy_helper.from_array(np.float32(LATER_SCORE), "mask/hidden_score"),
                ]
            )
            graph.node.extend(
                [
                    node,
                    helper.make_node("Cast", ["attention_mask"], ["mask/shown"], "mask/shown", to=TensorProto.FLOAT),
                    helper.make_node("Unsqueeze", ["mask/shown", "mask/axes"], ["mask/columns4"], "mask/columns4"),
                    helper.make_node("Mul", ["mask/columns4", "mask/hidden_score"], ["mask/gain"], "mask/gain"),
                ]
            )
            node = helper.make_node("Add", ["mask/later_scores", "mask/gain"], ["mask/scores"], "mask/sum")
        graph.node.append(node)
    onnx.checker.check_model(model, full_check=True)
    return model
