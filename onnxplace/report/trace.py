"""Write timelines of runs in the format of Chrome and Perfetto."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from onnxplace.bundle import Bundle
    from onnxplace.runtime import Event

# Colours by kind of event, among the names that the format defines.
_COLORS = {"run": "thread_state_running", "copy": "rail_animation", "wait": "thread_state_sleeping"}


def chrome_trace(events: Iterable[Event], bundle: Bundle) -> dict[str, Any]:
    """Return events in Chrome's trace format, in microseconds, a row per device."""
    rows = {device.id: index for index, device in enumerate(bundle.target.devices)}
    entries: list[dict[str, Any]] = [
        {"ph": "M", "pid": 0, "tid": row, "name": "thread_name", "args": {"name": device}}
        for device, row in rows.items()
    ]
    entries += [
        {
            "ph": "X",
            "pid": 0,
            "tid": rows[event.device],
            "cat": event.kind,
            "name": event.name,
            "cname": _COLORS[event.kind],
            "ts": event.start_seconds * 1e6,
            "dur": (event.finish_seconds - event.start_seconds) * 1e6,
            "args": {"request": event.request},
        }
        for event in events
    ]
    return {"traceEvents": entries, "displayTimeUnit": "ms", "otherData": {"model": bundle.manifest.model}}
