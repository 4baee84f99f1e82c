"""What goes with a sharded model: its profile, scaled, and the unsharded model with its interface and weights.

The unsharded model is the reference of the bundle. It may carry the layouts and stages in ONNX's own words: device
configurations and sharding specifications (docs/IR.md of ONNX, "Multi-device execution").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from types import MappingProxyType

import numpy as np
from onnx import DeviceConfigurationProto, NodeProto, TensorProto, helper, numpy_helper

from onnxplace.facts import Profile
from onnxplace.graph.op_graph import Floats, Ints, Longs, number_densely
from onnxplace.model.device_metadata import CONFIGURATION, MIN_IR_VERSION
from onnxplace.model.lowering import build_op_graph, value_bytes
from onnxplace.model.model import Model
from onnxplace.passes.placement.grouping.node_groups import Union, first_equal
from onnxplace.passes.sharding.apply.exchanges import list_slice_arguments
from onnxplace.passes.sharding.apply.sharded_model import ShardedModel, StateLayout
from onnxplace.passes.sharding.apply.sharding_specs import specify
from onnxplace.passes.sharding.choose.layout_choice import LayoutChoice
from onnxplace.passes.sharding.rules.layouts import Layout
from onnxplace.passes.sharding.space.known_shapes import infer_all_shapes
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy
from onnxplace.passes.sharding.space.sharding_costs import WorkCosts
from onnxplace.passes.sharding.space.strategy_space import StrategySpace
from onnxplace.problem import device_seconds
from onnxplace.target.target import Target


def scale_profile(
    profile: Profile, sharded: ShardedModel, choice: LayoutChoice, work: WorkCosts, target: Target, group: Sequence[int]
) -> Profile:
    """Return the profile of a sharded model.

    Parts of a node take their share of its time. Exchanges take what their bytes take to copy.
    """
    seconds_of_group = device_seconds(profile, target)[list(group)]
    origins = sharded.origins
    source = np.array([origin.source for origin in origins], dtype=np.int64)
    fraction = _fractions(sharded, choice, work, seconds_of_group)
    moved = np.array([origin.moved_bytes for origin in origins], dtype=np.float64)
    graph = build_op_graph(sharded.model, value_bytes(sharded.model, infer_all_shapes(sharded.model)))
    peaks = work.peaks[0]
    copy_seconds = moved / peaks.bytes_per_second + np.where(moved > 0, peaks.kernel_seconds, 0.0)
    return replace(
        profile.rewritten(graph, source, _units(profile.unit, source, sharded), copy_seconds, fraction),
        training=None if profile.training is None else profile.training.spread(source),
        unsharded_seconds=MappingProxyType(
            {device.cost_class: float(profile.seconds[device.cost_class].sum()) for device in target.devices}
        ),
    )


def _fractions(sharded: ShardedModel, choice: LayoutChoice, work: WorkCosts, device_seconds: Floats) -> Floats:
    """Return, per node, which fraction of its original's time it takes on its device; 0 for exchanges."""
    cache: dict[tuple[int, int, int, float], float] = {}
    result = np.zeros(len(sharded.origins))
    for index, origin in enumerate(sharded.origins):
        if origin.source < 0:
            continue
        strategy, whole = choice.strategies[origin.source], float(device_seconds[origin.device, origin.source])
        key = work.space.kinds[origin.source], id(strategy), origin.device, whole
        if key not in cache:
            part = work.part_seconds(origin.source, strategy, origin.device, whole)
            cache[key] = part / whole if whole > 0 else 1.0
        result[index] = cache[key]
    return result


def _units(unit: Ints, source: Longs, sharded: ShardedModel) -> Ints:
    """Return the kernel of each node: parts of one kernel on one device stay together.

    So do the steps of an exchange with the nodes next to them: the slice that a device keeps with the sum or
    concatenation it goes into, and the slice that it sends with the node that makes the value. Apart, they would be
    their own segments around a wait.
    """
    origins = enumerate(zip(source.tolist(), sharded.origins))
    keys = [(int(unit[node]), origin.device) if node >= 0 else (-1 - index, 0) for index, (node, origin) in origins]
    joined = Union(np.full(len(source), -1, dtype=np.int32))
    joined.join(first_equal(number_densely(keys)), np.arange(len(source)), "one kernel")
    steps = _find_partners(sharded)
    joined.join(np.array([step for step, _ in steps], np.int32), np.array([mate for _, mate in steps], np.int32), "")
    return joined.groups().group


def _find_partners(sharded: ShardedModel) -> list[tuple[int, int]]:
    """Return the steps of exchanges that stay with a node: that node's index is second."""
    nodes, origins = sharded.model.nodes, sharded.origins
    producer = {name: index for index, node in enumerate(nodes) for name in filter(None, node.output)}
    pairs = []
    for index, (node, origin) in enumerate(zip(nodes, origins)):
        if origin.source >= 0:
            continue
        reading = sharded.model.readers.get(node.output[0], [])
        remote = [reader for reader in reading if origins[reader].device != origin.device]
        maker = producer.get(next(iter(node.input), ""), -1)
        if len(reading) == 1 and not remote and origins[reading[0]].source < 0:
            pairs.append((index, reading[0]))
        elif remote and node.op_type == "Slice" and maker >= 0 and origins[maker].device == origin.device:
            pairs.append((index, maker))
    return pairs


def build_whole_model(model: Model, sharded: ShardedModel, space: StrategySpace, *, from_parts: bool) -> Model:
    """Return a model that computes what the original does.

    Carried states are taken and returned in the same parts as by the sharded model. With `from_parts`, weights are put
    together from their parts, so that a bundle stores each byte once.
    """
    return _WholeModel(model, sharded, space, from_parts).build()


class _WholeModel:
    def __init__(self, model: Model, sharded: ShardedModel, space: StrategySpace, from_parts: bool) -> None:
        self._weight_parts = sharded.weight_parts if from_parts else {}
        self._model, self._sharded = model, sharded
        self._shapes, self._division = space.facts.shapes, space.division
        self._weights: dict[str, TensorProto] = {}
        self._before: list[NodeProto] = []
        self._after: list[NodeProto] = []

    def build(self) -> Model:
        model, sharded = self._model, self._sharded
        parts_of = {name: parts.names for name, parts in self._weight_parts.items()}
        parts_of |= {name: state.inputs for name, state in sharded.split_states.items()}
        for name, tensor in model.initializers.items():
            names = parts_of.get(name)
            self._weights |= {part: sharded.model.initializers[part] for part in names} if names else {name: tensor}
            if (parts := self._weight_parts.get(name)) is not None:
                self._before += self._join(name, parts.layout, parts.names, tensor.dims[parts.layout.axis])
        for name, state in sharded.split_states.items():
            self._before += self._join_state(name, state)
            self._after += self._cut_state(name, state)
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
        inputs, attributes = list_slice_arguments(self._model.opset, source, axis, low, high, self._ints)
        return helper.make_node("Slice", inputs, [result], name=result, **attributes)

    def _join_state(self, name: str, state: StateLayout) -> list[NodeProto]:
        if not state.layout.is_split:
            return [helper.make_node("Identity", [state.inputs[0]], [name], name=f"{name}/joined")]
        parts = [state.inputs[device] for device in self._division.holders(state.layout, 0)]
        return self._join(name, state.layout, parts, self._shapes[name][state.layout.axis])

    def _cut_state(self, name: str, state: StateLayout) -> list[NodeProto]:
        source = self._model.sources.get(state.output, state.output)
        if not state.layout.is_split:
            return [helper.make_node("Identity", [source], [part], name=f"{part}/cut") for part in state.outputs]
        axis, nodes = state.layout.axis, []
        for device, part in enumerate(state.outputs):
            # Parts of states are single ranges.
            ((low, high),) = self._division.ranges(state.layout, self._shapes[name][axis], device)
            nodes.append(self._slice(source, part, axis, low, high))
        return nodes


def annotate_model(
    model: Model,
    space: StrategySpace,
    strategies: Sequence[NodeStrategy],
    device_ids: Sequence[str],
    stages: Mapping[int, int],
) -> Model:
    """Return a model whose nodes carry their sharding specifications and stages.

    Args:
        model: The unsharded model; it may have more nodes than those of `space`.
        space: Gives shapes and divisions.
        strategies: One for each node of `space`.
        device_ids: The devices of the groups of all stages, one group after the other.
        stages: Node of `space` -> its stage; empty if there is one group.
    """
    numbers, ways = {node.name: index for index, node in enumerate(space.facts.model.nodes)}, space.division.count

    def annotate(node: NodeProto) -> NodeProto:
        if (number := numbers.get(node.name)) is None:
            return node
        strategy, stage, copy = strategies[number], stages.get(number), deepcopy(node)
        entry = copy.device_configurations.add(configuration_id=CONFIGURATION, pipeline_stage=stage)
        group = range((stage or 0) * ways, ((stage or 0) + 1) * ways)
        layouts = dict((*zip(node.input, strategy.inputs), *zip(node.output, strategy.outputs)))
        shapes, division = space.facts.shapes, space.division
        specs = (specify(name, layout, shapes.get(name, ()), division, group) for name, layout in layouts.items())
        entry.sharding_spec.extend(filter(None, specs))
        return copy

    configuration = DeviceConfigurationProto(name=CONFIGURATION, num_devices=len(device_ids), device=device_ids)
    return replace(
        model,
        nodes=tuple(map(annotate, model.nodes)),
        ir_version=max(model.ir_version, MIN_IR_VERSION),
        device_configurations=(configuration,),
    )
