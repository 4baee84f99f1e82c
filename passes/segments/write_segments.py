"""Write the files of a bundle.

They are a model per segment, the weights, the whole model, costs and manifest.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from onnx import TypeProto, ValueInfoProto, helper

from onnxplace.bundle import (
    COSTS_FILE,
    MANIFEST_FILE,
    SEGMENTS_FOLDER,
    WEIGHTS_FILE,
    WHOLE_MODEL_FILE,
    BatchingRecord,
    FileRecord,
    describe_linked_file,
)
from onnxplace.facts import Recomputation, Segment, Segments, Shards
from onnxplace.model import Model, WeightFile, find_scales_to_protect
from onnxplace.passes.segments.boundary import infer_boundary_types
from onnxplace.passes.segments.fill_manifest import WrittenFiles, build_manifest
from onnxplace.passes.segments.initial_states import store_initial_states
from onnxplace.state import State
from onnxplace.target import Target, split_host
from onnxplace.utils import report_progress


@dataclass(frozen=True)
class _BundleFolder:
    """A folder that is being filled, with a record of each file."""

    path: Path
    records: dict[str, FileRecord] = field(default_factory=dict)

    def write(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)
        self.records[name] = FileRecord(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))


@dataclass(frozen=True)
class WrittenWeights:
    """Where the weights of a bundle are."""

    is_linked: bool
    """Whether it refers to weights files of the model."""
    copied: tuple[str, ...]
    """Parts of weights that were copied nevertheless: they are not contiguous in their file."""


def write_bundle_files(
    state: State, path: Path, pipeline: str, costs: str, linkable_folder: Path | None, batching: BatchingRecord
) -> WrittenWeights:
    """Create and fill the folder of a bundle.

    `costs` is the text of its cost file, `batching` says whether requests can be joined. Weights files in
    `linkable_folder` are referred to; without such a folder all weights are copied.
    """
    path.mkdir()
    (path / SEGMENTS_FOLDER).mkdir()
    folder, model, segments = _BundleFolder(path), state[Model], state[Segments].segments
    ids = name_segments(segments, state.target)
    crossing = {name for segment in segments for name in (*segment.inputs, *segment.outputs)}
    types = infer_boundary_types(model, crossing)
    with WeightFile(path / SEGMENTS_FOLDER / WEIGHTS_FILE, WEIGHTS_FILE, linkable_folder) as weights:
        initial_states = store_initial_states(model, weights)
        protected_scales = find_scales_to_protect(model, [segment.nodes for segment in segments])
        for number, (segment, name, scales) in enumerate(zip(segments, ids, protected_scales)):
            report_progress(number, len(segments))
            proto = _segment_bytes(model, segment, name, weights, types, scales, initial_states)
            folder.write(f"{SEGMENTS_FOLDER}/{name}.onnx", proto)
        folder.write(WHOLE_MODEL_FILE, _whole_model(state, linkable_folder).whole_proto(weights).SerializeToString())
    record = FileRecord(sha256=weights.digest, bytes=weights.bytes_written)
    folder.records[f"{SEGMENTS_FOLDER}/{WEIGHTS_FILE}"] = record
    folder.write(COSTS_FILE, costs.encode())
    written = WrittenFiles(dict(sorted(folder.records.items())), initial_states)
    manifest = build_manifest(state, ids, types, written, pipeline, batching)
    linked = {location: describe_linked_file(file) for location, file in sorted(weights.linked.items())}
    text = manifest.model_copy(update={"linked": linked}).model_dump_json(indent=1)
    (path / MANIFEST_FILE).write_text(text, encoding="utf-8")
    return WrittenWeights(bool(linked), tuple(weights.copied))


def _whole_model(state: State, linkable_folder: Path | None) -> Model:
    """Return the unsplit model, the reference of the bundle.

    For a sharded model that is the original, of the same weights: in parts if they are copied, else as in its file.
    """
    if Recomputation in state and (whole := state[Recomputation].whole) is not None:
        return whole
    if Shards not in state:
        return state[Model]
    shards = state[Shards]
    return (shards.whole_of_parts if linkable_folder is None else shards.whole) or state[Model]


def name_segments(segments: Sequence[Segment], target: Target) -> list[str]:
    """Name segments by device and position there: `cpu0-000`."""
    counts = [0] * len(target.devices)
    ids = []
    for segment in segments:
        # `cuda:0/1` becomes `cuda0p1`, and `node1/cpu:0` becomes `node1-cpu0`, since files have these names.
        host, local_id = split_host(target.devices[segment.device].id)
        name = f"{host}-" * bool(host) + local_id.replace(":", "").replace("/", "p")
        ids.append(f"{name}-{counts[segment.device]:03d}")
        counts[segment.device] += 1
    return ids


def _segment_bytes(
    model: Model,
    segment: Segment,
    name: str,
    weights: WeightFile,
    types: Mapping[str, TypeProto],
    protected_scales: Collection[str],
    initial_states: Collection[str],
) -> bytes:
    """Return the ONNX file of a segment.

    Protected scales are inputs with a default value in it. Initial values of states are not: the runtime has them.
    """
    nodes = [model.nodes[index] for index in segment.nodes]
    reads = dict.fromkeys(value for index in segment.nodes for value in model.reads[index])
    stored = [value for value in reads if value in model.initializers and value not in initial_states]
    tensors = [weights.place(model.initializers[value], model.folder) for value in stored]
    inputs = [ValueInfoProto(name=value, type=types[value]) for value in segment.inputs]
    inputs += [
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in tensors
        if tensor.name in protected_scales
    ]
    outputs = [ValueInfoProto(name=value, type=types[value]) for value in segment.outputs]
    return model.proto(nodes, tensors, inputs, outputs, name=name).SerializeToString()
