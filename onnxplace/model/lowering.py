"""Turn a Model into an OpGraph: names become dense integers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from onnxplace.graph import Csr, OpGraph
from onnxplace.model.tensors import tensor_size

if TYPE_CHECKING:
    from onnxplace.model.model import Model

# Operators whose first output shares the memory of the first input.
VIEW_OPERATORS = frozenset({"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Identity"})


def build_op_graph(model: Model, value_bytes: Mapping[str, int]) -> OpGraph:
    """Return the operator graph of a model.

    An initializer that the caller may override is an input, any other one is a weight. Outputs of a node come after
    its inputs, so a view has a higher index than its source.

    Args:
        model: The model.
        value_bytes: Bytes by value; missing values count zero.
    """
    weight_names = [name for name in model.initializers if not model.overridable(name)]
    weight_index = {name: index for index, name in enumerate(weight_names)}
    names = [value.name for value in model.inputs]
    producer, value_index = [-1] * len(names), {name: index for index, name in enumerate(names)}
    for node_index, node in enumerate(model.nodes):
        for name in filter(None, node.output):
            value_index[name] = len(names)
            names.append(name)
            producer.append(node_index)
    returned = {model.sources.get(output.name, output.name) for output in model.outputs}
    return OpGraph(
        names=tuple(node.name for node in model.nodes),
        ops=tuple(node.op_type for node in model.nodes),
        value_names=tuple(names),
        value_bytes=np.array([value_bytes.get(name, 0) for name in names], dtype=np.int64),
        producer=np.array(producer, dtype=np.int32),
        is_output=np.array([name in returned for name in names], dtype=bool),
        alias=np.array(_find_aliases(model, names, producer, value_index), dtype=np.int32),
        inputs=Csr.of([[value_index[name] for name in reads if name in value_index] for reads in model.reads]),
        weight_names=tuple(weight_names),
        weight_bytes=np.array([tensor_size(model.initializers[name]) for name in weight_names], dtype=np.int64),
        weights=Csr.of([[weight_index[name] for name in reads if name in weight_index] for reads in model.reads]),
        workspace_bytes=np.zeros(len(model.nodes), dtype=np.int64),
    )


def _find_aliases(model: Model, names: list[str], producer: list[int], value_index: Mapping[str, int]) -> list[int]:
    """Return the index of the value that each value views.

    It is -1 for a value that is no view.
    """
    aliases = [-1] * len(names)
    for value, node_index in enumerate(producer):
        if node_index >= 0:
            node = model.nodes[node_index]
            is_view = node.domain in ("", "ai.onnx") and node.op_type in VIEW_OPERATORS and node.input
            if is_view and node.output[0] == names[value]:
                aliases[value] = value_index.get(node.input[0], -1)
    return aliases
