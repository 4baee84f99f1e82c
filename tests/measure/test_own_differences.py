"""Outputs near zero differ no more than the unsplit model from itself; wrong ones are found all the same."""

import sys
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import ModelProto, numpy_helper, parser

import onnxplace
from onnxplace.driver.compile import compile_model
from onnxplace.measure import compare
from onnxplace.measure.step_inputs import choose_step_inputs
from onnxplace.passes.emit import Emit
from onnxplace.passes.optimize import Optimize
from onnxplace.passes.profile import ProfileCosts
from onnxplace.passes.split import Split
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.target.target import Device, Target
from tests.conftest import FAST_PIPELINE
from tests.support.commands import only_json
from tests.support.random_placements import RandomPlacement

TWO = Target((Device("cpu:0", 1 << 30), Device("cpu:1", 1 << 30)))

# In one session, the normalization is folded into the convolution. The values of `y` are near 1e-7.
NEAR_ZERO = """<ir_version: 8, opset_import: ["": 17]>
g (float[N, 16, 8, 8] x) => (float[N, 16, 8, 8] y)
{ c = Conv(x, w) d = BatchNormalization(c, scale, bias, mean, variance) y = Sigmoid(d) }"""


# After its end at token 3, ONNX Runtime leaves the rest of the row unwritten.
GREEDY = """<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]>
g (int32[B, S] ids, int32[1] longest, int32[1] shortest, float[1] penalty) => (int32[B, 40] sequences) {
sequences = com.microsoft.GreedySearch<eos_token_id = 3, pad_token_id = 0, model_type = 0, decoder = d (
    int32[B, S] input_ids, int32[B, S] position_ids, int32[B, T] attention_mask, float[2, B, 2, P, 4] past_0
) => (float[B, S, 16] logits, float[2, B, 2, T, 4] present_0) {
    logits = Gather(scores, input_ids)
    keys = Gather(table, input_ids)
    heads = Transpose<perm = [0, 2, 1, 3]>(keys)
    one = Unsqueeze(heads, first)
    both = Concat<axis = 0>(one, one)
    present_0 = Concat<axis = 3>(past_0, both)
}>(ids, longest, shortest, penalty) }"""


def make_greedy_search() -> ModelProto:
    model = parser.parse_model(GREEDY)
    (decoder,) = (item.g for item in model.graph.node[0].attribute if item.name == "decoder")
    scores = np.zeros((16, 16), np.float32)
    scores[[7, 5], [5, 3]] = 50
    weights = {"scores": scores, "table": np.ones((16, 2, 4), np.float32), "first": np.array([0])}
    decoder.initializer.extend(numpy_helper.from_array(value, name) for name, value in weights.items())
    return model


def make_model() -> ModelProto:
    random = np.random.default_rng(1)
    weights = {
        "scale": random.uniform(0.5, 1.5, 16),
        "bias": random.normal(size=16) - 17,
        "mean": random.normal(size=16),
        "variance": random.uniform(0.5, 1.5, 16),
        "w": random.normal(size=(16, 16, 3, 3)) * 0.1,
    }
    model = parser.parse_model(NEAR_ZERO)
    model.graph.initializer.extend(
        numpy_helper.from_array(value.astype(np.float32), name) for name, value in weights.items()
    )
    return model


def cut_at_every_node(model: ModelProto, folder: Path, *, trial: bool = False) -> onnxplace.Bundle:
    steps = (Optimize(), ProfileCosts(estimate=not trial), RandomPlacement((0, 1, 0)), Split(), Emit())
    return compile_model(
        model, folder / "out", target=TWO, pipeline=Pipeline(steps), shape={"N": 1}, trial=trial
    ).bundle


@pytest.mark.usefixtures("no_gpus")
def test_outputs_near_zero_are_equal_for_verify_and_the_trial(tmp_path, run_cli):
    bundle = cut_at_every_node(make_model(), tmp_path, trial=True)
    assert bundle.manifest.trial is not None
    assert len(bundle.manifest.segments) == 3
    result = run_cli("verify", bundle.path)
    assert (result.code, result.out.split()[0]) == (0, "equal")


def scale_weight(name: str, value: np.ndarray) -> np.ndarray:
    return value * np.float32(1.001) if name == "w" else value


def swap_axes(name: str, value: np.ndarray) -> np.ndarray:
    return value.transpose(0, 1, 3, 2) if name == "w" else value


def drop_mean(name: str, value: np.ndarray) -> np.ndarray:
    return value * 0 if name == "mean" else value


def change_one(name: str, value: np.ndarray) -> np.ndarray:
    value = value.copy()
    if name == "w":
        value.flat[np.abs(value).argmax()] *= np.float32(1.01)
    return value


@pytest.mark.parametrize("damage", [scale_weight, swap_axes, drop_mean, change_one])
def test_damaged_weights_differ_also_near_zero(tmp_path, run_cli, damage: Callable[[str, np.ndarray], np.ndarray]):
    bundle = cut_at_every_node(make_model(), tmp_path)
    other = make_model()
    for tensor in other.graph.initializer:
        tensor.CopyFrom(numpy_helper.from_array(damage(tensor.name, numpy_helper.to_array(tensor)), tensor.name))
    onnx.save(other, tmp_path / "other.onnx")
    result = run_cli("verify", bundle.path, "--against", tmp_path / "other.onnx", "--sizes", "0")
    assert (result.code, result.out.split()[0]) == (1, "DIFFERS")


def test_an_output_that_two_runs_compute_otherwise_is_named(tmp_path, run_cli, monkeypatch):
    bundle = cut_at_every_node(make_model(), tmp_path)
    runs, open_reference = count(), compare.open_reference

    def open_unrepeatable(*arguments):
        run = open_reference(*arguments)
        return lambda feeds: {name: value + next(runs) for name, value in run(feeds).items()}

    monkeypatch.setattr(compare, "open_reference", open_unrepeatable)
    result = run_cli("verify", bundle.path)
    assert result.code == 0
    assert "random y  two equal runs of the unsplit model differ in it" in result.out
    (output,) = only_json(run_cli("verify", bundle.path, "--json"))["outputs"]
    assert (output["equal"], output["own_error"]) == (True, None)
    bundle = cut_at_every_node(make_model(), tmp_path / "again", trial=True)
    (note,) = [item for item in bundle.manifest.diagnostics if item.code == "C023"]
    assert note.message.startswith("output 'y': two equal runs of the unsplit model differ in it")


@pytest.mark.skipif(sys.platform != "linux", reason="memory is filled by glibc")
def test_memory_that_the_model_leaves_unwritten_is_not_compared(tmp_path):
    model = make_greedy_search()
    feeds = {
        "ids": np.array([[1, 7]], np.int32),
        "longest": np.array([40], np.int32),
        "shortest": np.array([1], np.int32),
        "penalty": np.ones(1, np.float32),
    }
    bundle = onnxplace.compile(model, tmp_path / "out", devices="cpu:0", inputs=feeds, pipeline=FAST_PIPELINE)
    other = np.full((1, 40), 9, np.int32)
    comparison = compare.ModelComparison(bundle, None, [0], ["sequences"])
    ((item,),) = comparison.compare(lambda _: {"sequences": other}, choose_step_inputs(bundle, feeds, {}, 0), 1)
    assert (item.equal, item.own_error) == (True, np.inf)
