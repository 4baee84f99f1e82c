"""Routes: the devices that a request may take through a bundle.

The programs of a bundle are its first route. A further route names, for each device with a program, a device that
follows this program instead. So copies of the model, of a pipeline, or of single stages are routes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxplace.bundle.manifest import Manifest, RouteRecord

if TYPE_CHECKING:
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
    for route in reversed(list_routes(manifest)):  # the first one that uses a device comes last, and counts
        seconds |= dict.fromkeys(route.devices.values(), 0.0)
        for segment in manifest.segments:
            seconds[route.devices[segment.device]] += route.seconds[segment.id]
    return seconds
