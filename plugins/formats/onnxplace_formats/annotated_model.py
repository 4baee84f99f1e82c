"""Export a bundle as one model whose nodes say on which device they belong, in ONNX's own words.

ONNX has these fields since IR version 11 ("Multi-device execution" in its docs/IR.md). Netron shows the metadata of
nodes as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path

from onnx import DeviceConfigurationProto, ModelProto, TensorProto

from onnxplace.bundle.bundle_simulation import order_segments
from onnxplace.bundle.manifest import Manifest
from onnxplace.errors import Diagnostic
from onnxplace.export.exporting import note_plans, note_routes
from onnxplace.export.merging import build_whole_model, collect_initializers
from onnxplace.export.segment_models import BundleModels
from onnxplace.model.device_metadata import CONFIGURATION, DEVICE_KEY, MIN_IR_VERSION
from onnxplace.model.weights import WeightFile
from onnxplace_formats.segment_files import drop_metadata, list_producers, write_model

MODEL_FILE = "model.onnx"
SEGMENT_KEY = "onnxplace.segment"


def write_annotated_model(models: BundleModels, folder: Path) -> tuple[Diagnostic, ...]:
    """Write the whole model with its devices; large weights go into their own file.

    A model whose operators were split with `compile --shard-metadata` has whole operators with their layouts.
    """
    with_layouts = models.manifest.sharding is not None and bool(models.whole.configuration)
    initializers = list(models.whole.graph.initializer if with_layouts else collect_initializers(models).values())

    def build(weights: WeightFile | None) -> ModelProto:
        if with_layouts:
            return copy_whole_model(models, initializers, weights)
        proto = build_whole_model(models, initializers, weights)
        annotate_nodes(proto, models)
        return proto

    write_model(folder / MODEL_FILE, initializers, build)
    notes = note_routes(models.manifest, "onnx-metadata") + note_plans(models.manifest, "onnx-metadata")
    if models.manifest.sharding is None or with_layouts:
        return notes
    message = "operators are split over devices: the model has a node for each part, on one device each"
    hint = "compile with --shard-metadata to export whole operators with sharding specifications"
    return (*notes, Diagnostic("I001", message, where="onnx-metadata", hint=hint))


def copy_whole_model(
    models: BundleModels, initializers: Sequence[TensorProto], weights: WeightFile | None
) -> ModelProto:
    """Return the model of whole operators, which has layouts already, with its weights in a file or in itself."""
    proto = deepcopy(models.whole)
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(models.place(initializers, weights))
    return proto


def annotate_nodes(proto: ModelProto, models: BundleModels) -> None:
    """Add the device of each node: as a sharding specification of its outputs, and as metadata.

    They replace what the model that was compiled said of devices. The stage of a node is the number of times that the
    longest path to it changes the device.
    """
    devices = list(models.devices)
    stages = number_stages(models.manifest)
    segment_of = {node.name: segment.record for segment in models.segments for node in segment.proto.graph.node}
    proto.ir_version = max(proto.ir_version, MIN_IR_VERSION)
    proto.configuration.append(DeviceConfigurationProto(name=CONFIGURATION, num_devices=len(devices), device=devices))
    for node in proto.graph.node:
        drop_metadata(node, (DEVICE_KEY, SEGMENT_KEY))
        del node.device_configurations[:]
        if (record := segment_of.get(node.name)) is None:  # it only renames an output
            continue
        entry = node.device_configurations.add(configuration_id=CONFIGURATION, pipeline_stage=stages[record.id])
        for name in filter(None, node.output):
            entry.sharding_spec.add(tensor_name=name, device=[devices.index(record.device)])
        node.metadata_props.add(key=DEVICE_KEY, value=record.device)
        node.metadata_props.add(key=SEGMENT_KEY, value=record.id)


def number_stages(manifest: Manifest) -> dict[str, int]:
    """Return the stage of each segment: how often the longest path to it changes the device."""
    records, stages = {segment.id: segment for segment in manifest.segments}, dict[str, int]()
    for segment in order_segments(manifest):
        producers = list_producers(manifest, segment)
        before = [stages[name] + (records[name].device != segment.device) for name in producers]
        stages[segment.id] = max(before, default=0)
    return stages
