"""Build the manifest of a bundle from the results of the passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata

import numpy as np
from onnx import TypeProto

from onnxplace.bundle import (
    SCHEMA_VERSION,
    SEGMENTS_FOLDER,
    BatchingRecord,
    CompiledRecord,
    DeviceRecord,
    DiagnosticRecord,
    FileRecord,
    InitialRecord,
    InputRecord,
    Manifest,
    OutputRecord,
    Predicted,
    RepeatRecord,
    RouteRecord,
    SegmentRecord,
    ShardedKindRecord,
    ShardingRecord,
    SizedRecord,
    SplitStateRecord,
    StateRecord,
    Step,
    StreamRecord,
    TargetRecord,
    TrainingNodesRecord,
    TrainingRecord,
    ValueRecord,
    WeightRecord,
    predict_interval_seconds as predict_bundle_interval_seconds,
    predict_weight_wait_seconds,
)
from onnxplace.facts import Instruction, Placement, Profile, Routes, Schedule, Segment, Segments, Shards, Streaming
from onnxplace.graph import Ints
from onnxplace.machine import describe_optimiser
from onnxplace.model import (
    Model,
    declaration_of,
    format_type,
    list_custom_operators,
    read_shape_entries,
    says_unknown,
)
from onnxplace.passes.segments.segment_predictions import (
    list_device_maps,
    measure_route_memory,
    predict_interval_seconds,
)
from onnxplace.problem import (
    fits_single_device,
    index_segments,
    list_transfer_bytes,
    predict_request_seconds,
    predict_single_device_seconds,
    predict_step_seconds,
)
from onnxplace.simulation import device_weights
from onnxplace.state import State
from onnxplace.target import Target
from onnxplace.training_roles import Phase

_Shape = tuple[int | str | None, ...]


@dataclass(frozen=True)
class WrittenFiles:
    """What the manifest says about the files of its bundle."""

    records: dict[str, FileRecord]
    """Path -> record."""
    initial_states: Mapping[str, InitialRecord]
    """Where the initial value of a state is, by its input."""
    streamed: Mapping[str, WeightRecord]
    """Where each weight is that streams."""
    sized: Sequence[tuple[SizedRecord, ...]]
    """Per segment, its models for devices with static shapes."""
    compiled: Sequence[tuple[CompiledRecord, ...]]
    """Per segment, its compiled models."""
    optimised: Sequence[str]
    """Per segment, its optimised model, if there is one."""


def build_manifest(
    state: State,
    ids: Sequence[str],
    types: dict[str, TypeProto],
    written: WrittenFiles,
    pipeline: str,
    batching: BatchingRecord,
) -> Manifest:
    """Return the manifest of a split model.

    Args:
        state: With Model, Profile, Placement, Schedule and Segments.
        ids: The name of each segment.
        types: Types of the values that cross between segments, by name.
        written: The files of the bundle that are already written.
        pipeline: The text of the whole pipeline, for the record.
        batching: Whether requests can be joined.
    """
    model, target = state[Model], state.target
    sent_bytes = list_transfer_bytes(state)
    manifest = Manifest(
        schema_version=SCHEMA_VERSION,
        model=model.name,
        model_digest=model.digest,
        dimensions=_dimension_sizes(model),
        pipeline=pipeline,
        placer=state[Placement].placer,
        versions=_package_versions(),
        target=TargetRecord(
            devices=target.devices,
            links=target.with_all_links().links,
            link_model=target.link_model,
            shared=target.shared,
        ),
        inputs=tuple(InputRecord(**asdict(declaration_of(value, model))) for value in model.inputs),
        outputs=_output_records(model, types),
        states=_state_records(state, written.initial_states),
        segments=_segment_records(state, ids, written),
        values=_value_records(state, ids, types),
        programs=_program_records(state, ids),
        streamed=dict(written.streamed),
        streams=_stream_records(state),
        routes=_route_records(state, ids),
        predicted=_prediction(state),
        devices=_device_records(state),
        transfers=len(sent_bytes),
        transfer_bytes=sum(sent_bytes),
        diagnostics=tuple(DiagnosticRecord(**asdict(note)) for note in state.diagnostics),
        files=written.records,
        optimised_for=describe_optimiser() if any(written.optimised) else "",
        repeats=tuple(
            RepeatRecord(count=repeat.count, nodes=repeat.nodes, first=state[Profile].graph.names[repeat.start])
            for repeat in state[Profile].repeats
        ),
        sharding=_sharding_record(state),
        batching=batching,
        custom_operators=list_custom_operators(model),
        training=_training_record(state),
        metadata=model.metadata,
    )
    if not manifest.streams:
        return manifest
    updates = {
        "interval_seconds": max(manifest.predicted.interval_seconds, predict_bundle_interval_seconds(manifest)),
        "weight_wait_seconds": predict_weight_wait_seconds(manifest),
    }
    return manifest.model_copy(update={"predicted": manifest.predicted.model_copy(update=updates)})


def _output_records(model: Model, types: Mapping[str, TypeProto]) -> tuple[OutputRecord, ...]:
    records = []
    for output in model.outputs:
        value = model.sources.get(output.name, output.name)
        kind = types.get(value, output.type)
        shape = _merge_shapes(read_shape_entries(output.type), read_shape_entries(kind))
        records.append(OutputRecord(name=output.name, dtype=format_type(kind), shape=shape, value=value))
    return tuple(records)


def _merge_shapes(declared: _Shape | None, inferred: _Shape | None) -> _Shape | None:
    """Return a declared shape with the sizes that are only inferred, as ONNX Runtime does."""
    if inferred is None:
        return declared
    known = tuple(None if isinstance(size, str) and says_unknown(size) else size for size in inferred)
    if declared is None or len(known) != len(declared):
        return known
    return tuple(size if isinstance(size, int) or name is None else name for name, size in zip(declared, known))


def _prediction(state: State) -> Predicted:
    """Return the prediction for one inference, request overhead included."""
    whole = state.with_facts(state[Streaming].whole_profile) if Streaming in state else state
    single = float(predict_single_device_seconds(state).min())
    return Predicted(
        step_seconds=predict_step_seconds(state),
        single_device_seconds=single if np.isfinite(single) else 0.0,
        single_device_fits=bool(fits_single_device(whole).any()),
        lower_bound_seconds=state[Schedule].lower_bound_seconds,
        interval_seconds=predict_interval_seconds(state),
        request_seconds=predict_request_seconds(state),
    )


def _sharding_record(state: State) -> ShardingRecord | None:
    """Return how operators are split; None if they are not."""
    if Shards not in state or state[Shards].ways < 2:
        return None
    shards = state[Shards]
    return ShardingRecord(
        ways=shards.ways,
        stages=shards.stages,
        exchanges=dict(shards.exchanges),
        kinds=tuple(ShardedKindRecord(**asdict(kind)) for kind in shards.kinds),
        states=tuple(SplitStateRecord(**asdict(item)) for item in shards.split_states),
    )


def _training_record(state: State) -> TrainingRecord | None:
    """Return the training step that the model is; None if it is none."""
    roles, step = state[Profile].training, state[Model].training
    if roles is None:
        return None if step is None else TrainingRecord(**step.model_dump())
    nodes = TrainingNodesRecord(
        forward=roles.count(Phase.FORWARD),
        backward=roles.count(Phase.BACKWARD),
        update=roles.count(Phase.UPDATE),
        owned_backward=int((roles.owner >= 0).sum()),
        of_one_parameter=int((roles.parameter >= 0).sum()),
    )
    return TrainingRecord(**roles.step.model_dump(), nodes=nodes)


def _dimension_sizes(model: Model) -> dict[str, int]:
    """Return the sizes of symbolic dimensions that the costs are for.

    An input of unknown rank has a dimension per axis of its sample: `input.axis`.
    """
    ranked = {
        f"{value.name}.{axis}": size
        for value in model.inputs
        if value.name in model.samples and declaration_of(value, model).shape is None
        for axis, size in enumerate(getattr(model.samples[value.name], "shape", ()))
    }
    return {**model.dimensions, **ranked}


def _package_versions() -> dict[str, str]:
    """Return the versions of the installed packages that results depend on."""
    versions = {}
    for name in ("onnxplace", "onnx", "onnxruntime", "onnxruntime-gpu"):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


def _segment_records(state: State, ids: Sequence[str], written: WrittenFiles) -> tuple[SegmentRecord, ...]:
    segments, simulation, graph = state[Segments].segments, state[Segments].simulation, state[Profile].graph
    segment_of = index_segments(segments, len(graph))
    coarse = graph.contract(segment_of)
    weights_bytes = device_weights(graph, segment_of, len(ids))
    seconds = simulation.finish_seconds - simulation.start_seconds
    return tuple(
        SegmentRecord(
            id=name,
            file=f"{SEGMENTS_FOLDER}/{name}.onnx",
            device=state.target.devices[segment.device].id,
            nodes=len(segment.nodes),
            inputs=segment.inputs,
            outputs=segment.outputs,
            seconds=float(seconds[i]),
            weights_bytes=int(weights_bytes[i]),
            workspace_bytes=int(coarse.workspace_bytes[i]),
            keeps_order=state[Model].keeps_order,
            streamed=_list_streamed(state, segment),
            sized=written.sized[i],
            compiled=written.compiled[i],
            optimised=written.optimised[i],
        )
        for i, (name, segment) in enumerate(zip(ids, segments))
    )


def _list_streamed(state: State, segment: Segment) -> tuple[str, ...]:
    """Return the weights of a segment that stream, in the order in which its nodes read them."""
    if Streaming not in state:
        return ()
    graph, homes = state[Profile].graph, state[Streaming].homes
    names = (graph.weight_names[weight] for node in segment.nodes.tolist() for weight in graph.weights[node].tolist())
    return tuple(dict.fromkeys(name for name in names if name in homes))


def _stream_records(state: State) -> tuple[StreamRecord, ...]:
    return tuple(
        StreamRecord(
            device=state.target.devices[device].id,
            pool_bytes=stream.pool_bytes,
            bytes_per_second=dict(stream.bytes_per_second),
        )
        for device, stream in sorted(state[Streaming].streams.items() if Streaming in state else ())
    )


def _state_records(state: State, initial_states: Mapping[str, InitialRecord]) -> tuple[StateRecord, ...]:
    model, devices = state[Model], state.target.devices
    home = {name: devices[segment.device].id for segment in state[Segments].segments for name in segment.outputs}
    return tuple(
        StateRecord(
            output=output,
            input=name,
            device=home[model.sources.get(output, output)],
            initial=initial_states.get(name),
        )
        for name, output in model.states.items()
    )


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
            dtype=format_type(types[name]),
            shape=read_shape_entries(types[name]),
            bytes=int(size[name]),
            producer=producer.get(name),
            readers=tuple(segments),
        )
        for name, segments in readers.items()
    }


def _program_records(state: State, ids: Sequence[str]) -> dict[str, tuple[Step, ...]]:
    return {
        device.id: tuple(_program_step(instruction, ids, state.target) for instruction in program)
        for device, program in zip(state.target.devices, state[Segments].programs)
    }


def _program_step(instruction: Instruction, ids: Sequence[str], target: Target) -> Step:
    if instruction.op == "run":
        return Step(op="run", segment=ids[instruction.segment])
    peer = target.devices[instruction.peer].id if instruction.peer >= 0 else ""
    return Step(op=instruction.op, value=instruction.value, peer=peer)


def _route_records(state: State, ids: Sequence[str]) -> tuple[RouteRecord, ...]:
    devices = state.target.devices
    return tuple(
        RouteRecord(
            devices={devices[home].id: devices[route.device[home]].id for home in np.flatnonzero(route.device >= 0)},
            seconds=dict(zip(ids, route.seconds.tolist())),
            share=route.share,
        )
        for route in (state[Routes].routes if Routes in state else ())
    )


def _device_records(state: State) -> tuple[DeviceRecord, ...]:
    device_maps = list_device_maps(state)
    memory = measure_route_memory(state, device_maps)
    home_nodes = np.bincount(state[Placement].device, minlength=len(state.target.devices))
    homes = [
        {int(home) for routes in device_maps for home in np.flatnonzero(routes == index)}
        for index in range(len(state.target.devices))
    ]
    return tuple(
        DeviceRecord(
            id=device.id,
            nodes=int(home_nodes[sorted(homes[i])].sum()),
            compute_seconds=_compute_seconds(state, device_maps, i),
            weights_bytes=int(memory.weights_bytes[i]),
            peak_bytes=int(memory.peak_bytes[i]),
            limit_bytes=device.memory_bytes,
        )
        for i, device in enumerate(state.target.devices)
    )


def _compute_seconds(state: State, device_maps: Sequence[Ints], device: int) -> float:
    """Return the seconds that a device computes for one request, on the first route that uses it."""
    segments = state[Segments]
    if (device_maps[0] == device).any():
        return float(segments.simulation.compute_seconds[device])
    for device_map, route in zip(device_maps[1:], state[Routes].routes if Routes in state else ()):
        if (homes := np.flatnonzero(device_map == device)).size:
            return float(sum(s for s, segment in zip(route.seconds, segments.segments) if segment.device in homes))
    return 0.0
