"""Write the bundle."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from onnx import TypeProto, ValueInfoProto

from onnxplace.bundle import COSTS, MANIFEST, SEGMENTS, WEIGHTS, WHOLE, FileRecord, sha256_of
from onnxplace.facts import Emitted, Placement, Profile, Schedule, Segment, Segments
from onnxplace.files import replaced_folder, require_free
from onnxplace.model import Model, WeightFile
from onnxplace.passes._boundary import boundary_types
from onnxplace.passes._cost_file import costs_json
from onnxplace.passes._manifest import manifest_of
from onnxplace.state import Pass, State
from onnxplace.target import Target


@dataclass(frozen=True)
class Emit(Pass):
    """Write segments, weights and manifest to a temporary folder beside `path`, and rename it when it is complete."""

    name: ClassVar[str] = "emit"
    requires: ClassVar[tuple[type, ...]] = (Model, Profile, Placement, Schedule, Segments)
    provides: ClassVar[tuple[type, ...]] = (Emitted,)

    path: str = "bundle"
    """Where the bundle goes."""
    force: bool = False
    """Replace what is there."""
    pipeline: str = ""
    """The text of the whole pipeline, for the record."""

    def run(self, state: State) -> State:
        path = Path(self.path)
        require_free(path, self.force, MANIFEST)
        with replaced_folder(path) as folder:
            _write(state, folder, self.pipeline)
        return state.having(Emitted(path))


def _write(state: State, folder: Path, pipeline: str) -> None:
    (folder / SEGMENTS).mkdir()
    ids = _segment_ids(state[Segments].segments, state.target)
    types = boundary_types(state[Model], {n for s in state[Segments].segments for n in (*s.inputs, *s.outputs)})
    hashes = {}
    with WeightFile(folder / SEGMENTS / WEIGHTS, WEIGHTS) as weights:
        for segment, name in zip(state[Segments].segments, ids):
            _write_segment(state[Model], segment, folder / SEGMENTS / f"{name}.onnx", weights, types)
        whole = state[Model].whole_proto(weights)
        (folder / WHOLE).write_bytes(whole.SerializeToString())
        hashes[f"{SEGMENTS}/{WEIGHTS}"] = weights.digest
    (folder / COSTS).write_text(json.dumps(costs_json(state[Profile]), indent=1), encoding="utf-8")
    files = {}
    for file in sorted(folder.rglob("*")):
        if file.is_file():
            name = file.relative_to(folder).as_posix()
            files[name] = FileRecord(sha256=hashes.get(name) or sha256_of(file), bytes=file.stat().st_size)
    manifest = manifest_of(state, ids, types, files, pipeline)
    (folder / MANIFEST).write_text(manifest.model_dump_json(indent=1), encoding="utf-8")


def _segment_ids(segments: Sequence[Segment], target: Target) -> list[str]:
    """Name segments by device and position there: `cpu0-000`."""
    counts = [0] * len(target.devices)
    ids = []
    for segment in segments:
        ids.append(f"{target.devices[segment.device].id.replace(':', '')}-{counts[segment.device]:03d}")
        counts[segment.device] += 1
    return ids


def _write_segment(
    model: Model, segment: Segment, file: Path, weights: WeightFile, types: dict[str, TypeProto]
) -> None:
    nodes = [model.nodes[i] for i in segment.nodes]
    reads = dict.fromkeys(name for i in segment.nodes for name in model.reads[i])
    tensors = [weights.place(model.initializers[name], model.folder) for name in reads if name in model.initializers]
    inputs = [ValueInfoProto(name=name, type=types[name]) for name in segment.inputs]
    outputs = [ValueInfoProto(name=name, type=types[name]) for name in segment.outputs]
    proto = model.proto(nodes, tensors, inputs, outputs, name=file.stem)
    file.write_bytes(proto.SerializeToString())
