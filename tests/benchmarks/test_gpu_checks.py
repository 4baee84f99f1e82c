"""The checks of GPUs say that there is none, and work on devices of a fake driver."""

from functools import partial

import pytest

import onnxplace
from benchmarks import gpu_checks
from onnxplace.target.cuda import Cuda
from tests.support.fake_streams import FakeDriver, register_fake_kind, use_fake_driver


@pytest.fixture
def fake_devices():
    with register_fake_kind(), use_fake_driver(FakeDriver(1)):
        yield ["fake:0/0", "fake:0/1"]


def test_without_a_gpu_the_exit_code_is_2_and_nothing_is_printed_as_a_result(monkeypatch, capsys):
    monkeypatch.setattr(Cuda, "list_hardware", lambda self: ())
    assert gpu_checks.main([]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "no CUDA device here" in printed.err


@pytest.mark.slow
def test_a_model_that_is_too_large_for_one_device_runs_on_two(fake_devices, capsys):
    assert gpu_checks.run_large_model(fake_devices, 8 << 20)
    printed = capsys.readouterr().out
    assert "| fake:0/0 | 8 MiB | 10 MiB | refused, as expected: P0" in printed
    assert "| fake:0/0,fake:0/1 | 8 MiB | 10 MiB | equal to the CPU |" in printed


def test_copies_are_compared_with_a_plain_loop(fake_devices, monkeypatch, capsys):
    monkeypatch.setattr(gpu_checks, "COPY_BYTES", (4096, 8192))
    gpu_checks.measure_copies(["fake:0", "fake:1"])
    rows = [
        line.split(" | ")[:3] for line in capsys.readouterr().out.splitlines() if line.startswith(("| host", "| fake"))
    ]
    places = (("host", "fake:0"), ("fake:0", "host"), ("fake:0", "fake:1"))
    assert rows == [[f"| {source}", target, str(size)] for size in (4096, 8192) for source, target in places]


def test_examples_are_verified_and_cuts_are_timed(fake_devices, monkeypatch, capsys):
    # Costs are measured in a process of their own, which does not have these devices.
    estimated = partial(onnxplace.compile, pipeline="optimize,profile{estimate=true},m-etf,split,emit")
    monkeypatch.setattr(gpu_checks.onnxplace, "compile", estimated)
    equal, steps = gpu_checks.verify_examples(["decoder"], [fake_devices], 1 << 30)
    assert equal
    gpu_checks.print_steps(steps)
    monkeypatch.undo()
    monkeypatch.setattr(gpu_checks, "NODES", 6)
    gpu_checks.measure_cuts([fake_devices], 1 << 30)
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "fake:0/0,fake:0/1" in line]
    assert len(rows) == 4
    assert rows[0][-1] == "True |"
    assert float(rows[1][3]) > 0
    assert float(rows[2][2]) > 0
