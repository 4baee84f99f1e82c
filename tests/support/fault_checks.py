"""Helpers of the tests of failures at run time."""

import os
import threading
import time
from pathlib import Path

import numpy as np

from tests.support.endless import expected

ROOT = Path(__file__).parents[2]


# Far more than any test takes: whatever is still running then hangs.
HUNG_SECONDS = 20


def assert_expected(outputs, rounds):
    for output, reference in zip(outputs, expected(rounds), strict=True):
        np.testing.assert_array_equal(output, reference)


def wait_until(condition):
    deadline = time.monotonic() + HUNG_SECONDS
    while not condition():
        assert time.monotonic() < deadline, "it hangs"
        time.sleep(0.005)


def list_worker_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("onnxplace c")]


def read_resident_bytes():
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
