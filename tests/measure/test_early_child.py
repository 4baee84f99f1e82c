"""The child that compares another size starts beside the search for a placement."""

import errno
import subprocess

import numpy as np
import pytest
from onnx import parser

import onnxplace
from onnxplace.driver import compile as compiling
from onnxplace.machine.isolated_sessions import DeviceProcess
from onnxplace.measure import size_comparison, trial

pytestmark = [pytest.mark.usefixtures("no_gpus"), pytest.mark.child_comparisons]

MODEL = """<ir_version: 10, opset_import: ["": 21]>
g (float[rows, 8] x) => (float[rows, 8] y) <float[8, 8] w = {%s}> { a = MatMul(x, w)  y = Relu(a) }"""


def make_model(rows: str = "rows"):
    return parser.parse_model((MODEL % ", ".join(["0.5"] * 64)).replace("rows", rows))


@pytest.fixture
def starts(monkeypatch, tmp_path):
    """List the processes that start; work in a temporary folder."""
    monkeypatch.chdir(tmp_path)
    processes, actual = [], DeviceProcess.start

    def start(process):
        processes.append(process)
        actual(process)

    monkeypatch.setattr(DeviceProcess, "start", start)
    return processes


def compile_model(model, **options):
    return onnxplace.compile(model, "b", devices="cpu:0,cpu:1", shape={"rows": 4}, cache=False, **options)


def test_one_child_starts_before_the_search_and_compares(starts, monkeypatch):
    begun, compared = [], []
    decide, call = compiling.decide_or_recompute, DeviceProcess.call
    monkeypatch.setattr(compiling, "decide_or_recompute", lambda *args: begun.append(len(starts)) or decide(*args))
    monkeypatch.setattr(DeviceProcess, "call", lambda self, *args: compared.append(self) or call(self, *args))
    bundle = compile_model(make_model())
    assert begun == [1]
    assert len(starts) == 1
    assert set(compared) == set(starts)
    assert starts[0].ended.is_set()
    assert starts[0].describe_end()  # it is no longer there
    x = np.ones((5, 8), np.float32)
    np.testing.assert_allclose(onnxplace.InferenceSession(bundle.path).run(None, {"x": x})[0], 4 * x)


def test_no_child_starts_where_nothing_is_compared(starts):
    onnxplace.compile(make_model("4"), "fixed", devices="cpu:0,cpu:1", cache=False)
    compile_model(make_model(), trial=False, save_costs="costs.csv")
    compile_model(make_model(), costs="costs.csv", force=True)  # costs that are given are not tried
    assert not starts


def test_the_child_has_started_before_anything_is_timed(starts, monkeypatch):
    answered, timed, call, take_turns = [], [], DeviceProcess.call, trial._take_turns

    def answer(process, *args):
        result = call(process, *args)
        answered.append(process)
        return result

    monkeypatch.setattr(DeviceProcess, "call", answer)
    monkeypatch.setattr(trial, "_take_turns", lambda *args: timed.append(answered[:]) or take_turns(*args))
    compile_model(make_model())
    assert timed == [starts]


def test_a_child_that_cannot_start_early_starts_where_it_is_needed(starts, monkeypatch):
    failures, popen = [], subprocess.Popen

    def fail_once(*args, **kwargs):
        if not failures:
            failures.append(args)
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")
        return popen(*args, **kwargs)

    monkeypatch.setattr(subprocess, "Popen", fail_once)
    compile_model(make_model())
    assert failures
    assert len(starts) == 2
    assert all(process.ended.is_set() for process in starts)


def test_a_child_that_died_early_is_started_again(starts, monkeypatch):
    decide = compiling.decide_or_recompute

    def kill_first(*args):
        starts[0]._child.kill()
        return decide(*args)

    monkeypatch.setattr(compiling, "decide_or_recompute", kill_first)
    compile_model(make_model())
    assert len(starts) == 2


def test_the_child_ends_with_a_search_that_fails(starts, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(compiling, "decide_or_recompute", fail)
    with pytest.raises(KeyboardInterrupt):
        compile_model(make_model())
    assert len(starts) == 1
    assert starts[0].ended.is_set()
    assert starts[0].describe_end()
    assert size_comparison._early.get() is None
