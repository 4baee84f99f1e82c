"""The runtime `mpi` with a host that a remote shell reaches; the shell is a program that stays on this machine."""

import os
import signal
import sys

import numpy as np
import pytest
from onnx import parser

import onnxplace
from onnxplace.runtimes.mpi import Mpi
from tests.support.ranks import await_gone
from tests.support.two_hosts import compile_alternating

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPICH is not installed here")

MODEL = """
<ir_version: 8, opset_import: ["" : 17]>
chain (float[4] x) => (float[4] y) { a = Neg(x) y = Relu(a) }
"""
WAIT_SECONDS = 60.0
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
        processes = session.engine._cluster._processes
        os.kill(processes[1], signal.SIGKILL)
        with pytest.raises(onnxplace.ExecutionError, match=r"K011.* node2/cpu:0: its process on host node2 died"):
            run_for_ever(session)
    assert await_gone(processes.values()) == []
