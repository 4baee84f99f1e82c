"""Write down how operators are split in ONNX's own words: device configurations and sharding specifications.

ONNX has had these fields since IR version 11 (docs/IR.md of ONNX, "Multi-device execution"). They say nothing of
partial values, nor of uneven parts: these are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from onnx import DeviceConfigurationProto, NodeDeviceConfigurationProto, NodeProto, ShardingSpecProto

from onnxplace.model import Model
from onnxplace.passes.sharding.layouts import PARTIAL, Layout
from onnxplace.passes.sharding.space import StrategySpace
from onnxplace.passes.sharding.strategies import Strategy

CONFIGURATION = "onnxplace"
"""Name of the device configuration."""
MIN_IR_VERSION = 11


def annotate_model(
    model: Model, space: StrategySpace, strategies: Sequence[Strategy], device_ids: Sequence[str]
) -> Model:
    """Return a model whose nodes carry their sharding specifications.

    Args:
        model: The unsharded model; it may have more nodes than those of `space`.
        space: Gives shapes and divisions.
        strategies: One for each node of `space`.
        device_ids: The devices of the group.
    """
    by_name = {node.name: strategy for node, strategy in zip(space.facts.model.nodes, strategies)}
    nodes = [_annotate(node, space, by_name[node.name]) if node.name in by_name else node for node in model.nodes]
    configuration = DeviceConfigurationProto(name=CONFIGURATION, num_devices=len(device_ids), device=device_ids)
    return replace(
        model,
        nodes=tuple(nodes),
        ir_version=max(model.ir_version, MIN_IR_VERSION),
        device_configurations=(configuration,),
    )


def _annotate(node: NodeProto, space: StrategySpace, strategy: Strategy) -> NodeProto:
    """Return a node with the layouts of its inputs and outputs."""
    entry = NodeDeviceConfigurationProto(configuration_id=CONFIGURATION)
    values = zip((*node.input, *node.output), (*strategy.inputs, *strategy.outputs))
    for name, layout in dict(values).items():
        if name and layout is not None and (spec := _specify(name, layout, space)) is not None:
            entry.sharding_spec.append(spec)
    copy = NodeProto()
    copy.CopyFrom(node)
    copy.device_configurations.append(entry)
    return copy


def _specify(name: str, layout: Layout, space: StrategySpace) -> ShardingSpecProto | None:
    """Return the specification of a value, None for what ONNX cannot express."""
    count = space.division.count
    spec = ShardingSpecProto(tensor_name=name, device=range(count))
    if layout == PARTIAL:
        return None
    if not layout.is_split:
        return spec
    size = space.facts.shapes[name][layout.axis]
    if len({space.division.local_size(layout, size, device) for device in range(count)}) > 1:
        return None
    dimension = spec.sharded_dim.add(axis=layout.axis)
    for _ in range(layout.outer):  # fused tensors, such as q, k and v, are each split
        dimension.simple_sharding.add(dim_value=size // layout.outer, num_shards=count)
    return spec
