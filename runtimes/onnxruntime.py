"""Run a bundle with ONNX Runtime: a worker thread per device, a session per segment, copies in between.

Each worker follows its device's program, request after request, in the order of submission; so requests overlap across
devices like a pipeline. Where a bundle has several routes, each request takes one, with the same programs on other
devices. Workers sleep while they wait. A failure ends its request on all devices. Requests that pass states on do not
overlap: each begins after the previous one of its conversation has succeeded or failed.
"""

from __future__ import annotations

import itertools
from typing import ClassVar

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.bundle_routes import list_route_devices
from onnxplace.errors import UsageError
from onnxplace.machine.hardware import find_cores, local_target, require_device
from onnxplace.runtime.interface import DEFAULT_MAX_IN_FLIGHT, Runtime, RuntimeSession
from onnxplace.runtimes.execution.engine import Engine
from onnxplace.runtimes.execution.segments import Fallback, PlacedDevice, open_routes
from onnxplace.runtimes.execution.sessions import EngineSession
from onnxplace.target.parsing import parse_device_spec

_numbers = itertools.count(1)


class OnnxRuntime(Runtime):
    """ONNX Runtime on the devices that the bundle names.

    Args:
        fallback: The device that takes over the segments of a device that is lost while a session is open, such as
            `cpu:0`; empty for none, so that requests fail then.
        isolate: Whether each device has its own process, which is opened again after its death.
    """

    name: ClassVar[str] = "onnxruntime"
    summary: ClassVar[str] = "run segments with ONNX Runtime, a worker per device"
    keeps_state: ClassVar[bool] = True

    def __init__(self, fallback: str = "", isolate: bool = False) -> None:
        if fallback and isolate:
            message = "a device that is isolated is opened again, and no other one takes over"
            raise UsageError("U045", message, where="fallback", hint="leave one of both out")
        self._isolates = isolate
        self._fallback = fallback and parse_device_spec(fallback, "--fallback") and fallback

    def open(
        self, bundle: Bundle, *, trace: bool = False, max_in_flight: int = DEFAULT_MAX_IN_FLIGHT
    ) -> RuntimeSession:
        """Open all segments, then start the workers.

        Raises TargetError before any thread starts if a device is missing, and ExecutionError if the process of an
        isolated device ends.
        """
        used = [bundle.target.devices[bundle.target.position(name)] for name in list_route_devices(bundle.manifest)]
        alternative = "without it, `onnxplace run --runtime simulated` predicts the time"
        for device in used:
            require_device(device, "" if bundle.manifest.states else alternative)
        cores = find_cores(bundle.target.devices)
        owner = f"session {next(_numbers)}" if self._isolates else ""
        devices = {device.id: PlacedDevice(device, cores.get(device.id, ()), owner) for device in used}
        fallback = None
        if self._fallback:
            (stand_in,) = local_target(self._fallback).devices
            fallback = Fallback(bundle, stand_in, cores.get(stand_in.id) or find_cores([stand_in]).get(stand_in.id, ()))
        return EngineSession(Engine(bundle, devices, open_routes(bundle, devices), trace, max_in_flight, fallback))
