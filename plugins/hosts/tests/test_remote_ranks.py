"""The runtime `mpi` with a host that a remote shell reaches; the shell is a program that stays on this machine."""

import os
import signal
import socket
import subprocess
import sys

import numpy as np
import pytest
from onnx import parser

import onnxplace
from onnxplace_hosts.mpi import Mpi
from onnxplace_hosts.ranks import bridge
from tests.support.ranks import await_gone
from tests.support.two_hosts import compile_alternating

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPICH is not installed here")

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
chain (float[4] x) => (float[4] y) { a = Neg(x) y = Relu(a) }
"""
WAIT_SECONDS = 300.0
X = np.array([-2, -1, 0, 1], np.float32)


@pytest.fixture
def bundle(tmp_path, monkeypatch):
    monkeypatch.setenv("ONNXPLACE_CACHE_DIR", str(tmp_path / "cache"))
    return compile_alternating(parser.parse_model(MODEL), tmp_path, "node2/cpu:0", "localhost/cpu:0")


def run_for_ever(session):
    while True:
        session.submit({"x": X}).result(WAIT_SECONDS)


def test_a_host_is_reached_by_the_remote_shell_and_named_when_its_process_dies(bundle, local_shell):
    session = Mpi(remote_shell=local_shell, timeout=WAIT_SECONDS).open(bundle, trace=True)
    with session:
        result = session.submit({"x": X}).result(WAIT_SECONDS)
        np.testing.assert_array_equal(result.outputs["y"], np.maximum(-X, 0))
        assert {event.device for event in result.events} == {"node2/cpu:0", "localhost/cpu:0"}
        processes = session.engine.worker._cluster._processes
        os.kill(processes[1], signal.SIGKILL)
        with pytest.raises(onnxplace.ExecutionError, match=r"K011.* node2/cpu:0: its process on host node2 died"):
            run_for_ever(session)
    assert await_gone(processes.values()) == []


def test_ranks_that_are_all_elsewhere_are_started_there_and_named_when_one_dies(tmp_path, write_shell):
    bundle = compile_alternating(parser.parse_model(MODEL), tmp_path, "node2/cpu:0", "node3/cpu:0")
    shell = write_shell('echo welcome\nexec sh -c "$*"')  # as shells do that print when they start
    with onnxplace.InferenceSession(
        bundle, runtime="mpi", remote_shell=shell, timeout=WAIT_SECONDS, trace=True
    ) as session:
        for _ in range(3):
            np.testing.assert_array_equal(session.run(None, {"x": X})[0], np.maximum(-X, 0))
        events = [event for timeline in session.list_timelines() for event in timeline.events]
        assert all(0 <= event.start_seconds <= event.finish_seconds < WAIT_SECONDS for event in events)
        processes = session._session.engine.worker._cluster._processes
        os.kill(processes[1], signal.SIGKILL)
        with pytest.raises(onnxplace.ExecutionError, match=r"K011.* host node[23] died"):
            run_for_ever(session._session)
    assert await_gone(processes.values()) == []


DRIVER = """
import sys, onnxplace
session = onnxplace.InferenceSession(sys.argv[1], runtime="mpi", remote_shell=sys.argv[2], timeout=300)
print(*session._session.engine.worker._cluster._processes.values(), flush=True)
sys.stdin.read()
"""


def test_no_rank_elsewhere_outlives_its_driver(tmp_path, local_shell):
    bundle = compile_alternating(parser.parse_model(MODEL), tmp_path, "node2/cpu:0", "node3/cpu:0")
    command = [sys.executable, "-c", DRIVER, str(bundle.path), local_shell]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as driver:
        ranks = [int(item) for item in driver.stdout.readline().split()]
        driver.kill()
    assert len(ranks) == 2
    assert await_gone(ranks) == []


def test_a_silent_driver_is_noticed_by_the_bridge(monkeypatch):
    near, far = socket.socketpair()
    rank_side, bridge_side = socket.socketpair()
    with near, far, rank_side, bridge_side:
        monkeypatch.setattr(bridge, "MAX_SILENT_SECONDS", 0.05)
        monkeypatch.setattr(bridge, "_INPUT", far.fileno())
        near.sendall(b"request")
        bridge._pass_on_input(bridge_side)
        rank_side.settimeout(WAIT_SECONDS)
        assert rank_side.recv(100) == b"request"
        assert rank_side.recv(100) == b""  # the end of all ranks
