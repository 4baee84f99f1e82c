"""Sessions in their own process, which an execution provider that crashes takes with it.

All sessions of an isolated device live in one child process. It starts with the first of them, and ends with the last
one, or with this process, however that ends. Requests go to it one at a time, as pickles by pipes. The bytes of arrays
go through memory that both processes map, where the system has such memory, and numpy their type. A run that is to end
is told so; if that does not help, the process is killed.

A process that has an owner is its owner's only. If it dies, the run that it was doing fails. It is opened again at
once, with all its sessions, and calls wait for that.
"""

from __future__ import annotations

import itertools
import mmap
import os
import pickle
import queue
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from operator import methodcaller
from pathlib import Path
from typing import Any, BinaryIO

from onnxplace.errors import ExecutionError
from onnxplace.machine.ort_sessions import (
    CPU,
    SessionHandle,
    create_session_options,
    describe_session,
    describe_session_options,
    list_taken_nodes as list_taken_here,
    may_pin,
    open_session as open_session_here,
)
from onnxplace.machine.ort_values import make_array_runner, to_ort_value, to_python
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.target.kind_table import is_isolated
from onnxplace.utils.ort import import_onnxruntime
from onnxplace.utils.subprocesses import start_child
from onnxplace.utils.threads import start_thread

# How often a caller that waits looks whether its run is to end.
POLL_SECONDS = 0.02
# Time for a run that is to end; closing an engine waits a little longer.
STOP_SECONDS = 1.5
_ALIGNED_BYTES, _LEAST_BYTES = 64, 1 << 16
# Pause before a process is opened again that died while its sessions were opened.
PAUSE_SECONDS = 5.0


# ------------------------------------------------------------------------------------------------------------- messages


class _SharedBlock:
    """Memory that two processes map, one of which writes; it grows with what is written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor, self._memory = descriptor, memoryview(b"")

    def map(self, size: int) -> memoryview:
        """Return the memory, at least this many bytes."""
        if size > len(self._memory):
            size = max(1 << (size - 1).bit_length(), _LEAST_BYTES)
            os.ftruncate(self._descriptor, max(size, os.fstat(self._descriptor).st_size))
            self._memory = memoryview(mmap.mmap(self._descriptor, size))
        return self._memory


class _Channel:
    """One side of the pipes between two processes; messages are plain objects and arrays.

    Args:
        reading, writing: The pipes.
        blocks: Descriptors of the memory that is read, and that is written; empty without such memory.
        copies: Whether received arrays outlive the next message.
    """

    def __init__(self, reading: BinaryIO, writing: BinaryIO, blocks: Sequence[int], *, copies: bool) -> None:
        self._reading, self._writing, self._copies = reading, writing, copies
        self._blocks = [_SharedBlock(descriptor) for descriptor in blocks]

    def send(self, message: Any) -> None:
        """Send a message, unless the other side has ended."""
        buffers: list[pickle.PickleBuffer] = []
        data = pickle.dumps(message, 5, buffer_callback=buffers.append)
        raw = [item.raw() for item in buffers]
        places: list[Any] = [bytes(item) for item in raw] if not self._blocks else self._write(raw)
        with suppress(OSError):
            pickle.dump((data, places), self._writing)
            self._writing.flush()

    def _write(self, buffers: Sequence[memoryview]) -> list[slice]:
        """Write buffers one after the other; return where they are."""
        starts = [0, *itertools.accumulate(-(-len(item) // _ALIGNED_BYTES) * _ALIGNED_BYTES for item in buffers)]
        places = [slice(start, start + len(item)) for start, item in zip(starts, buffers)]
        memory = self._blocks[1].map(starts[-1] + 1)
        for place, item in zip(places, buffers):
            memory[place] = item
        return places

    def receive(self) -> Any:
        """Return the next message; raises EOFError or OSError if the other side has ended."""
        data, places = pickle.load(self._reading)
        if self._blocks:
            memory = self._blocks[0].map(max((place.stop for place in places), default=0) + 1)
            places = [memory[place] for place in places]
        return pickle.loads(data, buffers=map(bytearray, places) if self._copies else places)


# ------------------------------------------------------------------------------------------- the process of a device


def serve_sessions(blocks: Sequence[int]) -> None:
    """Open and run sessions, in the child, as messages say, until the parent ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a provider prints is no answer
    channel = _Channel(sys.stdin.buffer, answers, blocks, copies=False)
    requests: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    make_options = import_onnxruntime().RunOptions

    def read() -> None:
        options = make_options()
        with suppress(Exception):
            while True:
                if (message := channel.receive()) is None:
                    options.terminate = True
                else:
                    options = make_options()
                    requests.put((message, options))
        os._exit(0)

    threading.Thread(target=read, daemon=True).start()
    sessions: dict[int, Any] = {}
    while True:
        (dropped, function, number, arguments), options = requests.get()
        for item in dropped:
            sessions.pop(item, None)
        try:
            channel.send((function(sessions, number, options, *arguments), None))
        except Exception as problem:  # noqa: BLE001 - the parent raises it
            channel.send((None, problem))
        del arguments


def _open(sessions: dict[int, Any], number: int, _: Any, source: Any, recipe: Any, *more: Any) -> Any:
    options = create_session_options(*recipe)
    if options.cores and may_pin():
        with suppress(OSError):  # a core that is no longer available: slower, but not wrong
            os.sched_setaffinity(0, options.cores)  # before the provider is loaded, whose threads have the same
    sessions[number] = open_session_here(source, options, *more)
    return describe_session(sessions[number])


def _run(sessions: dict[int, Any], number: int, options: Any, names: Sequence[str] | None, feeds: Any) -> list[Any]:
    return list(make_array_runner(sessions[number])(names, feeds, options))


def _call(sessions: dict[int, Any], number: int, _: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    return function(sessions[number], *arguments)


class DeviceProcess:
    """The process of an isolated device, which lives as long as it has sessions.

    Args:
        device: The device.
        serve: What the process does, as `serve_sessions`; a module of its own is imported before the first call.
    """

    def __init__(self, device: DeviceAddress, serve: Callable[[Sequence[int]], None] = serve_sessions) -> None:
        self.device, self._serve = device, serve
        self.numbers = itertools.count()
        self.sessions: dict[int, tuple[Any, ...]] = {}
        """Of each session that is open, the arguments of `_open`, and the states of files; empty while it is opened."""
        self.ended = threading.Event()
        self.is_open = False
        """Whether it is there, with all its sessions."""
        self.death_count, self.last_failure = 0, ""
        """How often it died, and how it did last."""
        self._dropped: list[int] = []
        self._owner, self._stack, self._lock = os.getpid(), ExitStack(), threading.Lock()
        self._child: Any = None
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._reason = ""

    def start(self) -> None:
        """Start it, with the sessions that it had before it died; else the next call does."""
        recipes = [(number, *recipe) for number, recipe in list(self.sessions.items()) if recipe]
        for _, arguments, files in recipes:
            if files != _list_file_states(arguments[0]):
                message = "a process that ended is not opened again: files of its model have changed since"
                raise ExecutionError("X017", message, where=str(arguments[0]), hint="open a new session")
        self._stack.close()
        self._reason, self._answers = "", queue.SimpleQueue()
        blocks = [os.memfd_create("onnxplace") for _ in range(2)] if hasattr(os, "memfd_create") else []
        for descriptor in blocks:
            self._stack.callback(os.close, descriptor)
        self._child = self._stack.enter_context(start_child(self._serve, blocks, connects=blocks))
        reading, writing = self._child.pipes
        self._stack.enter_context(suppress(OSError))  # of a pipe with bytes that the child did not read
        self._stack.callback(writing.close)
        self._channel = _Channel(reading, writing, blocks[::-1], copies=True)
        self.ended.clear()
        start_thread(threading.Thread(target=self._read, args=(reading,), name="onnxplace answers", daemon=True))
        try:
            for number, arguments, _ in recipes:
                self._channel.send(((), _open, number, arguments))
                _, problem = self._await_answer(None) or (None, self._make_death_error(arguments[3]))
                if problem is not None:
                    raise problem
        except BaseException:
            self._child.kill()
            raise
        self.is_open = True
        if not self.sessions:  # they were dropped meanwhile
            self._stack.close()

    def _read(self, pipe: BinaryIO) -> None:
        """Pass answers on; None at the end. Then start the process again if it has an owner."""
        child, answers, channel = self._child, self._answers, self._channel
        with suppress(Exception), pipe:
            while True:
                answers.put(channel.receive())
        child.kill()  # if it has sent what cannot be read
        self.is_open, pause = False, 0.0 if self.is_open else PAUSE_SECONDS
        self.death_count += 1
        self.last_failure = f"the process of {self.device.id} ended: {self._reason or child.describe_end()}"
        self.ended.set()
        answers.put(None)
        while self.device.owner and self.sessions and self._child is child:
            time.sleep(pause)
            pause = PAUSE_SECONDS
            with suppress(Exception), self._lock:
                if self._child is child:  # else a call was faster
                    self.start()

    def drop(self, number: int) -> None:
        """Free a session, at the latest with the next call; the process ends with the last one."""
        self.sessions.pop(number, None)
        self._dropped.append(number)
        if not self.sessions and os.getpid() == self._owner:  # and not in a fork
            self.ended.set()
            self._stack.close()

    def call(self, where: str, function: Callable[..., Any], number: int, *arguments: Any, options: Any = None) -> Any:
        """Return what a function returns there.

        Args:
            where: The part of a model that needs it, for errors.
            function: One at the top level of a module, called with all sessions by number, and with what follows.
            number: That of a session.
            arguments: Picklable arguments, which come after RunOptions there.
            options: ONNX Runtime's RunOptions; once they say `terminate`, so do those of the function.

        Raises what it raises, and ExecutionError if the process has ended.
        """
        with self._lock:
            answer = None
            if self.device.owner and self._child is not None and self._child.exit_code is not None:
                self.ended.wait()  # it died a moment ago, without a run
            if self._child is None or (self.device.owner and self.ended.is_set() and self.sessions):
                self.start()
            if not self.ended.is_set():
                dropped = [self._dropped.pop() for _ in range(len(self._dropped))]
                try:
                    self._channel.send((dropped, function, number, arguments))
                    answer = self._await_answer(options)
                except BaseException:  # an interrupt: the next call must not get this answer
                    self._stop()
                    raise
            if answer is None:
                raise self._make_death_error(where)
        value, problem = answer
        if problem is not None:
            raise problem
        return value

    def describe_end(self) -> str:
        """Wait for the end of the process; return how it ended, such as `SIGSEGV`."""
        return self._reason or str(self._child.describe_end())

    def _make_death_error(self, where: str) -> ExecutionError:
        """Return the error of what it did when it died."""
        message = f"{where} failed: the process of this device ended: {self.describe_end()}"
        hint = "its sessions are isolated, so all else goes on; open a new session, or use --fallback cpu:0"
        hint = "it is opened again for other requests; this one may end it once more" if self.device.owner else hint
        return ExecutionError("X016", message, where=self.device.id, hint=hint)

    def _await_answer(self, options: Any) -> Any:
        """Return the next answer; None if the process has ended."""
        while options is None or not options.terminate:
            with suppress(queue.Empty):
                return self._answers.get(timeout=POLL_SECONDS)
        return self._stop()

    def _stop(self) -> Any:
        """End the current request, or else the process; return the answer."""
        self._channel.send(None)
        with suppress(queue.Empty):
            return self._answers.get(timeout=STOP_SECONDS)
        self._reason = f"it was killed, as a run did not end within {STOP_SECONDS} s"
        self._child.kill()
        return self._answers.get()


# ------------------------------------------------------------------------------------------------------------- sessions


class IsolatedSession(SessionHandle):
    """A session in the process of its device. It has those of ONNX Runtime's methods that onnxplace uses."""

    def __init__(self, process: DeviceProcess, number: int, where: str, description: Any) -> None:
        super().__init__(description)
        self._process, self._number, self._where = process, number, where

    def close(self) -> None:
        """Free the session; may be called twice."""
        self._process.drop(self._number)

    __del__ = close

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any], options: Any = None) -> list[Any]:
        """Return outputs as numpy arrays, also those of types that numpy lacks; feeds may be such arrays, too."""
        return list(self._process.call(self._where, _run, self._number, names, dict(feeds), options=options))

    def run_with_ort_values(self, names: Sequence[str], feeds: Mapping[str, Any], options: Any = None) -> list[Any]:
        """Return outputs as OrtValues in the host's memory."""
        types = {item.name: item.type for item in self.get_outputs()}
        outputs = self.run(names, {name: to_python(value) for name, value in feeds.items()}, options)
        return [to_ort_value(value, types[name]) for name, value in zip(names, outputs)]

    def end_profiling(self) -> str:
        """Return the path of the profile."""
        return str(self.call(methodcaller("end_profiling")))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function at the top level of a module returns there for the session and more arguments."""
        return self._process.call(self._where, _call, self._number, function, *arguments)


_processes: weakref.WeakValueDictionary[tuple[object, ...], DeviceProcess] = weakref.WeakValueDictionary()


def open_session(
    model: str | Path | bytes,
    options: Any,
    device: DeviceAddress = CPU,
    where: str = "",
    provider_options: Mapping[str, str] | None = None,
) -> Any:
    """Open a session for a model on a device, in the process of the device if it is isolated.

    Args:
        model: Path or bytes of an ONNX model.
        options: As `make_session_options` returns them.
        device: By default the CPU.
        where: Place for error messages; by default the path.
        provider_options: More options of the device's execution providers.

    Raises:
        ModelError: ONNX Runtime refuses the model.
        ExecutionError: ONNX Runtime falls back to another device, or has no space to write; or the process of an
            isolated device has ended.
    """
    if not is_isolated(device):
        return open_session_here(model, options, device, where, provider_options)
    key = (os.getpid(), device.id, device.owner, *sorted(device.options.items()))
    process = _processes.get(key)
    if process is None or process.ended.is_set():
        process = _processes[key] = DeviceProcess(device)
    number, recipe = next(process.numbers), describe_session_options(options)
    place = where or ("model" if isinstance(model, bytes) else str(model))
    source = model if isinstance(model, bytes) else os.path.abspath(model)
    process.sessions[number], arguments = (), (source, recipe, device, place, provider_options)
    files = _list_file_states(source)
    try:
        description = process.call(place, _open, number, *arguments)
    except BaseException:
        process.drop(number)
        raise
    process.sessions[number] = arguments, files
    return IsolatedSession(process, number, place, description)


def _list_file_states(source: str | bytes) -> list[tuple[object, ...]]:
    """Return what changes with each file in the folder of a model, which has its weights, too."""
    if isinstance(source, bytes):
        return []
    with suppress(OSError), os.scandir(os.path.dirname(source)) as entries:
        return sorted((i.name, (s := i.stat()).st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for i in entries)
    return []


def find_processes(owner: str) -> list[DeviceProcess]:
    """Return the processes of an owner; none for an empty name."""
    return [process for process in list(_processes.values()) if process.device.owner == owner != ""]


def list_taken_nodes(session: Any, device: DeviceAddress) -> frozenset[str]:
    """Return the names of the nodes that a device's provider took; the CPU computes the others of the session.

    The session must have been opened with the entry `session.record_ep_graph_assignment_info` = 1.
    """
    if isinstance(session, IsolatedSession):
        return frozenset(session.call(list_taken_here, device))
    return list_taken_here(session, device)
