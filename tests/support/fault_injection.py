"""Inject one fault at one instruction of one device, for one request among others, and check all that is guaranteed.

Faults come in through public seams: a subclass of the engine, whose programs, devices and segments are wrapped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
from onnxruntime.capi.onnxruntime_pybind11_state import Fail

import onnxplace
from onnxplace.bundle.manifest import Step
from onnxplace.errors import ExecutionError, FeedError, OnnxplaceError, RunTimeoutError
from onnxplace.runtimes import onnxruntime as runtime_module
from onnxplace.runtimes.execution.engine import Engine
from onnxplace.runtimes.execution.programs import drop_last_frees
from tests.support.fault_checks import HUNG_SECONDS, raise_in
from tests.support.small_programs import SmallModel, Talker

RAISING = ("ort", "python", "memory", "bad_alloc", "base", "interrupt", "exit")
KINDS = (*RAISING, "sleep", "hang", "kill", "kill_outside")
MODES = ("submit", "run", "timeout")
"""How the request starts: among others, alone in the thread of its caller, or with a timeout."""


class Stop(BaseException):
    """An exception like KeyboardInterrupt."""


@dataclass(frozen=True)
class Fault:
    """What happens, where, and to which kind of request."""

    kind: str
    device: str
    position: int
    """Before this instruction; after the last one if it is their number, and while outputs are read if it is one more.

    -1 for `kill_outside`, which comes from another thread.
    """
    inside: bool
    """Whether it happens inside of the segment, or of the copy, that the instruction runs."""
    mode: str
    delay_seconds: float = 0.0
    """Of `kill_outside`, after the submission."""
    part: str = ""
    """Of `kill_outside`: the end of the thread's name, ` deliveries` for that which waits for enqueued work."""

    def reads(self, bundle: onnxplace.Bundle) -> bool:
        """Return whether it happens while outputs are read, in the thread of the device that finishes last."""
        return self.position > len(drop_last_frees(bundle.manifest.programs[self.device]))


@dataclass
class Outcome:
    """What a fault led to."""

    answer: str
    """`right`, or the code of the error, or the name of the exception that the caller got."""
    broken: bool
    """Whether the session said that it is over."""
    slowest_seconds: float
    """Longest time from the fault to the end of a request that was in flight."""


def list_faults(bundle: onnxplace.Bundle, kinds: Sequence[str] = KINDS) -> list[Fault]:
    """Return every fault at every instruction of a bundle."""
    faults = []
    for device, whole in bundle.manifest.programs.items():
        program = drop_last_frees(whole)
        faults += [Fault("kill_outside", device, -1, False, "submit")] if "kill_outside" in kinds else []
        for position in range(len(program) + 2):
            op = program[position].op if position < len(program) else ""
            for inside in (False, True) if op in ("run", "receive") else (False,):
                for kind in kinds:
                    modes = {"hang": ("timeout",), "kill_outside": ()}.get(kind, MODES)
                    if kind != "bad_alloc" or (inside and op == "run"):
                        faults += [Fault(kind, device, position, inside, mode) for mode in modes]
    return faults


# --------------------------------------------------------------------------------------------------------- the engine


class FaultyEngine(Engine):
    """An engine with at most one fault, for the request that is created next."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._lone_outputs = []  # all requests follow programs, at whose steps faults are
        self.fault: Fault | None = None
        self.armed = False
        self.victim = -1
        """Number of the request that the fault is for."""
        self.fired_at = 0.0
        self.reached = threading.Event()
        self.released = threading.Event()
        """Ends a hang."""

    def request(self, *arguments: Any) -> Any:
        request = super().request(*arguments)
        if self.armed:
            self.armed, self.victim = False, request.number
        return request

    def follow_program(self, device: Any, program: Sequence[Step], request: Any) -> None:
        fault = self.fault
        if fault is not None and request.number == self.victim and device.id == fault.device:
            steps = FaultySteps(self, program)
            super().follow_program(FaultyDevice(device, self, steps), steps, request)
        else:
            super().follow_program(device, program, request)

    def run_segment(self, device: Any, segment: Any, values: dict[str, Any], request: Any) -> None:
        wrapped = FaultySegment(segment, self, device.steps) if isinstance(device, FaultyDevice) else segment
        super().run_segment(device, wrapped, values, request)

    def _read_output(self, value: str, request: Any) -> Any:
        fault = self.fault
        if (
            fault is not None
            and request.number == self.victim
            and not self.reached.is_set()
            and fault.reads(self.bundle)
        ):
            self.fire()
        return super()._read_output(value, request)

    def fire(self) -> None:
        """Let the fault happen in this thread."""
        assert self.fault is not None
        kind = self.fault.kind
        self.fired_at = time.perf_counter()
        self.reached.set()
        if kind == "sleep":
            time.sleep(0.01)
        elif kind == "hang":
            self.released.wait(HUNG_SECONDS)
        elif kind == "kill":
            raise_in(threading.get_ident(), SystemExit)
        elif kind == "memory":
            np.empty(1 << 62, np.uint8)
        else:
            raise {
                "ort": lambda: Fail("[ONNXRuntimeError] : 1 : FAIL : injected"),
                "python": lambda: ValueError("injected"),
                "bad_alloc": lambda: RuntimeError("std::bad_alloc"),
                "base": lambda: Stop("injected"),
                "interrupt": KeyboardInterrupt,
                "exit": lambda: SystemExit(3),
            }[kind]()


class FaultySteps(Sequence[Step]):
    """A program whose steps fire the fault."""

    def __init__(self, engine: FaultyEngine, program: Sequence[Step]) -> None:
        self.engine, self.program, self.current = engine, program, -1

    def __len__(self) -> int:
        return len(self.program)

    def __getitem__(self, index: Any) -> Any:
        return self.program[index]

    def __iter__(self) -> Iterator[Step]:
        fault = self.engine.fault
        assert fault is not None
        for index, step in enumerate(self.program):
            self.current = index
            if index == fault.position and not fault.inside:
                self.engine.fire()
            yield step
        self.current = len(self.program)
        if self.current == fault.position:
            self.engine.fire()

    def fire_inside(self) -> None:
        """Fire if the current step is that of the fault."""
        fault = self.engine.fault
        if fault is not None and fault.inside and self.current == fault.position:
            self.engine.fire()


class FaultyDevice:
    """A device whose copies fire the fault."""

    def __init__(self, device: Any, engine: FaultyEngine, steps: FaultySteps) -> None:
        self.device, self.engine, self.steps = device, engine, steps
        self.memory = FaultyMemory(device.memory, steps)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.device, name)


class FaultyMemory:
    """A memory whose copies fire the fault."""

    def __init__(self, memory: Any, steps: FaultySteps) -> None:
        self.memory, self.steps = memory, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.memory, name)

    def receive(self, *arguments: Any) -> Any:
        self.steps.fire_inside()
        return self.memory.receive(*arguments)


class FaultySegment:
    """A segment whose call fires the fault."""

    def __init__(self, segment: Any, engine: FaultyEngine, steps: FaultySteps) -> None:
        self.segment, self.engine, self.steps = segment, engine, steps

    def __getattr__(self, name: str) -> Any:
        return getattr(self.segment, name)

    def run(self, *arguments: Any) -> None:
        self.steps.fire_inside()
        self.segment.run(*arguments)


# ----------------------------------------------------------------------------------------------------------- one case


def inject(bundle: onnxplace.Bundle, model: SmallModel, fault: Fault) -> Outcome:
    """Inject a fault, check everything, and return what it led to; raises AssertionError."""
    results: list[Outcome | BaseException] = []

    def work() -> None:
        try:
            results.append(Case(bundle, model, fault).check())
        except BaseException as problem:  # noqa: BLE001 - raised below
            results.append(problem)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(3 * HUNG_SECONDS)
    require(not thread.is_alive(), f"{fault}: it hangs")
    (result,) = results
    if isinstance(result, BaseException):
        raise AssertionError(f"{fault}: {type(result).__name__}: {result}") from result
    return result


def require(condition: object, message: str) -> None:
    """Raise AssertionError, even under `python -O`."""
    if not condition:
        raise AssertionError(message)


class Case:
    """One fault in one session."""

    def __init__(self, bundle: onnxplace.Bundle, model: SmallModel, fault: Fault) -> None:
        self.fault, self.model, self.bundle, self.reads_outputs = fault, model, bundle, fault.reads(bundle)
        with mock.patch.object(runtime_module, "Engine", FaultyEngine):
            self.session = onnxplace.InferenceSession(bundle)
        self.engine: FaultyEngine = self.session._session.engine  # type: ignore[attr-defined]
        self.victim = Talker(self.session.conversation(), model)
        self.others = [Talker(self.session, model), Talker(self.session.conversation(), model)]
        self.pending: list[tuple[Talker, Future[Any], dict[str, Any]]] = []
        """Requests of others in flight, and what they must return."""

    def check(self) -> Outcome:
        """Run the case; raises AssertionError."""
        try:
            for number, talker in enumerate([self.victim, *self.others]):
                self.ask(talker, number)
            self.engine.fault = self.fault
            answer = getattr(self, f"start_by_{self.fault.mode}")()
            self.engine.released.set()
            self.collect()
            slowest = time.perf_counter() - self.engine.fired_at if self.engine.fired_at else 0.0
            broken = self.check_next()
        finally:
            self.engine.released.set()
            self.session.close(timeout=HUNG_SECONDS)
        self.check_end()
        return Outcome(answer, broken, slowest)

    def ask(self, talker: Talker, number: int) -> None:
        feeds, expected = talker.prepare(number)
        result = talker.user.run_timed(feeds, self.model.outputs, timeout=HUNG_SECONDS)
        require_equal(result.outputs, expected)
        talker.keep(expected)

    def submit(self, talker: Talker, number: int) -> None:
        feeds, expected = talker.prepare(number)
        self.pending.append((talker, talker.user.submit(feeds, self.model.outputs), expected))
        talker.keep(expected)

    @property
    def may_break(self) -> bool:
        """Whether the fault may end a worker, and so the session."""
        ends = (*RAISING[4:], "kill") if self.reads_outputs else ("kill",)
        return self.fault.kind in (*ends, "kill_outside")

    @property
    def possible_devices(self) -> list[str]:
        """The devices whose threads the fault may hit: outputs are read by that of the device which finishes last."""
        return list(self.bundle.manifest.programs) if self.reads_outputs else [self.fault.device]

    # -- the request with the fault -------------------------------------------------------------------------

    def start_by_submit(self) -> str:
        """Submit the request among others; return its answer."""
        self.submit(self.others[0], 11)
        kill = self.fault.kind == "kill_outside"
        worker = next(
            (w for w in self.engine._workers if kill and w.name == f"onnxplace {self.fault.device}{self.fault.part}"),
            None,
        )
        self.engine.armed = True
        feeds, expected = self.victim.prepare(12)
        try:
            future = self.victim.user.submit(feeds, self.model.outputs)
            if worker is not None:
                time.sleep(self.fault.delay_seconds)
                self.engine.fired_at = time.perf_counter()
                raise_in(worker.ident, SystemExit)
            for number, talker in enumerate([self.others[1], self.others[0]]):
                self.submit(talker, 13 + number)
        except ExecutionError as problem:  # the worker died before all were submitted
            require(problem.code == "X005", f"a refused request: {problem}")
            return problem.code
        return self.judge(lambda: future.result(HUNG_SECONDS).outputs, expected)

    def start_by_run(self) -> str:
        """Run the request alone, in part in this thread."""
        self.engine.armed = True
        feeds, expected = self.victim.prepare(12)
        return self.judge(lambda: self.victim.user.run_timed(feeds, self.model.outputs).outputs, expected)

    def start_by_timeout(self) -> str:
        """Run the request after another one, with a timeout."""
        self.submit(self.others[0], 11)
        self.engine.armed = True
        feeds, expected = self.victim.prepare(12)
        timeout = 0.05 if self.fault.kind == "hang" else HUNG_SECONDS

        def run() -> Mapping[str, Any]:
            return self.victim.user.run_timed(feeds, self.model.outputs, timeout=timeout).outputs

        return self.judge(run, expected)

    def judge(self, call: Any, expected: dict[str, Any]) -> str:
        """Return the answer of the request; raises AssertionError unless it is right, or says what failed and where."""
        kind = self.fault.kind
        try:
            outputs = call()
        except RunTimeoutError as problem:
            require(kind == "hang", f"a wrong timeout: {problem}")
            require(self.fault.device in problem.message or self.reads_outputs, f"it does not say where: {problem}")
            self.victim.states = {}
            return problem.code
        except ExecutionError as problem:
            self.victim.states = {}
            self.check_message(problem)
            return problem.code
        except (Stop, KeyboardInterrupt, SystemExit) as problem:  # it hit this thread, which did a part of the request
            require(kind in ("base", "interrupt", "exit", "kill"), f"it raises {problem!r}")  # kill: by chance this one
            require(self.fault.mode == "run", f"a caller that only waits gets {problem!r}")
            self.victim.states = {}
            return type(problem).__name__
        require(kind in ("sleep", "kill", "kill_outside", "hang"), "the request has an answer")
        require_equal(outputs, expected)
        self.victim.keep(expected)
        return "right"

    def check_message(self, problem: ExecutionError) -> None:
        """Raise AssertionError unless an error names the device, the cause, and the segment that failed."""
        fault, text = self.fault, str(problem)
        require(fault.kind not in ("sleep", "hang"), f"it fails: {problem}")
        if problem.code == "X005":
            require(self.may_break, f"the session is over: {problem}")
        where = ["output"] if self.reads_outputs and problem.code != "X005" else self.possible_devices
        require(any(item in text for item in where), f"the error does not name one of {where}: {problem}")
        causes = {"ort": "injected", "python": "injected", "base": "injected", "memory": "EiB", "bad_alloc": "predicts"}
        causes |= {
            "interrupt": "KeyboardInterrupt",
            "exit": "SystemExit",
            "kill": "SystemExit",
            "kill_outside": "SystemExit",
        }
        require(causes[fault.kind] in text, f"the error does not name its cause: {problem}")
        require((problem.code == "X010") == (fault.kind in ("memory", "bad_alloc")), f"another code: {problem}")
        program = drop_last_frees(self.bundle.manifest.programs[fault.device])
        if fault.inside and program[fault.position].op == "run":
            require(program[fault.position].segment in text, f"the error does not name the segment: {problem}")
        if fault.inside and program[fault.position].op == "receive":
            require(repr(program[fault.position].value) in text, f"the error does not name the value: {problem}")

    # -- afterwards -----------------------------------------------------------------------------------------

    def collect(self) -> None:
        """Wait for the other requests, which are not affected unless a worker died."""
        for talker, future, expected in self.pending:
            try:
                require_equal(future.result(HUNG_SECONDS).outputs, expected)
            except OnnxplaceError as problem:
                codes = ("X001", "X005", "S007") if self.fault.kind == "kill_outside" else ("X005", "S007")
                require(problem.code in codes and self.may_break, f"another request: {problem}")
                talker.states = {}

    def check_next(self) -> bool:
        """Check the next request of each; returns whether the session is over."""
        kind = self.fault.kind
        if kind in ("hang", "kill_outside") or self.reads_outputs:
            # A request that was over before its turn leaves the states, and one after its programs has stored them.
            self.victim.user.reset_state()
            self.victim.states = {}
        elif not self.victim.states and self.model.states:
            try:
                self.victim.user.run(None, self.model.make_feeds(1), timeout=HUNG_SECONDS)
                raise AssertionError("states that were lost are there")
            except FeedError as problem:
                require(problem.code == "S007" and "failed and lost it" in problem.message, str(problem))
            except ExecutionError as problem:
                require(problem.code == "X005", str(problem))
        errors = []
        for number, talker in enumerate([*self.others, self.victim]):
            for _ in range(2):
                try:
                    self.ask(talker, 20 + number)
                except ExecutionError as problem:
                    require(problem.code == "X005" and self.may_break, f"the next one: {problem}")
                    names_device = any(device in str(problem) for device in self.possible_devices)
                    require(names_device and problem.hint, f"it does not say where: {problem}")
                    errors.append(problem)
                else:
                    require(not errors, f"an answer after the session was over: {errors}")
        # A thread that waits dies once it is woken, which may be by one of these requests.
        require(len(errors) in (0, 6) or kind == "kill_outside", f"the session is over for some: {errors}")
        return bool(errors)

    def check_end(self) -> None:
        """Check that threads and states are gone."""
        for worker in self.engine._workers:
            worker.join(HUNG_SECONDS)
            require(not worker.is_alive(), f"{worker.name} is still alive")
        require(not self.engine._in_flight and not self.engine._ready, "requests are left in flight")
        for talker in (self.victim, *self.others):
            try:
                talker.user.run(None, self.model.make_feeds(1), timeout=HUNG_SECONDS)
                raise AssertionError("a closed session ran")
            except ExecutionError as problem:
                require(problem.code in ("X002", "X005"), str(problem))


def require_equal(outputs: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Raise AssertionError unless all outputs are right."""
    require(set(outputs) == set(expected), f"outputs {sorted(outputs)} instead of {sorted(expected)}")
    for name, value in expected.items():
        require(np.array_equal(outputs[name], value), f"output {name!r} is {outputs[name]} instead of {value}")


def inject_at_each_place(bundle, model, kind):
    """Inject a fault at each place once, by one of the ways to start a request; return the number of places.

    benchmarks/faults.py tries all ways.
    """
    faults = list_faults(bundle, [kind])
    places = {(fault.device, fault.position, fault.inside) for fault in faults}
    tried = {}
    for index, fault in enumerate(faults):
        if fault.mode == MODES[index // 3 % 3] or len(faults) == len(places):
            tried[fault.device, fault.position, fault.inside] = fault
    assert set(tried) == places
    for fault in tried.values():
        outcome = inject(bundle, model, fault)
        assert outcome.slowest_seconds < HUNG_SECONDS
        if kind == "sleep":
            assert outcome.answer == "right"
        if kind in ("ort", "python", "memory"):
            assert not outcome.broken
    return len(places)
