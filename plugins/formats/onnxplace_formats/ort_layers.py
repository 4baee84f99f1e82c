"""Export a bundle as one model for one session of ONNX Runtime, whose nodes are on the devices of the bundle.

ONNX Runtime 1.26 assigns nodes to execution providers by an annotation in their metadata, `layer_ann`, and a session
option that says which provider has which annotation. Here a node is annotated with the id of its device.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnxplace.bundle.bundle import COSTS_FILE
from onnxplace.errors import Diagnostic, InputError, format_names
from onnxplace.export.exporting import note_plans, note_routes, require_one_host
from onnxplace.export.merging import build_whole_model, collect_initializers
from onnxplace.export.segment_models import BundleModels
from onnxplace.model.nested_graphs import walk_nodes
from onnxplace.model.weights import WeightFile
from onnxplace.target.target import Device, count_cores_by_processor
from onnxplace.utils.files import read_json
from onnxplace.utils.quantities import format_milliseconds
from onnxplace_formats.memory_stats import collect_memory, format_stats, measure_weights
from onnxplace_formats.one_session import OneSession
from onnxplace_formats.ort_providers import describe_providers, designate, explain_conflict, orders_host_first
from onnxplace_formats.segment_files import drop_metadata, write_model
from onnxplace_formats.session_prediction import predict_session

TO = "ort-layers"
LAYER_KEY = "layer_ann"
"""The metadata of a node by which ONNX Runtime assigns it."""
BY_LAYER, BY_NAME = "session.layer_assignment_settings", "session.name_based_layer_assignment"
"""The session options that say which provider has which annotations, or which names of nodes."""
LIBRARIES = "custom_op_libraries"
"""The entry of the settings with the libraries of operators that ONNX Runtime lacks."""
MODEL_FILE, SETTINGS_FILE, SCRIPT_FILE, MEMORY_FILE = "model.onnx", "session_options.json", "session.py", "memory.csv"


def write_layers(models: BundleModels, folder: Path) -> tuple[Diagnostic, ...]:
    """Write the whole model with the devices of its nodes, the options of the session, and a script that opens it.

    Raises:
        InputError: The bundle is for several hosts, or uses devices that do not share a session.
    """
    manifest = models.manifest
    require_one_host(manifest, TO)
    used = dict.fromkeys(segment.record.device for segment in models.segments)
    devices = [models.devices[name] for name in used]
    if conflict := explain_conflict(devices):
        hint = f"compile with --placer {OneSession.name}, which avoids that, or export --to stages"
        raise InputError("I015", conflict, where=f"--to {TO}", hint=hint)
    initializers = list(collect_initializers(models).values())

    def build(weights: WeightFile | None) -> ModelProto:
        proto = build_whole_model(models, initializers, weights)
        annotate_layers(proto, models)
        return proto

    proto = write_model(folder / MODEL_FILE, initializers, build)
    settings = describe_session(devices, any(segment.record.keeps_order for segment in models.segments))
    (folder / SETTINGS_FILE).write_text(json.dumps(settings, indent=1) + "\n", encoding="utf-8")
    shutil.copyfile(Path(__file__).with_name("run_layers.py"), folder / SCRIPT_FILE)
    # Budgets of memory are those of CUDA's provider.
    if any(designate(device) == "cuda" for device in devices):
        write_memory(proto, measure_weights(initializers), models, folder / MEMORY_FILE)
    return (*note_routes(manifest, TO), *note_plans(manifest, TO), *note_placement(models, devices))


def write_memory(proto: ModelProto, weights: Mapping[str, int], models: BundleModels, path: Path) -> None:
    """Write the memory of nodes as ONNX Runtime reads it for a budget, unless the size of a value is not known."""
    file = models.bundle.file(COSTS_FILE)
    costs = read_json(file, "C011", "a cost file") if file.exists() else {}
    sizes = dict(costs.get("value_bytes", {}))
    sizes |= {item.name: sizes[item.value] for item in models.manifest.outputs if item.value in sizes}
    inputs = [item.name for item in models.manifest.inputs]
    rows = collect_memory(proto.graph.node, weights, inputs, {**costs, "value_bytes": sizes})
    if rows is not None:
        path.write_text(format_stats(rows), encoding="utf-8")


def annotate_layers(proto: ModelProto, models: BundleModels) -> None:
    """Annotate each node with the id of its device, in place of what the model that was compiled said.

    Nodes of subgraphs have no annotation: in ONNX Runtime they follow the node around them.
    """
    device_of = {node.name: item.record.device for item in models.segments for node in item.proto.graph.node}
    home = dict[str, str]()  # of each value
    for node in walk_nodes(proto.graph.node):
        drop_metadata(node, (LAYER_KEY,))
    for node in proto.graph.node:
        # A node that only renames an output belongs to no segment.
        if device := device_of.get(node.name) or next((home[name] for name in node.input if name in home), ""):
            node.metadata_props.add(key=LAYER_KEY, value=device)
            home.update(dict.fromkeys(node.output, device))


def describe_session(devices: Sequence[Device], keeps_order: bool = False) -> dict[str, Any]:
    """Return the options of a session: entries of its configuration, and its providers in their order.

    Where the CPU's provider is the first, it takes all nodes whose layer no rule names.
    """
    layers: dict[str, list[str]] = {}
    for device in devices:
        if device.is_host and orders_host_first(devices):
            continue
        layers.setdefault(designate(device), []).append(f"={device.id}")
    rules = (f"{word}({','.join(annotations)})" for word, annotations in layers.items())
    # As the costs of nodes were measured; of several CPU devices, all cores, each once.
    threads = sum(count_cores_by_processor([device for device in devices if device.is_host]).values())
    return {
        BY_LAYER: ";".join(rules),
        "providers": [provider.describe() for provider in describe_providers(devices)],
        **({"intra_op_num_threads": threads} if threads else {}),
        **({"keeps_order": True} if keeps_order else {}),
    }


def note_placement(models: BundleModels, devices: Sequence[Device]) -> Iterator[Diagnostic]:
    """Yield notes on what one session does otherwise than the bundle."""
    manifest = models.manifest
    if manifest.custom_operators:
        message = f"the session needs the library of the operators {format_names(manifest.custom_operators)}"
        hint = f'write its path into {SETTINGS_FILE}: "{LIBRARIES}": ["/path/to/library"]'
        yield Diagnostic("I001", message, where=TO, hint=hint)
    hosts = [device.id for device in devices if device.is_host]
    if len(hosts) > 1:
        message = f"{', '.join(hosts)} are one device in a session: its nodes run one after the other"
        yield Diagnostic("I001", message, where=TO, hint="export --to stages keeps them apart")
    if manifest.sharding is not None:
        message = "operators are split over devices: the model has a node for each part"
        yield Diagnostic("I001", message, where=TO, hint="compile with --shard off")
    if len(devices) > 1 and manifest.placer != OneSession.name:
        message = f"placer {manifest.placer!r} lets devices compute at the same time, which one session does not"
        if predicted := predict_session(models):
            message += f": it takes {format_milliseconds(predicted.step_seconds)} for this placement by its costs"
            best = predicted.best_seconds
            message += "" if best is None else f", and {format_milliseconds(best)} for the best one"
        yield Diagnostic("I001", message, where=TO, hint=f"compile with --placer {OneSession.name}, the best for one")
