"""A script that MPI runs itself on several ranks: rank 0 has the session, the others serve it."""

import subprocess
import sys

import pytest

from onnxplace.hosts import find_launcher
from tests.support.endless import endless_bundle

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPICH is not installed here")

WAIT_SECONDS = 60.0
SCRIPT = """
import sys
import numpy as np
import onnxplace
from tests.support.endless import expected, feeds
with onnxplace.InferenceSession(sys.argv[1], runtime="mpi", timeout=60) as session:
    for rounds in range(5):
        for actual, want in zip(session.run(None, feeds(rounds)), expected(rounds)):
            np.testing.assert_array_equal(actual, want)
    futures = [session.submit(feeds(3)) for _ in range(6)]
    assert all(len(future.result(60).outputs) == 2 for future in futures)
    try:
        session.run(None, feeds(None), timeout=0.3)
    except onnxplace.RunTimeoutError as problem:
        print(problem.code)
    session.run(None, feeds(1))
print("led", flush=True)
"""


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return endless_bundle(tmp_path_factory.mktemp("endless"))


def run_job(ranks, bundle):
    launched = find_launcher().make_command({"localhost": ranks}, "", "")
    command = [*launched, sys.executable, "-m", "mpi4py", "-c", SCRIPT, str(bundle.path)]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)


def test_rank_0_runs_the_session_and_the_other_ranks_serve_it_and_end(bundle):
    job = run_job(2, bundle)
    assert job.returncode == 0, job.stderr
    assert job.stdout.split() == ["X007", "led"]


def test_a_job_of_another_size_than_the_bundle_is_refused_on_all_ranks(bundle):
    job = run_job(3, bundle)
    assert job.returncode != 0
    assert "error[K009] expected 2 ranks, one for each device of the bundle, got 3" in job.stderr
    assert "mpiexec -n 2" in job.stderr
