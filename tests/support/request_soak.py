"""Many requests of random sizes from several threads, over sessions and conversations, with all answers checked."""

from __future__ import annotations

import gc
import os
import random
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import onnxplace
from tests.support.fault_checks import HUNG_SECONDS, list_worker_threads
from tests.support.fault_injection import require, require_equal
from tests.support.small_programs import SmallModel, Talker, make_ping_pong

# Elements of a value; large ones take several pages.
MAX_SIZE = 1 << 15
MAX_IN_FLIGHT = 8


@dataclass
class SoakReport:
    """What happened to the requests."""

    requests: int
    seconds: float
    growth_bytes: int
    """Resident memory at the end, less that after a tenth of the requests."""
    counts: Counter[tuple[str, int]] = field(default_factory=Counter)
    """Requests by model and number in flight."""


def soak_requests(folder: Path, requests: int, threads: int = 4, seed: int = 0) -> SoakReport:
    """Run requests with 1 to 8 in flight from each thread; raises AssertionError for any wrong answer or leak."""
    models = {"stateless": make_ping_pong(3, states=0), "states": make_ping_pong(2)}
    sessions, counts, marks = {}, Counter[tuple[str, int]](), list[int]()
    for name, model in models.items():
        (folder / name).mkdir()
        sessions[name] = onnxplace.InferenceSession(model.compile(folder / name))
    began, problems = time.perf_counter(), list[BaseException]()
    lock = threading.Lock()

    def work(thread: int) -> None:
        draw = random.Random(f"{seed} {thread}")
        try:
            while not problems:
                with lock:
                    done = counts.total()
                    if done >= requests:
                        return
                    if done >= requests // 10 and not marks:
                        marks.append(read_resident_bytes())
                    in_flight = min(draw.randint(1, MAX_IN_FLIGHT), requests - done)
                    name = draw.choice(list(models))
                    counts[name, in_flight] += in_flight
                ask(draw, sessions[name], models[name], in_flight)
        except BaseException as problem:  # noqa: BLE001 - raised below
            problems.append(problem)

    workers = [threading.Thread(target=work, args=(index,), daemon=True) for index in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    for problem in problems:
        raise AssertionError(f"seed {seed}: {type(problem).__name__}: {problem}") from problem
    for session in sessions.values():
        session.close(timeout=HUNG_SECONDS)
    seconds = time.perf_counter() - began
    gc.collect()
    left = list_worker_threads()
    require(not left, f"threads are left: {left}")
    return SoakReport(counts.total(), seconds, read_resident_bytes() - marks[0], counts)


def ask(draw: random.Random, session: onnxplace.InferenceSession, model: SmallModel, in_flight: int) -> None:
    """Ask some requests of random sizes at once: independent ones, or one conversation."""
    size, talks = draw.randint(1, MAX_SIZE), draw.random() < 0.5
    talker = Talker(session.conversation() if talks else session, model)
    pending = []
    for _ in range(in_flight):
        number = draw.randrange(1000)
        if not talks:  # with states that are fed, requests of other threads do not matter
            size, talker.states = draw.randint(1, MAX_SIZE), {}
        feeds, expected = talker.prepare(number, size)
        pending.append((talker.user.submit(feeds, model.outputs), expected))
        talker.keep(expected)
    for future, expected in pending:
        require_equal(future.result(HUNG_SECONDS).outputs, expected)
    if talks and draw.random() < 0.5:  # others are dropped
        talker.user.close()


def read_resident_bytes() -> int:
    """Return the memory that this process uses."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
