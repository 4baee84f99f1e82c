"""Predict what several plans of one bundle hold together, and whether their devices have room for it.

ONNX Runtime maps weights files. Sessions on CPU devices whose kernels read a weight where it lies share its pages: it
counts once. Kernels of products and of recurrent layers pack their weights when a session is opened, so each plan has
its own copy, and so has each plan on a device with memory of its own (measured: docs/sizes.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import compress

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import HOST, DeviceRecord, HeldRecord
from onnxplace.driver.join_plans import SHARED_WEIGHTS, list_external, load_structure, map_file
from onnxplace.model.nested_graphs import walk_nodes
from onnxplace.model.tensors import read_external_range
from onnxplace.model.weights import PAGE_BYTES
from onnxplace.target.target import Target

# Operators whose kernels read weights where they lie.
TABLE_READERS = frozenset({"Gather", "Slice"})
# The same in models that were optimised when they were written; opening other ones rewrites weights of convolutions.
OPTIMISED_READERS = TABLE_READERS | {"Conv"}


@dataclass(frozen=True)
class PlanMemory:
    """What devices hold for one plan."""

    devices: Sequence[DeviceRecord]
    target: Target
    mapped: Mapping[str, Collection[tuple[int, object]]]
    """CPU device -> the weights that its sessions read where they lie.

    A weight is known by its length and by its first bytes, or by its place in a file that all plans link to.
    """

    @staticmethod
    def of(bundle: Bundle) -> PlanMemory:
        """Return the memory of a bundle that is not yet one of several plans."""
        weights, mapped = map_file(bundle.file(SHARED_WEIGHTS)), dict[str, set[tuple[int, object]]]()
        hosts = {device.id for device in bundle.target.devices if device.is_host}
        for segment in (item for item in bundle.manifest.segments if item.device in hosts):
            in_place = OPTIMISED_READERS if segment.optimised else TABLE_READERS
            model = load_structure(bundle.file(segment.optimised or segment.file))
            packed = {
                name for node in walk_nodes(model.graph.node) if node.op_type not in in_place for name in node.input
            }
            for tensor in (item for item in list_external(model) if item.name not in packed):
                offset, length = read_external_range(tensor)
                first = weights[offset : offset + min(length, PAGE_BYTES)].tobytes()
                mapped.setdefault(segment.device, set()).add((length, offset if bundle.manifest.linked else first))
        return PlanMemory(bundle.manifest.devices, bundle.target, mapped)

    def grow(self, peaks: Sequence[Mapping[str, int]]) -> PlanMemory:
        """Return the memory of the plan for further sizes, of each of which `peaks` has the peak of every device."""
        most = [max([item.peak_bytes, *(peak.get(item.id, 0) for peak in peaks)]) for item in self.devices]
        updates = [item.model_copy(update={"peak_bytes": peak}) for item, peak in zip(self.devices, most)]
        return replace(self, devices=updates)


def hold_together(plans: Sequence[PlanMemory]) -> dict[str, HeldRecord]:
    """Return what each device holds for some plans: the weights of all of them, and the values of any one.

    The record `HOST` is that of a process with all devices on processor cores.
    """
    devices = {device.id: device for plan in plans for device in plan.target.devices}
    groups = {name: {name} for name in devices} | {HOST: {name for name, item in devices.items() if item.has_cores}}
    return {name: hold_on(group, plans) for name, group in groups.items()}


def hold_on(group: Collection[str], plans: Sequence[PlanMemory], join: Callable[..., int] = max) -> HeldRecord:
    """Return what some devices, such as those of a pool, hold together for some plans.

    With `sum` for `join`, it is the values of all plans, which run at once.
    """
    own = [[item for item in plan.devices if item.id in group] for plan in plans]
    uses = Counter(key for plan in plans for name in group for key in plan.mapped.get(name, ()))
    shared = sum((count - 1) * length for (length, _), count in uses.items())
    weights = sum(item.weights_bytes for items in own for item in items) - shared
    values = join(sum(item.peak_bytes - item.weights_bytes for item in items) for items in own)
    return HeldRecord(weights_bytes=weights, shared_bytes=shared, peak_bytes=weights + values)


def fits_together(plans: Sequence[PlanMemory], join: Callable[..., int] = max) -> bool:
    """Return whether the devices of some plans have room for what they hold together, as `hold_on` has it.

    Devices that share processors share the memory of these: `cpu:0-1` has that of `cpu:0` and of `cpu:1`. A pool holds
    what is on its devices, and on others with their processors.
    """
    devices = {device.id: device for plan in plans for device in plan.target.devices}
    every, limits = Target(tuple(devices.values())), np.array([device.memory_bytes for device in devices.values()])
    # Each processor has the part of its devices' memory; devices may share processors by way of others.
    rooms = (every.processors * np.ceil(limits / every.processors.sum(axis=1))[:, None]).max(axis=0)
    sharing = np.linalg.matrix_power(every.conflicts, len(limits))
    pools = [pool for plan in plans for pool in plan.target.pools]
    pooled = [every.conflicts[[every.position(name) for name in pool.devices]].any(axis=0) for pool in pools]
    groups = [*np.eye(len(limits), dtype=bool), *sharing, *pooled]
    most = [*limits, *(sharing @ every.processors @ rooms), *(pool.memory_bytes for pool in pools)]
    held = (hold_on(set(compress(devices, group)), plans, join).peak_bytes for group in groups)
    return all(size <= limit for size, limit in zip(held, most))
