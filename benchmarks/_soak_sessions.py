"""One process of benchmarks/soak.py: sessions that are used, misused, interrupted and closed, in random order.

python benchmarks/_soak_sessions.py ENDLESS.bundle STATES.bundle SECONDS SEED prints one JSON object: how often each
thing was done, and what was left at the end. Whatever gives a wrong answer ends it with a traceback; whatever takes
longer than half a minute ends it with the stacks of all threads.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import faulthandler
import gc
import json
import os
import pickle
import queue
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

import onnxplace
from onnxplace.errors import ExecutionError, OnnxplaceError
from onnxplace.utils import start_thread
from tests.support.endless import expected, feeds

HUNG_SECONDS = 30
MAX_SESSIONS = 3


def require(condition: object, message: str) -> None:
    """Raise AssertionError, even under `python -O`."""
    if not condition:
        raise AssertionError(message)


def require_right(outputs: Any, rounds: int) -> None:
    """Raise AssertionError unless the endless model gave what it has to."""
    for output, want in zip(outputs, expected(rounds), strict=True):
        np.testing.assert_array_equal(output, want)


class Soak:
    """Open sessions, and all that is done to them."""

    def __init__(self, endless: str, states: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.endless, self.states = onnxplace.load(endless), onnxplace.load(states)
        self.sessions: list[onnxplace.InferenceSession] = []
        self.busy: list[onnxplace.InferenceSession] = []
        """Sessions with runs that never end, if an interrupt came before they were closed."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.before: dict[str, int] | None = None
        """What was open after the first actions."""
        self.told = 0
        """Errors of callbacks that reached `threading.excepthook`, where they belong."""
        threading.excepthook = self.hear

    def hear(self, arguments: Any) -> None:
        self.told += 1

    def rounds(self) -> int:
        return self.random.choice([0, 1, 2, 3, 50, 5000])

    def session(self) -> onnxplace.InferenceSession:
        """Return one of the open sessions, or a new one."""
        if not self.sessions or (len(self.sessions) < MAX_SESSIONS and self.random.random() < 0.1):
            self.sessions.append(onnxplace.InferenceSession(self.endless, trace=self.random.random() < 0.2))
        return self.random.choice(self.sessions)

    def drop(self, session: onnxplace.InferenceSession) -> None:
        self.sessions = [other for other in self.sessions if other is not session]

    # -- what is done ---------------------------------------------------------------------------------------------

    def run(self) -> None:
        rounds = self.rounds()
        timeout = self.random.choice([None, None, HUNG_SECONDS])
        require_right(self.session().run(None, feeds(rounds), timeout=timeout), rounds)

    def run_out_of_time(self) -> None:
        session = self.session()
        try:
            session.run(None, feeds(None), timeout=self.random.uniform(0.001, 0.05))
        except onnxplace.RunTimeoutError:
            pass
        else:
            raise AssertionError("what never ends ended")
        require_right(session.run(None, feeds(3), timeout=HUNG_SECONDS), 3)

    def submit(self) -> None:
        session, all_rounds = self.session(), [self.rounds() for _ in range(self.random.randrange(1, 13))]
        futures = [session.submit(feeds(rounds)) for rounds in all_rounds]
        for future, rounds in zip(futures, all_rounds):
            outputs = future.result(HUNG_SECONDS).outputs
            require_right([outputs[name] for name in "yz"], rounds)

    def call_back(self) -> None:
        """Let callbacks end their thread, or fail; all of them have to be called."""
        session, called = self.session(), queue.SimpleQueue[None]()
        kind = self.random.choice([SystemExit, KeyboardInterrupt, ValueError])

        def fail(*_: object) -> None:
            called.put(None)
            raise kind

        count = self.random.randrange(1, 6)
        for _ in range(count):
            if self.random.random() < 0.5:
                session.run_async(None, feeds(self.rounds()), fail)
            else:
                session.submit(feeds(self.rounds())).add_done_callback(fail)
        for _ in range(count):
            called.get(timeout=HUNG_SECONDS)

    def run_in_threads(self) -> None:
        """Run from several threads at once: plain ones, since an interrupt breaks those of `concurrent.futures`."""
        session, rounds, problems = self.session(), self.rounds(), queue.SimpleQueue[BaseException | None]()

        def run() -> None:
            try:
                for _ in range(3):
                    require_right(session.run(None, feeds(rounds)), rounds)
                problems.put(None)
            except BaseException as problem:  # noqa: BLE001 - for the main thread, if it still wants to know
                problems.put(problem)

        for _ in range(4):
            start_thread(threading.Thread(target=run, daemon=True))
        for _ in range(4):
            if (problem := problems.get(timeout=HUNG_SECONDS)) is not None:
                raise problem

    def close(self) -> None:
        session = self.session()
        self.drop(session)
        session.close(self.random.choice([None, 0, 1.0]))
        self.require_closed(session)

    def close_busy(self) -> None:
        for session in self.busy:
            session.close(timeout=0)
        session = onnxplace.InferenceSession(self.endless)
        self.busy = [session]
        futures = [session.submit(feeds(None)) for _ in range(self.random.randrange(1, 5))]
        session.close(timeout=self.random.choice([0, 0.01]))
        for future in futures:
            require(isinstance(future.exception(HUNG_SECONDS), ExecutionError), "a closed session gave a result")
        self.require_closed(session)
        self.busy.clear()

    def require_closed(self, session: onnxplace.InferenceSession) -> None:
        try:
            session.run(None, feeds(1))
        except ExecutionError as problem:
            require(problem.code == "X002", str(problem))
        else:
            raise AssertionError("a closed session ran")

    def forget(self) -> None:
        """Drop a session with runs under way: they come to their end all the same."""
        session, rounds = onnxplace.InferenceSession(self.endless), self.rounds()
        future = session.submit(feeds(rounds))
        del session
        outputs = future.result(HUNG_SECONDS).outputs
        require_right([outputs[name] for name in "yz"], rounds)

    def kill_worker(self) -> None:
        """Let a worker die: runs say so, and nobody waits."""
        session = onnxplace.InferenceSession(self.endless)
        worker = self.random.choice(session._session.engine._workers)  # type: ignore[attr-defined]
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident), ctypes.py_object(SystemExit))
        try:
            for _ in range(3):
                session.run(None, feeds(3), timeout=HUNG_SECONDS)
            raise AssertionError("a worker that was killed goes on")
        except ExecutionError as problem:
            require(problem.code in ("X001", "X005"), str(problem))
        finally:
            session.close(timeout=1)

    def fork(self) -> None:
        session = self.session()
        child = os.fork()
        if child == 0:
            code = 1
            with contextlib.suppress(BaseException):
                signal.signal(signal.SIGALRM, signal.SIG_DFL)
                signal.alarm(HUNG_SECONDS)
                try:
                    session.run(None, feeds(1))
                except ExecutionError as problem:
                    code = 0 if problem.code == "X006" else 1
                session.close()  # nothing is freed: ONNX Runtime's own locks may be held by threads that are not here
            os._exit(code)
        self.wait_for(child)

    def wait_for(self, child: int) -> None:
        """Wait for a forked child, whatever interrupts that."""
        while True:
            try:
                _, status = os.waitpid(child, 0)
                break
            except KeyboardInterrupt:
                self.counts["interrupted"] += 1
            except ChildProcessError:  # an interrupt came when its end was known already
                return
        require(status == 0, f"a forked child ended with {status}")

    def copy(self) -> None:
        try:
            pickle.dumps(self.session())
        except onnxplace.UsageError as problem:
            require(problem.code == "U055", str(problem))

    def fail(self) -> None:
        """Give inputs that are refused, or that a node cannot take; the next run is right again."""
        session = self.session()
        for bad in ({}, {"limit": np.array(1), "x": np.ones(5, np.float32)}, {"limit": "x", "x": None}):
            try:
                session.run(None, bad)
            except OnnxplaceError as problem:
                require(problem.exit_code == 2, str(problem))
        require_right(session.run(None, feeds(1), timeout=HUNG_SECONDS), 1)

    def carry_states(self) -> None:
        """Count up in a state; runs that are given up lose it, and that is said."""
        x = np.ones(4, np.float32)
        with onnxplace.InferenceSession(self.states) as session:
            for begin in range(3):
                total = float(self.random.randrange(100))
                outputs: Any = session.run(None, {"x": x, "total": np.full(4, total, np.float32)})
                for step in range(self.random.randrange(1, 6)):
                    outputs = session.run(None, {"x": x})
                    want = total + 2 + step
                    require(np.all(outputs[0] == want), f"state {begin}: {outputs[0]} instead of {want}")
                session.reset_state()
            try:
                session.run(None, {"x": x})
            except onnxplace.FeedError as problem:
                require(problem.code == "S007", str(problem))
            else:
                raise AssertionError("a state that was reset is there")

    # -- all of it ------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Do one thing, with an interrupt at a random moment of it now and then."""
        actions: list[tuple[Callable[[], None], int]] = [
            *((self.run, 30), (self.submit, 15), (self.run_out_of_time, 6), (self.call_back, 8)),
            *((self.run_in_threads, 6), (self.close, 5), (self.close_busy, 4), (self.forget, 4)),
            *((self.kill_worker, 2), (self.fork, 2), (self.copy, 2), (self.fail, 4), (self.carry_states, 5)),
        ]
        (action,) = self.random.choices([a for a, _ in actions], [weight for _, weight in actions])
        interrupted = action not in (self.kill_worker, self.fork) and self.random.random() < 0.25
        try:
            if interrupted:
                signal.setitimer(signal.ITIMER_REAL, self.random.expovariate(500))
            action()
            self.counts[action.__name__] += 1
        except KeyboardInterrupt:
            self.counts["interrupted"] += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)

    def go_on(self, ends: float) -> None:
        """Act until it is time to end, at least until there is something to compare the end with."""
        while time.monotonic() < ends or self.before is None:
            faulthandler.dump_traceback_later(HUNG_SECONDS, exit=True)
            self.act()
            if self.before is None and sum(self.counts.values()) >= 100:
                self.before = self.leftovers()

    def leftovers(self) -> dict[str, int]:
        """Close everything, and return what is there all the same."""
        for session in (*self.sessions, *self.busy):
            session.close(timeout=1)
        self.sessions.clear()
        self.busy.clear()
        gc.collect()
        ends = time.monotonic() + 10
        while (left := workers()) and time.monotonic() < ends:
            time.sleep(0.01)
        return {"threads": len(left), "files": len(os.listdir("/proc/self/fd")), "resident_bytes": resident_bytes()}


def workers() -> list[str]:
    """Return the names of the threads of sessions."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("onnxplace c")]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(endless: str, states: str, seconds: str, seed: str) -> None:
    """Soak for so many seconds; interrupts from outside may come at any time once `ready` is printed."""
    faulthandler.enable()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    soak = Soak(endless, states, int(seed))
    soak.run()  # an interrupt in the middle of importing ONNX Runtime would leave it half imported, for good
    ends = time.monotonic() + float(seconds)
    print("ready", flush=True)
    while True:
        try:
            soak.go_on(ends)
            break
        except KeyboardInterrupt:  # from outside, between two actions
            soak.counts["interrupted"] += 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    after = soak.leftovers()
    faulthandler.cancel_dump_traceback_later()
    session = onnxplace.InferenceSession(soak.endless)  # the interpreter ends with runs under way
    under_way: list[Future[Any]] = [session.submit(feeds(20_000)) for _ in range(soak.random.randrange(4))]
    print(
        json.dumps(
            {"counts": soak.counts, "told": soak.told, "before": soak.before, "after": after, "last": len(under_way)}
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
