"""A sharded model computes the same as the model: random models, random strategies."""

from __future__ import annotations

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, note, settings, strategies as st
from onnx import ModelProto, parser, printer

from onnxplace.model.loading import load
from tests.support.random_models import Feeds, RandomModel, random_models, reference, run_plain
from tests.support.random_placements import assert_same
from tests.support.shardable_models import make_model
from tests.support.shardings import SHARES, WIDE_SHARES, check_structure, make_space, shard_randomly

EXAMPLES = int(os.environ.get("ONNXPLACE_EXAMPLES", "0"))
"""Number of models; unless it is set, they are always the same."""


def run_sizes(proto: ModelProto, feeds: tuple[Feeds, ...]) -> list[tuple[Feeds, list[Any]]]:
    """Return the feeds that ONNX Runtime takes, with the outputs; the first ones must be among them."""
    model, results = proto.SerializeToString(), []
    for index, item in enumerate(feeds):
        try:
            results.append((item, run_plain(model, [item])[0]))
        except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
            if index == 0:
                return []
    return results


def assert_close(actual: list[Any], expected: list[Any], tolerance: float) -> None:
    """Raise AssertionError unless outputs are equal, floats up to rounding."""
    for first, second in zip(actual, expected, strict=True):
        assert (first.dtype, first.shape) == (second.dtype, second.shape)
        finite = second[np.isfinite(second)] if second.dtype.kind == "f" else np.zeros(0)
        scale = max(1.0, float(np.abs(finite).max(initial=0))) if second.dtype.kind == "f" else 0.0
        np.testing.assert_allclose(first, second, rtol=0, atol=tolerance * scale)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, EXAMPLES or 300, 100))
def test_every_sharding_of_a_model_computes_the_same_at_every_size(first: int) -> None:
    for seed in range(first, first + 100):
        random = Random(seed)
        model = make_model(random, is_wide=True)
        results = run_sizes(model.proto, model.feeds)
        if not results:
            continue
        space = make_space(model.proto, model.dimensions[0], random.choice(WIDE_SHARES))
        sharded = shard_randomly(space, random)
        try:
            check_structure(space.facts.model, sharded)
            proto = sharded.model.whole_proto().SerializeToString()
            for feeds, expected in results:
                assert_close(run_plain(proto, [feeds])[0], expected, model.tolerance)
        except Exception as problem:
            problem.add_note(f"seed {seed}, model {model!r}")
            raise


@settings(
    max_examples=EXAMPLES or 150,
    deadline=None,
    derandomize=not EXAMPLES,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(random_models(), st.integers(0, 2**16))
def test_a_sharding_of_any_model_computes_the_same_bits(model: RandomModel, seed: int) -> None:
    try:
        expected = reference(model.proto, model.feeds)
    except Exception:  # noqa: BLE001 - ONNX Runtime raises its own unrelated types
        assume(False)
    note(printer.to_text(model.proto))
    random = Random(seed)
    space = make_space(model.proto, model.dimensions, random.choice(SHARES))
    sharded = shard_randomly(space, random)
    check_structure(space.facts.model, sharded)
    assert_same(run_plain(sharded.model.whole_proto().SerializeToString(), model.feeds), expected)


RETURNED_WEIGHT = """
<ir_version: 8, opset_import: ["": 18]>
g (float[4, 4] x) => (float[4, 4] w, float[4, 4] y)
<float[4, 4] w = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16}>
{
    y = MatMul(x, w)
}
"""


def test_a_weight_that_is_an_output_stays_whole() -> None:
    proto = parser.parse_model(RETURNED_WEIGHT)
    feeds = {"x": np.ones((4, 4), np.float32)}
    for seed in range(10):
        space = make_space(proto, {})
        sharded = shard_randomly(space, Random(seed))
        check_structure(load(proto), sharded)
        actual = run_plain(sharded.model.whole_proto().SerializeToString(), [feeds])
        assert_same(actual, run_plain(proto.SerializeToString(), [feeds]))
