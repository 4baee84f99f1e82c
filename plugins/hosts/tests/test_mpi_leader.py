"""A script that MPI runs itself on several ranks: rank 0 has the session, the others serve it."""

import subprocess
import sys

import pytest

from onnxplace_hosts.connection import find_launcher
from tests.support.endless import endless_bundle

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPICH is not installed here")

WAIT_SECONDS = 300.0
SCRIPT = """
import sys
import numpy as np
import onnxplace
from tests.support.endless import expected, feeds
with onnxplace.InferenceSession(sys.argv[1], runtime="mpi", timeout=300) as session:
    for rounds in range(5):
        for actual, want in zip(session.run(None, feeds(rounds)), expected(rounds)):
            np.testing.assert_array_equal(actual, want)
    futures = [session.submit(feeds(3)) for _ in range(6)]
    assert all(len(future.result(300).outputs) == 2 for future in futures)
    try:
        session.run(None, feeds(None), timeout=0.3)
    except onnxplace.RunTimeoutError as problem:
        print(problem.code)
    session.run(None, feeds(1))
print("led", flush=True)
"""
# Rank 1 is on another machine, whose clock shows more.
OTHER_CLOCK = """
import sys, time
from mpi4py import MPI
import onnxplace
from onnxplace_hosts.ranks import rank_loop
from tests.support.endless import feeds
if MPI.COMM_WORLD.rank:
    read = time.perf_counter
    time.perf_counter = lambda: read() + 1000.0
    rank_loop.find_clock = lambda: "another"
with onnxplace.InferenceSession(sys.argv[1], runtime="mpi", timeout=300, trace=True) as session:
    result = session.submit(feeds(2)).result(300)
assert {event.device for event in result.events} == {"cpu:0", "cpu:1"}
assert all(0 <= event.start_seconds <= event.finish_seconds <= result.seconds + 0.1 for event in result.events)
print("one clock", flush=True)
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return endless_bundle(tmp_path_factory.mktemp("endless"))


def run_job(ranks, bundle, script=SCRIPT):
    launched = find_launcher().make_command({"localhost": ranks}, "", "")
    command = [*launched, sys.executable, "-m", "mpi4py", "-c", script, str(bundle.path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)


def test_rank_0_runs_the_session_and_the_other_ranks_serve_it_and_end(bundle):
    job = run_job(2, bundle)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["X007", "led"]


@pytest.mark.slow
def test_events_of_ranks_on_other_machines_are_on_the_clock_of_the_script(bundle):
    job = run_job(2, bundle, OTHER_CLOCK)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["one", "clock"]


@pytest.mark.slow
def test_a_job_of_another_size_than_the_bundle_is_refused_on_all_ranks(bundle):
    job = run_job(3, bundle)
    assert job.returncode != 0
    assert "error[K001] expected 2 ranks, one for each device of the bundle, got 3" in job.stderr
    assert "mpiexec -n 2" in job.stderr
