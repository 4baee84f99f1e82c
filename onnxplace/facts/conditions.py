"""Conditions of facts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from onnxplace.simulation import Simulation

if TYPE_CHECKING:
    from onnxplace.state import State


def require(condition: bool, message: str) -> None:
    """Raise ValueError unless a condition holds."""
    if not condition:
        raise ValueError(message)


def require_memory(state: State, simulation: Simulation) -> None:
    """Raise ValueError if a simulated peak exceeds the memory of its device."""
    for device, peak in zip(state.target.devices, simulation.peak_bytes):
        require(int(peak) <= device.memory_bytes, f"{device.id} needs {int(peak)} bytes of {device.memory_bytes}")
