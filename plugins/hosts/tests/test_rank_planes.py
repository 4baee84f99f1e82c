"""Devices with streams as ranks of MPI: values pass through page-locked memory, or MPI reads them on the device."""

import ctypes
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from onnx import parser

import onnxplace
from onnxplace.runtimes.execution import engine
from onnxplace_hosts import mpi
from onnxplace_hosts.connection import Connection
from onnxplace_hosts.ranks import data_planes
from tests.streams.conftest import driver, fake_kind  # noqa: F401 - fixtures
from tests.support.two_hosts import compile_alternating

pytest.importorskip("mpi4py")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="MPICH is not installed here")

WAIT_SECONDS = 300.0
ROOT = Path(__file__).parents[3]
# Values of 160 kB, of 12 bytes, empty ones, texts, and a carried state; each node is on another device than the last.
MODEL = """
<ir_version: 8, opset_import: ["": 17]>
mixed (float[200, 200] x, float[3] small, float[0, 3] empty, string[2] text, float[200, 200] total)
    => (float[200, 200] y, float[3] s, float[0, 3] e, string[2] t, float[200, 200] total_next)
{
    total_next = Add(total, x)
    a = Neg(total_next)
    b = MatMul(a, x)
    y = Sub(b, a)
    s0 = Neg(small)
    s = Abs(s0)
    e0 = Neg(empty)
    e = Neg(e0)
    t0 = Identity(text)
    t = Identity(t0)
}
"""
# A rank whose devices have a driver of its own, which has to be clean at the end.
RANK = """
import json, pathlib
from mpi4py import MPI
from onnxplace_hosts.ranks import data_planes
from tests.support.fake_streams import FakeDriver, register_fake_kind, use_fake_driver
from {module} import main
if {reads}:
    data_planes.reads_device_memory = lambda kind: kind == "fake"
rank = MPI.COMM_WORLD.rank
with register_fake_kind(), use_fake_driver(FakeDriver(rank + {reads})) as driver:
    main()
pathlib.Path("{folder}", str(rank)).write_text(json.dumps(driver.counts))
"""


def start_fake_ranks(monkeypatch, folder, reads):
    """Start ranks with fake devices, whose memory MPI reads or not."""

    class Fake(Connection):
        def make_ranks_command(self, counts, module, *arguments):
            *command, _, _ = super().make_ranks_command(counts, module)
            code = RANK.format(module=module, reads=int(reads), folder=folder)
            return [*command, "-c", code, *arguments]

    monkeypatch.setenv("PYTHONPATH", f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.setattr(mpi, "Connection", Fake)


def make_feeds(seed):
    random = np.random.default_rng(seed)
    return {
        "x": random.standard_normal((200, 200), np.float32),
        "small": np.array([seed, -1, 2], np.float32),
        "empty": np.zeros((0, 3), np.float32),
        "text": np.array(["ä", str(seed)], object),
    }


def run_requests(bundle):
    """Run requests that pass states on, and compare their outputs."""
    total = np.zeros((200, 200), np.float32)
    with onnxplace.InferenceSession(bundle, runtime="mpi", hosts="localhost:3", timeout=WAIT_SECONDS) as session:
        for seed in range(4):
            feeds = make_feeds(seed)
            start = {} if seed else {"total": total}
            total = total + feeds["x"]
            outputs = session.run(None, {**feeds, **start})
            np.testing.assert_allclose(outputs[0], total - total @ feeds["x"], rtol=1e-4, atol=1e-3)
            for actual, expected in zip(outputs[1:], (np.abs(feeds["small"]), feeds["empty"], feeds["text"])):
                np.testing.assert_array_equal(actual, expected)
        np.testing.assert_array_equal(session.read_states()["total"], total)


def test_values_of_devices_with_streams_cross_between_ranks_through_the_host_or_read_by_mpi(tmp_path, monkeypatch):
    devices = ("fake:0", "cpu:0", "fake:1")
    bundle = compile_alternating(parser.parse_model(MODEL), tmp_path, *devices, state=("total_next=total",))
    monkeypatch.setattr(engine, "END_GRACE_SECONDS", WAIT_SECONDS)  # for ranks that end on a busy machine
    copies = []
    for reads in (False, True):
        start_fake_ranks(monkeypatch, tmp_path, reads)
        run_requests(bundle)
        counts = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(3)]  # written after a clean end
        assert sum(not item for item in counts) == 1  # the CPU has no driver
        copies.append(sum(item.get("copy_to_host", 0) for item in counts))
        assert all(item["copy_to_device"] for item in counts if item)
    assert copies[1] < copies[0]


def test_mpi_is_asked_whether_it_reads_the_memory_of_gpus():
    from mpi4py import MPI

    library = ctypes.CDLL(MPI.__file__)
    assert library.MPIX_Query_cuda_support() == 0  # the wheel of MPICH is built without CUDA
    assert data_planes.reads_device_memory("cuda") is False
    assert data_planes.reads_device_memory("cpu") is False


def answer_for_one_kind(kind, answer):
    answer._obj.value = int(kind == 0)
    return 0


@pytest.mark.parametrize(
    ("functions", "expected"),
    [
        ({}, False),
        ({"MPIX_Query_cuda_support": lambda: 1}, True),
        ({"MPIX_Query_cuda_support": lambda: 0, "MPIX_GPU_query_support": answer_for_one_kind}, False),
        ({"MPIX_GPU_query_support": answer_for_one_kind}, True),
        ({"MPIX_GPU_query_support": lambda kind, answer: 1}, False),
    ],
)
def test_the_answer_of_mpi_counts_and_silence_is_no(functions, expected):
    assert data_planes.ask_for_cuda(SimpleNamespace(**functions)) is expected
