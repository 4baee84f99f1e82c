"""One process of benchmarks/soak.py: random use and misuse of sessions.

python benchmarks/_soak_sessions.py ENDLESS.bundle STATES.bundle SECONDS SEED prints one JSON object: the number of
actions of each kind, and the open threads, files and memory at the end. A wrong result ends it with a traceback. A hang
of half a minute ends it with the stacks of all threads.
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
from onnxplace.utils.threads import start_thread
from tests.support.endless import expected, feeds

HUNG_SECONDS = 30
MAX_SESSIONS = 3


def require(condition: object, message: str) -> None:
    """Raise AssertionError, even under `python -O`."""
    if not condition:
        raise AssertionError(message)


def require_right(outputs: Any, rounds: int) -> None:
    """Raise AssertionError unless the outputs of the endless model are right."""
    for output, values in zip(outputs, expected(rounds), strict=True):
        np.testing.assert_array_equal(output, values)


class Soak:
    """Open sessions, and the actions on them."""

    def __init__(self, endless: str, states: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.endless, self.states = onnxplace.load(endless), onnxplace.load(states)
        self.sessions: list[onnxplace.InferenceSession] = []
        self.busy: list[onnxplace.InferenceSession] = []
        """Sessions with runs that never end, if an interrupt came before they were closed."""
        self.counts: collections.Counter[str] = collections.Counter()
        self.before: dict[str, int] | None = None
        """Open threads, files and memory after the first actions."""
        self.callback_errors = 0
        """Number of errors of callbacks that reached `threading.excepthook`."""
        threading.excepthook = self.count_callback_error

    def count_callback_error(self, arguments: Any) -> None:
        self.callback_errors += 1

    def draw_rounds(self) -> int:
        return self.random.choice([0, 1, 2, 3, 50, 5000])

    def choose_session(self) -> onnxplace.InferenceSession:
        """Return one of the open sessions, or a new one."""
        if not self.sessions or (len(self.sessions) < MAX_SESSIONS and self.random.random() < 0.1):
            self.sessions.append(onnxplace.InferenceSession(self.endless, trace=self.random.random() < 0.2))
        return self.random.choice(self.sessions)

    def drop(self, session: onnxplace.InferenceSession) -> None:
        self.sessions = [other for other in self.sessions if other is not session]

    # -- actions --------------------------------------------------------------------------------------------------

    def run(self) -> None:
        rounds = self.draw_rounds()
        timeout = self.random.choice([None, None, HUNG_SECONDS])
        require_right(self.choose_session().run(None, feeds(rounds), timeout=timeout), rounds)

    def run_out_of_time(self) -> None:
        session = self.choose_session()
        try:
            session.run(None, feeds(None), timeout=self.random.uniform(0.001, 0.05))
        except onnxplace.RunTimeoutError:
            pass
        else:
            raise AssertionError("an endless run ended")
        require_right(session.run(None, feeds(3), timeout=HUNG_SECONDS), 3)

    def submit(self) -> None:
        session, all_rounds = self.choose_session(), [self.draw_rounds() for _ in range(self.random.randrange(1, 13))]
        futures = [session.submit(feeds(rounds)) for rounds in all_rounds]
        for future, rounds in zip(futures, all_rounds):
            outputs = future.result(HUNG_SECONDS).outputs
            require_right([outputs[name] for name in "yz"], rounds)

    def raise_in_callbacks(self) -> None:
        """Let callbacks raise; all of them must be called."""
        session, called = self.choose_session(), queue.SimpleQueue[None]()
        kind = self.random.choice([SystemExit, KeyboardInterrupt, ValueError])

        def fail(*_: object) -> None:
            called.put(None)
            raise kind

        count = self.random.randrange(1, 6)
        for _ in range(count):
            if self.random.random() < 0.5:
                session.run_async(None, feeds(self.draw_rounds()), fail)
            else:
                session.submit(feeds(self.draw_rounds())).add_done_callback(fail)
        for _ in range(count):
            called.get(timeout=HUNG_SECONDS)

    def run_in_threads(self) -> None:
        """Run from several threads at once: plain ones, since an interrupt breaks those of `concurrent.futures`."""
        session, rounds, problems = self.choose_session(), self.draw_rounds(), queue.SimpleQueue[BaseException | None]()

        def run() -> None:
            try:
                for _ in range(3):
                    require_right(session.run(None, feeds(rounds)), rounds)
                problems.put(None)
            except BaseException as problem:  # noqa: BLE001 - raised in the main thread
                problems.put(problem)

        for _ in range(4):
            start_thread(threading.Thread(target=run, daemon=True))
        for _ in range(4):
            if (problem := problems.get(timeout=HUNG_SECONDS)) is not None:
                raise problem

    def close(self) -> None:
        session = self.choose_session()
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
        """Drop a session with runs in flight, which must end all the same."""
        session, rounds = onnxplace.InferenceSession(self.endless), self.draw_rounds()
        future = session.submit(feeds(rounds))
        del session
        outputs = future.result(HUNG_SECONDS).outputs
        require_right([outputs[name] for name in "yz"], rounds)

    def kill_worker(self) -> None:
        """Kill a worker: runs must raise, and not hang."""
        session = onnxplace.InferenceSession(self.endless)
        worker = self.random.choice(session._session.engine._workers)  # type: ignore[attr-defined]
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(worker.ident), ctypes.py_object(SystemExit))
        try:
            for _ in range(3):
                session.run(None, feeds(3), timeout=HUNG_SECONDS)
            raise AssertionError("a killed worker continues")
        except ExecutionError as problem:
            require(problem.code in ("X001", "X005"), str(problem))
        finally:
            session.close(timeout=1)

    def fork(self) -> None:
        session = self.choose_session()
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
                session.close()  # frees nothing: threads that do not exist here may hold locks of ONNX Runtime
            os._exit(code)
        self.wait_for(child)

    def wait_for(self, child: int) -> None:
        """Wait for a forked child despite interrupts."""
        while True:
            try:
                _, status = os.waitpid(child, 0)
                break
            except KeyboardInterrupt:
                self.counts["interrupted"] += 1
            except ChildProcessError:  # an interrupt came after the end of the child
                return
        require(status == 0, f"a forked child ended with {status}")

    def copy(self) -> None:
        try:
            pickle.dumps(self.choose_session())
        except onnxplace.UsageError as problem:
            require(problem.code == "X006", str(problem))

    def fail(self) -> None:
        """Run with wrong inputs; the next run must be right."""
        session = self.choose_session()
        for bad in ({}, {"limit": np.array(1), "x": np.ones(5, np.float32)}, {"limit": "x", "x": None}):
            try:
                session.run(None, bad)
            except OnnxplaceError as problem:
                require(problem.exit_code == 2, str(problem))
        require_right(session.run(None, feeds(1), timeout=HUNG_SECONDS), 1)

    def carry_states(self) -> None:
        """Count up in a carried state; a reset must forget it."""
        x = np.ones(4, np.float32)
        with onnxplace.InferenceSession(self.states) as session:
            for begin in range(3):
                total = float(self.random.randrange(100))
                outputs: Any = session.run(None, {"x": x, "total": np.full(4, total, np.float32)})
                for step in range(self.random.randrange(1, 6)):
                    outputs = session.run(None, {"x": x})
                    expected_total = total + 2 + step
                    require(
                        np.all(outputs[0] == expected_total), f"state {begin}: {outputs[0]} instead of {expected_total}"
                    )
                session.reset_state()
            try:
                session.run(None, {"x": x})
            except onnxplace.FeedError as problem:
                require(problem.code == "S007", str(problem))
            else:
                raise AssertionError("a state exists after its reset")

    # -- main loop ------------------------------------------------------------------------------------------------

    def act(self) -> None:
        """Perform a random action, sometimes with an interrupt at a random moment."""
        actions: list[tuple[Callable[[], None], int]] = [
            *((self.run, 30), (self.submit, 15), (self.run_out_of_time, 6), (self.raise_in_callbacks, 8)),
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

    def act_until(self, ends: float) -> None:
        """Act until the end, at least until the first measurement of leftovers."""
        while time.monotonic() < ends or self.before is None:
            faulthandler.dump_traceback_later(HUNG_SECONDS, exit=True)
            self.act()
            if self.before is None and sum(self.counts.values()) >= 100:
                self.before = self.count_leftovers()

    def count_leftovers(self) -> dict[str, int]:
        """Close all sessions; return open threads, files and memory."""
        for session in (*self.sessions, *self.busy):
            session.close(timeout=1)
        self.sessions.clear()
        self.busy.clear()
        gc.collect()
        ends = time.monotonic() + 10
        while (threads := list_workers()) and time.monotonic() < ends:
            time.sleep(0.01)
        return {
            "threads": len(threads),
            "files": len(os.listdir("/proc/self/fd")),
            "resident_bytes": read_resident_bytes(),
        }


def list_workers() -> list[str]:
    """Return the names of the threads of sessions."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("onnxplace c")]


def read_resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")


def main(endless: str, states: str, seconds: str, seed: str) -> None:
    """Soak for a time; interrupts may come once `ready` is printed."""
    faulthandler.enable()
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    soak = Soak(endless, states, int(seed))
    soak.run()  # an interrupt while ONNX Runtime is imported would break it for good
    ends = time.monotonic() + float(seconds)
    print("ready", flush=True)
    while True:
        try:
            soak.act_until(ends)
            break
        except KeyboardInterrupt:  # from outside, between two actions
            soak.counts["interrupted"] += 1
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    after = soak.count_leftovers()
    faulthandler.cancel_dump_traceback_later()
    session = onnxplace.InferenceSession(soak.endless)  # the interpreter ends with runs in flight
    futures: list[Future[Any]] = [session.submit(feeds(20_000)) for _ in range(soak.random.randrange(4))]
    print(
        json.dumps(
            {
                "counts": soak.counts,
                "callback_errors": soak.callback_errors,
                "before": soak.before,
                "after": after,
                "last": len(futures),
            }
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
