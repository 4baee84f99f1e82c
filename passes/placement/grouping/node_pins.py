"""Device maps in models: ONNX's multi-device metadata, devices in the metadata of nodes, and Olive's pieces."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from onnx import NodeProto

from onnxplace.errors import Diagnostic, TargetError, UsageError, format_count
from onnxplace.graph import Ints, OpGraph
from onnxplace.model import DeviceMetadata, read_device_metadata
from onnxplace.passes.placement.grouping.module_maps import pin_modules
from onnxplace.passes.placement.grouping.node_names import format_list, suggest_names
from onnxplace.target import Target
from onnxplace.utils import format_path


def pin_named_nodes(
    path: Path, graph: OpGraph, target: Target, removed: Sequence[str], nodes: Sequence[NodeProto]
) -> tuple[Ints, list[Diagnostic]]:
    """Return the device that the nodes of a model file name for nodes of the same names, -1 for none, and notes.

    Raises:
        ModelError: The file is not a model.
        InputError: Its nodes name no devices.
        TargetError: The target lacks one of these devices.
        UsageError: No name of a node agrees.
    """
    where = format_path(path)
    metadata = read_device_metadata(path)
    if metadata.pieces:
        return pin_modules(metadata.pieces, graph, target, removed, nodes, where, by_position=True)
    devices = _find_devices(metadata, target, where)
    pinned: Ints = np.array([devices.get(name, -1) for name in graph.names], dtype=np.int32)
    pinned_count = int((pinned >= 0).sum())
    if not pinned_count:
        hint = f"{suggest_names(graph)}; in {where}: {format_list(map(repr, [*devices, *metadata.split][:3]))}"
        raise UsageError("U020", "no node has a name of this model's nodes with one device", where=where, hint=hint)
    message = f"the model pins {format_count(pinned_count, 'node')} of {len(graph)}; the others are free"
    if metadata.split:
        message += f"; {format_count(len(metadata.split), 'node')} on several devices, such as {metadata.split[0]!r}"
    known = {*graph.names, *removed}
    if unknown := [name for name in devices if name not in known]:
        message += f"; this model lacks {format_list(map(repr, unknown))}"
    return pinned, [Diagnostic("U026", message, where=where)]


def _find_devices(metadata: DeviceMetadata, target: Target, where: str) -> dict[str, int]:
    """Return the position of each node's device in the target."""
    ids = [device.id for device in target.devices]
    names = dict(metadata.by_id)
    devices = dict(metadata.by_stage)
    for node, position in metadata.by_position.items():
        name = metadata.devices[position] if 0 <= position < len(metadata.devices) else ""
        if name:
            names[node] = name
        else:
            devices[node] = position
    hint = f"devices are {', '.join(ids)}; devices of nodes are in {where}"
    if unknown := [name for name in dict.fromkeys(names.values()) if name not in ids]:
        raise TargetError("T004", f"no device {format_list(map(repr, unknown))} in this target", where=where, hint=hint)
    if beyond := sorted({number for number in devices.values() if not 0 <= number < len(ids)}):
        listed = format_list(map(str, beyond))
        raise TargetError("T004", f"no device at position {listed} of this target", where=where, hint=hint)
    return devices | {node: ids.index(name) for node, name in names.items()}
