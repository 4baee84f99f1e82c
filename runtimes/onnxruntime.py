"""Run a bundle with ONNX Runtime: a worker thread per device, a session per segment, copies in between.

Each worker follows its device's program, request after request, in the order of submission; so requests overlap
across devices like a pipeline. Workers sleep while they wait. A failure ends its request everywhere. Requests that
pass states on do not overlap: each begins when the one before it is over, since only then is it known to have worked.
"""

from __future__ import annotations

import copy
import itertools
import queue
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np

from onnxplace.bundle import Bundle, SegmentRecord, Step
from onnxplace.errors import ExecutionError, OnnxplaceError, one_line
from onnxplace.feeds import Array
from onnxplace.machine import core_sets, onnxruntime, require_cuda
from onnxplace.runtime import Event, EventKind, Result, Runtime, RuntimeSession
from onnxplace.runtimes._arena import give_back, shared_memory
from onnxplace.runtimes._requests import CancelledError, Request
from onnxplace.runtimes._states import States
from onnxplace.runtimes._values import as_value, is_absent, is_array, is_native, is_plain, to_python, to_value
from onnxplace.sessions import open_session, pinned, session_options

MAX_IN_FLIGHT = 8


class OnnxRuntime(Runtime):
    """ONNX Runtime on the devices that the bundle names."""

    name: ClassVar[str] = "onnxruntime"
    summary: ClassVar[str] = "run segments with ONNX Runtime, a worker per device"
    keeps_state: ClassVar[bool] = True

    def open(self, bundle: Bundle, *, trace: bool = False) -> RuntimeSession:
        """Open all segments, then start the workers; raises before any thread starts if a device is missing."""
        used = [device for device in bundle.target.devices if bundle.manifest.programs.get(device.id)]
        instead = "" if bundle.manifest.states else "without it, `onnxplace run --runtime simulated` says what it takes"
        for device in used:
            if device.kind == "cuda":
                require_cuda(device.id, instead)
        cpus = [device for device in bundle.target.devices if device.kind == "cpu"]
        cores = dict(zip([device.id for device in cpus], core_sets([device.cores for device in cpus])))
        placed = {device.id: _Placed(device.id, cores.get(device.id, ())) for device in used}
        sessions = {segment.id: _open(bundle, segment, placed[segment.device]) for segment in bundle.manifest.segments}
        return _Session(bundle, placed, sessions, trace)


class _Placed:
    """A device as the workers use it: how values get there and back."""

    def __init__(self, device_id: str, cores: Sequence[int]) -> None:
        self.id = device_id
        self.cores = cores
        kind, _, index = device_id.partition(":")
        self.kind, self.index = kind, int(index)
        self.busy = threading.RLock()
        """Held by the thread that follows the device's program."""

    def receive(self, value: Any) -> Any:
        """Return a copy of a value on this device. What is no plain tensor is shared: it cannot change."""
        if not (is_array(value) or is_plain(value)):
            return value
        if self.kind == "cpu":
            copied = np.array(to_python(value))
            return copied if is_array(copied) else to_value(copied)
        return onnxruntime().OrtValue.ortvalue_from_numpy(as_value(value).numpy(), self.kind, self.index)

    def feed(self, array: Array, declared: str) -> Any:
        """Return an input on this device; on a CPU it shares the caller's memory for the time of the request."""
        if self.kind == "cpu" and is_array(array):
            return array if array.flags.c_contiguous else array.copy()
        value = to_value(array, declared)
        return value if self.kind == "cpu" else self.receive(value)


class _OpenSegment:
    """A segment's session, and how to call it with values that stay on the device."""

    def __init__(self, record: SegmentRecord, session: Any, device: _Placed) -> None:
        self.record = record
        self._session = session
        self._device = device
        types = [item.type for item in (*session.get_inputs(), *session.get_outputs())]
        self.plain = all(kind.startswith("tensor(") and kind != "tensor(string)" for kind in types)
        """Whether all it takes and gives are tensors whose bytes ONNX Runtime owns."""
        self._maps = any("map(" in kind for kind in types)  # these have no form but Python's
        self._native = device.kind == "cpu" and all(is_native(kind) for kind in types)
        self._names = list(record.outputs)

    def run(self, values: dict[str, Any], held: list[Any]) -> None:
        """Compute this segment's outputs from `values` and add them there.

        `held` keeps what an optional or a sequence may go on looking at after `values` has let go of it.
        """
        if self._native:  # the cheapest call, and no more copies than any other
            given = {name: values[name] for name in self.record.inputs if name in values}
            arrays = {name: value if is_array(value) else to_python(value) for name, value in given.items()}
            values.update(zip(self._names, self._session.run(self._names, arrays)))
            return
        feeds = {name: as_value(values[name]) for name in self.record.inputs if name in values}
        outputs = self._bound(feeds) if self.plain else self._unbound(feeds)
        if not self.plain:
            held.append(feeds)
        values.update(zip(self.record.outputs, outputs))

    def _bound(self, feeds: Mapping[str, Any]) -> list[Any]:
        binding = self._session.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, value)
        for name in self.record.outputs:
            binding.bind_output(name, self._device.kind, self._device.index)
        self._session.run_with_iobinding(binding)
        return list(binding.get_outputs())

    def _unbound(self, feeds: Mapping[str, Any]) -> list[Any]:
        """Sequences, maps, optionals and strings cannot be bound."""
        # Handing back an optional that holds nothing ends the process, unless it goes through Python.
        if self._maps or any(is_absent(value) for value in feeds.values()):
            return list(self._session.run(self._names, {name: to_python(value) for name, value in feeds.items()}))
        return list(self._session.run_with_ort_values(self._names, dict(feeds)))


def _open(bundle: Bundle, segment: SegmentRecord, device: _Placed) -> _OpenSegment:
    with pinned(device.cores):
        options = session_options(device.cores, entries={**bundle.session_entries, **shared_memory(device.kind)})
        options.enable_mem_pattern = device.kind != "cpu"  # it takes the memory of a run once more, in one piece
        session = open_session(bundle.file(segment.file), options, device.id, f"segment {segment.id}")
    give_back(segment.weights_bytes)
    return _OpenSegment(segment, session, device)


class _Session(RuntimeSession):
    def __init__(
        self, bundle: Bundle, devices: Mapping[str, _Placed], segments: Mapping[str, _OpenSegment], trace: bool
    ) -> None:
        self._bundle = bundle
        self._segments = segments
        self._trace = trace
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(MAX_IN_FLIGHT)
        self._closed = False
        self._types = {item.name: item.dtype for item in bundle.manifest.inputs}
        self._inputs = set(self._types)
        self._read = {
            device: {v for s in bundle.manifest.segments if s.device == device for v in s.inputs} & self._inputs
            for device in devices
        }
        made_on = {value: segment.device for segment in bundle.manifest.segments for value in segment.outputs}
        wanted = dict.fromkeys(item.value for item in bundle.manifest.outputs)
        self._plain = {name: item.plain for item in segments.values() for name in item.record.outputs}
        self._returned = {device: [v for v in wanted if made_on.get(v) == device] for device in devices}
        self._returned_names = frozenset(item.name for item in bundle.returned)
        self._outputs = [(item.name, item.value) for item in bundle.manifest.outputs]
        self._states = States(bundle)
        self._kept = {value for states in self._states.on.values() for value in states.values()}
        self._last_over = threading.Event()
        self._last_over.set()
        self._reset = False
        self._queues: dict[str, queue.SimpleQueue[Request | None]] = {device: queue.SimpleQueue() for device in devices}
        self._first = devices[bundle.manifest.segments[0].device] if bundle.manifest.segments else None
        """The device that can begin at once, whose program `run` follows in the thread of its caller."""
        self._under_way = 0
        self._devices = devices
        self._workers = [
            threading.Thread(
                target=self._work,
                args=(device,),
                name=f"onnxplace {device.id}",
                daemon=True,
            )
            for device in devices.values()
        ]
        for worker in self._workers:
            worker.start()

    def submit(self, feeds: Mapping[str, Array], also: Collection[str] = ()) -> Future[Result]:
        """Start a request; blocks while the most requests allowed are under way."""
        return self._start(feeds, also, None).future

    def run(self, feeds: Mapping[str, Array], also: Collection[str] = ()) -> Result:
        """Return the result of a request; with nothing else under way, do one device's part in this thread.

        That saves waking a worker and being woken by it, some 100 us. The thread stays on the cores where it is.
        """
        first = self._first
        request = self._start(feeds, also, first)
        if first is not None and request.here:
            try:
                self._serve(first, request)
            finally:
                first.busy.release()
                self._leave(request)
        return request.future.result()

    def _start(self, feeds: Mapping[str, Array], also: Collection[str], here: _Placed | None) -> Request:
        """Hand a request to the workers, but for device `here`, which its caller takes on if nothing is under way."""
        self._slots.acquire()
        with self._lock:
            if self._closed:
                self._slots.release()
                raise ExecutionError("X002", "the session is closed", where=str(self._bundle.path))
            wanted = self._returned_names.union(also) if also else self._returned_names
            request = Request(next(self._numbers), feeds, self._queues, wanted)
            if self._states.on:
                request.over = threading.Event()
                request.turn, self._last_over = self._last_over, request.over
                request.forgets, self._reset = self._reset, False
            request.here = here is not None and not self._under_way and here.busy.acquire(blocking=False)
            self._under_way += 1
            for device, waiting in self._queues.items():  # all in the same order, so that no two wait for each other
                if not (request.here and here is not None and device == here.id):
                    waiting.put(request)
        if not self._queues:
            self._finish(request)
        return request

    def reset_state(self) -> None:
        """Forget states before the next request, and at once if nothing is under way."""
        with self._lock:
            self._reset = True
            if self._last_over.is_set():
                self._states.clear()

    def close(self) -> None:
        """Let the workers finish what is under way and end."""
        with self._lock:
            if not self._closed:
                self._closed = True
                for waiting in self._queues.values():
                    waiting.put(None)
        for worker in self._workers:
            if worker is not threading.current_thread():
                worker.join()
        for device in self._devices.values():
            with device.busy:  # a caller of `run` may be at it
                pass
        self._segments = {}
        self._states.clear()

    def _work(self, device: _Placed) -> None:
        with pinned(device.cores):
            while (request := self._queues[device.id].get()) is not None:
                with device.busy, suppress(BaseException):
                    self._serve(device, request)
                self._leave(request)
                del request

    def _serve(self, device: _Placed, request: Request) -> None:
        """Follow a device's program for one request; what goes wrong ends the request, interrupts are passed on."""
        try:
            self._follow(device, self._bundle.manifest.programs[device.id], request)
        except CancelledError:
            pass
        except OnnxplaceError as failure:
            request.fail(failure)
        except BaseException as failure:
            said = f"{type(failure).__name__}: {failure}"
            request.fail(ExecutionError("X001", f"the worker failed: {said}", where=device.id))
            if not isinstance(failure, Exception):
                raise

    def _leave(self, request: Request) -> None:
        """Note that a device is through with a request; the last one hands out its result."""
        if request.done():
            self._finish(request)

    def _follow(self, device: _Placed, program: Sequence[Step], request: Request) -> None:
        """Do the steps of a device's program for one request."""
        stored, states = request.begin(self._states), self._states.on.get(device.id, {})
        values = {
            name: device.feed(request.feeds[name], self._types[name])
            for name in self._read[device.id]
            if name in request.feeds
        }
        values.update({name: stored.pop(name) for name in states if name in stored})
        for step in program:
            if request.failure is not None:
                raise CancelledError
            if step.op == "run":
                self._run(device, self._segments[step.segment], values, request)
            elif step.op == "send":
                request.put(step.value, step.peer, values[step.value])
            elif step.op == "receive":
                began = time.perf_counter()
                arrived = request.take(step.value, device.id)
                self._note(request, device, "wait", step.value, began)
                began = time.perf_counter()
                values[step.value] = device.receive(arrived)
                self._note(request, device, "copy", step.value, began)
            else:
                values.pop(step.value, None)
        request.outputs.update((name, values[name]) for name in self._returned[device.id])
        request.left.update({name: self._own(device, value, values[value]) for name, value in states.items()})

    def _own(self, device: _Placed, name: str, value: Any) -> Any:
        """Return a value that outlives its request: what a segment made of other than tensors may look at its feeds."""
        return value if self._plain[name] else device.receive(value)

    def _run(self, device: _Placed, segment: _OpenSegment, values: dict[str, Any], request: Request) -> None:
        began = time.perf_counter()
        try:
            segment.run(values, request.held)
        except OnnxplaceError:
            raise
        except Exception as problem:
            text = one_line(problem)
            raise ExecutionError(
                "X001",
                f"segment {segment.record.id} failed: {text}",
                where=device.id,
                hint="try the same feeds on the whole model: onnxplace verify",
            ) from problem
        self._note(request, device, "run", segment.record.id, began)

    def _note(self, request: Request, device: _Placed, kind: EventKind, name: str, began: float) -> None:
        if self._trace:
            now = time.perf_counter()
            request.events.append(
                Event(device.id, kind, name, began - request.began, now - request.began, request.number)
            )

    def _finish(self, request: Request) -> None:
        """Hand the result, or the failure, to whoever waits for it."""
        if request.turn is not None:
            self._pass_on(request)
        with self._lock:
            self._under_way -= 1
        self._slots.release()
        if request.failure is not None:
            request.future.set_exception(request.failure)
            return
        try:
            outputs = {
                name: self._handed_out(value, request) for name, value in self._outputs if name in request.wanted
            }
        except Exception as problem:  # noqa: BLE001 - a future that is never set would hang its caller
            request.future.set_exception(
                ExecutionError("X003", f"an output cannot be read: {problem}", where="outputs")
            )
            return
        events = tuple(sorted(request.events, key=lambda event: event.start_seconds))
        request.future.set_result(Result(outputs, events, time.perf_counter() - request.began))

    def _pass_on(self, request: Request) -> None:
        """Store what a request left for the next one, and let that begin."""
        with self._lock:
            if request.failure is None:
                self._states.store(request.left)
            elif request.took_states:
                self._states.lose()
            if self._reset and self._last_over is request.over:
                self._states.clear()
            if request.over is not None:
                request.over.set()

    def _handed_out(self, value: str, request: Request) -> Any:
        """Return what an output returns, as numpy: the caller may alter it without altering what we still read."""
        if value in self._inputs:
            return copy.deepcopy(request.feeds[value])
        found = to_python(request.outputs[value])
        return found.copy() if value in self._kept else found
