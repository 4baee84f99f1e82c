"""A small graph builder for the example models, on top of `onnx.helper`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

IR_VERSION = 8  # the version of opset 18, which every recent runtime reads
OPSET_VERSION = 18
PRODUCER_NAME = "onnxplace-examples"

Dimension = int | str  # a string names a symbolic dimension


class GraphBuilder:
    """Collects nodes, random weights and constants into one model.

    A node and its (first) output share one name, such as `image/block_0/attention/q_proj`.
    """

    def __init__(self, name: str, seed: int) -> None:
        """Start an empty graph; `seed` determines all random weights."""
        self.name = name
        self._random = np.random.default_rng(seed)
        self._nodes: list[onnx.NodeProto] = []
        self._initializers: dict[str, onnx.TensorProto] = {}
        self._node_names: set[str] = set()

    def node(self, operator: str, inputs: Sequence[str], name: str, **attributes: Any) -> str:
        """Append a node with one output of the same name; return that name."""
        return self.node_with_outputs(operator, inputs, [name], name, **attributes)[0]

    def node_with_outputs(
        self, operator: str, inputs: Sequence[str], outputs: Sequence[str], name: str, **attributes: Any
    ) -> Sequence[str]:
        """Append a node with several named outputs; return their names."""
        if name in self._node_names:
            raise ValueError(f"two nodes are named {name!r}")
        self._node_names.add(name)
        self._nodes.append(helper.make_node(operator, inputs, outputs, name=name, **attributes))
        return outputs

    def constant(self, name: str, values: NDArray[Any]) -> str:
        """Store `values` as an initializer under a new name; return the name."""
        if name in self._initializers:
            raise ValueError(f"two initializers are named {name!r}")
        self._initializers[name] = numpy_helper.from_array(values, name)
        return name

    def integers(self, *values: int) -> str:
        """Return the name of a 1-D int64 constant (a shape, axes), stored once."""
        name = "constants/int64_" + "_".join(str(value) for value in values)
        return name if name in self._initializers else self.constant(name, np.array(values, np.int64))

    def index(self, value: int) -> str:
        """Return the name of an int64 scalar constant.

        As the index of Gather it takes one slice and drops the axis.
        """
        name = f"constants/index_{value}"
        return name if name in self._initializers else self.constant(name, np.array(value, np.int64))

    def scalar(self, value: float) -> str:
        """Return the name of a float32 scalar constant, stored once."""
        name = f"constants/float_{value:.6g}"
        return name if name in self._initializers else self.constant(name, np.array(value, np.float32))

    def random(self, name: str, shape: Sequence[int], deviation: float, mean: float = 0.0) -> str:
        """Store a float32 weight with normal values; return its name."""
        values = self._random.standard_normal(tuple(shape), dtype=np.float32)
        return self.constant(name, values * np.float32(deviation) + np.float32(mean))

    def matrix(self, name: str, rows: int, columns: int) -> str:
        """Store a Xavier-scaled float32 weight of shape [rows, columns]; return its name."""
        return self.random(name, (rows, columns), (2.0 / (rows + columns)) ** 0.5)

    def linear(self, value: str, inputs: int, outputs: int, name: str) -> str:
        """Append a dense layer with bias: [..., inputs] to [..., outputs]."""
        product = self.node("MatMul", [value, self.matrix(f"{name}/weight", inputs, outputs)], name)
        bias = self.random(f"{name}/bias", (outputs,), 0.02)
        return self.node("Add", [product, bias], f"{name}/add_bias")

    def layer_norm(self, value: str, width: int, name: str) -> str:
        """Append a layer normalisation over the last axis of size `width`."""
        scale = self.random(f"{name}/scale", (width,), 0.05, mean=1.0)
        bias = self.random(f"{name}/bias", (width,), 0.02)
        return self.node("LayerNormalization", [value, scale, bias], name, axis=-1, epsilon=1e-5)

    def model(self, inputs: Sequence[onnx.ValueInfoProto], outputs: Sequence[onnx.ValueInfoProto]) -> onnx.ModelProto:
        """Return the finished model with the given graph inputs and outputs."""
        initializers = list(self._initializers.values())
        graph = helper.make_graph(self._nodes, self.name, inputs, outputs, initializers)
        return helper.make_model(
            graph,
            producer_name=PRODUCER_NAME,
            ir_version=IR_VERSION,
            opset_imports=[helper.make_opsetid("", OPSET_VERSION)],
        )


def float_value(name: str, *shape: Dimension) -> onnx.ValueInfoProto:
    """Describe a float32 graph input or output."""
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def integer_value(name: str, *shape: Dimension) -> onnx.ValueInfoProto:
    """Describe an int64 graph input or output."""
    return helper.make_tensor_value_info(name, TensorProto.INT64, shape)
