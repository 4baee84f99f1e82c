"""Put bundles of one model together as the plans of one bundle, which holds each weight once.

A further plan is a folder of the bundle, and a bundle itself. Its segments refer to the weights file of the bundle
around it. Bytes that this file lacks, such as parts of split operators, are appended to it.

ONNX Runtime maps this file. Sessions on CPU devices whose kernels read a weight where it lies share its pages, so that
memory holds it once. Kernels of products and of recurrent layers pack their weights when a session is opened: each plan
has its own, and so has each plan on a device with memory of its own (measured: docs/sizes-memory-part.md).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from onnxplace.bundle.bundle import MANIFEST_FILE, SEGMENTS_FOLDER, WEIGHTS_FILE, Bundle, compute_sha256
from onnxplace.bundle.manifest import (
    HOST,
    DeviceRecord,
    FileRecord,
    HeldRecord,
    InitialRecord,
    LinkRecord,
    Manifest,
    SizeRecord,
)
from onnxplace.feeds.feeds import Array
from onnxplace.model.nested_graphs import walk_nodes
from onnxplace.model.tensors import make_reference, read_external_range
from onnxplace.model.weights import PAGE_BYTES
from onnxplace.target.target import Target

SHARED_WEIGHTS = f"{SEGMENTS_FOLDER}/{WEIGHTS_FILE}"
# Parts of so many ways are found in whole weights.
MAX_PARTS = 64
# Operators whose kernels read weights where they lie.
TABLE_READERS = frozenset({"Gather", "Slice"})
# The same in models that were optimised when they were written; opening other ones rewrites weights of convolutions.
OPTIMISED_READERS = TABLE_READERS | {"Conv"}


def join_plans(bundles: Sequence[Bundle], updates: dict[str, Any], sizes: Sequence[SizeRecord]) -> Bundle:
    """Move the other bundles into the first one, as its plans; return it.

    Args:
        bundles: Bundles of one model, which nothing else uses.
        updates: Fields of the first one's manifest.
        sizes: The step of each plan at each size.
    """
    first, *others = bundles
    plans = tuple(f"plan{number}" for number in range(1, len(bundles)))
    for name, plan in zip(plans, others):
        plan.path.rename(first.path / name)
    if first.manifest.linked:
        manifests = [plan.manifest.model_copy(update={"link_levels": 2}) for plan in others]
    else:
        weights = _SharedWeights(first)
        rewritten = [weights.take_over(first.path / name, plan.manifest) for name, plan in zip(plans, others)]
        record = _describe(first.path, SHARED_WEIGHTS)
        link = LinkRecord(sha256=record.sha256, bytes=record.bytes)
        manifests = [manifest.model_copy(update={"linked": {SHARED_WEIGHTS: link}}) for manifest in rewritten]
    files = dict(first.manifest.files)
    files[SHARED_WEIGHTS] = _describe(first.path, SHARED_WEIGHTS)
    for name, manifest in zip(plans, manifests):
        _write_manifest(first.path / name, manifest)
        files |= {f"{name}/{file}": record for file, record in manifest.files.items()}
        files[f"{name}/{MANIFEST_FILE}"] = _describe(first.path, f"{name}/{MANIFEST_FILE}")
    updates = {**updates, "files": dict(sorted(files.items())), "plans": plans, "sizes": tuple(sizes)}
    manifest = first.manifest.model_copy(update=updates)
    _write_manifest(first.path, manifest)
    return Bundle(first.path, manifest)


class _SharedWeights:
    """The weights file of a bundle, which takes those of its plans."""

    def __init__(self, bundle: Bundle) -> None:
        self._path = bundle.path / SHARED_WEIGHTS
        self._ranges: dict[tuple[int, int], None] = {}
        """(length, offset) of each weight, in the order in which they are written."""
        for file in bundle.list_files(with_compiled=True):
            if file.endswith(".onnx"):
                for tensor in _list_external(onnx.load(bundle.file(file), load_external_data=False)):
                    offset, length = read_external_range(tensor)
                    self._ranges[length, offset] = None
        self._bytes = _map(self._path)

    def take_over(self, folder: Path, manifest: Manifest) -> Manifest:
        """Let a plan in a folder refer to this file; return its manifest."""
        source, files = _map(folder / SHARED_WEIGHTS), dict(manifest.files)
        for name in [name for name in files if name.endswith(".onnx")]:
            model = onnx.load(folder / name, load_external_data=False)
            for tensor in (references := _list_external(model)):
                offset, length = read_external_range(tensor)
                moved = self._place(source[offset : offset + length])
                tensor.CopyFrom(
                    make_reference(tensor.name, tensor.data_type, tensor.dims, SHARED_WEIGHTS, moved, length)
                )
            if references:
                (folder / name).write_bytes(model.SerializeToString())
                files[name] = _describe(folder, name)

        def move(record: InitialRecord) -> dict[str, Any]:
            moved = self._place(source[record.offset : record.offset + record.bytes])
            return {"linked": True, "offset": moved}

        states = tuple(
            item
            if item.initial is None
            else item.model_copy(update={"initial": item.initial.model_copy(update=move(item.initial))})
            for item in manifest.states
        )
        streamed = {name: item.model_copy(update=move(item)) for name, item in manifest.streamed.items()}
        (folder / SHARED_WEIGHTS).write_bytes(b"")
        files[SHARED_WEIGHTS] = _describe(folder, SHARED_WEIGHTS)
        return manifest.model_copy(update={"files": files, "states": states, "streamed": streamed})

    def _place(self, data: Array) -> int:
        """Return where the file has these bytes, as a weight or as a part of one; they are appended if it has not."""
        length = len(data)
        for size, offset in self._ranges:
            if length and size % length == 0 and size // length <= MAX_PARTS:
                for start in range(offset, offset + size, length):
                    found = self._bytes[start : start + length]
                    if np.array_equal(found[:PAGE_BYTES], data[:PAGE_BYTES]) and np.array_equal(found, data):
                        return start
        start = -(-len(self._bytes) // PAGE_BYTES) * PAGE_BYTES
        with self._path.open("ab") as stream:
            stream.write(bytes(start - len(self._bytes)))
            stream.write(data.data)
        self._bytes = _map(self._path)
        self._ranges[length, start] = None
        return start


def _list_external(model: onnx.ModelProto) -> list[TensorProto]:
    return [tensor for tensor in model.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]


def _map(path: Path) -> Array:
    return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)


def _describe(folder: Path, name: str) -> FileRecord:
    return FileRecord(sha256=compute_sha256(folder / name), bytes=(folder / name).stat().st_size)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")


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
        weights, mapped = _map(bundle.file(SHARED_WEIGHTS)), dict[str, set[tuple[int, object]]]()
        hosts = {device.id for device in bundle.target.devices if device.is_host}
        for segment in (item for item in bundle.manifest.segments if item.device in hosts):
            in_place = OPTIMISED_READERS if segment.optimised else TABLE_READERS
            model = onnx.load(bundle.file(segment.optimised or segment.file), load_external_data=False)
            packed = {
                name for node in walk_nodes(model.graph.node) if node.op_type not in in_place for name in node.input
            }
            for tensor in (item for item in _list_external(model) if item.name not in packed):
                offset, length = read_external_range(tensor)
                first = weights[offset : offset + min(length, PAGE_BYTES)].tobytes()
                mapped.setdefault(segment.device, set()).add((length, offset if bundle.manifest.linked else first))
        return PlanMemory(bundle.manifest.devices, bundle.target, mapped)


def hold_together(plans: Sequence[PlanMemory]) -> dict[str, HeldRecord]:
    """Return what each device holds for some plans: the weights of all of them, and the values of any one.

    The record `HOST` is that of a process with all devices on processor cores.
    """
    devices = {device.id: device for plan in plans for device in plan.target.devices}
    groups = {name: {name} for name in devices} | {HOST: {name for name, item in devices.items() if item.has_cores}}
    return {name: _hold(plans, group) for name, group in groups.items()}


def _hold(plans: Sequence[PlanMemory], group: Collection[str]) -> HeldRecord:
    own = [[item for item in plan.devices if item.id in group] for plan in plans]
    uses = Counter(key for plan in plans for name in group for key in plan.mapped.get(name, ()))
    shared = sum((count - 1) * length for (length, _), count in uses.items())
    weights = sum(item.weights_bytes for items in own for item in items) - shared
    values = max(sum(item.peak_bytes - item.weights_bytes for item in items) for items in own)
    return HeldRecord(weights_bytes=weights, shared_bytes=shared, peak_bytes=weights + values)


def fits_together(plans: Sequence[PlanMemory]) -> bool:
    """Return whether the devices of some plans have room for what they hold together.

    Devices that share processors share the memory of these: `cpu:0-1` has that of `cpu:0` and of `cpu:1`. A pool holds
    what is on its devices, and on others with their processors.
    """
    devices, held = {device.id: device for plan in plans for device in plan.target.devices}, hold_together(plans)
    every, sizes = Target(tuple(devices.values())), np.array([held[name].peak_bytes for name in devices])
    limits = np.array([device.memory_bytes for device in every.devices])
    for pool in (pool for plan in plans for pool in plan.target.pools):
        members = every.conflicts[[every.position(name) for name in pool.devices]].any(axis=0)
        if sizes[members].sum() > pool.memory_bytes:
            return False
    # Each processor has the part of its devices' memory; devices may share processors by way of others.
    rooms = (every.processors * np.ceil(limits / every.processors.sum(axis=1))[:, None]).max(axis=0)
    sharing = np.linalg.matrix_power(every.conflicts, len(limits))
    return bool((sizes <= limits).all() and (sharing @ sizes <= sharing @ every.processors @ rooms).all())
