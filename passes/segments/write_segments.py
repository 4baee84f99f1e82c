"""Write the files of a bundle: a model per segment, the weights, the whole model, costs and manifest.

ONNX requires each input and output of a segment to be declared, so the types of all values that cross are found first.
Initial values of carried states are written once, and are read by no segment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto, helper

from onnxplace.bundle.bundle import (
    COSTS_FILE,
    MANIFEST_FILE,
    SEGMENTS_FOLDER,
    WEIGHTS_FILE,
    WHOLE_MODEL_FILE,
    compute_sha256,
    describe_linked_file,
    external_data_options,
)
from onnxplace.bundle.manifest import BatchingRecord, FileRecord, InitialRecord, SegmentRecord, WeightRecord
from onnxplace.errors import Diagnostic, ModelError, OnnxplaceError, format_count
from onnxplace.facts import Original, Prediction, Profile, Segment, Segments, Streaming, WeightSource
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.model.cut_constraints import find_scales_to_protect
from onnxplace.model.model import Model, store_for_session
from onnxplace.model.tensors import format_type, parse_type, read_shape_entries
from onnxplace.model.weights import WeightFile
from onnxplace.passes.segments.compile_segments import (
    compile_segments,
    list_segment_devices,
    may_be_optimised,
    optimise_segment,
    specialise,
)
from onnxplace.passes.segments.fill_manifest import build_manifest
from onnxplace.state import State
from onnxplace.utils.file_locks import temporary_folder
from onnxplace.utils.progress import report_progress


def infer_boundary_types(model: Model, names: Iterable[str]) -> dict[str, TypeProto]:
    """Return the type of each value, from shape inference or ONNX Runtime.

    ONNX Runtime also knows the shapes of outputs, which users see, behind operators that ONNX does not define.

    Raises:
        ModelError: neither knows the type of a value.
    """
    known = model.types
    types = {name: known[name] for name in names if name in known and _is_complete(known[name])}
    # Without such operators, a missing shape is one that inference gets wrong, also that of ONNX Runtime.
    has_others = any(node.domain not in ("", "ai.onnx", "ai.onnx.ml") for node in model.nodes)
    undeclared = {item.name for item in model.outputs if has_others and read_shape_entries(item.type) is None}
    described = sorted(name for name in undeclared & types.keys() if read_shape_entries(types[name]) is None)
    if described:
        with suppress(OnnxplaceError):  # such as that of a library of operators that is not given here
            types |= _infer_with_onnxruntime(model, described)
    unknown = sorted(set(names) - set(types))
    return {**types, **_infer_with_onnxruntime(model, unknown)} if unknown else types


def _is_complete(value_type: TypeProto) -> bool:
    return not value_type.HasField("tensor_type") or value_type.tensor_type.elem_type != TensorProto.UNDEFINED


def _infer_with_onnxruntime(model: Model, names: list[str]) -> dict[str, TypeProto]:
    """Open the model with these values as outputs and read types."""
    returned = {output.name for output in model.outputs}
    more = [ValueInfoProto(name=name) for name in names if name not in returned]
    with temporary_folder() as folder:
        source, entries = store_for_session(model, folder, more)
        session = open_session(source, make_session_options([0], "none", entries), where=model.name)
        unknown = set(names)
        outputs = [output for output in session.get_outputs() if output.name in unknown]
        types = {output.name: parse_type(output.type, output.shape or None) for output in outputs}
    for name in names:
        if types.get(name) is None:
            raise ModelError(
                "M008",
                "its type is unknown, so the model cannot be cut there",
                where=f"value {name!r}",
                hint="export the model with value_info, or keep its producer and readers together with --colocate",
            )
    return {name: value_type for name, value_type in types.items() if value_type is not None}


def store_initial_states(model: Model, weights: WeightFile) -> dict[str, InitialRecord]:
    """Write the default values of state inputs; return where each is, by input.

    In a segment they would be weights: a second copy, in memory for as long as its session is open. States of types
    without plain bytes, such as strings, stay there.
    """
    found = {name: _store(model, name, weights) for name in model.states if model.overridable(name)}
    return {name: record for name, record in found.items() if record is not None}


def store_streamed_weights(
    model: Model, weights: WeightFile, sources: Mapping[str, WeightSource]
) -> dict[str, WeightRecord]:
    """Write the weights that stream; return where each is."""
    records = {}
    for name, source in sources.items():
        record = _store(model, name, weights)
        assert record is not None, f"{name} has no plain bytes"
        records[name] = WeightRecord(**record.model_dump(), dtype=format_type(_type_of(model, name)), home=source)
    return records


def _store(model: Model, name: str, weights: WeightFile) -> InitialRecord | None:
    """Return where the bytes of an initializer are, which are written; None for types without plain bytes."""
    tensor = model.initializers[name]
    if (stored := weights.store(tensor, model.folder)) is None:
        return None
    return InitialRecord(
        file=stored.location if stored.is_linked else f"{SEGMENTS_FOLDER}/{WEIGHTS_FILE}",
        linked=stored.is_linked,
        offset=stored.offset,
        bytes=stored.size,
        shape=tuple(tensor.dims),
    )


def _type_of(model: Model, name: str) -> TypeProto:
    """Return the type of an initializer."""
    tensor = model.initializers[name]
    return helper.make_tensor_type_proto(tensor.data_type, tensor.dims)


@dataclass(frozen=True)
class _BundleFolder:
    """A folder that is being filled, with a record of each file."""

    path: Path
    records: dict[str, FileRecord] = field(default_factory=dict)

    def write(self, name: str, data: bytes) -> None:
        (self.path / name).write_bytes(data)
        self.records[name] = FileRecord(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))

    def record(self, name: str) -> None:
        """Record a file that something else wrote."""
        path = self.path / name
        self.records[name] = FileRecord(sha256=compute_sha256(path), bytes=path.stat().st_size)


def write_bundle_files(
    state: State,
    path: Path,
    pipeline: str,
    costs: str,
    linkable_folder: Path | None,
    batching: BatchingRecord,
    shapes: Mapping[str, Sequence[int]],
    values: Mapping[str, TensorProto],
) -> list[Diagnostic]:
    """Create and fill the folder of a bundle; return notes on its weights and compiled models.

    `costs` is the text of its cost file, `batching` says whether requests can be joined. Weights files in
    `linkable_folder` are referred to; without such a folder all weights are copied. For devices that need static
    shapes, `shapes` and `values` are those that follow from the compiled sizes.
    """
    path.mkdir()
    (path / SEGMENTS_FOLDER).mkdir()
    folder, model, segments = _BundleFolder(path), state[Model], state[Segments].segments
    crossing = {name for segment in segments for name in (*segment.inputs, *segment.outputs)}
    types = infer_boundary_types(model, crossing)
    records = list[SegmentRecord]()
    with WeightFile(path / SEGMENTS_FOLDER / WEIGHTS_FILE, WEIGHTS_FILE, linkable_folder) as weights:
        initial_states = store_initial_states(model, weights)
        streamed = store_streamed_weights(model, weights, state[Streaming].sources if Streaming in state else {})
        protected_scales = find_scales_to_protect(model, [segment.nodes for segment in segments])
        for number, (segment, scales) in enumerate(zip(segments, protected_scales)):
            report_progress(number, len(segments))
            proto = _segment_proto(model, segment, weights, types, scales, initial_states, streamed)
            if state.target.devices[segment.device].is_host:
                model.guard_empty_axes(proto)
            stem, updates = f"{SEGMENTS_FOLDER}/{segment.id}", dict[str, Any]()
            folder.write(f"{stem}.onnx", proto.SerializeToString())
            if linkable_folder is None and may_be_optimised(state, segment):
                data = optimise_segment(proto, path / f"{stem}.onnx", weights)
                if data is not None:
                    updates["optimised"] = f"{stem}.optimised.onnx"
                    folder.write(updates["optimised"], data)
            needs_sizes = any(device.needs_static_shapes for device in list_segment_devices(state, segment))
            if needs_sizes and (static := specialise(proto, stem, shapes, values)):
                updates["static"], data = static
                folder.write(updates["static"].file, data)
            records.append(_describe_segment(state, number, f"{stem}.onnx", **updates))
        original = Original.of(state)
        # Weights that are copied lie in the bundle in parts, linked ones in the model's file as they are.
        whole = original.joined_model or original.model if linkable_folder is None else original.model
        folder.write(WHOLE_MODEL_FILE, whole.whole_proto(weights).SerializeToString())
    record = FileRecord(sha256=weights.digest, bytes=weights.bytes_written)
    folder.records[f"{SEGMENTS_FOLDER}/{WEIGHTS_FILE}"] = record
    folder.write(COSTS_FILE, costs.encode())
    entries = external_data_options(linkable_folder.resolve()) if linkable_folder and weights.linked else {}
    records, notes = compile_segments(state, path, records, entries)
    for file in (file for record in records for item in record.compiled for file in item.files):
        folder.record(file)
    linked = {location: describe_linked_file(file) for location, file in sorted(weights.linked.items())}
    manifest = build_manifest(
        state,
        types,
        records,
        initial_states,
        streamed,
        pipeline=pipeline,
        batching=batching,
        files=dict(sorted(folder.records.items())),
        linked=linked,
    )
    (path / MANIFEST_FILE).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")
    return [*_report_weights(weights, linkable_folder, model.name), *notes]


def _report_weights(weights: WeightFile, linkable_folder: Path | None, where: str) -> Iterator[Diagnostic]:
    """Yield notes if weights should have been linked and were not."""
    if weights.copied:
        count = format_count(len(weights.copied), "part")
        example = f"such as {weights.copied[0]!r}: they are not contiguous in the file"
        yield Diagnostic("N011", f"{count} of weights were copied, {example}", where=where)
    if linkable_folder and not weights.linked:
        yield Diagnostic("N011", "there is nothing to link to: the model has no weights file of its own", where=where)


def _describe_segment(state: State, number: int, file: str, **updates: Any) -> SegmentRecord:
    segment, prediction = state[Segments].segments[number], state[Prediction]
    graph, sources = state[Profile].graph, state[Streaming].sources if Streaming in state else {}
    # Weights that stream, in the order in which the nodes read them.
    read = (graph.weight_names[weight] for node in segment.nodes.tolist() for weight in graph.weights[node].tolist())
    return SegmentRecord(
        id=segment.id,
        file=file,
        device=state.target.devices[segment.device].id,
        nodes=len(segment.nodes),
        inputs=segment.inputs,
        outputs=segment.outputs,
        seconds=float(prediction.segment_seconds[number]),
        weights_bytes=int(prediction.weights_bytes[number]),
        workspace_bytes=int(prediction.workspace_bytes[number]),
        keeps_order=state[Model].keeps_order,
        streamed=tuple(dict.fromkeys(weight for weight in read if weight in sources)),
        **updates,
    )


def _segment_proto(
    model: Model,
    segment: Segment,
    weights: WeightFile,
    types: Mapping[str, TypeProto],
    protected_scales: Collection[str],
    initial_states: Collection[str],
    streamed: Collection[str],
) -> ModelProto:
    """Return the model of a segment.

    Protected scales are inputs with a default value in it. Initial values of states are not: the runtime has them.
    Weights that stream are inputs without one.
    """
    nodes = [model.nodes[index] for index in segment.nodes]
    reads = dict.fromkeys(value for index in segment.nodes for value in model.reads[index])
    given = {*initial_states, *streamed}
    stored = [value for value in reads if value in model.initializers and value not in given]
    tensors = [weights.place(model.initializers[value], model.folder) for value in stored]
    inputs = [ValueInfoProto(name=value, type=types[value]) for value in segment.inputs]
    inputs += [
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in tensors
        if tensor.name in protected_scales
    ]
    inputs += [ValueInfoProto(name=value, type=_type_of(model, value)) for value in reads if value in streamed]
    outputs = [ValueInfoProto(name=value, type=types[value]) for value in segment.outputs]
    return model.proto(nodes, tensors, inputs, outputs, name=segment.id)
