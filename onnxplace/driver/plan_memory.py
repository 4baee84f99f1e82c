"""Predict what several plans of one bundle hold together, and whether their devices have room for it.

ONNX Runtime maps weights files. Sessions on CPU devices whose kernels read a weight where it lies share its pages: it
counts once. Kernels of products and of recurrent layers pack their weights when a session is opened, so each plan has
its own copy, and so has each plan on a device with memory of its own (measured: docs/sizes-memory-part.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol

import numpy as np
import onnx

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import HOST, DeviceRecord, HeldRecord
from onnxplace.driver.join_plans import SHARED_WEIGHTS, list_external, map_file
from onnxplace.model.nested_graphs import walk_nodes
from onnxplace.model.tensors import read_external_range
from onnxplace.model.weights import PAGE_BYTES
from onnxplace.target.target import Target

# Operators whose kernels read weights where they lie.
TABLE_READERS = frozenset({"Gather", "Slice"})
# The same in models that were optimised when they were written; opening other ones rewrites weights of convolutions.
OPTIMISED_READERS = TABLE_READERS | {"Conv"}

# What tells one weight from another: its length, and its first bytes, or where it is in a file that is linked.
WeightKey = tuple[int, object]
# Device -> the weights that its sessions read where they lie.
Mapped = Mapping[str, Collection[WeightKey]]


class HasDevices(Protocol):
    """What says how much devices hold for one plan: a manifest, or a prediction."""

    @property
    def devices(self) -> tuple[DeviceRecord, ...]: ...


def list_mapped(bundle: Bundle) -> Mapped:
    """Return the weights that the sessions of a bundle read where they lie, on each CPU device."""
    weights, mapped = map_file(bundle.file(SHARED_WEIGHTS)), dict[str, set[WeightKey]]()
    hosts = {device.id for device in bundle.target.devices if device.is_host}
    for segment in (item for item in bundle.manifest.segments if item.device in hosts):
        in_place = OPTIMISED_READERS if segment.optimised else TABLE_READERS
        graph = onnx.load(bundle.file(segment.optimised or segment.file), load_external_data=False).graph
        packed = {name for node in walk_nodes(graph.node) if node.op_type not in in_place for name in node.input}
        for tensor in (item for item in list_external(graph) if item.name not in packed):
            offset, length = read_external_range(tensor)
            first = weights[offset : offset + min(length, PAGE_BYTES)].tobytes()
            mapped.setdefault(segment.device, set()).add((length, offset if bundle.manifest.linked else first))
    return mapped


def hold_together(
    plans: Sequence[HasDevices], mapped: Sequence[Mapped], hosts: Collection[str]
) -> dict[str, HeldRecord]:
    """Return what each device holds for some plans: the weights of all of them, and the values of any one.

    Args:
        plans: The plans.
        mapped: Of each plan, the weights that sessions read where they lie.
        hosts: The devices of one process, which hold what the record `HOST` says.
    """
    ids = dict.fromkeys(device.id for plan in plans for device in plan.devices)
    return {name: _hold(plans, mapped, {name}) for name in ids} | {HOST: _hold(plans, mapped, hosts)}


def _hold(plans: Sequence[HasDevices], mapped: Sequence[Mapped], devices: Collection[str]) -> HeldRecord:
    own = [[item for item in plan.devices if item.id in devices] for plan in plans]
    uses = Counter(key for plan in mapped for name in devices for key in plan.get(name, ()))
    shared = sum((count - 1) * length for (length, _), count in uses.items())
    weights = sum(item.weights_bytes for plan in own for item in plan) - shared
    values = max(sum(item.peak_bytes - item.weights_bytes for item in plan) for plan in own)
    return HeldRecord(weights_bytes=weights, shared_bytes=shared, peak_bytes=weights + values)


def fits_together(held: Mapping[str, HeldRecord], targets: Sequence[Target]) -> bool:
    """Return whether the devices of some plans have room for what they hold together.

    Devices that share processors share the memory of these: `cpu:0-1` has that of `cpu:0` and of `cpu:1`. A pool holds
    what is on its devices, and on others with their processors.
    """
    devices = {device.id: device for target in targets for device in target.devices}
    every = Target(tuple(devices.values()))
    sizes = np.array([held[name].peak_bytes if name in held else 0 for name in devices])
    limits = np.array([device.memory_bytes for device in every.devices])
    alone = np.isin(np.arange(len(limits)), every.independent_devices) * limits
    # Whether devices share processors, also by way of others.
    sharing = np.linalg.matrix_power(every.conflicts, len(limits))
    rooms = np.maximum(sharing @ alone, (sharing * limits).max(axis=1))
    pools = [
        (every.conflicts[[every.position(name) for name in pool.devices]].any(axis=0), pool.memory_bytes)
        for target in targets
        for pool in target.pools
    ]
    is_held = all(sizes[members].sum() <= room for members, room in pools)
    return is_held and bool((sizes <= limits).all() and (sharing @ sizes <= rooms).all())
