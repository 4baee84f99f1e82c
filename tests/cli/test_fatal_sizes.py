"""Sizes that the user did not give are compared in a child process, whose end is reported with the node."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser

import onnxplace
from onnxplace.errors import ExecutionError, ModelError
from onnxplace.measure.size_comparison import Compare, compare_in_child
from onnxplace.measure.step_inputs import choose_step_inputs
from tests.conftest import FAST_PIPELINE
from tests.support.commands import only_json

pytestmark = [
    pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder"),
    pytest.mark.child_comparisons,
    pytest.mark.slow,
]

GRU = """g (float[S, B, 4] x) => (float[T, 1, B, 5] y)
<int64[1] one = {1}, int64[1] two = {2}, int64[1] zero = {0}>
{
    n = Shape<start = 0, end = 1>(x)
    odd = Mod(n, two)
    even = Sub(one, odd)
    end = Mul(n, even)
    t = Slice(x, zero, end, zero)
    [step] y = GRU<hidden_size = 5>(t, w, r)
}"""
"""Without rows where S is odd: the kernel ends the process (SIGABRT)."""
ENDS = "ONNX Runtime ends the process in node 'step' (GRU): "


def write(text: str, name: str = "model.onnx") -> str:
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}')
    for weight, columns in (("w", 4), ("r", 5)):
        model.graph.initializer.append(numpy_helper.from_array(np.full((1, 15, columns), 0.1, np.float32), weight))
    onnx.save(model, name)
    return name


@contextmanager
def open_and_end(number: int) -> Iterator[tuple[Compare, None]]:
    yield lambda steps: os.kill(os.getpid(), number), None


def test_the_end_of_the_process_is_the_models_if_the_model_alone_ends_one():
    bundle = onnxplace.compile(write(GRU), "out", devices="cpu:0", shape={"S": 4, "B": 2}, pipeline=FAST_PIPELINE)
    steps = choose_step_inputs(bundle, None, {"S": 1}, 0)
    with compare_in_child(partial(open_and_end, signal.SIGFPE), bundle.path, "model.onnx") as compare:
        for _ in range(2):  # the process starts again
            with pytest.raises(ModelError) as caught:
                compare(steps)
            assert (caught.value.code, caught.value.message) == ("M017", f"{ENDS}SIGFPE")
    steps = choose_step_inputs(bundle, None, {"S": 2}, 0)
    text = r"X004.*the comparison failed in a process of its own: SIGSEGV"
    with (
        compare_in_child(partial(open_and_end, signal.SIGSEGV), bundle.path, None) as compare,
        pytest.raises(ExecutionError, match=text),
    ):
        compare(steps)


def test_compile_goes_on_after_sizes_that_end_the_process(run_cli):
    result = run_cli("compile", write(GRU), "-o", "out", "--devices", "cpu:0", "--shape", "S=4,B=2")
    assert result.code == 0
    assert "note[C023] g: with S=5, B=1, " in result.err
    assert "in node 'step' (GRU)" in result.err
    assert sorted(os.listdir()) == ["model.onnx", "out"]
    again = run_cli("compile", "model.onnx", "-o", "again", "--devices", "cpu:0", "--shape", "S=4,B=2")
    assert "note[C023] g: with S=5, B=1, " in again.err  # from the cache


def test_verify_goes_on_after_sizes_that_end_the_process(run_cli):
    onnxplace.compile(write(GRU), "out", devices="cpu:0", shape={"S": 4, "B": 2}, pipeline=FAST_PIPELINE)
    against = ("verify", "out", "--against", "model.onnx", "--sizes", "1")
    result = run_cli(*against)
    assert result.code == 0
    assert f"skipped with S=5, B=1: {ENDS}SIGABRT" in result.out
    data = only_json(run_cli(*against, "--json"))
    assert data["equal"]
    assert {item["message"] for item in data["sizes"] if item["result"] == "skipped"} == {f"{ENDS}SIGABRT"}
    assert {item["result"] for item in data["sizes"]} == {"equal", "skipped"}
    assert sorted(os.listdir()) == ["model.onnx", "out"]
    assert not list(Path.cwd().glob(".onnxplace*"))
