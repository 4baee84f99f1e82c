"""Segments of a bundle, and models made of all of them, as ONNX files; and which others each segment reads."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from pathlib import Path

from onnx import ModelProto, NodeProto, TensorProto

from onnxplace.bundle.manifest import Manifest, SegmentRecord
from onnxplace.export.segment_models import BundleModels, SegmentModel
from onnxplace.model.model import MAX_INLINE_BYTES
from onnxplace.model.tensors import tensor_size
from onnxplace.model.weights import WeightFile
from onnxplace.utils.progress import progress_part

WEIGHTS_FILE = "weights.bin"


def write_segment_files(folder: Path, segments: Iterable[tuple[str, BundleModels, SegmentModel]]) -> None:
    """Write segments of bundles under these names to a folder, with the weights of all in one file next to them.

    A state whose initial value is known becomes an input with this default.
    """
    weights_path, rows = folder / WEIGHTS_FILE, list(segments)
    with WeightFile(weights_path, WEIGHTS_FILE) as weights:
        for index, (name, models, segment) in enumerate(rows):
            with progress_part(index, len(rows)):
                (folder / name).write_bytes(build_segment(models, segment, weights).SerializeToString())
        is_empty = not weights.bytes_written
    if is_empty:
        weights_path.unlink()


def write_model(
    path: Path, initializers: Iterable[TensorProto], build: Callable[[WeightFile | None], ModelProto]
) -> ModelProto:
    """Write a model with these initializers, and return it; where they are large, in a file next to it.

    `build` returns the model, and gets that file of weights, or None for a model that has them.
    """
    if sum(map(tensor_size, initializers)) > MAX_INLINE_BYTES:
        data = path.with_name(f"{path.name}.data")
        with WeightFile(data, data.name) as weights:
            proto = build(weights)
    else:
        proto = build(None)
    path.write_bytes(proto.SerializeToString())
    return proto


def drop_metadata(node: NodeProto, keys: Collection[str]) -> None:
    """Remove the entries with these keys from the metadata of a node."""
    others = [entry for entry in node.metadata_props if entry.key not in keys]
    del node.metadata_props[:]
    node.metadata_props.extend(others)


def build_segment(models: BundleModels, segment: SegmentModel, weights: WeightFile) -> ModelProto:
    """Return the model of a segment, whose weights are in a file."""
    proto = deepcopy(segment.proto)
    states = [models.initial_states[name] for name in segment.record.inputs if name in models.initial_states]
    tensors = models.place((*segment.proto.graph.initializer, *states), weights)
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(tensors)
    return proto


def list_producers(manifest: Manifest, segment: SegmentRecord) -> tuple[str, ...]:
    """Return the segments whose values a segment reads, each once."""
    producers = (manifest.values[name].producer for name in segment.inputs)
    return tuple(dict.fromkeys(producer for producer in producers if producer is not None))
