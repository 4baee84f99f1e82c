"""Open routes: the devices and sessions that a request may take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from onnxplace.bundle import Bundle, list_routes
from onnxplace.runtimes.execution.segments import OpenSegment, PlacedDevice, open_segment

# A route that the prediction leaves out is taken only if the others are this much busier.
MIN_SHARE = 1e-3


@dataclass(frozen=True)
class OpenRoute:
    """A route with its sessions."""

    index: int
    devices: Mapping[str, str]
    """Device with a program -> the device that follows this program on this route."""
    programs: Mapping[str, str]
    """The inverse."""
    segments: dict[str, OpenSegment]
    """By id, each on its device of this route; empty once the engine is closed."""
    share: float
    """Of the requests, by the prediction."""


def open_routes(bundle: Bundle, devices: Mapping[str, PlacedDevice]) -> list[OpenRoute]:
    """Open the segments of all routes, each once on each device that runs it; raises the errors of `open_segment`."""
    opened: dict[tuple[str, str], OpenSegment] = {}
    routes = []
    for index, route in enumerate(list_routes(bundle.manifest)):
        segments = {}
        for record in bundle.manifest.segments:
            device = route.devices[record.device]
            if (record.id, device) not in opened:
                opened[record.id, device] = open_segment(bundle, record, devices[device])
            segments[record.id] = opened[record.id, device]
        programs = {device: home for home, device in route.devices.items()}
        routes.append(OpenRoute(index, route.devices, programs, segments, max(route.share, MIN_SHARE)))
    return routes


def choose_route(routes: Sequence[OpenRoute], taken: Iterable[int]) -> OpenRoute:
    """Return the route of a new request, given the indices of those that requests in flight have taken.

    It is the one that then has the fewest requests in flight relative to its share. A request alone takes the first
    route.
    """
    counts = Counter(taken)
    if not counts:
        return routes[0]
    return min(routes, key=lambda route: ((counts[route.index] + 1) / route.share, route.index))
