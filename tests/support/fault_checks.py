"""Helpers of the tests of failures at run time."""

import ctypes
import os
import signal
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import onnxplace
from tests.support.endless import expected, feeds

ROOT = Path(__file__).parents[2]


# Far more than any test takes, also on a slow machine that is busy with others: what is still running then hangs.
HUNG_SECONDS = 120


def assert_expected(outputs, rounds):
    for output, reference in zip(outputs, expected(rounds), strict=True):
        np.testing.assert_array_equal(output, reference)


def run_at_once(session, *rounds):
    """Run an endless bundle for several numbers of rounds, all in flight at once."""
    futures = [session.submit(feeds(number)) for number in rounds]
    for number, future in zip(rounds, futures, strict=True):
        outputs = future.result(HUNG_SECONDS).outputs
        assert_expected([outputs["y"], outputs["z"]], number)


def interrupt_runs(session, count):
    """Interrupt runs of an endless bundle, `count` in a row, after 1 to 599 us; yield whether each was in time."""
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        for microseconds in range(1, 600):
            interrupted = False
            try:
                signal.setitimer(signal.ITIMER_REAL, microseconds * 1e-6)
                for _ in range(count):
                    session.run(None, feeds(3))
            except KeyboardInterrupt:
                interrupted = True
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
            yield interrupted
    finally:
        signal.signal(signal.SIGALRM, before)


def wait_until(condition):
    deadline = time.monotonic() + HUNG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.005)


def list_worker_threads():
    """Return the names of threads of devices, such as `onnxplace fake:0 deliveries`, and of callbacks."""
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("onnxplace ")]
    return [name for name in names if ":" in name or name == "onnxplace callbacks"]


def raise_in(identifier, kind):
    """Make a thread raise at its next instruction of Python; return whether it still lived."""
    return ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(identifier or 0), ctypes.py_object(kind)) == 1


def assert_death_fails_all_requests(session, thread_name, device):
    """Kill a thread of a device: all requests fail with its error, and none of the session's threads is left."""
    thread = next(thread for thread in threading.enumerate() if thread.name == thread_name)
    assert raise_in(thread.ident, SystemExit)
    first = session.submit(feeds(1))  # wakes it
    with pytest.raises(onnxplace.ExecutionError, match=rf"X005.*{device}: its worker died: SystemExit"):
        first.result(HUNG_SECONDS)
    with pytest.raises(onnxplace.ExecutionError, match="open a new session"):
        session.run(None, feeds(1))
    session.close()
    assert not list_worker_threads()


def read_resident_bytes():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
