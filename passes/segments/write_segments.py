"""Write the files of a bundle: a model per segment, the weights, the whole model, costs and manifest.

ONNX requires each input and output of a segment to be declared, so the types of all values that cross are found first.
Initial values of carried states are written once, and are read by no segment.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from onnx import ModelProto, TensorProto, TypeProto, ValueInfoProto, helper

from onnxplace.bundle import (
    COSTS_FILE,
    MANIFEST_FILE,
    SEGMENTS_FOLDER,
    WEIGHTS_FILE,
    WHOLE_MODEL_FILE,
    BatchingRecord,
    FileRecord,
    InitialRecord,
    SizedRecord,
    WeightRecord,
    compute_sha256,
    describe_linked_file,
    external_data_options,
)
from onnxplace.devices import find_kind
from onnxplace.errors import Diagnostic, ModelError, OnnxplaceError
from onnxplace.facts import Home, Recomputation, Segment, Segments, Shards, Streaming
from onnxplace.machine import make_session_options, open_session
from onnxplace.model import (
    Model,
    WeightFile,
    find_scales_to_protect,
    format_type,
    parse_type,
    read_shape_entries,
    store_for_session,
)
from onnxplace.passes.segments.compile_segments import (
    KnownValues,
    compile_segments,
    may_be_optimised,
    needs_sizes,
    optimise_segment,
    specialise,
)
from onnxplace.passes.segments.fill_manifest import WrittenFiles, build_manifest
from onnxplace.state import State
from onnxplace.target import Target
from onnxplace.utils import report_progress, temporary_folder


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


def store_streamed_weights(model: Model, weights: WeightFile, homes: Mapping[str, Home]) -> dict[str, WeightRecord]:
    """Write the weights that stream; return where each is."""
    records = {}
    for name, home in homes.items():
        record = _store(model, name, weights)
        assert record is not None, f"{name} has no plain bytes"
        records[name] = WeightRecord(**record.model_dump(), dtype=format_type(_type_of(model, name)), home=home)
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


@dataclass(frozen=True)
class WrittenWeights:
    """Where the weights of a bundle are."""

    is_linked: bool
    """Whether it refers to weights files of the model."""
    copied: tuple[str, ...]
    """Parts of weights that were copied nevertheless: they are not contiguous in their file."""
    notes: tuple[Diagnostic, ...] = ()
    """Why segments have no compiled model."""


def write_bundle_files(
    state: State,
    path: Path,
    pipeline: str,
    costs: str,
    linkable_folder: Path | None,
    batching: BatchingRecord,
    sizes: Sequence[KnownValues],
) -> WrittenWeights:
    """Create and fill the folder of a bundle.

    `costs` is the text of its cost file, `batching` says whether requests can be joined. Weights files in
    `linkable_folder` are referred to; without such a folder all weights are copied. `sizes` has what follows from each
    compiled size, for devices that need static shapes.
    """
    path.mkdir()
    (path / SEGMENTS_FOLDER).mkdir()
    folder, model, segments = _BundleFolder(path), state[Model], state[Segments].segments
    ids = name_segments(segments, state.target)
    crossing = {name for segment in segments for name in (*segment.inputs, *segment.outputs)}
    types = infer_boundary_types(model, crossing)
    sized, optimised = [tuple[SizedRecord, ...]()] * len(segments), [""] * len(segments)
    with WeightFile(path / SEGMENTS_FOLDER / WEIGHTS_FILE, WEIGHTS_FILE, linkable_folder) as weights:
        initial_states = store_initial_states(model, weights)
        streamed = store_streamed_weights(model, weights, state[Streaming].homes if Streaming in state else {})
        protected_scales = find_scales_to_protect(model, [segment.nodes for segment in segments])
        for number, (segment, name, scales) in enumerate(zip(segments, ids, protected_scales)):
            report_progress(number, len(segments))
            proto = _segment_proto(model, segment, name, weights, types, scales, initial_states, streamed)
            if find_kind(state.target.devices[segment.device].kind).is_host:
                model.guard_empty_axes(proto)
            folder.write(f"{SEGMENTS_FOLDER}/{name}.onnx", proto.SerializeToString())
            if linkable_folder is None and may_be_optimised(state, segment):
                data = optimise_segment(proto, path / SEGMENTS_FOLDER / f"{name}.onnx", weights)
                if data is not None:
                    optimised[number] = f"{SEGMENTS_FOLDER}/{name}.optimised.onnx"
                    folder.write(optimised[number], data)
            if needs_sizes(state, segment):
                models = list(specialise(proto, f"{SEGMENTS_FOLDER}/{name}", sizes))
                sized[number] = tuple(item for item, _ in models)
                for item, data in models:
                    folder.write(item.file, data)
        folder.write(WHOLE_MODEL_FILE, _whole_model(state, linkable_folder).whole_proto(weights).SerializeToString())
    record = FileRecord(sha256=weights.digest, bytes=weights.bytes_written)
    folder.records[f"{SEGMENTS_FOLDER}/{WEIGHTS_FILE}"] = record
    folder.write(COSTS_FILE, costs.encode())
    entries = external_data_options(linkable_folder.resolve()) if linkable_folder and weights.linked else {}
    compiled, notes = compile_segments(state, path, ids, sized, entries)
    for file in (file for records in compiled for record in records for file in record.files):
        folder.record(file)
    files = dict(sorted(folder.records.items()))
    written = WrittenFiles(files, initial_states, streamed, sized, compiled, optimised)
    manifest = build_manifest(state, ids, types, written, pipeline, batching)
    linked = {location: describe_linked_file(file) for location, file in sorted(weights.linked.items())}
    text = manifest.model_copy(update={"linked": linked}).model_dump_json(indent=1)
    (path / MANIFEST_FILE).write_text(text, encoding="utf-8")
    return WrittenWeights(bool(linked), tuple(weights.copied), tuple(notes))


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
        # `cuda:0/1` becomes `cuda0p1`, and `node1/qnn/npu:0` becomes `node1-qnn-npu0`, since files have these names.
        kind, _, number = target.devices[segment.device].id.partition(":")
        name = kind.replace("/", "-") + number.replace("/", "p")
        ids.append(f"{name}-{counts[segment.device]:03d}")
        counts[segment.device] += 1
    return ids


def _segment_proto(
    model: Model,
    segment: Segment,
    name: str,
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
    return model.proto(nodes, tensors, inputs, outputs, name=name)
