"""Whether devices have memory for a second set of their states."""

from __future__ import annotations

from collections import Counter

from onnxplace.bundle import Manifest


def has_room_for_copies(manifest: Manifest) -> bool:
    """Return whether every device can keep its old states while a step computes new ones, within its limit."""
    states: Counter[str] = Counter()
    for state in manifest.states:
        states[state.device] += manifest.values[state.input].bytes if state.input in manifest.values else 0
    return all(item.peak_bytes + states[item.id] <= item.limit_bytes for item in manifest.devices)
