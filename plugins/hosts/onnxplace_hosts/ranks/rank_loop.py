"""One rank's part of a bundle: the segments of its device, and the programs that it follows.

The driver sends each request to all ranks of its route, with a serial number that is the same for all; requests begin
and report in this order, and while one waits, the next may go on. A rank follows the program of its device as a worker
thread does, except that its peers are other processes. A send is only begun: the rest leaves while the next segment
runs. Values that arrive wait here, under the serial number of their request. Outputs go back in a report; states stay
here, under the serial number of the request that left them, until the driver names or frees them.

A rank that fails or is told to cancel leaves the program, and reports. The others would wait for its values, so the
driver cancels the request for them. Values of a request that has ended here are dropped when they come.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Generator, Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import numpy as np

from onnxplace.bundle.bundle_routes import list_routes
from onnxplace.bundle.manifest import Step
from onnxplace.errors import (
    OnnxplaceError,
    TargetError,
)
from onnxplace.machine.hardware import find_cores, require_device
from onnxplace.machine.ort_sessions import use_custom_operators, without_optimisations
from onnxplace.runtimes.execution.engine import END_GRACE_SECONDS, WEIGHTS_PART
from onnxplace.runtimes.execution.failures import describe_step_failure
from onnxplace.runtimes.execution.futures import Outcome
from onnxplace.runtimes.execution.programs import Condition, ProgramLoop
from onnxplace.runtimes.execution.requests import CancelledError, CarriedStates, Request
from onnxplace.runtimes.execution.segments import OpenRoute, OpenSegment, PlacedDevice, open_routes
from onnxplace.runtimes.execution.wakeups import exchanges_often
from onnxplace.runtimes.execution.workers import WorkerThread
from onnxplace.target.target import Device
from onnxplace_hosts.describe_host import describe_error, list_versions, require_versions
from onnxplace_hosts.ranks.data_planes import choose_plane
from onnxplace_hosts.ranks.frames import Frame, decode_values, encode_values
from onnxplace_hosts.ranks.links import Links
from onnxplace_hosts.ranks.opening import Fetch, Opening, find_clock, obtain_bundle
from onnxplace_hosts.ranks.placed_outputs import place_outputs
from onnxplace_hosts.ranks.shared_blocks import MappedBlocks

# Segments that take longer have the helper move messages meanwhile; waking it takes some 10 us.
LONG_SECONDS = 2e-3
# Where values are exchanged often, so many requests are in progress at once; each holds its values.
MAX_IN_PROGRESS = 4


class RankRequest(Request):
    """A request that a rank follows."""

    serial = -1
    """Its number, the same for all ranks."""
    arrived: dict[str, Any]
    """Values of other ranks."""


class RankLoop(ProgramLoop):
    """Follows the programs of one device, whose peers are other ranks.

    Args:
        opening: What the driver said.
        device: The device of this rank, opened.
        routes: All routes, with the segments of this device only.
        links: The messages of this rank.
    """

    def __init__(
        self,
        opening: Opening,
        device: PlacedDevice,
        routes: list[OpenRoute],
        links: Links,
    ) -> None:
        bundle = opening.bundle
        super().__init__(bundle, {device.id: device}, routes, opening.trace)
        self._device, self._links = device, links
        links.on_value = self.accept_value
        self._ranks = {name: rank for rank, name in enumerate(opening.devices)}
        self._plane = choose_plane(device)
        self._arrived: dict[int, dict[str, Any]] = {}
        """Values of other ranks, by the number of their request."""
        self._long_segments: set[str] = set()
        """Those whose last run took long."""
        self._stored: dict[tuple[int, str], Any] = {}
        """Carried states, by the number of the request that stored them and their input."""
        self._requests: dict[int, RankRequest] = {}
        """Requests in progress, by their number, in this order."""
        self._begun = -1
        """Number of the last request that began here; what comes for earlier ones that are not in progress is late."""
        self._cancelled: set[int] = set()
        """Requests that have not begun."""
        self._dtypes = {name: item.dtype for name, item in bundle.manifest.values.items()}
        self._blocks = MappedBlocks()
        self.shares_memory = self._blocks.try_probe(opening.probe)
        """Whether inputs can come by memory of the driver."""
        self._lent: deque[tuple[int, list[int]]] = deque()
        """Blocks with outputs of requests, which the driver has not taken."""
        self._entries = device.memory.run_entries()
        overlaps = exchanges_often(bundle.manifest) and device.kind.is_host and not self._weight_loaders
        self.max_in_progress = MAX_IN_PROGRESS if overlaps and not opening.trace else 1
        """How many requests may be in progress, one of which goes on while others wait."""
        self._readers = [WorkerThread(device, loader.read, WEIGHTS_PART) for loader in self._weight_loaders.values()]
        for reader in self._readers:
            reader.start()
        self.clock_offset_seconds = 0.0
        """What the clock of this machine shows more than the driver's."""
        self.compares_clocks = opening.trace and (opening.clock != find_clock() or links.rank in opening.remote)

    # -- messages, under the lock of the links --------------------------------------------------------

    def accept_value(self, serial: int, name: str, value: Any) -> None:
        """Keep a value of another rank, unless its request has ended here."""
        if serial > self._begun or serial in self._requests:
            self._arrived.setdefault(serial, {})[name] = value

    @property
    def is_busy(self) -> bool:
        """Return whether a request is in progress; for any thread."""
        return bool(self._requests)

    def cancel(self, serial: int) -> None:
        """End a request as soon as possible, whether it has begun here or not."""
        if (request := self._requests.get(serial)) is not None:
            request.fail(CancelledError())
        elif serial > self._begun:
            self._cancelled.add(serial)

    # -- requests ------------------------------------------------------------------------------------

    def follow(self, frame: Frame) -> Generator[Condition, None, Frame]:
        """Follow a program for one request; return the report with its outputs, or its failure.

        Where that has to wait, it yields what for, and goes on once it holds.
        """
        request, taken = self._begin(frame), frame.fields["taken"]
        try:
            outputs = yield from self._run_part(request)
            # Reports leave in the order of requests, so that `taken` is for all earlier ones, too.
            if next(iter(self._requests)) != request.serial:
                yield lambda: next(iter(self._requests)) == request.serial
            report = self._report(request.serial, outputs, request)
            if taken is not None:
                self._lent.append((request.serial, self._links.blocks.place(report)))
            return report
        finally:
            # What still comes for this request is late.
            with self._links.lock:
                del self._requests[request.serial], self._arrived[request.serial]

    def _begin(self, frame: Frame) -> RankRequest:
        """Return a request of the driver, which is in progress from now on."""
        fields = frame.fields
        serial, route, taken = fields["serial"], self._routes[fields["route"]], fields["taken"]
        names = self._returned_names.union(fields["states"]) if fields["states"] else self._returned_names
        self._blocks.restore(frame)
        while taken is not None and self._lent and self._lent[0][0] <= taken:
            self._links.blocks.give_back(self._lent.popleft()[1])
        feeds = decode_values(fields["feeds"], iter(frame.buffers))
        conversation = CarriedStates(self._state_table, fields["conversation"])
        request = RankRequest(fields["number"], feeds, route, names, conversation, Outcome())
        request.start_time = fields["submitted"] + self.clock_offset_seconds
        for key, value in self._entries.items():
            request.options.add_run_config_entry(key, value)
        request.states = {name: self._take_state(*handle) for name, handle in fields["stored"].items()}
        with self._links.lock:
            request.serial, request.arrived = serial, self._arrived.setdefault(serial, {})
            self._begun, self._requests[serial] = serial, request
            if serial in self._cancelled:  # its cancellation came before the request itself
                self._cancelled.remove(serial)
                request.fail(CancelledError())
        return request

    def _run_part(self, request: RankRequest) -> Generator[Condition, None, dict[str, Any]]:
        """Follow the program; return the outputs, empty after a failure, which the request then has."""
        device = self._device
        program = self._programs[request.route.programs[device.id]]
        try:
            yield from self.begin_program(device, program, request)
            for memory, _, checkpoint in request.checkpoints:
                memory.settle(checkpoint)
            return {name: device.memory.read(sent) for name, sent in request.outputs.items()}
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
        """Run a segment; the helper has to move messages meanwhile if it takes long, or if some have not left."""
        name, began = segment.record.id, time.perf_counter()
        if name in self._long_segments or self._links.is_sending:
            self._links.call_helper()
        super().run_segment(device, segment, values, request)
        is_long = time.perf_counter() - began > LONG_SECONDS
        (self._long_segments.add if is_long else self._long_segments.discard)(name)

    def _send(self, device: PlacedDevice, step: Step, value: Any, request: Request) -> None:
        """Send a value to the rank of another device; the send is only begun."""
        assert isinstance(request, RankRequest)
        rank = self._ranks[request.route.devices[step.peer]]
        exported = value if isinstance(value, np.ndarray) else self._plane.export(value)
        self._links.send_value(rank, request.serial, step.value, exported)

    def _receive(self, device: PlacedDevice, step: Step, request: Request) -> Generator[Condition, None, Any]:
        """Wait for a value of another rank; raises CancelledError if the request ends meanwhile."""
        assert isinstance(request, RankRequest)
        arrived, name, began = request.arrived, step.value, time.perf_counter()
        if name not in arrived:
            yield lambda: name in arrived or request.failure is not None
        if request.failure is not None:
            raise CancelledError
        value = arrived.pop(name)
        if self._trace:
            self._record(request, device, "wait", name, began)
            began = time.perf_counter()
        value = self._plane.accept(value, self._dtypes[name])
        if self._trace:
            self._record(request, device, "copy", name, began, value)
        return value

    # -- states ------------------------------------------------------------------------------------

    def take_states(self, request: Request) -> dict[str, Any]:
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
        for thread, loader in zip(self._readers, self._weight_loaders.values()):
            loader.end()
            thread.join(END_GRACE_SECONDS)
        for route in self._routes:
            route.segments.clear()
        self._device.memory.close()


def open_rank(opening: Opening, links: Links, fetch: Fetch) -> RankLoop:
    """Open the device and the segments of a rank; on another machine than the driver's, `fetch` gets what is missing.

    Raises the errors of the runtime `onnxruntime`, and TargetError if versions differ.
    """
    require_versions(list_versions(), opening.versions, "as where the session is opened")
    bundle, name = opening.bundle, opening.devices[links.rank]
    target = bundle.target
    device = target.devices[target.position(name)]
    _require_local(device)
    cores = find_cores([item for item in target.devices if item.host == device.host])
    placed = PlacedDevice(device, cores.get(name, ()))
    # A device may take the place of others on further routes: it opens the segments of all these.
    homes = {home for route in list_routes(bundle.manifest) for home, item in route.devices.items() if item == name}
    segments = [item for item in bundle.manifest.segments if item.device in homes]
    # A remote machine may lack files of the bundle: it fetches those that this rank needs.
    if links.rank in opening.remote:
        states = [item.input for item in bundle.manifest.states if item.device in homes]
        bundle = obtain_bundle(bundle, segments, states, fetch)
        opening = replace(opening, bundle=bundle)
    with use_custom_operators(opening.libraries), nullcontext() if opening.optimises else without_optimisations():
        bundle.check_files(*{item.file for item in segments}, check="small")
        routes = open_routes(bundle, {name: placed})
    if links.shares_memory or opening.probe:
        place_outputs(bundle, routes, links.blocks.allocate)
    if placed.cores and exchanges_often(bundle.manifest):
        links.open_rings()
    return RankLoop(opening, placed, routes, links)


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
