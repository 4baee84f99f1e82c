"""Write segments as models of their own, with the initial values of their states."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from onnx import ModelProto

from onnxplace.export.bundle_models import BundleModels, SegmentModel
from onnxplace.model import WeightFile
from onnxplace.utils import progress_part

WEIGHTS_FILE = "weights.bin"


def write_segment_files(models: BundleModels, folder: Path, segments: Iterable[tuple[str, SegmentModel]]) -> None:
    """Write segments under these names to a folder, with their weights in one file next to them.

    A state whose initial value is known becomes an input with this default.
    """
    weights_path, rows = folder / WEIGHTS_FILE, list(segments)
    with WeightFile(weights_path, WEIGHTS_FILE) as weights:
        for index, (name, segment) in enumerate(rows):
            with progress_part(index, len(rows)):
                (folder / name).write_bytes(build_segment(models, segment, weights).SerializeToString())
        is_empty = not weights.bytes_written
    if is_empty:
        weights_path.unlink()


def build_segment(models: BundleModels, segment: SegmentModel, weights: WeightFile) -> ModelProto:
    """Return the model of a segment, whose weights are in a file."""
    proto = ModelProto()
    proto.CopyFrom(segment.proto)
    states = [models.initial_states[name] for name in segment.record.inputs if name in models.initial_states]
    tensors = models.place((*segment.proto.graph.initializer, *states), weights)
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(tensors)
    return proto
