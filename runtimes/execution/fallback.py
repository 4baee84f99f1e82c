"""The fallback of a session: the device that takes over the segments of devices that are lost while it runs."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from onnxplace.bundle import Bundle
from onnxplace.errors import ExecutionError, OnnxplaceError
from onnxplace.machine import is_usable
from onnxplace.runtime import FallbackWarning
from onnxplace.runtimes.execution.segments import OpenRoute, OpenSegment, PlacedDevice, open_segment
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
        return address != self._device.address and (failure.code == "X016" or not is_usable(address))

    def take_over(self, device: PlacedDevice, routes: Sequence[OpenRoute], failure: ExecutionError) -> None:
        """Open the segments of a lost device on this one, and warn of it; for the thread that works for the device.

        Raises ExecutionError if they cannot be opened.
        """
        stand_in = PlacedDevice(self._device, self._cores)
        opened: dict[str, OpenSegment] = {}
        try:
            for route in routes:
                for record in self._bundle.manifest.segments:
                    if route.devices[record.device] == device.id and record.id not in opened:
                        opened[record.id] = open_segment(self._bundle, record, stand_in)
        except OnnxplaceError as problem:
            message = f"{failure.message}; {self._device.id} cannot take over: {problem.message}"
            raise ExecutionError("X016", message, where=device.id, hint=problem.hint) from failure
        for route in routes:
            own = [item.id for item in self._bundle.manifest.segments if route.devices[item.device] == device.id]
            route.segments.update({name: opened[name] for name in own})
        device.become(stand_in)
        message = f"{failure.message}; {self._device.id} runs its segments from now on"
        call_guarded(warnings.warn, FallbackWarning(message, device.id))
