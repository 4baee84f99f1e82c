"""Follow the program of a device for one request: run, send, receive, free.

Subclasses say how values get from device to device: between threads, or as messages to other processes.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.manifest import Step
from onnxplace.errors import OnnxplaceError
from onnxplace.machine.ort_sessions import is_foreign_error
from onnxplace.machine.ort_values import count_bytes
from onnxplace.runtime.interface import Event, EventKind
from onnxplace.runtimes.execution.failures import describe_segment_failure, is_out_of_memory
from onnxplace.runtimes.execution.requests import CancelledError, Request, StateTable
from onnxplace.runtimes.execution.segments import OpenRoute, OpenSegment, PlacedDevice
from onnxplace.runtimes.execution.turns import TurnQueue, shared_turns
from onnxplace.runtimes.execution.wakeups import WakeupFlag
from onnxplace.runtimes.execution.weight_files import WeightFiles

if TYPE_CHECKING:
    from onnxplace.runtimes.execution.weight_loader import WeightLoader

Condition = Callable[[], bool]
"""Whether what is awaited is here."""


class ProgramLoop(ABC):
    """The tables of a bundle that programs need, and the steps of these programs.

    Args:
        bundle: An open bundle.
        devices: The devices whose programs are followed here, by id.
        routes: All routes, the first of which has each program on its own device.
        trace: Whether activities are recorded.
    """

    def __init__(
        self, bundle: Bundle, devices: Mapping[str, PlacedDevice], routes: Sequence[OpenRoute], trace: bool
    ) -> None:
        self.bundle = bundle
        self._devices = devices
        self._trace = trace
        self._wakeup_flags: dict[str, WakeupFlag] = {}
        uses = Counter(name for device in devices.values() for name in device.processors)
        self._turns = shared_turns.get() or (TurnQueue() if max(uses.values(), default=0) > 1 else None)
        """What devices that share processors wait for before a segment; None where none do."""
        self._routes = routes
        self._index_values()
        self._state_table = StateTable(bundle)
        self._weight_files = WeightFiles(bundle, [item.memory.address for item in devices.values()])
        self._weight_loaders: dict[tuple[str, str], WeightLoader] = {}
        """By device, and the one in whose program its segments are."""
        if bundle.manifest.streams:
            from onnxplace.runtimes.execution.weight_loader import open_weight_loaders

            self._weight_loaders = open_weight_loaders(self._weight_files, devices, trace)

    def _index_values(self) -> None:
        """Build the tables of values that each request needs; those by device are by the home of its program."""
        manifest, homes = self.bundle.manifest, self._routes[0].devices
        self._types = {item.name: item.dtype for item in manifest.inputs}
        self._inputs = set(self._types)
        self._read_inputs = {
            device: {v for s in manifest.segments if s.device == device for v in s.inputs} & self._inputs
            for device in homes
        }
        producers = {value: segment.device for segment in manifest.segments for value in segment.outputs}
        self._returned_names = frozenset(item.name for item in self.bundle.returned_outputs)
        returned = dict.fromkeys(item.value for item in manifest.outputs if item.name in self._returned_names)
        segments = [item for route in self._routes for item in route.segments.values()]
        self._owns_buffers = {name: item.owns_buffers for item in segments for name in item.record.outputs}
        self._producers = producers
        self._returned_values = {device: [v for v in returned if producers.get(v) == device] for device in homes}
        self._outputs = [(item.name, item.value) for item in manifest.outputs]
        self._programs = {device: drop_last_frees(program) for device, program in manifest.programs.items()}

    def follow_program(self, device: PlacedDevice, program: Sequence[Step], request: Request) -> None:
        """Execute the steps of a device's program for one request; raises ExecutionError if its weights changed."""
        for _ in self.begin_program(device, program, request):
            pass

    def begin_program(self, device: PlacedDevice, program: Sequence[Step], request: Request) -> Iterator[Condition]:
        """Do what `follow_program` does; where that would wait, yield what for, to go on once it holds."""
        try:
            yield from self._follow_steps(device, program, request)
        except BaseException as failure:
            if getattr(failure, "code", "") != "X017":  # which says already what happened to the weights
                self._weight_files.check()
            raise
        self._weight_files.check()

    def _follow_steps(self, device: PlacedDevice, program: Sequence[Step], request: Request) -> Iterator[Condition]:
        home = request.route.programs[device.id]
        flag = self._wakeup_flags.get(device.id)
        stored, states = self.take_states(request), self._state_table.value_names.get(home, {})
        values = {
            name: device.memory.feed(request.feeds[name], self._types[name])
            for name in self._read_inputs[home]
            if name in request.feeds
        }
        values.update({name: stored.pop(name) for name in states if name in stored})
        self._state_table.add_initial_values(states, values, device.memory.feed)
        for step in program:
            if request.failure is not None:
                raise CancelledError
            if step.op == "free":
                values.pop(step.value, None)
                continue
            request.current_steps[device.id] = step
            if step.op == "run":
                if flag is not None:
                    flag.notify()
                self.run_segment(device, request.route.segments[step.segment], values, request)
            elif step.op == "send":
                self._send(device, step, values[step.value], request)
            else:
                values[step.value] = yield from self._receive(device, step, request)
        for name in self._returned_values[home]:
            request.outputs[name] = device.memory.send(values[name], None)
        if request.output_names is not self._returned_names:  # it also returns states, which else stay on their device
            for name, value in self._outputs:
                if name in request.output_names and value in values and self._producers.get(value) == home:
                    request.outputs[value] = device.memory.send(values[value], None)
        # Sequences and optionals may refer to memory of the feeds, which states outlive.
        next_states = {
            name: values[value] if self._owns_buffers[value] else device.memory.keep(values[value])
            for name, value in states.items()
        }
        request.next_states.update(next_states)
        if device.memory.runs_ahead:
            request.checkpoints.append((device.memory, device.id, device.memory.checkpoint()))

    def _send(self, device: PlacedDevice, step: Step, value: Any, request: Request) -> None:
        """Deliver a value to another device."""
        start = time.perf_counter()
        sent = device.memory.send(value, self._find_peer(step, request).memory)
        if device.memory.is_asynchronous:
            self._record(request, device, "copy", step.value, start, value)
        request.deliver(step.value, step.peer, sent)
        if (flag := self._wakeup_flags.get(device.id)) is not None:
            flag.plan_notification(self._wakeup_flags[request.route.devices[step.peer]])

    def _receive(self, device: PlacedDevice, step: Step, request: Request) -> Generator[Condition, None, Any]:
        """Wait for a value of another device, and return it as a value on this one."""
        yield from ()  # this thread waits itself
        start = time.perf_counter()
        arrived = request.receive(step.value, request.route.programs[device.id], self._wakeup_flags.get(device.id))
        self._record(request, device, "wait", step.value, start)
        start = time.perf_counter()
        value = device.memory.receive(arrived, self._find_peer(step, request).memory)
        self._record(request, device, "copy", step.value, start, value)
        return value

    def _find_peer(self, step: Step, request: Request) -> PlacedDevice:
        """Return the other device of a transfer on the route of a request."""
        return self._devices[request.route.devices[step.peer]]

    def run_segment(self, device: PlacedDevice, segment: OpenSegment, values: dict[str, Any], request: Request) -> None:
        """Run one segment; raises ExecutionError naming segment and device."""
        loader = None
        if segment.record.streamed:
            loader = self._weight_loaders[device.id, request.route.programs[device.id]]
            self._take_weights(loader, segment, values, request)
        try:
            if self._turns is not None:
                self._take_turn(self._turns, device, segment, request)
            start = time.perf_counter()
            segment.run(values, request.kept_alive, request.options)
            if self._trace and device.memory.is_asynchronous:
                device.memory.finish()  # so that the segment's event is its time on the device
        except (OnnxplaceError, CancelledError):
            raise
        except Exception as problem:
            if is_foreign_error(problem) and not is_out_of_memory(problem):
                raise
            raise describe_segment_failure(problem, segment.record, self.bundle.manifest, device.id) from problem
        finally:
            if self._turns is not None:  # also of work that is only enqueued: the device keeps its order
                self._turns.leave((self, request.number, device.id))
            if loader is not None:
                for name in segment.record.streamed:
                    values.pop(name, None)
                loader.release(device.memory.checkpoint() if device.memory.runs_ahead else None)
        self._record(request, device, "run", segment.record.id, start)

    def _take_turn(self, turns: TurnQueue, device: PlacedDevice, segment: OpenSegment, request: Request) -> None:
        """Wait until the processors of a device are its own; raises CancelledError when the request has failed."""
        start, home = time.perf_counter(), request.route.programs[device.id]
        turn = turns.join((self, request.number, device.id), device.processors, partial(request.wake, home))
        if not turn.has_begun:
            request.await_turn(turn, home)
            self._record(request, device, "wait", segment.record.id, start)

    def _take_weights(
        self, loader: WeightLoader, segment: OpenSegment, values: dict[str, Any], request: Request
    ) -> None:
        """Add the weights of a segment that stream to the values on its device; waits for them."""
        start, name, device = time.perf_counter(), segment.record.id, loader.device
        weights = loader.take(name, request)
        # What is not a plain tensor may refer to its inputs after the run.
        values |= weights if segment.owns_buffers else {key: device.memory.keep(item) for key, item in weights.items()}
        self._record(request, device, "wait", name, start)
        for load in loader.pop_loads():
            if load.finish > request.start_time:  # else it was read before, for the first request
                self._record(request, device, "load", load.segment, load.start, load.bytes, load.finish)

    def _record(
        self,
        request: Request,
        device: PlacedDevice,
        kind: EventKind,
        name: str,
        start: float,
        moved: Any = None,
        finish: float | None = None,
    ) -> None:
        """Note what a device did, by default until now; does nothing without a trace.

        `moved` is a value that was copied, or a number of bytes.
        """
        if not self._trace:
            return
        origin = request.start_time
        request.events.append(
            Event(
                device=device.id,
                kind=kind,
                name=name,
                start_seconds=max(start - origin, 0.0),
                finish_seconds=(time.perf_counter() if finish is None else finish) - origin,
                request=request.number,
                submitted_seconds=origin,
                route=request.route.index,
                conversation=request.conversation.number,
                bytes=moved if isinstance(moved, int) else count_bytes(moved),
            )
        )

    @abstractmethod
    def take_states(self, request: Request) -> dict[str, Any]:
        """Return the carried states of a request, by state input; each device removes its own."""


def drop_last_frees(program: Sequence[Step]) -> list[Step]:
    """Return a program without the steps that free values right before its end, which frees them all."""
    steps = list(program)
    while steps and steps[-1].op == "free":
        steps.pop()
    return steps
