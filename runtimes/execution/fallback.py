"""The fallback of a session: the device that takes over the segments of devices that are lost while it runs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from onnxplace.bundle import Bundle
from onnxplace.devices import DeviceAddress
from onnxplace.errors import Diagnostic, ExecutionError, FallbackWarning, OnnxplaceError
from onnxplace.machine import make_session_options, open_session
from onnxplace.ort import build_one_node_model
from onnxplace.runtimes.execution.segments import OpenRoute, PlacedDevice, open_routes
from onnxplace.target import Device
from onnxplace.utils import call_guarded


class Fallback:
    """A device that stands in for others, under their names.

    Args:
        bundle: An open bundle.
        device: The device, of this machine.
        cores: Its cores.
    """

    def __init__(self, bundle: Bundle, device: Device, cores: Sequence[int]) -> None:
        self._bundle, self._device, self._cores = bundle, device, cores

    def is_needed(self, device: PlacedDevice, failure: ExecutionError) -> bool:
        """Return whether a device that failed is lost: its process ended, or it does not run a single node any more."""
        address = device.memory.address
        return address != self._device.address and (failure.code == "X016" or not _is_usable(address))

    def take_over(self, device: PlacedDevice, routes: Sequence[OpenRoute], failure: ExecutionError) -> None:
        """Open the segments of a lost device on this one, and warn of it; for the thread that works for the device.

        Raises ExecutionError if they cannot be opened.
        """
        stand_in = PlacedDevice(self._device, self._cores)
        try:
            opened = open_routes(self._bundle, {device.id: stand_in})
        except OnnxplaceError as problem:
            message = f"{failure.message}; {self._device.id} cannot take over: {problem.message}"
            raise ExecutionError("X016", message, where=device.id, hint=problem.hint) from failure
        for route, part in zip(routes, opened):
            route.segments.update(part.segments)
        device.cores, device.kind, device.memory = stand_in.cores, stand_in.kind, stand_in.memory
        message = f"{failure.message}; {self._device.id} runs its segments from now on"
        call_guarded(warnings.warn, FallbackWarning(Diagnostic("X016", message, where=device.id)))


def _is_usable(device: DeviceAddress) -> bool:
    """Return whether a device still runs a node."""
    try:
        open_session(build_one_node_model(), make_session_options(()), device).run(None, {"x": np.zeros(1, np.float32)})
    except Exception:  # noqa: BLE001 - a device that is gone may fail in any way
        return False
    return True
