"""Derive bundles from a bundle: one that returns the values crossing devices, and one device's part.

They run like any other bundle, from the same files; nothing is written. They have one route.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import InputRecord, Manifest, OutputRecord
from onnxplace.bundle.routes import find_route_of_device, move_to_route


def list_crossing_values(manifest: Manifest) -> Mapping[tuple[str, str], tuple[str, ...]]:
    """Return the values that cross in one inference, by source and destination, in sending order."""
    crossing: dict[tuple[str, str], list[str]] = {}
    for device, program in manifest.programs.items():
        for step in program:
            if step.op == "send":
                crossing.setdefault((device, step.peer), []).append(step.value)
    return {ends: tuple(values) for ends, values in crossing.items()}


def record_crossing_values(bundle: Bundle) -> Bundle:
    """Return a bundle whose outputs are the values that cross between devices.

    Each output has the name of its value. States are no longer stored: their inputs have to be fed. Crossing values
    stay until the end of a request.
    """
    manifest = bundle.manifest
    sent = {name: device for (device, _), names in list_crossing_values(manifest).items() for name in names}
    programs = {
        device: tuple(step for step in program if not (step.op == "free" and sent.get(step.value) == device))
        for device, program in manifest.programs.items()
    }
    outputs = tuple(
        OutputRecord(name=name, dtype=manifest.values[name].dtype, shape=manifest.values[name].shape, value=name)
        for name in sent
    )
    updates = {"programs": programs, "outputs": outputs, "states": (), "routes": ()}
    return replace(bundle, manifest=manifest.model_copy(update=updates))


def extract_device_part(bundle: Bundle, device: str) -> Bundle:
    """Return a bundle of one device's part.

    Its inputs are those of the model that it reads, then the values that it received. Its outputs are those of the
    model that it computes; it sends nothing. States are no longer stored: their inputs have to be fed. The part is that
    of the first route that uses the device.
    """
    manifest = bundle.manifest
    if (route := find_route_of_device(manifest, device)) is not None:
        manifest = move_to_route(manifest, route)
    program = manifest.programs.get(device, ())
    segments = tuple(segment for segment in manifest.segments if segment.device == device)
    segment_ids = {segment.id for segment in segments}
    read = {name for segment in segments for name in segment.inputs}
    computed = {name for segment in segments for name in segment.outputs}
    received = [step.value for step in program if step.op == "receive"]
    records = {name: manifest.values[name] for name in manifest.values if name in read | computed | set(received)}
    inputs = [item for item in manifest.inputs if item.name in read]
    inputs += [InputRecord(name=name, dtype=records[name].dtype, shape=records[name].shape) for name in received]
    updates = {
        "inputs": tuple(inputs),
        "outputs": tuple(item for item in manifest.outputs if item.value in computed),
        "states": (),
        "routes": (),
        "segments": segments,
        "values": {
            name: record.model_copy(
                update={
                    "producer": record.producer if name in computed else None,
                    "readers": tuple(reader for reader in record.readers if reader in segment_ids),
                }
            )
            for name, record in records.items()
        },
        "programs": {device: tuple(step for step in program if step.op in ("run", "free"))},
    }
    return replace(bundle, manifest=manifest.model_copy(update=updates))
