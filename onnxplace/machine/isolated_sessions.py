"""Sessions in a process of their own, which an execution provider that crashes takes with it.

All sessions of an isolated device live in one child process. It starts with the first of them, and ends with the last
one, or with this process, however that ends. Requests go to it one at a time, as pickles by pipes. The bytes of arrays
go through memory that both processes map, where the system has such memory. A run that is to end is told so; if that
does not help, the process is killed.
"""

from __future__ import annotations

import io
import itertools
import mmap
import os
import pickle
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from onnxplace.devices import ISOLATE, DeviceAddress, find_kind
from onnxplace.errors import ExecutionError, format_one_line
from onnxplace.machine.ort_sessions import SessionRecipe, TensorInfo, copy_infos, open_session
from onnxplace.machine.ort_values import make_array_runner, to_ort_value, to_python
from onnxplace.ort import import_onnxruntime
from onnxplace.utils import ChildProcess, start_child, start_thread

# How often a caller that waits looks whether its run is to end.
POLL_SECONDS = 0.02
# Time for a run that is to end; closing an engine waits a little longer.
STOP_SECONDS = 1.5
_ALIGNED_BYTES, _LEAST_BYTES = 64, 1 << 16
_NO_MEMORY = (-1, -1)


# ------------------------------------------------------------------------------------------------------------- messages


class _SharedBlock:
    """Memory that two processes map, one of which writes; it grows with what is written."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._memory = memoryview(b"")

    def map(self, size: int) -> memoryview:
        """Return the memory, at least so many bytes."""
        if size > len(self._memory):
            size = max(1 << (size - 1).bit_length(), _LEAST_BYTES)
            if os.fstat(self._descriptor).st_size < size:
                os.ftruncate(self._descriptor, size)
            self._memory = memoryview(mmap.mmap(self._descriptor, size))
        return self._memory

    def write(self, buffers: Sequence[memoryview]) -> list[slice]:
        """Write buffers one after the other; return where they are."""
        ends = itertools.accumulate(-(-item.nbytes // _ALIGNED_BYTES) * _ALIGNED_BYTES for item in buffers)
        places = [slice(start, start + item.nbytes) for start, item in zip([0, *ends], buffers)]
        memory = self.map(max((place.stop for place in places), default=1) or 1)
        for place, item in zip(places, buffers):
            memory[place] = item
        return places


class _Pickler(pickle.Pickler):
    def reducer_override(self, item: Any) -> Any:
        """Let the bytes of types that numpy lacks, such as bfloat16, stay outside of the pickle, too."""
        if isinstance(item, np.ndarray) and item.dtype.isbuiltin == 2:
            return _view_as, (np.ascontiguousarray(item).reshape(-1).view(np.uint8), item.dtype, item.shape)
        return NotImplemented


def _view_as(data: Any, dtype: Any, shape: Sequence[int]) -> Any:
    return data.view(dtype).reshape(shape)


class _Channel:
    """One side of the pipes between two processes; messages are plain objects and arrays.

    Args:
        reading, writing: The pipes.
        blocks: Descriptors of the memory that is read and that is written, or `_NO_MEMORY`.
        copies: Whether received arrays outlive the next message.
    """

    def __init__(self, reading: BinaryIO, writing: BinaryIO, blocks: tuple[int, int], *, copies: bool) -> None:
        self._reading, self._writing, self._copies = reading, writing, copies
        self._shares = blocks != _NO_MEMORY
        self._read, self._written = map(_SharedBlock, blocks)

    def send(self, message: Any) -> None:
        """Send a message; raises OSError if the other side has ended."""
        buffers: list[pickle.PickleBuffer] = []
        stream = io.BytesIO()
        _Pickler(stream, 5, buffer_callback=buffers.append).dump(message)
        raw = [item.raw() for item in buffers]
        places = self._written.write(raw) if self._shares and raw else [bytes(item) for item in raw]
        pickle.dump((stream.getvalue(), places), self._writing)
        self._writing.flush()

    def receive(self) -> Any:
        """Return the next message; raises EOFError or OSError if the other side has ended."""
        data, places = pickle.load(self._reading)
        buffers = places
        if self._shares and places:
            memory = self._read.map(max(place.stop for place in places))
            buffers = [memory[place] for place in places]
        return pickle.loads(data, buffers=[bytearray(item) for item in buffers] if self._copies else buffers)

    def close(self) -> None:
        """Close the pipe to the other side, which then ends."""
        with suppress(OSError):
            self._writing.close()


# ---------------------------------------------------------------------------------------------- the process of a device


def serve_sessions(blocks: tuple[int, int]) -> None:
    """Open and run sessions, in the child, as messages say, until the parent ends."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what a provider prints is no answer
    channel = _Channel(sys.stdin.buffer, answers, blocks, copies=False)
    requests: queue.SimpleQueue[tuple[Any, Any]] = queue.SimpleQueue()
    runtime = import_onnxruntime()

    def read() -> None:
        options = runtime.RunOptions()
        with suppress(EOFError, OSError):
            while True:
                if (message := channel.receive()) is None:
                    options.terminate = True
                    continue
                options = runtime.RunOptions()
                requests.put((message, options))
        os._exit(0)

    threading.Thread(target=read, name="onnxplace requests", daemon=True).start()
    sessions: dict[int, Any] = {}
    while True:
        (dropped, function, number, arguments), options = requests.get()
        for item in dropped:
            sessions.pop(item, None)
        value = failure = None
        try:
            value = function(sessions, number, options, *arguments)
        except Exception as problem:  # noqa: BLE001 - the parent raises it
            failure = _make_picklable(problem)
        channel.send((value, failure))
        del value, failure, arguments


def _make_picklable(problem: Exception) -> Exception:
    try:
        pickle.loads(pickle.dumps(problem))
    except Exception:  # noqa: BLE001 - an exception of a plugin may do anything
        return RuntimeError(format_one_line(problem))
    return problem


def _open(sessions: dict[int, Any], number: int, _: Any, source: str | bytes, recipe: SessionRecipe, *rest: Any) -> Any:
    session = open_session(source, recipe.make(), *rest)
    sessions[number] = session, make_array_runner(session)
    items = (session.get_inputs(), session.get_outputs(), session.get_overridable_initializers())
    return *map(copy_infos, items), list(session.get_providers())


def _run(sessions: dict[int, Any], number: int, options: Any, names: Sequence[str] | None, feeds: Any) -> list[Any]:
    _, run = sessions[number]
    return list(run(names, feeds, options))


def _call(sessions: dict[int, Any], number: int, _: Any, function: Callable[..., Any], *arguments: Any) -> Any:
    session, _ = sessions[number]
    return function(session, *arguments)


class DeviceProcess:
    """The process of an isolated device, which lives as long as this object."""

    def __init__(self, device: DeviceAddress) -> None:
        self.device = device
        self.numbers = itertools.count()
        self.dropped: deque[int] = deque()
        """Numbers of sessions that nobody here refers to any more."""
        self._lock = threading.Lock()
        self._child: ChildProcess | None = None
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._reason = ""

    @property
    def has_ended(self) -> bool:
        """Return whether the process ran, and does not any more."""
        return self._ended.is_set()

    def _start(self) -> ChildProcess:
        with ExitStack() as stack:
            blocks = _NO_MEMORY
            if hasattr(os, "memfd_create"):
                blocks = (os.memfd_create("onnxplace"), os.memfd_create("onnxplace"))
                for descriptor in blocks:
                    stack.callback(os.close, descriptor)
            shared = () if blocks == _NO_MEMORY else blocks
            child = stack.enter_context(start_child(serve_sessions, blocks, connects=True, descriptors=shared))
            reading, writing = child.pipes
            self._channel = _Channel(reading, writing, (blocks[1], blocks[0]), copies=True)
            stack.callback(self._channel.close)
            work = partial(_read_answers, self._channel, reading, self._answers, self._ended)
            start_thread(threading.Thread(target=work, name=f"onnxplace {self.device.id} answers", daemon=True))
            # Not at the end of the interpreter: engines, which close their sessions then, let requests end before.
            weakref.finalize(self, _end_process, stack.pop_all(), os.getpid()).atexit = False
        return child

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
            if self._ended.is_set():
                raise self._make_error(where)
            if self._child is None:
                self._child = self._start()
            dropped = [self.dropped.popleft() for _ in range(len(self.dropped))]
            try:
                self._send((dropped, function, number, arguments))
                answer = self._await_answer(options)
            except BaseException:  # an interrupt: the next call must not get this answer
                self._stop()
                raise
            if answer is None:
                raise self._make_error(where)
        value, problem = answer
        if problem is not None:
            raise problem
        return value

    def _send(self, message: Any) -> None:
        with suppress(OSError):  # it has ended, as the next answer says
            self._channel.send(message)

    def _await_answer(self, options: Any) -> Any:
        """Return the next answer; None if the process has ended."""
        while options is None or not options.terminate:
            with suppress(queue.Empty):
                return self._answers.get(timeout=POLL_SECONDS)
        return self._stop()

    def _stop(self) -> Any:
        """End the current request, or else the process; return the answer."""
        self._send(None)
        with suppress(queue.Empty):
            return self._answers.get(timeout=STOP_SECONDS)
        assert self._child is not None
        self._reason = f"it was killed, as a run did not end within {STOP_SECONDS} s"
        self._child.kill()
        return self._answers.get()

    def _make_error(self, where: str) -> ExecutionError:
        if not self._reason:
            assert self._child is not None
            self._reason = self._child.describe_end()
        message = f"{where} failed: the process of this device ended: {self._reason}"
        hint = "its sessions are isolated, so all else goes on; open a new session, or use --fallback cpu:0"
        return ExecutionError("X016", message, where=self.device.id, hint=hint)


def _read_answers(
    channel: _Channel, reading: BinaryIO, answers: queue.SimpleQueue[Any], ended: threading.Event
) -> None:
    """Pass answers on; None at the end. It has no reference to the process, which would live forever."""
    with suppress(Exception), reading:
        while True:
            answers.put(channel.receive())
    ended.set()
    answers.put(None)


def _end_process(stack: ExitStack, owner: int) -> None:
    if os.getpid() == owner:  # and not a fork
        stack.close()


# ------------------------------------------------------------------------------------------------------------- sessions


class IsolatedSession:
    """A session in the process of its device. It has those of ONNX Runtime's methods that onnxplace uses."""

    def __init__(self, process: DeviceProcess, number: int, where: str, description: Sequence[Any]) -> None:
        self._process, self._number, self._where = process, number, where
        self._inputs, self._outputs, self._overridable, self._providers = description
        weakref.finalize(self, process.dropped.append, number).atexit = False

    def get_inputs(self) -> list[TensorInfo]:
        """Return the required inputs."""
        return list(self._inputs)

    def get_outputs(self) -> list[TensorInfo]:
        """Return the outputs."""
        return list(self._outputs)

    def get_overridable_initializers(self) -> list[TensorInfo]:
        """Return the optional inputs."""
        return list(self._overridable)

    def get_providers(self) -> list[str]:
        """Return the names of its execution providers, the preferred one first."""
        return list(self._providers)

    def run(self, names: Sequence[str] | None, feeds: Mapping[str, Any], options: Any = None) -> list[Any]:
        """Return outputs as numpy arrays, also those of types that numpy lacks; feeds may be such arrays, too."""
        arguments = (None if names is None else list(names), dict(feeds))
        outputs: list[Any] = self._process.call(self._where, _run, self._number, *arguments, options=options)
        return outputs

    def run_with_ort_values(self, names: Sequence[str], feeds: Mapping[str, Any], options: Any = None) -> list[Any]:
        """Return outputs as OrtValues in the host's memory."""
        types = {item.name: item.type for item in self._outputs}
        outputs = self.run(names, {name: to_python(value) for name, value in feeds.items()}, options)
        return [to_ort_value(value, types[name]) for name, value in zip(names, outputs)]

    def end_profiling(self) -> str:
        """Return the path of the profile."""
        return str(self.call(_end_profiling))

    def call(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Return what a function at the top level of a module returns there for the session and more arguments."""
        return self._process.call(self._where, _call, self._number, function, *arguments)


def _end_profiling(session: Any) -> str:
    return str(session.end_profiling())


_processes: weakref.WeakValueDictionary[tuple[object, ...], DeviceProcess] = weakref.WeakValueDictionary()


def _find_process(device: DeviceAddress) -> tuple[DeviceProcess, DeviceAddress]:
    """Return the process of a device, which may have to be started, and the address of the device there."""
    key = (os.getpid(), device.id, *sorted(device.options.items()))
    process = _processes.get(key)
    if process is None or process.has_ended:
        process = _processes[key] = DeviceProcess(device)
    return process, replace(device, options={**device.options, ISOLATE: "false"})


def find_isolated_problem(device: DeviceAddress) -> str | None:
    """Return why ONNX Runtime cannot use a device; None if it can. Providers are tried in the process of the device."""
    process, there = _find_process(device)
    try:
        problem: str | None = process.call("the search for it", _find_problem, next(process.numbers), there)
    except ExecutionError as failure:
        return failure.message
    return problem


def _find_problem(_: dict[int, Any], number: int, options: Any, device: DeviceAddress) -> str | None:
    return find_kind(device.kind).find_problem(device)


def open_isolated_session(
    model: str | Path | bytes,
    options: Any,
    device: DeviceAddress,
    where: str,
    provider_options: Mapping[str, str] | None,
) -> IsolatedSession:
    """Open a session in the process of its device, as `open_session` does.

    Raises ExecutionError if the process ends meanwhile, and what `open_session` raises there.
    """
    process, there = _find_process(device)
    place = where or ("model" if isinstance(model, bytes) else str(model))
    source = model if isinstance(model, bytes) else os.path.abspath(model)
    number = next(process.numbers)
    recipe = SessionRecipe.of(options)
    description = process.call(place, _open, number, source, recipe, there, place, dict(provider_options or {}))
    return IsolatedSession(process, number, place, description)
