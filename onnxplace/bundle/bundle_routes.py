"""Routes, the devices that a request may take through a bundle; and bundles derived from a bundle.

The programs of a bundle are its first route. A further route names, for each device with a program, a device that
follows this program instead. So copies of the model, of a pipeline, or of single stages are routes.

Derived bundles are one that returns the values crossing devices, and one device's part. They run like any other bundle,
from the same files; nothing is written. They have one route.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from onnxplace.bundle.manifest import InputRecord, Manifest, OutputRecord, RouteRecord

if TYPE_CHECKING:
    from onnxplace.bundle.bundle import Bundle
    from onnxplace.bundle.manifest import Step


def list_routes(manifest: Manifest) -> tuple[RouteRecord, ...]:
    """Return all routes: the programs on their own devices, then the further ones."""
    first = RouteRecord(
        devices={device: device for device in list_working_devices(manifest)},
        seconds={segment.id: segment.seconds for segment in manifest.segments},
        share=max(1.0 - sum(route.share for route in manifest.routes), 0.0),
    )
    return (first, *manifest.routes)


def list_working_devices(manifest: Manifest) -> tuple[str, ...]:
    """Return the devices that have a program, in the order of the programs."""
    return tuple(device for device, program in manifest.programs.items() if program)


def list_route_devices(manifest: Manifest) -> tuple[str, ...]:
    """Return the devices that any route uses, in the order of the target."""
    used = {device for route in list_routes(manifest) for device in route.devices.values()}
    return tuple(device.id for device in manifest.target.devices if device.id in used)


def move_to_route(manifest: Manifest, route: RouteRecord) -> Manifest:
    """Return a manifest whose only route is this one: programs and segments with their devices renamed.

    It describes the same files. States move along, too.
    """
    devices = route.devices
    segments = tuple(
        segment.model_copy(update={"device": devices[segment.device], "seconds": route.seconds[segment.id]})
        for segment in manifest.segments
    )
    programs: dict[str, tuple[Step, ...]] = dict.fromkeys(manifest.programs, ())
    for device, stand_in in devices.items():
        programs[stand_in] = tuple(
            step.model_copy(update={"peer": devices[step.peer]}) if step.peer else step
            for step in manifest.programs[device]
        )
    states = tuple(item.model_copy(update={"device": devices[item.device]}) for item in manifest.states)
    updates = {"segments": segments, "programs": programs, "states": states, "routes": ()}
    return manifest.model_copy(update=updates)


def find_route_of_device(manifest: Manifest, device: str) -> RouteRecord | None:
    """Return the first route that uses a device, or None."""
    return next((route for route in list_routes(manifest) if device in route.devices.values()), None)


def sum_device_seconds(manifest: Manifest) -> dict[str, float]:
    """Return, per device of the target, the time of its segments on the first route that uses it."""
    seconds = {device.id: 0.0 for device in manifest.target.devices}
    for device in list_route_devices(manifest):
        route = find_route_of_device(manifest, device)
        assert route is not None
        seconds[device] = sum(
            route.seconds[segment.id] for segment in manifest.segments if route.devices[segment.device] == device
        )
    return seconds


# ------------------------------------------------------------------------------------------------- bundles of a bundle


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
