"""A sample of ONNX's suite with every strategy of every node; all of it: `benchmarks.conformance --shard`."""

import zlib

import numpy as np
import pytest

from tests.support.conformance import names
from tests.support.forced_sharding import compare, shard_case

EVERY = 9
"""Of the cases that are not expanded functions, one in this many is tested."""
EXPANDED_EVERY = 150
"""Of the expanded functions, which are larger models, one in this many is tested."""
PARTS = 8


def sample() -> list[tuple[str, str]]:
    """Return the same cases every time: kind and name."""
    chosen = []
    for kind in ("node", "simple", "pytorch-converted", "pytorch-operator"):
        for name in names(kind):
            every = EXPANDED_EVERY if "_expanded" in name else EVERY
            if zlib.crc32(name.encode()) % every == 0:
                chosen.append((kind, name))
    return chosen


@pytest.mark.parametrize("part", range(PARTS))
def test_every_strategy_of_every_node_computes_what_the_whole_model_does(part: int):
    outcomes = [shard_case(kind, name) for kind, name in sample()[part::PARTS]]
    assert {item.name: item.failures for item in outcomes if item.failures} == {}
    assert sum(item.tried > 0 for item in outcomes) > len(outcomes) / 4


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
