"""The threads that deliver the results of devices whose work is enqueued."""

from __future__ import annotations

from contextlib import suppress

from onnxplace.errors import OnnxplaceError
from onnxplace.runtimes.execution.failures import describe_step_failure
from onnxplace.runtimes.execution.requests import Request
from onnxplace.runtimes.execution.segments import PlacedDevice
from onnxplace.runtimes.execution.workers import Worker, WorkLoop


class Deliverer(Worker):
    """The thread that waits for the enqueued work of requests, so that their device's worker can enqueue the next."""

    def __init__(self, engine: DeliveryLoop, device: PlacedDevice) -> None:
        super().__init__(engine, device, engine.deliver, " deliveries")


class DeliveryLoop(WorkLoop):
    """The part of an engine that deliverers run."""

    def deliver(self, device: PlacedDevice) -> None:
        """Wait for the enqueued work of one request after another, and finish each, until the engine is closed."""
        request = None
        try:
            while not self._is_ended():
                if (request := self._deliveries[device.id].get()) is not None:
                    self._settle(request)
                    self._finish_part(request, device.id)
                    request = None  # while this thread waits for the next one, nothing may keep its values
        except BaseException as cause:  # noqa: BLE001 - whatever ends a thread, such as an exception set from outside
            self._mark_broken(device, cause, request)
        # Requests that failed did not wait for their enqueued work, which may use what `close` frees. `close` waits for
        # this thread with a limit, so that it returns even if a device hangs.
        with suppress(Exception):
            device.memory.finish()

    def _settle(self, request: Request) -> None:
        """Wait for the enqueued work and the outputs of a request, unless it has failed; an error ends it."""
        for memory, device, checkpoint in request.checkpoints:
            if request.failure is not None:
                break
            try:
                memory.settle(checkpoint)
                home = request.route.programs[device]
                for name in [name for name in request.outputs if self._producers[name] == home]:
                    request.outputs[name] = memory.fetch(request.outputs[name])
            except OnnxplaceError as failure:
                self._fail(request, failure)
            except Exception as failure:  # noqa: BLE001 - the caller of the request gets it
                self._fail(request, describe_step_failure(failure, None, device))
        for memory, _, _ in request.checkpoints:
            with suppress(OnnxplaceError):  # of another request, which gets it itself
                memory.settle(None)  # an idle device holds nothing for copies that ended meanwhile
        request.checkpoints = []

    def _is_ended(self) -> bool:
        """Return whether the engine is closed and no request is in flight."""
        with self._lock:
            return self._closed and not self._in_flight
