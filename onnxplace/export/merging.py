"""Put a bundle back together as one model."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from onnx import GraphProto, ModelProto, NodeProto, StringStringEntryProto, TensorProto, helper

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import Manifest
from onnxplace.errors import Diagnostic, UsageError, format_count
from onnxplace.export.exporting import note_plans
from onnxplace.export.segment_models import BundleModels, SegmentModel, describe_values
from onnxplace.model.model import MAX_INLINE_BYTES
from onnxplace.model.tensors import tensor_size
from onnxplace.model.weights import WeightFile
from onnxplace.model_metadata import TRAINING_KEY
from onnxplace.utils.file_locks import hold_file_lock, sweep_leftovers
from onnxplace.utils.files import cannot_write_error, format_path, require_writable, write_refused_error
from onnxplace.utils.names import claim_name

DATA_ENDING = ".data"


@dataclass(frozen=True)
class MergedModel:
    """A model that was put together from a bundle."""

    path: Path
    data: Path | None
    """The file of its weights; None if they are in the model."""
    nodes: int
    segments: int
    weights_bytes: int
    diagnostics: tuple[Diagnostic, ...] = ()


def merge_bundle(
    bundle: Bundle | str | Path, output: str | Path, *, external_data: bool = False, force: bool = False
) -> MergedModel:
    """Put a bundle back together as one ONNX model.

    The model computes what the bundle computes, and for whole operators bit for bit. Where operators are split over
    devices, it has a node for each part and the exchanges between them.

    Args:
        bundle: A bundle, or its path.
        output: Path of the model. Weights go into a second file with the ending `.data` where they exceed 1 GiB.
        external_data: Whether weights go into the second file in any case.
        force: Whether existing files are replaced.

    Raises:
        BundleError: The bundle is damaged.
        UsageError: A file exists, or cannot be written.
        ExecutionError: The disk is full.

    >>> merge_bundle("model.bundle", "model.onnx").nodes  # doctest: +SKIP
    283
    """
    opened = bundle if isinstance(bundle, Bundle) else Bundle.open(bundle, "all")
    path = Path(output)
    if not path.name:
        raise cannot_write_error("expected the name of a file", path)
    data = path.with_name(path.name + DATA_ENDING)
    require_output_files_free(path, data, opened.path, force)
    models = BundleModels(opened)
    initializers = collect_initializers(models)
    weights_bytes = sum(map(tensor_size, initializers.values()))
    is_external = external_data or weights_bytes > MAX_INLINE_BYTES
    node_count, has_data = _write_files(models, initializers, path, data if is_external else None)
    return MergedModel(
        path=path,
        data=data if has_data else None,
        nodes=node_count,
        segments=len(models.segments),
        weights_bytes=weights_bytes,
        diagnostics=(*note_changes(opened.manifest, path), *note_plans(opened.manifest, format_path(path))),
    )


def require_output_files_free(path: Path, data: Path, bundle: Path, force: bool) -> None:
    """Raise UsageError unless a model and its file of weights can be written."""
    for file in (path, data):
        require_writable(file, bundle)
        if not force and os.path.lexists(file):
            hint = "choose another -o, or replace it with --force"
            raise UsageError("U030", "it already exists", where=format_path(file), hint=hint)


def note_changes(manifest: Manifest, path: Path) -> Iterator[Diagnostic]:
    """Yield notes on what the merged model computes otherwise than the model that was compiled."""
    if manifest.sharding is not None:
        message = (
            "operators are split over devices: the model has a node for each part and for the exchanges between them. "
            "Its results agree with those of the original within tolerance, not bit for bit"
        )
        yield Diagnostic("I001", message, where=format_path(path), hint="segments/whole.onnx has whole operators")


def _write_files(
    models: BundleModels, initializers: Mapping[str, TensorProto], path: Path, data: Path | None
) -> tuple[int, bool]:
    """Write a model, and its weights to `data` if that is given.

    Returns the number of its nodes, and whether any weight is in `data`: small ones stay in the model.

    Each file is complete when it gets its name. The model comes last, and one that it replaces goes before its weights.
    """
    sweep_leftovers(path.absolute().parent)
    has_data = False
    try:
        with hold_file_lock(path.absolute().parent) as lock:
            unfinished = lock.path_with_ending("data")
            if data is None:
                proto = build_whole_model(models, initializers.values(), None)
            else:
                with WeightFile(unfinished, data.name) as weights:
                    proto = build_whole_model(models, initializers.values(), weights)
            lock.path.write_bytes(proto.SerializeToString())
            has_data = data is not None and weights.bytes_written > 0
            try:
                if data is not None and has_data:
                    with suppress(FileNotFoundError):
                        path.unlink()
                    unfinished.replace(data)
                lock.path.replace(path)
            except BaseException:
                # An interrupt may come after each rename: weights without their model go, a complete pair stays.
                if data is not None and has_data and not unfinished.exists() and lock.path.exists():
                    data.unlink(missing_ok=True)
                raise
    except OSError as problem:
        raise write_refused_error(problem, path) from None
    return len(proto.graph.node), has_data


def collect_initializers(models: BundleModels) -> dict[str, TensorProto]:
    """Return the weights of all segments, the initial values of states, and defaults that no segment reads, by name."""
    tensors = {tensor.name: tensor for segment in models.segments for tensor in segment.proto.graph.initializer}
    tensors |= models.initial_states
    unread = {item.name for item in models.manifest.inputs if item.optional} - tensors.keys()
    if unread:
        tensors |= {tensor.name: tensor for tensor in models.whole.graph.initializer if tensor.name in unread}
    return tensors


def build_whole_model(
    models: BundleModels, initializers: Iterable[TensorProto], weights: WeightFile | None
) -> ModelProto:
    """Return the model that the segments of a bundle are parts of.

    Names are those of the segments, which share one set of names. Nodes follow each other by segments. The model
    has the metadata of the file that was compiled, such as its description; its producer is onnxplace.

    Args:
        models: The bundle.
        initializers: As `collect_initializers` returns them.
        weights: A file that takes the weights; None to hold them in the model.
    """
    manifest, header, metadata = models.manifest, models.header, models.manifest.metadata
    tensors = models.place(initializers, weights)
    graph = GraphProto(
        name=manifest.model or "graph",
        node=_return_outputs(manifest, models.segments, {tensor.name for tensor in tensors}),
        initializer=tensors,
        input=describe_values(manifest.inputs),
        output=describe_values(manifest.outputs),
        doc_string=metadata.graph_description,
    )
    entries = dict(metadata.custom_metadata_map)
    if manifest.training is not None and any(segment.record.keeps_order for segment in models.segments):
        entries[TRAINING_KEY] = manifest.training.model_dump_json(exclude={"nodes"})
    return ModelProto(
        ir_version=header.ir_version,
        opset_import=header.opset_import,
        producer_name="onnxplace",
        domain=metadata.domain,
        model_version=metadata.version,
        doc_string=metadata.description,
        graph=graph,
        metadata_props=[StringStringEntryProto(key=key, value=value) for key, value in entries.items()],
    )


def _return_outputs(manifest: Manifest, segments: Iterable[SegmentModel], weights: set[str]) -> list[NodeProto]:
    """Return all nodes, so that each output of the model has its own name again.

    The compiler lets a node return each output that is a weight, since a segment has to compute it.
    """
    renamed = {record.value: record.name for record in manifest.outputs if record.value != record.name}
    nodes: list[NodeProto] = []
    for segment in segments:
        for node in segment.proto.graph.node:
            value = node.output[0] if node.output else ""
            if value in renamed and renamed[value] in weights and list(node.input) == [renamed[value]]:
                continue
            nodes.append(node)
    produced = {name for node in nodes for name in node.output} | weights
    taken = {node.name for node in nodes}
    for value, name in renamed.items():
        if name not in produced:
            label = claim_name(f"{name}/returned", taken)
            nodes.append(helper.make_node("Identity", [value], [name], name=label))
    return nodes


def describe_merged(merged: MergedModel) -> str:
    """Return what was merged, in a line."""
    parts = format_count(merged.segments, "segment")
    data = f", weights in {merged.data}" if merged.data else ""
    return f"{merged.path}: {format_count(merged.nodes, 'node')} of {parts}{data}"
