"""Put bundles of one model together as the plans of one bundle, which holds each weight once.

A further plan is a folder of the bundle, and a bundle itself. Its segments refer to the weights file of the bundle
around it. Bytes that this file lacks, such as parts of split operators, are appended to it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from onnxplace.bundle.bundle import MANIFEST_FILE, SEGMENTS_FOLDER, WEIGHTS_FILE, Bundle, compute_sha256
from onnxplace.bundle.manifest import FileRecord, InitialRecord, LinkRecord, Manifest, SizeRecord
from onnxplace.feeds.feeds import Array
from onnxplace.model.tensors import make_reference, read_external_range
from onnxplace.model.weights import PAGE_BYTES

if TYPE_CHECKING:
    from onnx import ModelProto, TensorProto

SHARED_WEIGHTS = f"{SEGMENTS_FOLDER}/{WEIGHTS_FILE}"
# Parts of so many ways are found in whole weights.
MAX_PARTS = 64

AnyStored = TypeVar("AnyStored", bound=InitialRecord)


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
        self._offsets = defaultdict[int, set[int]](set)
        """Length of weights -> where each of them is."""
        for file in bundle.list_files(with_compiled=True):
            if file.endswith(".onnx"):
                for tensor in list_external(load_structure(bundle.file(file))):
                    offset, length = read_external_range(tensor)
                    self._offsets[length].add(offset)
        self._bytes = map_file(self._path)

    def take_over(self, folder: Path, manifest: Manifest) -> Manifest:
        """Let a plan in a folder refer to this file; return its manifest."""
        source, files = map_file(folder / SHARED_WEIGHTS), dict(manifest.files)
        for name in [name for name in files if name.endswith(".onnx")]:
            model = load_structure(folder / name)
            for tensor in (references := list_external(model)):
                offset, length = read_external_range(tensor)
                moved = self._place(source[offset : offset + length])
                reference = tensor.data_type, tensor.dims, SHARED_WEIGHTS, moved, length
                tensor.CopyFrom(make_reference(tensor.name, *reference))
            if references:
                (folder / name).write_bytes(model.SerializeToString())
                files[name] = _describe(folder, name)

        def move(record: AnyStored) -> AnyStored:
            moved = self._place(source[record.offset : record.offset + record.bytes])
            return record.model_copy(update={"linked": True, "offset": moved})

        updates = ({"initial": move(item.initial)} if item.initial else {} for item in manifest.states)
        states = tuple(item.model_copy(update=update) for item, update in zip(manifest.states, updates))
        streamed = {name: move(item) for name, item in manifest.streamed.items()}
        (folder / SHARED_WEIGHTS).write_bytes(b"")
        files[SHARED_WEIGHTS] = _describe(folder, SHARED_WEIGHTS)
        return manifest.model_copy(update={"files": files, "states": states, "streamed": streamed})

    def _place(self, data: Array) -> int:
        """Return where the file has these bytes, as a weight or as a part of one; they are appended if it has not."""
        length, head = len(data), data[:PAGE_BYTES]
        wholes = [size for size in self._offsets if 0 < length <= size <= MAX_PARTS * length and size % length == 0]
        for size in sorted(wholes):
            for offset in self._offsets[size]:
                for start in range(offset, offset + size, length):
                    part = self._bytes[start : start + length]
                    if np.array_equal(part[: len(head)], head) and np.array_equal(part, data):
                        return start
        start = -(-len(self._bytes) // PAGE_BYTES) * PAGE_BYTES
        with self._path.open("ab") as stream:
            stream.write(bytes(start - len(self._bytes)) + data.tobytes())
        self._bytes = map_file(self._path)
        self._offsets[length].add(start)
        return start


def load_structure(file: Path) -> ModelProto:
    """Return a model without the weights that are in a file."""
    import onnx

    return onnx.load(file, load_external_data=False)


def list_external(model: ModelProto) -> list[TensorProto]:
    """Return the initializers of a model that are in a weights file."""
    return [tensor for tensor in model.graph.initializer if tensor.data_location == tensor.EXTERNAL]


def map_file(path: Path) -> Array:
    """Return the bytes of a file, which may be empty, without reading it."""
    return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)


def _describe(folder: Path, name: str) -> FileRecord:
    return FileRecord(sha256=compute_sha256(folder / name), bytes=(folder / name).stat().st_size)


def _write_manifest(folder: Path, manifest: Manifest) -> None:
    (folder / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
