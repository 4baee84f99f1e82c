"""Say in the manifest what the passes found out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from importlib import metadata

import numpy as np
from onnx import TypeProto

from onnxplace.bundle import (
    SCHEMA_VERSION,
    SEGMENTS_FOLDER,
    DeviceRecord,
    DiagnosticRecord,
    FileRecord,
    InputRecord,
    Manifest,
    OutputRecord,
    Predicted,
    RepeatRecord,
    SegmentRecord,
    StateRecord,
    Step,
    TargetRecord,
    ValueRecord,
)
from onnxplace.facts import Instruction, Placement, Profile, Schedule, Segments
from onnxplace.graph import Ints
from onnxplace.model import Model, declaration_of, list_custom_operators, shape_entries, type_name
from onnxplace.passes.segments.process_footprint import Footprint, footprint
from onnxplace.problem import fits_single_device, single_device_seconds
from onnxplace.simulation import device_weights, loads_of_simulation
from onnxplace.state import State
from onnxplace.target import REQUEST_SECONDS, WAKING_SECONDS, Target


def build_manifest(
    state: State, ids: Sequence[str], types: dict[str, TypeProto], files: dict[str, FileRecord], pipeline: str
) -> Manifest:
    """Return the manifest of a state that has been split; `ids` names its segments, `files` what was written."""
    model, target, found = state[Model], state.target, state[Segments]
    simulation, sent = found.simulation, _sent_bytes(state)
    taken = footprint(state[Profile].graph, found.segments, simulation, target)
    several = len({segment.device for segment in found.segments}) > 1
    request_seconds = REQUEST_SECONDS + WAKING_SECONDS * several
    return Manifest(
        schema_version=SCHEMA_VERSION,
        model=model.name,
        model_digest=model.digest,
        dimensions=_dimensions(model),
        pipeline=pipeline,
        placer=state[Placement].placer,
        versions=_versions(),
        target=TargetRecord(
            devices=target.devices,
            links=target.with_all_links().links,
            link_model=target.link_model,
            shared=target.shared,
        ),
        inputs=tuple(InputRecord(**asdict(declaration_of(value, model))) for value in model.inputs),
        outputs=tuple(
            OutputRecord(
                name=value.name,
                dtype=type_name(value.type) if value.HasField("type") else "unknown",
                shape=shape_entries(value.type),
                value=model.sources.get(value.name, value.name),
            )
            for value in model.outputs
        ),
        states=_state_records(state),
        segments=_segment_records(state, ids),
        values=_value_records(state, ids, types),
        programs={
            device.id: tuple(_step(item, ids, target) for item in program)
            for device, program in zip(target.devices, found.programs)
        },
        predicted=Predicted(
            step_seconds=simulation.makespan_seconds + request_seconds,
            single_device_seconds=float(single_device_seconds(state[Profile], target).min()) + REQUEST_SECONDS,
            single_device_fits=bool(fits_single_device(state).any()),
            lower_bound_seconds=state[Schedule].lower_bound_seconds,
            interval_seconds=loads_of_simulation(simulation, target).interval_seconds,
            running_bytes=taken.running_bytes,
            opening_bytes=taken.opening_bytes,
            request_seconds=request_seconds,
        ),
        devices=_device_records(state, taken),
        transfers=len(sent),
        transfer_bytes=sum(sent),
        diagnostics=tuple(DiagnosticRecord(**asdict(note)) for note in state.diagnostics),
        files=files,
        repeats=tuple(
            RepeatRecord(count=found.count, nodes=found.nodes, first=state[Profile].graph.names[found.start])
            for found in state[Profile].repeats
        ),
        custom_operators=list_custom_operators(model),
    )


def _dimensions(model: Model) -> dict[str, int]:
    """Return the sizes of symbolic dimensions for the costs.

    An input whose rank the model leaves open has a dimension per axis of its sample: `input.axis`.
    """
    ranked = {
        f"{value.name}.{axis}": size
        for value in model.inputs
        if value.name in model.samples and declaration_of(value, model).shape is None
        for axis, size in enumerate(getattr(model.samples[value.name], "shape", ()))
    }
    return {**model.dimensions, **ranked}


def _versions() -> dict[str, str]:
    found = {}
    for name in ("onnxplace", "onnx", "onnxruntime", "onnxruntime-gpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _segment_records(state: State, ids: Sequence[str]) -> tuple[SegmentRecord, ...]:
    found, graph = state[Segments], state[Profile].graph
    segment_of = _segment_of(found, len(graph))
    coarse = graph.contract(segment_of)
    held = device_weights(graph, segment_of, len(ids))
    spent = found.simulation.finish_seconds - found.simulation.start_seconds
    return tuple(
        SegmentRecord(
            id=name,
            file=f"{SEGMENTS_FOLDER}/{name}.onnx",
            device=state.target.devices[segment.device].id,
            nodes=len(segment.nodes),
            inputs=segment.inputs,
            outputs=segment.outputs,
            seconds=float(spent[i]),
            weights_bytes=int(held[i]),
            workspace_bytes=int(coarse.workspace_bytes[i]),
        )
        for i, (name, segment) in enumerate(zip(ids, found.segments))
    )


def _state_records(state: State) -> tuple[StateRecord, ...]:
    model, found = state[Model], state[Segments]
    home = {name: state.target.devices[segment.device].id for segment in found.segments for name in segment.outputs}
    return tuple(
        StateRecord(output=output, input=name, device=home[model.sources.get(output, output)])
        for name, output in model.states.items()
    )


def _segment_of(found: Segments, count: int) -> Ints:
    segment_of = np.zeros(count, dtype=np.int32)
    for index, segment in enumerate(found.segments):
        segment_of[segment.nodes] = index
    return segment_of


def _value_records(state: State, ids: Sequence[str], types: dict[str, TypeProto]) -> dict[str, ValueRecord]:
    graph = state[Profile].graph
    size = dict(zip(graph.value_names, graph.value_bytes.tolist()))
    producer: dict[str, str] = {}
    readers: dict[str, list[str]] = {value.name: [] for value in state[Model].inputs}
    for name, segment in zip(ids, state[Segments].segments):
        producer |= dict.fromkeys(segment.outputs, name)
        for value in (*segment.outputs, *segment.inputs):
            readers.setdefault(value, [])
        for value in segment.inputs:
            readers[value].append(name)
    types = {**{value.name: value.type for value in state[Model].inputs}, **types}
    return {
        name: ValueRecord(
            dtype=type_name(types[name]),
            shape=shape_entries(types[name]),
            bytes=int(size[name]),
            producer=producer.get(name),
            readers=tuple(used),
        )
        for name, used in readers.items()
    }


def _step(item: Instruction, ids: Sequence[str], target: Target) -> Step:
    if item.op == "run":
        return Step(op="run", segment=ids[item.segment])
    return Step(op=item.op, value=item.value, peer=target.devices[item.peer].id if item.peer >= 0 else "")


def _device_records(state: State, taken: Footprint) -> tuple[DeviceRecord, ...]:
    simulation = state[Segments].simulation
    nodes = np.bincount(state[Placement].device, minlength=len(state.target.devices))
    return tuple(
        DeviceRecord(
            id=device.id,
            nodes=int(nodes[i]),
            compute_seconds=float(simulation.compute_seconds[i]),
            weights_bytes=int(simulation.weights_bytes[i]),
            peak_bytes=int(simulation.peak_bytes[i]),
            limit_bytes=device.memory_bytes,
            process_bytes=taken.device_bytes[i],
        )
        for i, device in enumerate(state.target.devices)
    )


def _sent_bytes(state: State) -> list[int]:
    """Return the bytes of each transfer of a step."""
    graph = state[Profile].graph
    size = dict(zip(graph.value_names, graph.value_bytes.tolist()))
    return [size[item.value] for program in state[Segments].programs for item in program if item.op == "send"]
