"""One rank's part of a bundle: the segments of its device, and the programs that it follows.

The driver sends each request to all ranks of its route, with a serial number that is the same for all; ranks follow
requests in this order. A rank follows the program of its device as a worker thread does, except that its peers are
other processes. A send is only begun: MPI moves the bytes while the next segment runs. A receive waits for a value that
has been expected since the request began, so that its bytes have a place when they arrive. Outputs go back in a report;
states stay here, under the serial number of the request that left them, until the driver names or frees them.

A rank that fails or is told to cancel leaves the program, and reports. The others would wait for its values, so the
driver cancels the request for them. Values of a request that has ended here are dropped when they come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from itertools import count
from typing import Any

from onnxplace.bundle import Step, list_routes, list_working_devices
from onnxplace.errors import (
    OnnxplaceError,
    TargetError,
)
from onnxplace.hosts import describe_error, list_versions
from onnxplace.machine import require_device, use_custom_operators, without_optimisations
from onnxplace.runtimes.execution import (
    END_GRACE_SECONDS,
    WEIGHTS_PART,
    CancelledError,
    CarriedStates,
    OpenRoute,
    OpenSegment,
    Outcome,
    PlacedDevice,
    ProgramLoop,
    Request,
    Worker,
    describe_step_failure,
    drop_last_frees,
    find_cores,
    open_routes,
)
from onnxplace.runtimes.ranks.frames import Frame, decode_value, decode_values, encode_value, encode_values
from onnxplace.runtimes.ranks.mpi_messages import Channel, MessageBus, ValueChannels, choose_plane
from onnxplace.runtimes.ranks.opening import Fetch, Opening, find_clock, obtain_bundle
from onnxplace.runtimes.ranks.shared_blocks import MappedBlocks
from onnxplace.target import Device

# A look for later values delays the value that is awaited by some us, so most looks are for that one alone.
LOOKS_PER_LOOK_AHEAD = 10

Waiter = Callable[..., None]
"""Waits, while messages are looked for, until its first argument holds; it naps only while its second one does not."""


class RankLoop(ProgramLoop):
    """Follows the programs of one device, whose peers are other ranks.

    Args:
        opening: What the driver said.
        device: The device of this rank, opened.
        routes: All routes, with the segments of this device only.
        bus: The messages of this rank.
        wait: Waits until a condition holds, while messages are looked for.
    """

    def __init__(
        self,
        opening: Opening,
        device: PlacedDevice,
        routes: list[OpenRoute],
        bus: MessageBus,
        wait: Waiter,
    ) -> None:
        bundle = opening.bundle
        segments = {name: item for route in routes for name, item in route.segments.items()}
        super().__init__(bundle, {device.id: device}, list_working_devices(bundle.manifest), segments, opening.trace)
        self._device, self._routes, self._bus, self._wait = device, routes, bus, wait
        self._followed = {home: drop_last_frees(program) for home, program in bundle.manifest.programs.items()}
        self._ranks = {name: rank for rank, name in enumerate(opening.devices)}
        self._channels = ValueChannels(bus, bundle.manifest)
        self._plane = choose_plane(device)
        self._arrived: dict[int, dict[str, Any]] = {}
        """Values of other ranks that came as frames, by the number of their request."""
        self._stored: dict[tuple[int, str], Any] = {}
        """Carried states, by the number of the request that stored them and their input."""
        self._ended = -1
        """Number of the last request that ended here; values of earlier ones are late."""
        self._current: Request | None = None
        self._serial = -1
        self._cancelled: set[int] = set()
        self._blocks = MappedBlocks()
        self.shares_memory = self._blocks.try_probe(opening.probe)
        """Whether inputs can come by memory of the driver."""
        self._entries = device.memory.run_entries()
        self._readers = [Worker(device, loader.read, WEIGHTS_PART) for loader in self._weight_loaders.values()]
        for reader in self._readers:
            reader.start()
        self.cores = device.cores
        self.clock_offset_seconds = 0.0
        """What the clock of this machine shows more than the driver's."""
        self.compares_clocks = opening.trace and (opening.clock != find_clock() or bus.rank in opening.remote)

    # -- messages, under the lock of the bus ----------------------------------------------------------

    def accept_value(self, frame: Frame) -> None:
        """Keep a value that came as a frame, unless its request has ended here."""
        serial = frame.fields["serial"]
        if serial > self._ended:
            value = decode_value(frame.fields["value"], iter(frame.buffers))
            self._arrived.setdefault(serial, {})[frame.fields["name"]] = value

    def look_ahead(self) -> None:
        """Receive what the current request waits for next, while its segments run; for any thread."""
        if self._current is not None:
            self._channels.look(self._serial)

    @property
    def is_receiving(self) -> bool:
        """Return whether a value is on its way to here; for any thread."""
        with self._bus.lock:
            return self._channels.is_arriving

    def cancel(self, serial: int) -> None:
        """End a request as soon as possible, whether it has begun here or not; for any thread."""
        if serial <= self._ended:
            return
        self._cancelled.add(serial)
        request = self._current
        if request is not None and self._serial == serial:
            request.fail(CancelledError())

    # -- requests ------------------------------------------------------------------------------------

    def follow(self, frame: Frame) -> Frame:
        """Follow a program for one request; return the report with its outputs, or its failure."""
        fields = frame.fields
        serial, route = fields["serial"], self._routes[fields["route"]]
        names = self._returned_names.union(fields["states"]) if fields["states"] else self._returned_names
        self._blocks.restore(frame)
        feeds = decode_values(fields["feeds"], iter(frame.buffers))
        conversation = CarriedStates(self._state_table, fields["conversation"])
        request = Request(fields["number"], feeds, route, names, conversation, Outcome())
        request.start_time = fields["submitted"] + self.clock_offset_seconds
        for key, value in self._entries.items():
            request.options.add_run_config_entry(key, value)
        request.states = {name: self._take_state(*handle) for name, handle in fields["stored"].items()}
        # From here on, looks of other threads receive its values, and a cancellation reaches it.
        self._serial, self._current = serial, request
        # Its cancellation may have come before the request itself.
        if serial in self._cancelled:
            request.fail(CancelledError())
        try:
            return self._report(serial, self._run_part(request), request)
        finally:
            # What still comes for this request, or an earlier one, is late: values and cancellations are dropped.
            self._ended, self._current = serial, None
            self._arrived.pop(serial, None)
            # One by one, since another thread may add some meanwhile.
            for item in tuple(self._cancelled):
                if item <= serial:
                    self._cancelled.discard(item)

    def _run_part(self, request: Request) -> dict[str, Any]:
        """Follow the program; return the outputs, empty after a failure, which the request then has."""
        device = self._device
        program = self._followed[request.route.programs[device.id]]
        self._channels.expect((step.value, self._find_rank(step, request)) for step in program if step.op == "receive")
        try:
            self.follow_program(device, program, request)
            for memory, _, checkpoint in request.checkpoints:
                memory.settle(checkpoint)
            return {name: device.memory.read(parcel) for name, parcel in request.outputs.items()}
        except (CancelledError, OnnxplaceError) as failure:
            request.fail(failure)
        except Exception as failure:  # noqa: BLE001 - the driver reports it
            request.fail(describe_step_failure(failure, request.current_steps.get(device.id), device.id))
        # After a failure, wait for nothing; only what is over is dropped.
        for memory, _, _ in request.checkpoints:
            with suppress(Exception):
                memory.settle(None)
        return {}

    def _report(self, serial: int, outputs: Mapping[str, Any], request: Request) -> Frame:
        """Return the end of a request as a frame."""
        failure = request.failure
        fields: dict[str, Any] = {"serial": serial, "cancelled": isinstance(failure, CancelledError)}
        buffers: list[Any] = []
        if isinstance(failure, OnnxplaceError):
            fields["error"] = describe_error(failure)
        if failure is None:
            fields["outputs"] = encode_values(outputs, buffers)
            # States stay here; the driver learns their shapes, and names them by this request from now on.
            self._stored.update({(serial, name): value for name, value in request.next_states.items()})
            fields["states"] = {name: list(_read_shape(value)) for name, value in request.next_states.items()}
        fields["events"] = [
            [item.device, item.kind, item.name, item.start_seconds, item.finish_seconds, item.bytes]
            for item in request.events
        ]
        return Frame("report", fields, buffers)

    def run_segment(self, device: PlacedDevice, segment: OpenSegment, values: dict[str, Any], request: Request) -> None:
        """Run a segment; the helper has to look for messages meanwhile."""
        if self._bus.is_moving:
            self._bus.is_unattended.set()
        super().run_segment(device, segment, values, request)

    def _send(self, device: PlacedDevice, step: Step, value: Any, request: Request) -> None:
        """Send a value to the rank of another device; the send is only begun."""
        rank = self._find_rank(step, request)
        array = self._plane.export(value)
        # Tensors of types that numpy has go by channels; other values are packed into frames.
        if step.value in self._channels:
            self._channels.send(rank, self._serial, step.value, array)
            return
        buffers: list[Any] = []
        fields = {"serial": self._serial, "name": step.value, "value": encode_value(array, buffers)}
        self._bus.send(rank, Frame("value", fields, buffers))

    def _receive(self, device: PlacedDevice, step: Step, request: Request) -> Any:
        """Wait for a value of another rank; raises CancelledError if the request ends meanwhile."""
        began = time.perf_counter()
        if step.value in self._channels:
            array = self._await_channel(self._channels.find(step.value, self._find_rank(step, request)), request)
        else:
            arrived = self._arrived.setdefault(self._serial, {})
            self._wait(lambda: step.value in arrived or request.failure is not None)
            if request.failure is not None:
                raise CancelledError
            array = arrived.pop(step.value)
        self._record(request, device, "wait", step.value, began)
        began = time.perf_counter()
        value = self._plane.accept(array, self.bundle.manifest.values[step.value].dtype)
        self._record(request, device, "copy", step.value, began, value)
        return value

    def _await_channel(self, channel: Channel, request: Request) -> Any:
        """Wait for the value of a channel, and return it."""
        serial, lock, looks = self._serial, self._bus.lock, count(1)

        def is_ready() -> bool:
            with lock:
                if channel.look(serial) or request.failure is not None:
                    return True
                if next(looks) % LOOKS_PER_LOOK_AHEAD == 0:  # later values may arrive before this one
                    self._channels.look(serial)
                return False

        self._wait(is_ready, lambda: channel.is_arriving or self._channels.is_arriving)
        if request.failure is not None:
            raise CancelledError
        return channel.take()

    def _find_rank(self, step: Step, request: Request) -> int:
        """Return the rank of the other device of a transfer."""
        return self._ranks[request.route.devices[step.peer]]

    # -- states ------------------------------------------------------------------------------------

    def _take_states(self, request: Request) -> dict[str, Any]:
        """Return the states that the driver named."""
        return dict(request.states or {})

    def _take_state(self, serial: int, name: str, keeps: bool) -> Any:
        """Return a stored state, which stays stored if it is kept."""
        return self._stored[serial, name] if keeps else self._stored.pop((serial, name))

    def free(self, handles: list[list[Any]]) -> None:
        """Free stored states that the driver has no use for; those that a request has taken are gone."""
        for serial, name in handles:
            self._stored.pop((serial, name), None)

    def read(self, serial: int, name: str) -> Any:
        """Return a stored state as numpy."""
        memory = self._device.memory
        return memory.read(memory.send(self._stored[serial, name], None))

    def close(self) -> None:
        """Close sessions and memory."""
        self._channels.close()
        for thread, loader in zip(self._readers, self._weight_loaders.values()):
            loader.end()
            thread.join(END_GRACE_SECONDS)
        for route in self._routes:
            route.segments.clear()
        self._device.memory.close()


def open_rank(opening: Opening, bus: MessageBus, wait: Waiter, fetch: Fetch) -> RankLoop:
    """Open the device and the segments of a rank; on another machine than the driver's, `fetch` gets what is missing.

    Raises the errors of the runtime `onnxruntime`, and TargetError if versions differ.
    """
    _require_versions(opening.versions)
    bundle, name = opening.bundle, opening.devices[bus.rank]
    target = bundle.target
    device = target.devices[target.position(name)]
    _require_local(device)
    cores = find_cores(item for item in target.devices if item.host == device.host)
    placed = PlacedDevice(device, cores.get(name, ()))
    # A device may take the place of others on further routes: it opens the segments of all these.
    homes = {home for route in list_routes(bundle.manifest) for home, item in route.devices.items() if item == name}
    segments = [item for item in bundle.manifest.segments if item.device in homes]
    # A remote machine may lack files of the bundle: it fetches those that this rank needs.
    if bus.rank in opening.remote:
        states = [item.input for item in bundle.manifest.states if item.device in homes]
        bundle = obtain_bundle(bundle, segments, states, fetch)
        opening = replace(opening, bundle=bundle)
    with use_custom_operators(opening.libraries), nullcontext() if opening.optimises else without_optimisations():
        bundle.check_files(*{item.file for item in segments}, check="small")
        routes = open_routes(bundle, {name: placed})
    return RankLoop(opening, placed, routes, bus, wait)


def _require_versions(expected: Mapping[str, str]) -> None:
    """Raise TargetError unless the versions here are those of the driver."""
    for name, version in list_versions().items():
        if version != expected[name]:
            message = (
                f"expected {name} {expected[name] or 'none'}, as where the session is opened, got {version or 'none'}"
            )
            raise TargetError("K005", message, hint="install the same versions on all hosts")


def _require_local(device: Device) -> None:
    """Raise TargetError unless a device of this host can be used; the error names it with its host."""
    try:
        require_device(device.local)
    except TargetError as problem:
        raise TargetError(problem.code, problem.message, where=device.id, hint=problem.hint) from None


def _read_shape(value: Any) -> tuple[int, ...]:
    """Return the shape of a state; empty for values that are no tensors."""
    shape = getattr(value, "shape", ())
    return tuple(shape() if callable(shape) else shape)
