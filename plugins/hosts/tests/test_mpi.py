"""The runtime `mpi`: the contract of runtimes, and what happens when ranks or their driver die."""

import gc
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import onnxplace
from onnxplace.testing.runtime_contract import check_runtime
from onnxplace_hosts.mpi import Mpi
from tests.support.endless import endless_bundle, expected, feeds
from tests.support.ranks import await_gone, find_ranks, read_rank_ids

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="ranks are looked up in /proc")

# Far more than it takes, also on a busy machine: to report the end of a rank, and all else.
REPORTED_SECONDS, WAIT_SECONDS = 60.0, 300.0


def open_ranks(bundle, **options):
    return onnxplace.InferenceSession(bundle, runtime="mpi", hosts="localhost:2", timeout=WAIT_SECONDS, **options)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    return endless_bundle(tmp_path_factory.mktemp("endless"))


@pytest.fixture(scope="module")
def shared(bundle):
    """A session for all tests that leave it as it is."""
    with open_ranks(bundle) as session:
        yield session


def check_outputs(outputs, rounds):
    for actual, want in zip(outputs, expected(rounds)):
        np.testing.assert_array_equal(actual, want)


def await_start(future):
    """Wait until ranks work on an endless request."""
    time.sleep(0.3)
    assert not future.done()


def test_the_runtime_satisfies_the_contract_of_runtimes():
    check_runtime(lambda: Mpi("localhost:2", timeout=WAIT_SECONDS))


def test_the_ranks_of_these_tests_are_found(shared):
    assert set(read_rank_ids(shared)) <= set(find_ranks())


def test_a_run_that_takes_too_long_is_ended_and_names_the_device(shared):
    with pytest.raises(onnxplace.RunTimeoutError, match=r"cpu:0, cpu:1 has not finished"):
        shared.run(None, feeds(None), timeout=0.3)
    check_outputs(shared.run(None, feeds(3)), 3)


def test_a_cancelled_request_ends_on_its_ranks(shared):
    future = shared.submit(feeds(None))
    await_start(future)
    shared._session.cancel(future)
    assert isinstance(future.exception(WAIT_SECONDS), onnxplace.ExecutionError)
    check_outputs(shared.run(None, feeds(2)), 2)


def test_idle_ranks_sleep(shared):
    shared.run(None, feeds(3))
    before = [read_processor_seconds(item) for item in read_rank_ids(shared)]
    time.sleep(0.5)
    used = [read_processor_seconds(item) - first for item, first in zip(read_rank_ids(shared), before)]
    assert max(used) < 0.1  # a rank that waits inside MPI uses 0.5


def read_processor_seconds(process_id):
    with open(f"/proc/{process_id}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def test_a_session_says_how_long_the_threads_of_its_ranks_waited_for_a_core(shared):
    before, after = (shared._session.read_remote_delays() for _ in range(2))
    assert {f"cpu:{rank} {process_id}" for rank, process_id in enumerate(read_rank_ids(shared))} <= before.keys()
    assert all(0 <= before[thread] <= after[thread] for thread in before)


@pytest.mark.parametrize(("rank", "device"), [(0, "cpu:0"), (1, "cpu:1")])
def test_a_killed_rank_is_reported_by_its_device_and_host_and_nothing_is_left(bundle, rank, device):
    with open_ranks(bundle) as session:
        ranks = read_rank_ids(session)
        maps = "".join(Path(f"/proc/{item}/maps").read_text() for item in ranks)
        memory = set(re.findall(r"/dev/shm/\S+$", maps, re.MULTILINE))
        assert memory
        futures = [session.submit(feeds(None)) for _ in range(3)]
        await_start(futures[0])
        os.kill(ranks[rank], signal.SIGKILL)
        for future in futures:
            problem = future.exception(REPORTED_SECONDS)
            assert isinstance(problem, onnxplace.ExecutionError)
            assert str(problem).startswith(f"error[K011] {device}: its process on host localhost died (SIGKILL)")
        with pytest.raises(onnxplace.ExecutionError, match="K011"):
            session.run(None, feeds(1))
        with pytest.raises(onnxplace.ExecutionError, match="K011"):
            session._session.read_remote_delays()
    assert await_gone(ranks) == []
    assert [path for path in memory if Path(path).exists()] == []


@pytest.mark.slow
def test_a_stopped_rank_is_reported_and_all_ranks_end(bundle):
    with open_ranks(bundle) as session:
        ranks = read_rank_ids(session)
        future = session.submit(feeds(None))
        await_start(future)
        os.kill(ranks[1], signal.SIGSTOP)
        problem = future.exception(REPORTED_SECONDS)
        assert str(problem).startswith("error[K011] cpu:1: its process on host localhost has not answered for")
    assert await_gone(ranks) == []


@pytest.mark.slow
def test_a_stopped_rank_0_is_reported_and_all_ranks_end(bundle):
    with open_ranks(bundle) as session:
        ranks = read_rank_ids(session)
        os.kill(ranks[0], signal.SIGSTOP)
        with pytest.raises(onnxplace.ExecutionError, match=r"K011.* cpu:0: its process .* has not answered"):
            session.run(None, feeds(1))
    assert await_gone(ranks) == []


def test_closing_ends_an_endless_request_and_all_ranks(bundle):
    session = open_ranks(bundle)
    ranks = read_rank_ids(session)
    future = session.submit(feeds(None))
    await_start(future)
    session.close(timeout=0)
    assert isinstance(future.exception(0), onnxplace.ExecutionError)
    assert await_gone(ranks) == []


def test_a_forgotten_session_ends_its_ranks_and_threads(bundle):
    before = set(threading.enumerate())
    session = open_ranks(bundle)
    ranks = read_rank_ids(session)
    threads = set(threading.enumerate()) - before
    assert len(threads) == 1
    del session
    gc.collect()
    for thread in threads:
        thread.join(WAIT_SECONDS)
    assert not any(thread.is_alive() for thread in threads)
    assert await_gone(ranks) == []


DRIVER = """
import sys, onnxplace
from tests.support.endless import feeds
from tests.support.ranks import read_rank_ids
session = onnxplace.InferenceSession(sys.argv[1], runtime="mpi", hosts="localhost:2", timeout=300)
print(*read_rank_ids(session), flush=True)
session.run(None, feeds(None))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.slow
def test_no_rank_outlives_a_driver_that_is_killed_or_interrupted(bundle, number):
    command = [sys.executable, "-c", DRIVER, str(bundle.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as driver:
        ranks = [int(item) for item in driver.stdout.readline().split()]
        assert len(ranks) == 2
        time.sleep(0.3)
        driver.send_signal(number)
        driver.communicate(timeout=WAIT_SECONDS)
    assert driver.returncode == -number
    assert await_gone(ranks) == []


def test_a_bundle_that_a_rank_refuses_leaves_no_rank(bundle, tmp_path):
    before = find_ranks()
    copy = shutil.copytree(bundle.path, tmp_path / "copy")
    damaged = onnxplace.load(copy)
    segment = next(item for item in damaged.manifest.segments if item.device == "cpu:1")
    path = copy / segment.file
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    with pytest.raises(onnxplace.BundleError) as caught:
        open_ranks(damaged)
    assert segment.file in str(caught.value)
    assert await_gone(set(find_ranks()) - set(before)) == []


def test_ranks_that_take_too_long_to_start_are_ended(bundle):
    before = find_ranks()
    with pytest.raises(onnxplace.ExecutionError, match=r"K012.*within 0.1 s"):
        onnxplace.InferenceSession(bundle, runtime="mpi", hosts="localhost:2", timeout=0.1)
    assert await_gone(set(find_ranks()) - set(before)) == []


def run_until_interrupted(session):
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    session.run(None, feeds(None))


def test_an_interrupt_ends_its_run_and_the_next_one_succeeds(shared):
    with pytest.raises(KeyboardInterrupt):
        run_until_interrupted(shared)
    check_outputs(shared.run(None, feeds(3)), 3)


FORKING_DRIVER = """
import os, sys, time, onnxplace
from tests.support.ranks import read_rank_ids
session = onnxplace.InferenceSession(sys.argv[1], runtime="mpi", hosts="localhost:2", timeout=300)
child = os.fork()
if child == 0:
    time.sleep(600)
    os._exit(0)
print(child, *read_rank_ids(session), flush=True)
time.sleep(600)
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.slow
def test_a_forked_child_does_not_keep_ranks_alive_after_their_driver(bundle):
    command = [sys.executable, "-c", FORKING_DRIVER, str(bundle.path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as driver:
        child, *ranks = [int(item) for item in driver.stdout.readline().split()]
        try:
            driver.kill()
            driver.wait(WAIT_SECONDS)
            assert len(ranks) == 2
            assert await_gone(ranks) == []
        finally:
            os.kill(child, signal.SIGKILL)
