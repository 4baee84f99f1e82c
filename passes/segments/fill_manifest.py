"""Build the manifest of a bundle from the results of the passes: it copies them, and computes nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from importlib import metadata
from typing import Any

import numpy as np
from onnx import TypeProto

from onnxplace.bundle.manifest import (
    SCHEMA_VERSION,
    InitialRecord,
    InputRecord,
    Manifest,
    OutputRecord,
    RepeatRecord,
    RouteRecord,
    SegmentRecord,
    ShardingRecord,
    StateRecord,
    TargetRecord,
    TrainingNodesRecord,
    TrainingRecord,
    ValueRecord,
    WeightRecord,
)
from onnxplace.facts import Placement, Prediction, Profile, Routes, Segments, Shards, Streaming
from onnxplace.machine.hardware import describe_optimiser
from onnxplace.model.model import Model, declaration_of
from onnxplace.model.operator_checks import list_custom_operators
from onnxplace.model.tensors import format_type, read_shape_entries, says_unknown
from onnxplace.model_metadata import Phase
from onnxplace.state import State

_Shape = tuple[int | str | None, ...]


def build_manifest(
    state: State,
    types: Mapping[str, TypeProto],
    segments: Sequence[SegmentRecord],
    initial_states: Mapping[str, InitialRecord],
    streamed: Mapping[str, WeightRecord],
    **written: Any,
) -> Manifest:
    """Return the manifest of a split model.

    Args:
        state: With Model, Profile, Placement, Segments and Prediction.
        types: Types of the values that cross between segments, by name.
        segments: The record of each segment.
        initial_states: Where the initial value of a state is, by its input.
        streamed: Where each weight is that streams.
        written: Further fields of the manifest, about how the bundle was made and its files.
    """
    model, target, profile, prediction = state[Model], state.target, state[Profile], state[Prediction]
    return Manifest(
        schema_version=SCHEMA_VERSION,
        model=model.name,
        model_digest=model.digest,
        dimensions=_dimension_sizes(model),
        placer=state[Placement].placer,
        versions=_package_versions(),
        target=TargetRecord(
            devices=target.devices,
            links=target.with_all_links().links,
            link_model=target.link_model,
            shared=target.shared,
            pools=target.pools,
        ),
        inputs=tuple(InputRecord(**asdict(declaration_of(value, model))) for value in model.inputs),
        outputs=_output_records(model, types),
        states=_state_records(state, initial_states),
        segments=tuple(segments),
        values=_value_records(state, types),
        programs={device.id: program for device, program in zip(target.devices, state[Segments].programs)},
        streamed=dict(streamed),
        streams=tuple(stream for _, stream in sorted(state[Streaming].streams.items())) if Streaming in state else (),
        routes=_route_records(state),
        predicted=prediction.request,
        devices=prediction.devices,
        transfers=len(prediction.transfer_bytes),
        transfer_bytes=sum(prediction.transfer_bytes),
        diagnostics=state.diagnostics,
        optimised_for=describe_optimiser() if any(segment.optimised for segment in segments) else "",
        repeats=tuple(
            RepeatRecord(count=repeat.count, nodes=repeat.nodes, first=profile.graph.names[repeat.start])
            for repeat in profile.repeats
        ),
        sharding=_sharding_record(state),
        custom_operators=list_custom_operators(model),
        training=_training_record(state),
        metadata=model.metadata,
        **written,
    )


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


def _sharding_record(state: State) -> ShardingRecord | None:
    """Return how operators are split; None if they are not."""
    if Shards not in state or state[Shards].ways < 2:
        return None
    shards = state[Shards]
    return ShardingRecord(
        ways=shards.ways,
        stages=shards.stages,
        exchanges=dict(shards.exchanges),
        kinds=shards.kinds,
        states=shards.split_states,
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
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


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


def _value_records(state: State, types: Mapping[str, TypeProto]) -> dict[str, ValueRecord]:
    graph = state[Profile].graph
    size = dict(zip(graph.value_names, graph.value_bytes.tolist()))
    producer: dict[str, str] = {}
    readers: dict[str, list[str]] = {value.name: [] for value in state[Model].inputs}
    for segment in state[Segments].segments:
        producer |= dict.fromkeys(segment.outputs, segment.id)
        for value in (*segment.outputs, *segment.inputs):
            readers.setdefault(value, [])
        for value in segment.inputs:
            readers[value].append(segment.id)
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


def _route_records(state: State) -> tuple[RouteRecord, ...]:
    devices, ids = state.target.devices, [segment.id for segment in state[Segments].segments]
    return tuple(
        RouteRecord(
            devices={devices[home].id: devices[route.device[home]].id for home in np.flatnonzero(route.device >= 0)},
            seconds=dict(zip(ids, route.seconds.tolist())),
            share=route.share,
        )
        for route in (state[Routes].routes if Routes in state else ())
    )
