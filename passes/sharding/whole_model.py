"""The unsharded model with the interface and the weights of a sharded one: the reference of its bundle."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from onnx import NodeProto, TensorProto, helper, numpy_helper

from onnxplace.model import Model
from onnxplace.passes.sharding.layouts import Division, Layout
from onnxplace.passes.sharding.rewrite import ShardedModel, StateLayout


def build_whole_model(model: Model, sharded: ShardedModel, division: Division, *, from_parts: bool) -> Model:
    """Return a model that computes what the original does.

    Carried states are taken and returned in the same parts as by the sharded model. With `from_parts`, weights are put
    together from their parts, so that a bundle stores each byte once.
    """
    return _WholeModel(model, sharded, division, from_parts).build()


class _WholeModel:
    def __init__(self, model: Model, sharded: ShardedModel, division: Division, from_parts: bool) -> None:
        self._weight_parts = sharded.weight_parts if from_parts else {}
        self._model, self._sharded, self._division = model, sharded, division
        self._weights: dict[str, TensorProto] = {}
        self._before: list[NodeProto] = []
        self._after: list[NodeProto] = []

    def build(self) -> Model:
        model, sharded = self._model, self._sharded
        for name, tensor in model.initializers.items():
            if (state := sharded.split_states.get(name)) is not None:
                self._weights.update({part: sharded.model.initializers[part] for part in state.inputs})
                continue
            parts = self._weight_parts.get(name)
            if parts is None:
                self._weights[name] = tensor
                continue
            for part in parts.names:
                self._weights[part] = sharded.model.initializers[part]
            size = tensor.dims[parts.layout.axis]
            self._before += self._join(name, parts.layout, parts.names, size)
        for name, state in sharded.split_states.items():
            self._before += self._join_state(name, state)
            self._after += self._cut_state(state)
        return replace(
            model,
            nodes=(*self._before, *model.nodes, *self._after),
            initializers=MappingProxyType(self._weights),
            inputs=sharded.model.inputs,
            outputs=sharded.model.outputs,
            states=sharded.model.states,
        )

    def _ints(self, values: Sequence[int]) -> str:
        name = "whole/" + "_".join(map(str, values))
        self._weights.setdefault(name, numpy_helper.from_array(np.array(values, np.int64), name))
        return name

    def _join(self, name: str, layout: Layout, parts: Sequence[str], size: int) -> list[NodeProto]:
        """Return the nodes that put a value together from its parts."""
        axis, nodes, ordered = layout.axis, list[NodeProto](), []
        if layout.outer == 1:
            return [helper.make_node("Concat", list(parts), [name], name=f"{name}/joined", axis=axis)]
        for row in range(layout.outer):
            for device, part in enumerate(parts):
                rows = self._division.local_size(layout, size, device) // layout.outer
                piece = f"{part}/row{row}"
                nodes.append(self._slice(part, piece, axis, row * rows, (row + 1) * rows))
                ordered.append(piece)
        return [*nodes, helper.make_node("Concat", ordered, [name], name=f"{name}/joined", axis=axis)]

    def _slice(self, source: str, result: str, axis: int, low: int, high: int) -> NodeProto:
        if self._model.opset < 10:
            return helper.make_node("Slice", [source], [result], name=result, starts=[low], ends=[high], axes=[axis])
        inputs = [source, self._ints([low]), self._ints([high]), self._ints([axis])]
        return helper.make_node("Slice", inputs, [result], name=result)

    def _join_state(self, name: str, state: StateLayout) -> list[NodeProto]:
        if not state.layout.is_split:
            return [helper.make_node("Identity", [state.inputs[0]], [name], name=f"{name}/joined")]
        return self._join(name, state.layout, state.inputs, self._size(state))

    def _size(self, state: StateLayout) -> int:
        """Return the size of the split axis of a state."""
        axis, sizes = state.layout.axis, {value.name: value for value in self._sharded.model.inputs}
        return sum(sizes[part].type.tensor_type.shape.dim[axis].dim_value for part in state.inputs)

    def _cut_state(self, state: StateLayout) -> list[NodeProto]:
        source = self._model.sources.get(state.output, state.output)
        if not state.layout.is_split:
            return [helper.make_node("Identity", [source], [part], name=f"{part}/cut") for part in state.outputs]
        nodes, size = [], self._size(state)
        for device, part in enumerate(state.outputs):
            ranges = self._division.ranges(state.layout, size, device)
            pieces = [f"{part}/cut{row}" for row in range(len(ranges))] if len(ranges) > 1 else [part]
            for piece, (low, high) in zip(pieces, ranges):
                nodes.append(self._slice(source, piece, state.layout.axis, low, high))
            if len(pieces) > 1:
                nodes.append(helper.make_node("Concat", pieces, [part], name=f"{part}/cut", axis=state.layout.axis))
        return nodes
