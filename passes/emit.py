"""Write the bundle."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from onnx import TypeProto, ValueInfoProto, helper

from onnxplace.bundle import (
    COSTS_FILE,
    MANIFEST_FILE,
    SEGMENTS_FOLDER,
    WEIGHTS_FILE,
    WHOLE_MODEL_FILE,
    FileRecord,
    describe_linked_file,
    require_output_free,
    stage_output,
)
from onnxplace.errors import Diagnostic
from onnxplace.facts import Emitted, Placement, Profile, Schedule, Segment, Segments
from onnxplace.model import Model, WeightFile, find_scales_to_protect, require_unchanged
from onnxplace.passes.cost_files import format_costs
from onnxplace.passes.segments import build_manifest, infer_boundary_types
from onnxplace.state import Pass, State
from onnxplace.target import Target
from onnxplace.utils import disk_error, path_text


@dataclass(frozen=True)
class Emit(Pass):
    """Write segments, weights and manifest to a hidden folder next to `path`, and rename it when it is complete."""

    name: ClassVar[str] = "emit"
    requires: ClassVar[tuple[type, ...]] = (Model, Profile, Placement, Schedule, Segments)
    provides: ClassVar[tuple[type, ...]] = (Emitted,)

    path: str = "bundle"
    """Where the bundle goes."""
    force: bool = False
    """Replace what is there."""
    pipeline: str = ""
    """The text of the whole pipeline, for the record."""
    link_weights: bool = False
    """Refer to the model's own weights files, beside which `path` must be, instead of copying them."""

    def run(self, state: State) -> State:
        path = Path(self.path)
        require_output_free(path, self.force)
        beside = path.absolute().parent if self.link_weights else None
        with stage_output(path, self.force) as staging:
            try:
                linked = _write(state, staging.folder, self.pipeline, beside)
            except OSError as problem:
                raise disk_error(problem, path_text(path)) from None
            require_unchanged(state[Model])
            staging.place(staging.folder)
        if self.link_weights and not linked:
            message = "there is nothing to link to: the model has no weights file of its own"
            state = state.saying(Diagnostic("N011", message, where=state[Model].name))
        return state.having(Emitted(path))


def _write(state: State, folder: Path, pipeline: str, beside: Path | None) -> bool:
    """Fill the folder of the bundle; returns whether it refers to weights files in `beside`."""
    folder.mkdir()
    (folder / SEGMENTS_FOLDER).mkdir()
    ids = _segment_ids(state[Segments].segments, state.target)
    types = infer_boundary_types(state[Model], {n for s in state[Segments].segments for n in (*s.inputs, *s.outputs)})
    files = {}

    def write(name: str, data: bytes) -> None:
        (folder / name).write_bytes(data)
        files[name] = FileRecord(sha256=hashlib.sha256(data).hexdigest(), bytes=len(data))

    with WeightFile(folder / SEGMENTS_FOLDER / WEIGHTS_FILE, WEIGHTS_FILE, beside) as weights:
        held = find_scales_to_protect(state[Model], [segment.nodes for segment in state[Segments].segments])
        for segment, name, scales in zip(state[Segments].segments, ids, held):
            write(f"{SEGMENTS_FOLDER}/{name}.onnx", _segment_bytes(state[Model], segment, name, weights, types, scales))
        write(WHOLE_MODEL_FILE, state[Model].whole_proto(weights).SerializeToString())
    files[f"{SEGMENTS_FOLDER}/{WEIGHTS_FILE}"] = FileRecord(sha256=weights.digest, bytes=weights.bytes_written)
    write(COSTS_FILE, format_costs(state[Profile]).encode())
    manifest = build_manifest(state, ids, types, dict(sorted(files.items())), pipeline)
    linked = {location: describe_linked_file(file) for location, file in sorted(weights.linked.items())}
    text = manifest.model_copy(update={"linked": linked}).model_dump_json(indent=1)
    (folder / MANIFEST_FILE).write_text(text, encoding="utf-8")
    return bool(linked)


def _segment_ids(segments: Sequence[Segment], target: Target) -> list[str]:
    """Name segments by device and position there: `cpu0-000`."""
    counts = [0] * len(target.devices)
    ids = []
    for segment in segments:
        ids.append(f"{target.devices[segment.device].id.replace(':', '')}-{counts[segment.device]:03d}")
        counts[segment.device] += 1
    return ids


def _segment_bytes(
    model: Model,
    segment: Segment,
    name: str,
    weights: WeightFile,
    types: dict[str, TypeProto],
    held: Collection[str],
) -> bytes:
    """Return the ONNX file of a segment; the weights `held` are inputs with a default value there."""
    nodes = [model.nodes[i] for i in segment.nodes]
    reads = dict.fromkeys(name for i in segment.nodes for name in model.reads[i])
    tensors = [weights.place(model.initializers[name], model.folder) for name in reads if name in model.initializers]
    inputs = [ValueInfoProto(name=name, type=types[name]) for name in segment.inputs]
    inputs += [
        helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        for tensor in tensors
        if tensor.name in held
    ]
    outputs = [ValueInfoProto(name=name, type=types[name]) for name in segment.outputs]
    return model.proto(nodes, tensors, inputs, outputs, name=name).SerializeToString()
