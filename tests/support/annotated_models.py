"""Models whose nodes have sharding specifications of ONNX."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path

import onnx
from onnx import DeviceConfigurationProto, ModelProto, NodeProto

# Tensor -> the axis that is split evenly; None for a whole copy on each device.
Axes = Mapping[str, int | None]


def annotate_nodes(model: ModelProto, axes: Mapping[str, Axes], devices: int = 2) -> ModelProto:
    """Return a model in which some nodes have specifications, as a user writes them."""
    result = ModelProto.FromString(model.SerializeToString())
    result.ir_version = max(model.ir_version, 11)
    result.configuration.append(DeviceConfigurationProto(name="mine", num_devices=devices))
    nodes = {node.name: node for node in result.graph.node}
    for name, values in axes.items():
        entry = nodes[name].device_configurations.add(configuration_id="mine")
        for tensor, axis in values.items():
            spec = entry.sharding_spec.add(tensor_name=tensor)
            if axis is None:
                spec.device.append(-1)
                spec.index_to_device_group_map.add(key=-1, value=range(devices))
            else:
                spec.device.extend(range(devices))
                spec.sharded_dim.add(axis=axis).simple_sharding.add(num_shards=devices)
    return result


def save_annotated(path: Path, model: ModelProto, axes: Mapping[str, Axes], devices: int = 2) -> Path:
    """Write such a model; return its path."""
    onnx.save(annotate_nodes(model, axes, devices), path)
    return path


def strip_nodes(model: ModelProto, kept: Collection[str]) -> ModelProto:
    """Return a model in which only these nodes have specifications."""
    result = ModelProto.FromString(model.SerializeToString())
    for node in result.graph.node:
        if node.name not in kept:
            del node.device_configurations[:]
    return result


def list_specs(node: NodeProto) -> dict[str, bytes]:
    """Return the specifications of a node, by tensor, as bytes."""
    entries = node.device_configurations
    return {spec.tensor_name: spec.SerializeToString() for entry in entries for spec in entry.sharding_spec}
