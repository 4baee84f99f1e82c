"""Fix the sizes of segments for devices that need static shapes, and let providers compile segments.

ONNX Runtime writes a compiled model while it opens a segment on the device. So it is exactly what opening the segment
would compile, and the time that it saves is measured. It is opened once, too: one that cannot be used is left out.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import onnx
from onnx import ModelProto, TensorProto, TypeProto, numpy_helper

from onnxplace.bundle.bundle import SEGMENTS_FOLDER
from onnxplace.bundle.manifest import CompiledRecord, SegmentRecord, StaticRecord
from onnxplace.errors import Diagnostic, OnnxplaceError
from onnxplace.facts import Segment, Segments
from onnxplace.machine.hardware import describe_optimiser, find_device_problem
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.model.lowering import with_shape
from onnxplace.model.model import Model
from onnxplace.model.tensors import read_shape_entries
from onnxplace.model.weights import WeightFile
from onnxplace.passes.segments.segment_predictions import list_device_maps
from onnxplace.state import State
from onnxplace.target.kind_table import find_kind
from onnxplace.target.target import Device
from onnxplace.utils.file_locks import temporary_folder
from onnxplace.utils.progress import report_progress


def may_be_optimised(state: State, segment: Segment) -> bool:
    """Return whether a segment may be opened as ONNX Runtime optimised it for the processor of this machine."""
    is_optimised = bool(describe_optimiser()) and not state[Model].keeps_order
    return is_optimised and any(device.is_host for device in list_segment_devices(state, segment))


def list_segment_devices(state: State, segment: Segment) -> list[Device]:
    """Return the devices that run a segment, on any route."""
    devices = dict.fromkeys(int(route[segment.device]) for route in list_device_maps(state))
    return [state.target.devices[index] for index in devices if index >= 0]


def specialise(
    proto: ModelProto, stem: str, shapes: Mapping[str, Sequence[int]], values: Mapping[str, TensorProto]
) -> tuple[StaticRecord, bytes] | None:
    """Return a segment's model in which all inputs have fixed shapes; None if these do not follow from the sizes.

    Inputs whose values follow from the sizes are constants in it: providers take few nodes, such as Reshape, without.

    Args:
        proto: The segment.
        stem: Path of its file in the bundle, without the ending.
        shapes: Shapes of values that follow from the sizes of the model's inputs alone.
        values: Small values that do, such as targets of Reshape, and constants.
    """
    optional = {tensor.name for tensor in proto.graph.initializer}
    inputs = [item for item in proto.graph.input if item.name in optional or item.name not in values]
    constants = [values[item.name] for item in proto.graph.input if item not in inputs]
    varying = [item.name for item in inputs if item.name not in optional and not is_static(item.type)]
    static = StaticRecord(
        file=f"{stem}.static.onnx" if varying or constants else f"{stem}.onnx",
        shapes={name: tuple(shapes[name]) for name in varying if name in shapes},
        values={tensor.name: numpy_helper.to_array(tensor).tobytes().hex() for tensor in constants},
    )
    model = ModelProto()
    model.CopyFrom(proto)
    model.graph.initializer.extend(constants)
    del model.graph.input[:]
    model.graph.input.extend(with_shape(item, static.shapes.get(item.name)) for item in inputs)
    is_fixed = all(is_static(item.type) for item in model.graph.input)
    return (static, model.SerializeToString()) if is_fixed else None


def is_static(value_type: TypeProto) -> bool:
    """Return whether all sizes of a type are known; those of sequences do not matter."""
    shape = read_shape_entries(value_type)
    return not value_type.HasField("tensor_type") or (shape is not None and all(isinstance(n, int) for n in shape))


def optimise_segment(proto: ModelProto, source: Path, weights: WeightFile) -> bytes | None:
    """Return the model of a segment as ONNX Runtime optimises it for this processor, where that is of use.

    Returns None where little would be gained, or ONNX Runtime cannot open it here. What takes long is to rearrange
    the weights of convolutions, so it is for segments with such. Its weights are added to those of the bundle. No input
    may have a default value, which ONNX Runtime would take as a constant.

    Args:
        proto: The segment.
        source: Its file.
        weights: The weights of the bundle, next to this file.
    """
    constants = {tensor.name for tensor in proto.graph.initializer}
    if not any(node.op_type == "Conv" and node.input[1] in constants for node in proto.graph.node) or any(
        item.name in constants for item in proto.graph.input
    ):
        return None
    weights.flush()
    with temporary_folder() as folder:
        entries = {"session.optimized_model_external_initializers_file_name": "weights"}
        options = make_session_options((), entries=entries)
        options.optimized_model_filepath = str(folder / "model.onnx")
        try:
            open_session(source, options, where=source.stem)
        except OnnxplaceError:  # for devices elsewhere, for example
            return None
        model = onnx.load(folder / "model.onnx", load_external_data=False)
        for tensor in model.graph.initializer:
            tensor.CopyFrom(weights.place(tensor, folder, source.stem))
    return model.SerializeToString()


def compile_segments(
    state: State, folder: Path, segments: Sequence[SegmentRecord], entries: Mapping[str, str]
) -> tuple[list[SegmentRecord], list[Diagnostic]]:
    """Write the compiled models of all segments for devices of this machine; return the segments with them, and notes.

    Args:
        state: With Model and Segments.
        folder: The bundle, with segments and weights.
        segments: The record of each segment.
        entries: Entries for the configuration of sessions.
    """
    records, notes = list[SegmentRecord](), list[Diagnostic]()
    for number, (segment, record) in enumerate(zip(state[Segments].segments, segments)):
        report_progress(number, len(segments))
        compiled = dict[str, CompiledRecord]()  # equal hardware shares one
        for device in list_segment_devices(state, segment):
            kind = find_kind(device.kind)
            model = record.static if kind.needs_static_shapes else record
            made_for = "" if find_device_problem(device) else kind.describe_compiler(device.address)
            if model is None or not made_for or made_for in compiled:
                continue
            path = folder / SEGMENTS_FOLDER / f"{record.id}.{len(compiled)}.compiled.onnx"
            try:
                seconds = _compile(folder / model.file, path, device, entries, state[Model].keeps_order)
            except OnnxplaceError as problem:
                for file in path.parent.glob(f"{path.stem}*"):
                    file.unlink()
                message = f"it has no compiled model: {problem.message}"
                notes.append(Diagnostic("N012", message, where=f"segment {record.id}, {device.id}"))
                continue
            if not path.exists():  # its provider takes none of the nodes
                continue
            written = [path, *sorted(set(path.parent.glob(f"{path.stem}*")) - {path})]
            compiled[made_for] = CompiledRecord(
                files=tuple(f"{SEGMENTS_FOLDER}/{file.name}" for file in written),
                made_for=made_for,
                compile_seconds=seconds[0],
                open_seconds=seconds[1],
            )
        records.append(record.model_copy(update={"compiled": tuple(compiled.values())}))
    return records, notes


def _compile(source: Path, path: Path, device: Device, entries: Mapping[str, str], keeps_order: bool) -> list[float]:
    """Write a compiled model, if its provider takes a node, and open it; return the seconds of both.

    Raises OnnxplaceError.
    """
    entries = {**entries, "ep.context_file_path": str(path)}  # where linked weights are elsewhere, also to open it
    writing = {"ep.context_enable": "1", "ep.context_embed_mode": "0"}
    sessions, times = [], [time.perf_counter()]
    for model, more in ((source, writing), (path, {})):
        if not model.exists():
            break
        options = make_session_options((), entries={**entries, **more}, keeps_order=keeps_order)
        sessions.append(open_session(model, options, device.address, device.id))  # the last one ends its process
        times.append(time.perf_counter())
    return [after - before for before, after in pairwise(times)]
