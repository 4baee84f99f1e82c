"""Inject one fault into the reads or copies of weights that stream, and check all that is guaranteed.

Faults come in through two seams: the function that reads a file, and the driver of fake GPUs.
"""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

import onnxplace
from onnxplace.errors import ExecutionError
from onnxplace.runtimes.execution import weight_loader
from onnxplace.runtimes.execution.device_streams import DriverError
from tests.support.fake_streams import FakeDriver, use_fake_driver
from tests.support.fault_checks import HUNG_SECONDS, list_worker_threads, raise_in, wait_until
from tests.support.small_programs import Talker
from tests.support.streamed_chains import StreamedChain, draw_chain

READS = {
    "error": "an error of the disk (EIO)",
    "cut": "the end of the file",
    "short": "a read of fewer bytes",
    "memory": "memory that runs out",
    "sleep": "10 ms of sleep",
    "hang": "a read that hangs, with a timeout",
    "kill": "SystemExit set from outside in the thread that reads",
}
COPIES = {
    "copy": "a copy that is refused",
    "allocate": "no page-locked memory",
    "record": "an event that is refused",
    "late": "a copy that fails after it was enqueued",
}
MEANINGS = {**READS, **COPIES}
CODES = {
    "error": {"X017"},
    "cut": {"X017"},
    "short": set[str](),
    "memory": {"X010"},
    "sleep": set[str](),
    "hang": {"X007"},
    "kill": {"X005"},
    "copy": {"X001"},
    "allocate": {"X010"},
    "record": {"X001"},
    "late": {"X001"},
}
"""What requests may answer, if not what is right."""
LASTING = ("kill", "late")
"""Faults after which a session may fail for good."""
HOSTS, GPUS = ("cpu:0", "cpu:1"), ("fake:0", "fake:1", "cpu:0")
IN_FLIGHT = 5


@dataclass(frozen=True)
class WeightFault:
    """What happens, and when."""

    kind: str
    call: int
    """The number of the call at which it happens first, counted from the one that follows some requests."""
    repeats: int
    """In so many calls."""


@dataclass
class Outcome:
    """What a fault led to."""

    answers: list[str]
    """Of the requests in flight: `right`, or the code of the error."""
    slowest_seconds: float
    """From the first fault to the end of the last of these requests; 0 if the fault hit none."""


def draw_fault(draw: random.Random, kind: str) -> WeightFault:
    return WeightFault(kind, draw.choice([0, 0, 1, 2, draw.randrange(30)]), draw.choice([1, 1, 2, 100]))


def compile_chain(folder: Path, draw: random.Random, kind: str) -> tuple[onnxplace.Bundle, StreamedChain]:
    """Compile a random chain with weights that stream; under a fake driver if the fault needs one."""
    chain = draw_chain(draw, GPUS if kind in COPIES else HOSTS)
    while not any(home and (kind in READS or name != "cpu:0") for home, name in zip(chain.homes, chain.devices)):
        chain = draw_chain(draw, GPUS if kind in COPIES else HOSTS)
    return chain.compile(folder), chain


class Injector:
    """Lets a fault happen in the calls of the threads that read weights."""

    def __init__(self, fault: WeightFault, driver: FakeDriver) -> None:
        self.fault, self.driver = fault, driver
        self.is_armed = False
        self.calls = 0
        self.fired_at = 0.0
        self.released = threading.Event()

    def is_due(self) -> bool:
        """Return whether the fault happens in this call."""
        if not self.is_armed or not threading.current_thread().name.endswith(" weights"):
            return False
        self.calls += 1
        due = self.fault.call < self.calls <= self.fault.call + self.fault.repeats
        self.fired_at = self.fired_at or (time.perf_counter() if due else 0.0)
        return due

    @contextmanager
    def install(self) -> Iterator[None]:
        """Replace what the fault hits."""
        with ExitStack() as stack:
            if self.fault.kind in READS:
                read_at = weight_loader.read_at
                stack.enter_context(mock.patch.object(weight_loader, "read_at", self._wrap_read(read_at)))
            else:
                name = {"copy": "copy_to_device", "allocate": "allocate_host", "late": "copy_to_device"}
                name = name.get(self.fault.kind, self.fault.kind)
                stack.enter_context(mock.patch.object(self.driver, name, self._wrap(getattr(self.driver, name))))
                if self.fault.kind == "allocate":
                    target = "onnxplace.runtimes.execution.device_streams.MAX_KEPT_BYTES"
                    stack.enter_context(mock.patch(target, 0))
            yield

    def _wrap_read(self, read_at: Any) -> Any:
        def read(file: Any, offset: int, view: memoryview) -> Any:
            kind = self.fault.kind
            if not self.is_due():
                return read_at(file, offset, view)
            if kind == "error":
                raise OSError(5, "Input/output error")
            if kind == "memory":
                raise MemoryError("injected")
            if kind == "cut":
                return 0
            if kind == "sleep":
                time.sleep(0.01)
            elif kind == "hang":
                self.released.wait(HUNG_SECONDS)
            elif kind == "kill":
                raise_in(threading.get_ident(), SystemExit)
            return read_at(file, offset, view[: max(len(view) // 3, 1)] if kind == "short" else view)

        return read

    def _wrap(self, call: Any) -> Any:
        def wrapped(*arguments: Any) -> Any:
            due = self.is_due()
            if due and self.fault.kind == "late":
                self.driver.push(arguments[-1], self._fail_late)
            elif due:
                raise DriverError("out of memory" if self.fault.kind == "allocate" else "refused")
            return call(*arguments)

        return wrapped

    @staticmethod
    def _fail_late(is_shadow: bool) -> None:
        if not is_shadow:
            raise DriverError("an illegal memory access was encountered")


def inject(folder: Path, fault: WeightFault, seed: int) -> Outcome:
    """Inject a fault, check everything, and return what it led to; raises AssertionError."""
    draw = random.Random(seed)
    with use_fake_driver(FakeDriver(seed, eagerness=draw.choice([0.0, 0.3, 0.9]))) as driver:
        bundle, chain = compile_chain(folder, draw, fault.kind)
        gc.collect()
        before = len(os.listdir("/proc/self/fd"))
        injector = Injector(fault, driver)
        with injector.install():
            session = onnxplace.InferenceSession(bundle, max_in_flight=8)
            try:
                outcome = _check_session(session, chain, injector, draw)
            finally:
                injector.released.set()
                session.close(timeout=HUNG_SECONDS)
        wait_until(lambda: not list_worker_threads())
        del session
        for failure in driver._failures.values():
            failure.__traceback__ = None  # the frames of those to whom the driver reported it
        gc.collect()
        driver.drain()
        require(len(os.listdir("/proc/self/fd")) == before, f"{fault}: open files are left")
        require(not any(driver.used_bytes.values()), f"{fault}: memory of a device is left")
        counts = driver.counts
        locked = counts.get("allocate_host", 0) - counts.get("free_host", 0)
        require(locked == 0, f"{fault}: {locked} pieces of page-locked memory are left")
        return outcome


def _check_session(
    session: onnxplace.InferenceSession, chain: StreamedChain, injector: Injector, draw: random.Random
) -> Outcome:
    fault = injector.fault
    talkers = [Talker(session, chain), *(Talker(session.conversation(), chain) for _ in range(IN_FLIGHT - 1))]
    for number, talker in enumerate(talkers):
        require(_ask(talker, number, None) == "right", f"{fault}: a request before it fails")
    injector.is_armed = True
    answers, slowest = [], 0.0
    hangs = fault.kind == "hang"
    threads = [
        threading.Thread(
            target=lambda talker=talker, number=number: answers.append(  # type: ignore[misc]
                _ask(talker, number, 0.2 if hangs else HUNG_SECONDS if number % 2 else None)
            ),
            daemon=True,
        )
        for number, talker in enumerate(talkers)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * HUNG_SECONDS)
        require(not thread.is_alive(), f"{fault}: a request hangs")
    if injector.fired_at:
        slowest = time.perf_counter() - injector.fired_at
    injector.is_armed = False
    injector.released.set()
    allowed = {"right", *CODES[fault.kind]}
    require(set(answers) <= allowed, f"{fault}: expected one of {sorted(allowed)}, got {sorted(set(answers))}")
    later = {_ask(talker, number, HUNG_SECONDS) for number, talker in enumerate(talkers)}
    allowed = {"right", *(CODES[fault.kind] if fault.kind in LASTING else ())}
    require(later <= allowed, f"{fault}: later requests answer {sorted(later)}")
    return Outcome(answers, slowest)


def _ask(talker: Talker, number: int, timeout: float | None) -> str:
    """Return `right`, or the code of the error; raises AssertionError for a wrong answer."""
    feeds, expected = talker.prepare(number, 2)
    try:
        outputs = talker.user.run_timed(feeds, talker.model.outputs, timeout=timeout).outputs
    except ExecutionError as problem:
        talker.states = {}
        return problem.code
    except onnxplace.FeedError:  # the state was lost by the request before
        talker.states = {}
        return "right"
    for name, array in expected.items():
        require(np.array_equal(outputs[name], array), f"a wrong answer: {name}")
    talker.keep(expected)
    return "right"


def require(condition: object, message: str) -> None:
    """Raise AssertionError, even under `python -O`."""
    if not condition:
        raise AssertionError(message)
