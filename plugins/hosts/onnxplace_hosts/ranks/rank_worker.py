"""The worker of a session whose devices are ranks: it sends requests to them, and reads their reports.

Admission, order, conversations, timeouts and the end are the engine's. All ranks together are its one device.
Ranks work on requests in the order of sending. A request ends when all its ranks have reported.

Waking another thread takes longer than to send a request, so callers do that themselves. One thread at a time reads: a
caller whose request is the only one reads its own reports. It leaves everything else, and all that takes long or goes
wrong, to the worker, which reads while no caller does. So Ctrl-C may find a caller at any step of sending and reading:
what is decided is one assignment, and all steps after it may be repeated by any thread.
"""

from __future__ import annotations

import itertools
import queue
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from onnxplace.bundle.bundle import Bundle
from onnxplace.bundle.bundle_routes import list_routes
from onnxplace.errors import ExecutionError, OnnxplaceError
from onnxplace.runtime.interface import Event, RuntimeSession
from onnxplace.runtimes.execution.engine import Engine
from onnxplace.runtimes.execution.host_memory import HostMemory
from onnxplace.runtimes.execution.requests import CancelledError, Request
from onnxplace.runtimes.execution.segments import OpenRoute, PlacedDevice
from onnxplace.runtimes.execution.sessions import EngineSession
from onnxplace.runtimes.execution.workers import Worker
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.kind_table import find_kind
from onnxplace_hosts.ranks.cluster import MAX_SILENT_SECONDS, NEW_SESSION_HINT, Cluster, make_clock_frame
from onnxplace_hosts.ranks.frames import (
    SLICE_SECONDS,
    Frame,
    decode_value,
    decode_values,
    encode_fields,
    encode_values,
)
from onnxplace_hosts.ranks.opening import Opening, rebuild_error

# Requests of a session whose devices are ranks, and the carried states that stay there.

# All ranks together are one device for the engine, which has the order of requests and the states.
ALL_RANKS = "ranks"


class RemoteRequest(Request):
    """A request that ranks work on."""

    serial = -1
    """Its number in the order of sending, the same for all ranks; -1 if it is not sent."""
    waiting: frozenset[int] = frozenset()
    """The ranks that have not reported its end."""
    is_cancelled = False
    """Whether its ranks were told to end it."""
    cancel_deadline = 0.0
    """When they have to have ended it."""
    rank_names: Sequence[str] = ()
    """Devices by rank."""
    blocks: Sequence[int] = ()
    """Shared memory of its inputs."""

    def describe_progress(self) -> str:
        """Return what has not finished."""
        if self.serial < 0:
            return "it has not begun"
        names = [self.rank_names[rank] for rank in sorted(self.waiting)]
        return f"{', '.join(names)} has not finished" if names else "all devices have finished"


class RemoteState:
    """A carried state that a rank stores, until nothing refers to it."""

    def __init__(
        self, serial: int, name: str, rank: int, shape: tuple[int, ...], free: Callable[[RemoteState], None]
    ) -> None:
        self.serial, self.name, self.rank, self.shape = serial, name, rank, shape
        self._free = free
        self.is_taken = True
        """Whether its rank need not be told: a request has taken it from there, or nothing has got it yet."""

    def __del__(self) -> None:
        if not self.is_taken:
            self._free(self)


class RemoteMemory(HostMemory):
    """The memory of all ranks together: outputs are here already, and states are read from their ranks."""

    def __init__(self, read_state: Callable[[RemoteState], Any]) -> None:
        super().__init__(DeviceAddress.of("cpu:0"), ())
        self._read_state = read_state

    def read(self, sent: Any) -> Any:
        """Return an output, or a state of its rank, as numpy."""
        return self._read_state(sent) if isinstance(sent, RemoteState) else sent


class RemoteDevice(PlacedDevice):
    """All ranks together."""

    def __init__(self, memory: RemoteMemory) -> None:
        self.id = ALL_RANKS
        self.cores, self.processors = (), frozenset()
        self.kind = find_kind("cpu")
        self.memory = memory


Answers = queue.SimpleQueue[Any]


class RankWorker(Worker):
    """Does the work of a bundle whose devices are the ranks of a cluster.

    Args:
        bundle: The bundle, which the ranks have opened.
        cluster: The ranks.
        copy_index: Index of the copy of the bundle in its session, for events.
    """

    request_class = RemoteRequest
    callers_seconds = SLICE_SECONDS

    def __init__(self, bundle: Bundle, cluster: Cluster, copy_index: int = 0) -> None:
        self._bundle, self._cluster, self._copy_index = bundle, cluster, copy_index
        self._routes = list_routes(bundle.manifest)
        self._rank_of = {name: rank for rank, name in enumerate(cluster.plan.devices)}
        manifest, inputs = bundle.manifest, {item.name for item in bundle.manifest.inputs}
        self._inputs_of_home = {
            home: sorted({name for item in manifest.segments if item.device == home for name in item.inputs} & inputs)
            for home in self._routes[0].devices
        }
        self._returned_names = {item.name for item in bundle.returned_outputs}
        # To the engine, all states are on its one device; requests to ranks need to know which rank has which.
        self._states_of_home: dict[str, list[str]] = {}
        for state in manifest.states:
            self._states_of_home.setdefault(state.device, []).append(state.input)
        self._calls = itertools.count()
        self._next_serial = 0
        self._taken = {rank: -1 for rank, blocks in cluster.maps.items() if blocks.is_mapped}
        """The last request whose outputs were copied from the memory of a rank, which then can use it again."""
        self._common: dict[str, tuple[Mapping[str, Any], str]] = {}
        """What the last request of each home had in common with others, and its text."""
        self._sent: dict[int, RemoteRequest] = {}
        self._reader: object = None
        """Who reads: this worker for its thread, or the request of a caller."""
        self._freed: deque[RemoteState] = deque()
        self._answers: dict[int, Answers] = {}
        assert cluster.sockets is not None
        self._sockets = cluster.sockets

    def open_engine(self, trace: bool, max_in_flight: int) -> Engine:
        """Return the engine whose work it does, which is not started."""
        device = RemoteDevice(RemoteMemory(self._read_state))
        routes = [
            OpenRoute(index, {ALL_RANKS: ALL_RANKS}, {ALL_RANKS: ALL_RANKS}, {}, max(route.share, 1e-3))
            for index, route in enumerate(self._routes)
        ]
        return Engine(self._bundle, {ALL_RANKS: device}, routes, trace, max_in_flight, worker=self)

    # -- requests ------------------------------------------------------------------------------------

    def work(self, device: PlacedDevice) -> None:
        """Send and read what callers do not, until the engine is closed, then end the ranks."""
        try:
            while not self.engine.is_finished(device.id):
                self._send_freed()
                self._dispatch()
                self._end_requests_that_are_over()
                self._read_reports()
                if self.engine.owner is not None and self.engine.owner() is None:
                    self.engine.abandon()  # an interrupt may have prevented the finalizer from it
        except (EOFError, OSError):
            if not self.engine.is_ended() and not self._cluster.is_ended:
                self._break(self._cluster.describe_end())
        except OnnxplaceError as failure:
            self._break(failure)
        except BaseException as cause:  # noqa: BLE001 - whatever ends a thread, such as an exception set from outside
            message = f"the session's thread died: {type(cause).__name__}: {cause}".rstrip(": ")
            self._break(ExecutionError("X005", message, where=device.id, hint=NEW_SESSION_HINT))
        finally:
            self._end_calls()
            self._cluster.close()
            self._cluster.close_socket()

    def offer(self, request: Request) -> None:
        """Send a request in this thread, unless its caller does all of it."""
        assert isinstance(request, RemoteRequest)
        if not request.callers_device:
            self._dispatch()
            if self._reader is not self or not request.waiting:
                self.wake()

    def wake(self) -> None:
        """Make the thread look for work; for any thread, also in finalizers."""
        self._sockets.wake()

    def _dispatch(self) -> None:
        """Send ends of requests, and new ones."""
        with suppress(OSError), self._sockets.sending:  # reading says why
            with self.engine.lock:
                failed = [item for item in self.engine.list_in_flight() if item.failure is not None]
            # Ends come first: ranks leave off what nobody waits for.
            for request in failed:
                assert isinstance(request, RemoteRequest)
                if request.waiting and not request.is_cancelled:
                    frame = Frame("cancel", {"serial": request.serial}).pack
                    pieces = self._sockets.pack([(rank, frame(rank)) for rank in request.waiting])
                    request.cancel_deadline = time.monotonic() + self._cluster.timeout_seconds
                    # No call between these, so that an interrupt comes before or after all of them.
                    self._sockets.unsent += pieces
                    request.is_cancelled = True
            while (next_request := self.engine.next_request(_is_unsent)) is not None:
                assert isinstance(next_request, RemoteRequest)
                self._begin(next_request)
            self._sockets.flush()

    def _end_requests_that_are_over(self) -> None:
        """End requests that failed before they were sent, or that need no rank; in no caller's thread."""
        for request in self.engine.list_in_flight():
            assert isinstance(request, RemoteRequest)
            if not request.waiting and (request.serial >= 0 or request.failure is not None):
                self.engine.finish_part(request, ALL_RANKS)

    def _begin(self, request: RemoteRequest) -> None:
        """Decide to send a request to its ranks, for whoever may send; it fails if it has no states to begin with."""
        try:
            stored = self.engine.take_states(request)
        except (OnnxplaceError, CancelledError) as failure:
            self._fail(request, failure)
            return
        devices = self._routes[request.route.index].devices
        ranks = {self._rank_of[name]: home for home, name in devices.items()}
        request.rank_names, serial = self._cluster.plan.devices, self._next_serial
        # Rank 0, which passes frames on, gets its own last: then it computes.
        frames = []
        for rank, home in sorted(ranks.items(), reverse=True):
            frame = self._make_frame(request, serial, home, stored)
            frame.fields["taken"] = self._taken.get(rank)
            if rank in self._cluster.maps:
                request.blocks = [*request.blocks, *self._cluster.blocks.place(frame)]
            frames.append((rank, frame.pack(rank)))
        pieces, waiting = self._sockets.pack(frames), frozenset(ranks)
        with self.engine.lock:
            if request.failure is not None:
                return
            # No call between these, so that an interrupt comes before or after all of them.
            self._sent[serial] = request
            self._sockets.unsent += pieces
            request.serial, request.waiting, self._next_serial = serial, waiting, serial + 1
        for state in stored.values():
            # A taken state leaves its rank with this request, so nothing is left to free.
            state.is_taken = not request.conversation.keeps_previous

    def run_part(self, request: Request) -> None:
        """Send a request, and read its reports, in the thread of its caller."""
        assert isinstance(request, RemoteRequest)
        try:
            with self.engine.lock:
                if self._reader is None:
                    self._reader = request
            with suppress(EOFError, OSError):  # the worker finds that out, too, and says why
                with self._sockets.sending:
                    self._begin(request)
                    self._sockets.flush()
                if self._reader is request:
                    self._read_own_reports(request)
        finally:
            if self._reader is request:
                self._reader = None
        if request.waiting and self._reader is not self:
            self.wake()

    def _read_own_reports(self, request: RemoteRequest) -> None:
        """Read the reports of a request; leave them to the worker if they take long, or if something else comes."""
        deadline = time.monotonic() + self.callers_seconds
        while request.waiting and (found := self._sockets.find(deadline - time.monotonic())) is not None:
            frame = found.frames[0].unpack()
            if frame.kind == "report" and frame.fields["serial"] == request.serial:
                self._take_report(frame)
            elif frame.kind != "alive":
                return
            found.frames = found.frames[1:]

    def _make_frame(self, request: RemoteRequest, serial: int, home: str, stored: Mapping[str, RemoteState]) -> Frame:
        """Return the part of a request that a rank needs: its inputs, and which states it takes."""
        buffers: list[Any] = []
        feeds = {name: request.feeds[name] for name in self._inputs_of_home[home] if name in request.feeds}
        handles = {}
        for name in self._states_of_home.get(home, ()):
            if (state := stored.get(name)) is not None:
                handles[name] = [state.serial, state.name, request.conversation.keeps_previous]
            elif name in request.feeds:
                feeds[name] = request.feeds[name]
        fields = {"serial": serial, "number": request.number, "submitted": request.start_time, "stored": handles}
        common: dict[str, Any] = {
            "route": request.route.index,
            "conversation": request.conversation.number,
            "states": sorted(set(request.output_names) - self._returned_names),
            "feeds": encode_values(feeds, buffers),
        }
        # What says the shapes of arrays is mostly that of the last request; other descriptions have values in them.
        if any(item[0] != "array" for item in common["feeds"].values()):
            return Frame("request", {**fields, **common}, buffers)
        if home not in self._common or self._common[home][0] != common:
            self._common[home] = common, encode_fields(common)
        return Frame("request", fields, buffers, common=self._common[home][1])

    def _fail(self, request: Request, failure: BaseException) -> None:
        """End a request with a failure; its ranks are told by the thread of this worker."""
        self.engine.fail(request, failure)
        self.wake()

    def finished(self, request: Request) -> bool:
        """Return whether no rank works on a request any more; then its blocks are free."""
        assert isinstance(request, RemoteRequest)
        if request.waiting:
            return False
        self._sent.pop(request.serial, None)
        blocks, request.blocks = request.blocks, ()
        self._cluster.blocks.give_back(blocks)
        return True

    # -- reports ------------------------------------------------------------------------------------

    def _read_reports(self) -> None:
        """Read what ranks send, unless a caller does, until there is something else to do or nothing comes."""
        with self.engine.lock:
            if self._reader is None:
                self._reader = self
        if self._reader is self:
            try:
                while (frame := self._cluster.receive(SLICE_SECONDS if self._expects_frames else 0.0)) is not None:
                    self._take(frame)
                    if not self._expects_frames:
                        break
                self._check_time(*self._sockets.find_silence())
            finally:
                self._reader = None
        if not self._expects_frames or self._reader is not None:
            self._sockets.sleep(SLICE_SECONDS)

    @property
    def _expects_frames(self) -> bool:
        """Return whether ranks will send something, or have not got all that was sent."""
        return bool(self._sent or self._answers or self._sockets.unsent)

    def _check_time(self, rank: int, silent_seconds: float) -> None:
        """Raise ExecutionError if a rank is silent, or a request does not end although it was ended."""
        if silent_seconds > MAX_SILENT_SECONDS and not self._cluster.is_ended:
            raise self._cluster.describe_silence(rank, silent_seconds)
        for request in list(self._sent.values()):
            if request.is_cancelled and request.waiting and time.monotonic() > request.cancel_deadline:
                seconds = self._cluster.timeout_seconds
                message = f"request {request.number} was ended, and {request.describe_progress()} after {seconds:g} s"
                rank = min(request.waiting)
                raise ExecutionError("K011", message, where=self._cluster.plan.devices[rank], hint=NEW_SESSION_HINT)

    def _take(self, frame: Frame) -> None:
        """Take a frame of a rank."""
        fields = frame.fields
        if frame.kind == "report":
            self._take_report(frame)
        elif frame.kind == "answer":
            if (answers := self._answers.get(fields["call"])) is not None:
                answers.put(decode_value(fields["value"], iter(frame.buffers)))
        elif frame.kind == "clock":
            self._cluster.send(frame.rank, make_clock_frame())
        elif frame.kind == "silent":
            raise self._cluster.describe_silence(frame.rank, fields["seconds"])
        self._check_time(*self._sockets.find_silence())

    def _take_report(self, frame: Frame) -> None:
        """Take the outputs and states of a rank, or its failure; the last report ends the request."""
        fields, rank = frame.fields, frame.rank
        request = self._sent.get(fields["serial"])
        # It has ended: its ranks were given up. Or an interrupt has this report taken again.
        if request is None or rank not in request.waiting:
            return
        events = request.events + [self._make_event(request, *item) for item in fields["events"]]
        outputs, states, new = request.outputs, request.next_states, dict[str, RemoteState]()
        if "error" in fields:
            self._fail(request, rebuild_error(fields["error"], self._cluster.plan.describe(rank)))
        elif fields["cancelled"]:
            self._fail(request, CancelledError())  # never the first failure
        else:
            new = {
                name: RemoteState(request.serial, name, rank, tuple(shape), self._free)
                for name, shape in fields["states"].items()
            }
            if request.failure is None:
                if rank in self._taken:
                    self._cluster.maps[rank].restore(frame)
                    # Callers may alter outputs.
                    frame.buffers = [item if item.flags.writeable else item.copy() for item in frame.buffers]
                outputs = {**outputs, **decode_values(fields["outputs"], iter(frame.buffers))}
                states = {**states, **new}
        waiting = request.waiting - {rank}
        # No call between these, so that an interrupt comes before or after all of them.
        if rank in self._taken:
            self._taken[rank] = request.serial
        request.outputs, request.next_states, request.events, request.waiting = outputs, states, events, waiting
        for state in new.values():
            state.is_taken = False
        self.engine.finish_part(request, ALL_RANKS)

    def _make_event(
        self, request: Request, device: str, kind: Any, name: str, start: float, finish: float, size: int | None
    ) -> Event:
        return Event(
            device=device,
            kind=kind,
            name=name,
            start_seconds=max(start, 0.0),  # clocks of machines are compared with an error
            finish_seconds=max(finish, 0.0),
            request=request.number,
            submitted_seconds=request.start_time,
            route=request.route.index,
            conversation=request.conversation.number,
            bytes=size,
            copy=self._copy_index,
        )

    # -- states ------------------------------------------------------------------------------------

    def _free(self, state: RemoteState) -> None:
        """Note that nothing refers to a state any more; for finalizers, which may run in any thread."""
        self._freed.append(state)
        self.wake()

    def _send_freed(self) -> None:
        """Tell ranks which states they need not store any more."""
        handles: dict[int, list[list[Any]]] = {}
        while self._freed:
            state = self._freed.popleft()
            state.is_taken = True  # it is over
            handles.setdefault(state.rank, []).append([state.serial, state.name])
        with suppress(OSError):
            self._sockets.send([(rank, Frame("free", {"handles": items})) for rank, items in handles.items()])

    def _read_state(self, state: RemoteState) -> Any:
        """Return a stored state; raises ExecutionError if its rank does not answer."""
        return self._ask(state.rank, Frame("read", {"serial": state.serial, "name": state.name}), "send a state")

    def read_remote_delays(self) -> dict[str, int]:
        """Return how long threads of the ranks waited for a core; raises ExecutionError if a rank does not answer."""
        return {
            f"{device} {thread}": delay
            for rank, device in enumerate(self._cluster.plan.devices)
            for thread, delay in self._ask(rank, Frame("delays"), "say how long it waited").items()
        }

    def _ask(self, rank: int, frame: Frame, task: str) -> Any:
        """Return what a rank answers to a frame; raises ExecutionError if it does not do its task in time."""
        call, answers = next(self._calls), Answers()
        self._answers[call] = answers
        frame.fields["call"] = call
        try:
            with suppress(OSError):  # the failure of the engine says why
                self._cluster.send(rank, frame)
            self.wake()
            answer = self.engine.failure or answers.get(timeout=self._cluster.timeout_seconds)
        except queue.Empty:
            answer = ExecutionError("K011", f"it did not {task}", where=self._cluster.plan.devices[rank])
        finally:
            self._answers.pop(call, None)
        if isinstance(answer, OnnxplaceError):
            raise answer
        return answer

    def _end_calls(self) -> None:
        """Let all calls fail that wait for an answer."""
        reason = self.engine.failure or ExecutionError("X002", "the session is closed", where=str(self._bundle.path))
        for answers in list(self._answers.values()):
            answers.put(reason)

    # -- the end ------------------------------------------------------------------------------------

    def _break(self, failure: OnnxplaceError) -> None:
        """Fail all requests after ranks ended or are silent, and end all ranks."""
        if not isinstance(failure, ExecutionError):
            failure = ExecutionError(failure.code, failure.message, where=failure.where, hint=failure.hint)
        self.engine.refuse(failure)
        self._release(failure)
        self.wake()
        self._cluster.end(0.0)

    def _release(self, failure: BaseException) -> None:
        """Fail all requests in flight, and do not wait for their ranks."""
        with self.engine.lock:
            requests = self.engine.list_in_flight()
        for request in requests:
            assert isinstance(request, RemoteRequest)
            self._fail(request, failure)
            request.waiting = frozenset()
            self.engine.finish_part(request, ALL_RANKS)

    def give_up(self) -> None:
        """Fail all requests in flight, and end all ranks."""
        self._break(ExecutionError("X002", "the session was closed", where=str(self._bundle.path)))


def _is_unsent(request: Request) -> bool:
    """Return whether a request is to be sent, and not by its caller."""
    assert isinstance(request, RemoteRequest)
    return request.serial < 0 and not request.callers_device and request.failure is None


class RankSession(EngineSession):
    """A handle on an engine whose work ranks do."""

    def read_remote_delays(self) -> Mapping[str, int]:
        """Return how long threads of the ranks waited for a core; raises ExecutionError if a rank does not answer."""
        assert isinstance(self.engine.worker, RankWorker)
        return self.engine.worker.read_remote_delays()


def open_ranks(
    bundle: Bundle, cluster: Cluster, trace: bool, max_in_flight: int, copy_index: int = 0
) -> RuntimeSession:
    """Start the ranks of a cluster, open a bundle on them, and return their session; raises the errors of `open`."""
    cluster.open(Opening.of(bundle, cluster.plan, trace, fetches=cluster.fetches_bundle))
    try:
        engine = RankWorker(bundle, cluster, copy_index).open_engine(trace, max_in_flight)
    except BaseException:
        cluster.end(0.0)
        raise
    return RankSession(engine)
