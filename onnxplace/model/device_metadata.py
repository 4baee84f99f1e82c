"""The devices that the nodes of a model name in their metadata."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from onnx import DeviceConfigurationProto, NodeDeviceConfigurationProto, NodeProto, ShardingSpecProto

from onnxplace.errors import InputError, format_value
from onnxplace.model.canonicalize import canonicalize
from onnxplace.model.loading import parse_model, read_metadata, read_model_file
from onnxplace.utils.files import format_path

DEVICE_KEY = "onnxplace.device"
"""Metadata of a node: the id of its device, which viewers such as Netron show."""
CONFIGURATION = "onnxplace"
"""Name of the device configuration of models that onnxplace writes."""
MIN_IR_VERSION = 11
"""The first version of ONNX that has device configurations."""
SPLITS_KEY = "split_assignments"
"""Metadata of a model in which Olive records which piece each module belongs to."""

_PIECE = re.compile(r"[0-9]{1,9}")


class ShardedNode(NamedTuple):
    """A node that has sharding specifications."""

    node: NodeProto
    """In canonical form."""
    specs: Sequence[ShardingSpecProto]
    """Those of inputs first."""
    devices: Sequence[int]
    """The devices that share the node, by position in the configuration; each stage has its own."""


@dataclass(frozen=True)
class DeviceMetadata:
    """The devices that a model names."""

    devices: tuple[str, ...]
    """The devices of its configuration, by position; empty where the configuration only counts them."""
    by_id: Mapping[str, str]
    """Node -> id of its device."""
    by_position: Mapping[str, int]
    """Node -> position of its device in the configuration."""
    by_stage: Mapping[str, int]
    """Node -> pipeline stage, for nodes of which neither id nor position is known."""
    split: tuple[str, ...]
    """Nodes that several devices share."""
    sharded: Mapping[str, ShardedNode]
    """Nodes with sharding specifications, by name; also those that are on one device."""
    pieces: Mapping[str, int]
    """Module -> piece, as Olive assigned it; nodes name no devices then."""


def read_device_metadata(path: Path) -> DeviceMetadata:
    """Return the devices that the nodes of a model file name, under the names that `load` gives to nodes.

    Where a node has several configurations, that of the model's first one counts. The model's weights are not needed.
    What nodes within subgraphs and calls of functions name does not count.

    Raises:
        ModelError: The file is not a model.
        InputError: The model names no devices, or a tensor is on one that its configuration lacks.
    """
    proto = parse_model(read_model_file(path), path)
    nodes = canonicalize(proto, path.name, path.parent).nodes
    configuration = proto.configuration[0] if proto.configuration else None
    count = max(configuration.num_devices, len(configuration.device)) if configuration else 1 << 31
    by_position, by_stage = dict[str, int](), dict[str, int]()
    by_id, split, sharded = dict[str, str](), list[str](), dict[str, ShardedNode]()
    for node in nodes:
        entry = find_entry(node, proto.configuration)
        positions = list_positions(entry) if entry is not None else {}
        if beyond := [position for position in positions if not 0 <= position < count]:
            message = f"tensor {positions[beyond[0]]!r} is on {beyond[0]}, expected devices from 0 to {count - 1}"
            hint = "negative numbers are groups of devices, listed in its index_to_device_group_map"
            raise InputError("U023", message, where=f"{format_path(path)}, node {node.name!r}", hint=hint)
        if entry is not None and entry.sharding_spec:
            specs = sorted(entry.sharding_spec, key=lambda spec: spec.tensor_name in node.output)
            named = sorted(positions) if any(spec.device for spec in specs) else range(count)
            sharded[node.name] = ShardedNode(node, specs, named)
        device_id = next((item.value for item in node.metadata_props if item.key == DEVICE_KEY), "")
        if len(positions) > 1:
            split.append(node.name)
        elif device_id:
            by_id[node.name] = device_id
        elif positions:
            by_position[node.name] = next(iter(positions))
        elif entry is not None and entry.HasField("pipeline_stage"):
            by_stage[node.name] = entry.pipeline_stage
    pieces = read_split_assignments(read_metadata(proto).custom_metadata_map.get(SPLITS_KEY, ""), path)
    if by_id or by_position or by_stage or split:
        pieces = {}
    elif not pieces:
        hint = "`onnxplace export BUNDLE --to onnx-metadata` writes such a model; subgraphs, calls of functions and "
        hint += "further configurations do not count"
        message = "not a device map: no node of this model names a device"
        raise InputError("U023", message, where=format_path(path), hint=hint)
    devices = tuple(configuration.device) if configuration else ()
    return DeviceMetadata(devices, by_id, by_position, by_stage, tuple(split), sharded, pieces)


def read_split_assignments(text: str, path: Path) -> dict[str, int]:
    """Return the piece of each module that Olive wrote into the metadata of a model; raises InputError at other text.

    >>> read_split_assignments("model.layers.0=0;model.layers.1=1", Path("model.onnx"))
    {'model.layers.0': 0, 'model.layers.1': 1}
    """
    rows = [row.rpartition("=") for row in text.split(";") if row]
    if any(not _PIECE.fullmatch(number) for _, _, number in rows):
        hint = "write it like model.layers.0=0;model.layers.1=1"
        message = f"expected modules and their pieces in its metadata {SPLITS_KEY!r}, got {format_value(text)}"
        raise InputError("U023", message, where=format_path(path), hint=hint)
    return {module: int(number) for module, _, number in rows}


def find_entry(
    node: NodeProto, configurations: Sequence[DeviceConfigurationProto]
) -> NodeDeviceConfigurationProto | None:
    """Return what a node says about the first configuration of its model, or else about none that the model has.

    What it says about another one does not count, since that one has other devices at the same positions.
    """
    names = [item.name for item in configurations]
    entries = [entry for entry in node.device_configurations if entry.configuration_id not in names[1:]]
    return min(entries, key=lambda entry: entry.configuration_id not in names, default=None)


def list_positions(entry: NodeDeviceConfigurationProto) -> dict[int, str]:
    """Return the devices that hold tensors of a node, by position, those of groups too; each with its first tensor.

    Shards that name no device are on the first two devices, which is to say on several.

    >>> entry = NodeDeviceConfigurationProto(configuration_id="two")
    >>> entry.sharding_spec.add(tensor_name="y", device=[1]).tensor_name
    'y'
    >>> list_positions(entry)
    {1: 'y'}
    """
    positions: dict[int, str] = {}
    for spec in entry.sharding_spec:
        is_split = any(part.num_shards > 1 for item in spec.sharded_dim for part in item.simple_sharding)
        # Many shards may be on the same large group.
        groups = dict(zip(spec.device, list_groups(spec))).values()
        for group in groups or ([(0, 1)] if is_split else []):
            for device in group:
                positions.setdefault(device, spec.tensor_name)
    return positions


def list_groups(spec: ShardingSpecProto) -> list[tuple[int, ...]]:
    """Return the devices of each shard of a tensor; copies of it are on the devices of a group.

    The number of an empty group stands for itself, as that of a group that is not in the map.

    >>> list_groups(ShardingSpecProto(device=[-1, 2], index_to_device_group_map=[{"key": -1, "value": [0, 1]}]))
    [(0, 1), (2,)]
    """
    groups = {entry.key: tuple(dict.fromkeys(entry.value)) for entry in spec.index_to_device_group_map}
    return [groups.get(number) or (number,) for number in spec.device]
