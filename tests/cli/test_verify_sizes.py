"""`onnxplace verify` and the trial of `compile` look at other sizes than the compiled ones."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from hypothesis import given, strategies as st
from onnx import parser

import onnxplace
from onnxplace.errors import ExecutionError
from onnxplace.measure import size_comparison, trial
from onnxplace.measure.size_comparison import list_other_sizes
from onnxplace.runtimes.execution.sessions import EngineSession
from tests.conftest import FAST_PIPELINE
from tests.support.commands import only_json

pytestmark = pytest.mark.usefixtures("no_gpus", "work_in_temporary_folder")

RELU = "g (float[N, 4] x) => (float[N, 4] y) { y = Relu(x) }"
# Equal to RELU where N is 1.
TIMES_ROWS = """g (float[N, 4] x) => (float[N, 4] y)
<int64[1] first = {0}>
{ s = Shape(x) n = Gather(s, first) rows = Cast<to = 1>(n) r = Relu(x) y = Mul(r, rows) }"""
SUM = "g (float[N, 4] x) => (float y) { y = ReduceSum<keepdims = 0>(x) }"
# Equal to SUM where N is even; refused by ONNX Runtime where it is odd.
SUM_OF_PAIRS = """g (float[N, 4] x) => (float y)
<int64[2] pairs = {-1, 8}>
{ p = Reshape(x, pairs) y = ReduceSum<keepdims = 0>(p) }"""
# Both sizes have to be equal, which their names do not say.
TWINS = "g (float[A, 2] a, float[B, 2] b, float[C] c) => (float[A, 2] y, float[C] z) { y = Add(a, b) z = Relu(c) }"


def write(name: str, text: str) -> str:
    onnx.save(parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> {text}'), name)
    return name


def compile_fast(text: str, **shape: int) -> onnxplace.Bundle:
    model = write("model.onnx", text)
    return onnxplace.compile(model, "out", devices="cpu:0", shape=shape, pipeline=FAST_PIPELINE)


def tried(data: dict) -> list[tuple[dict, str]]:
    return [(item["sizes"], item["result"]) for item in data["sizes"]]


def test_a_bundle_that_is_right_at_the_compiled_size_only_differs(run_cli):
    compile_fast(RELU, N=1)
    result = run_cli("verify", "out", "--against", write("other.onnx", TIMES_ROWS))
    assert result.code == 1
    assert result.out.startswith("DIFFERS y")
    assert ", first with N=2\n" in result.out
    data = only_json(run_cli("verify", "out", "--against", "other.onnx", "--json"))
    assert data["equal"] is False
    assert tried(data) == [({"N": 1}, "equal"), ({"N": 2}, "differs"), ({"N": 3}, "differs"), ({"N": 7}, "differs")]


def test_given_sizes_are_not_changed(run_cli):
    compile_fast(RELU, N=5)
    against = ("--against", write("other.onnx", TIMES_ROWS))
    result = run_cli("verify", "out", "--shape", "N=1", *against)
    assert (result.code, result.out.splitlines()[-1]) == (0, "compared with N=1")
    np.savez("inputs.npz", x=np.ones((1, 4), np.float32))
    result = run_cli("verify", "out", "--inputs", "inputs.npz", *against)
    assert (result.code, result.out.splitlines()[-1]) == (0, "compared with N=1")
    assert run_cli("verify", "out", "--shape", "N=2", *against).code == 1


@pytest.mark.parametrize("count", [0, 1, 4])
def test_sizes_says_how_many_others_are_compared(run_cli, count):
    compile_fast(RELU, N=4)
    data = only_json(run_cli("verify", "out", "--sizes", count, "--json"))
    assert len({item["sizes"]["N"] for item in data["sizes"]}) == 1 + count


def test_sizes_that_the_model_refuses_are_skipped_and_named(run_cli):
    compile_fast(SUM_OF_PAIRS, N=4)
    result = run_cli("verify", "out", "--sizes", "2")
    assert result.code == 0
    assert result.out.splitlines()[-2:] == [
        "compared with N=4; N=8; N=2",
        "skipped, as the model refuses them: N=5; N=1; N=3",
    ]


def test_sizes_that_only_the_bundle_refuses_are_not_equal(run_cli):
    compile_fast(SUM_OF_PAIRS, N=4)
    result = run_cli("verify", "out", "--sizes", "1", "--against", write("other.onnx", SUM))
    assert result.code == 1
    assert "equal  y" in result.out
    assert "REFUSED with N=5, which the model takes: " in result.out
    data = only_json(run_cli("verify", "out", "--sizes", "1", "--against", "other.onnx", "--json"))
    assert (data["equal"], tried(data)) == (False, [({"N": 4}, "equal"), ({"N": 5}, "refused")])
    assert "Reshape" in data["sizes"][1]["message"]


def test_dimensions_that_have_to_be_equal_change_together(run_cli):
    compile_fast(TWINS, A=4, B=4, C=9)
    data = only_json(run_cli("verify", "out", "--sizes", "2", "--json"))
    compared = [sizes for sizes, result in tried(data) if result == "equal"]
    for name in "ABC":
        assert len({sizes[name] for sizes in compared}) >= 3


@given(st.dictionaries(st.sampled_from("abcd"), st.integers(0, 1000), min_size=1), st.integers(0, 3))
def test_other_sizes_change_only_the_named_dimensions_each_to_three_sizes(sizes, kept):
    names = sorted(sizes)[kept:]
    others = list_other_sizes(sizes, names)
    assert all({**other, **{name: sizes[name] for name in names}} == sizes for other in others)
    assert all(other != sizes for other in others)
    for name in names:
        alone = [other for other in others if {**sizes, name: other[name]} == other]
        assert len({other[name] for other in alone}) >= 3
        assert min(other[name] for other in alone) == 1 or sizes[name] == 1


@pytest.fixture
def wrong_at_other_sizes(monkeypatch) -> None:
    """Let bundles compute something else where a batch is not of 4."""
    run = EngineSession.run

    def run_wrong(self, feeds, *rest):
        result = run(self, feeds, *rest)
        extra = 0.0 if feeds["x"].shape[0] == 4 else 1.0
        return replace(result, outputs={name: value + np.float32(extra) for name, value in result.outputs.items()})

    monkeypatch.setattr(EngineSession, "run", run_wrong)


COMPILE = {"devices": "cpu:0,cpu:1", "shape": {"batch": 4}}


@pytest.fixture(autouse=True)
def short_trials(monkeypatch):
    monkeypatch.setattr(trial, "REPEAT_POLICY", replace(trial.REPEAT_POLICY, max_runs=3))
    monkeypatch.setattr(trial, "BURST_SECONDS", 0.0)


@pytest.mark.usefixtures("wrong_at_other_sizes")
def test_compile_fails_if_the_bundle_is_wrong_at_another_size(model_file):
    for _ in range(2):  # a cached trial would not compare again
        with pytest.raises(ExecutionError, match="output 'y' differs from the unsplit model's with batch=5") as caught:
            onnxplace.compile(model_file, "out", **COMPILE)
        assert caught.value.code == "C022"
        assert not Path("out").exists()
    assert onnxplace.compile(model_file, "out", trial=False, **COMPILE).manifest.trial is None


@pytest.mark.usefixtures("wrong_at_other_sizes")
def test_the_error_of_compile_says_what_is_known_of_the_cause(run_cli, model_file):
    result = run_cli("compile", model_file, "-o", "out", "--devices", "cpu:0,cpu:1", "--shape", "batch=4")
    assert result.code == 4
    message = "differs from the unsplit model's with batch=5; the error is gone when segments run alone, without"
    assert f"error[C022] branches: output 'y' {message} optimisations\n" in result.err
    assert "please report it, with this command and `onnxplace doctor`'s report; --no-trial writes" in result.err


@pytest.mark.usefixtures("wrong_at_other_sizes")
def test_the_trial_compares_only_where_that_is_cheap(model_file, monkeypatch):
    monkeypatch.setattr(size_comparison, "MAX_COMPARED_BYTES", 1000)
    assert onnxplace.compile(model_file, "out", **COMPILE).manifest.trial is not None
