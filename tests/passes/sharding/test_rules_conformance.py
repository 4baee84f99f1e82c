"""A sample of ONNX's suite with every strategy of every node; all of it: `benchmarks.conformance --shard`."""

import zlib

import numpy as np
import onnx
import onnxruntime
import pytest

from tests.support.conformance import names
from tests.support.forced_sharding import compare, shard_case, try_strategies
from transformer import transformer

EVERY = 14
"""Of the cases that are not expanded functions, one in this many is tested."""
EXPANDED_EVERY = 150
"""Of the expanded functions, which are larger models, one in this many is tested."""
PARTS = 8


def sample(quick: bool = False) -> list[tuple[str, str]]:
    """Return the same cases every time, kind and name; those that onnx makes quickly, if asked for."""
    chosen = []
    for kind in ("node", "simple", "pytorch-converted", "pytorch-operator"):
        for name in names(kind, quick):
            every = EXPANDED_EVERY if "_expanded" in name else EVERY
            if zlib.crc32(name.encode()) % every == 0:
                chosen.append((kind, name))
    return chosen


@pytest.mark.slow
@pytest.mark.parametrize("part", range(PARTS))
def test_every_strategy_of_every_node_computes_what_the_whole_model_does(part: int):
    check(sample()[part::PARTS])


def test_every_strategy_of_the_nodes_of_a_few_cases():
    check(sample(quick=True)[:: 2 * PARTS])


def check(cases: list[tuple[str, str]]) -> None:
    outcomes = [shard_case(kind, name) for kind, name in cases]
    assert {item.name: item.failures for item in outcomes if item.failures} == {}
    assert sum(item.tried > 0 for item in outcomes) > len(outcomes) / 4


def test_an_absent_optional_input_has_no_shape():
    outcome = shard_case("node", "test_optional_has_element_empty_optional_input")
    assert not outcome.refused
    assert outcome.failures == []


@pytest.mark.parametrize("is_fused", [False, True])
@pytest.mark.sampled(2)
def test_a_transformer_split_at_one_size_computes_other_sizes_too(is_fused: bool, tmp_path):
    model = transformer(layers=1, hidden=32, heads=4, vocab=20, positions=16)
    if is_fused:
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath, options.log_severity_level = str(tmp_path / "fused.onnx"), 4
        onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        model = onnx.load(tmp_path / "fused.onnx")
    feeds = [{value.name: np.ones(shape, np.int64) for value in model.graph.input} for shape in ((2, 4), (3, 5))]
    trials = list(try_strategies(model, feeds))
    assert [trial.problem for trial in trials if trial.problem] == []
    split = {name for trial in trials for name in trial.nodes}
    assert {"MatMul", "Softmax", "Erf"} <= split
    assert ("com.microsoft::FusedMatMul" in split) == is_fused


@pytest.mark.parametrize(
    "other",
    [
        np.float32([1, 2.001]),
        np.float32([[1, 2]]),
        np.float64([1, 2]),
        np.float32([1, np.nan]),
        np.float32([1, np.inf]),
        [np.float32([1, 2])],
    ],
)
def test_another_value_type_shape_or_nan_is_a_difference(other):
    assert compare(np.float32([1, 2]), other)


def test_sums_in_another_order_are_no_difference():
    assert not compare(np.float32([1, 2, np.nan]), np.float32([1, 2.00001, np.nan]))
    assert compare(np.int64([1, 2]), np.int64([1, 3]))
