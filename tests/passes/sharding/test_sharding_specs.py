"""Layouts in words of ONNX: what is written is read again, and what is none of our layouts says why."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies as st
from onnx import ShardingSpecProto

from onnxplace.passes.sharding.apply import sharding_specs
from onnxplace.passes.sharding.apply.sharding_specs import read_layout, specify
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Division, Layout

EVEN = Division((1.0, 1.0))
divisions = st.lists(st.sampled_from((1.0, 2.0, 3.0, 0.5)), min_size=2, max_size=5).map(tuple).map(Division)
even = st.integers(2, 8).map(lambda count: Division((1.0,) * count))


def sharding(**fields: Any) -> ShardingSpecProto:
    return ShardingSpecProto(tensor_name="y", **fields)


def split(axis: int, *parts: tuple[int, int], device: tuple[int, ...] = (0, 1), **groups: Any) -> ShardingSpecProto:
    """Return a specification of an axis that is fused of parts (size, shards); size 0 is left open."""
    factors = [{"num_shards": shards} | ({"dim_value": size} if size else {}) for size, shards in parts]
    return sharding(device=device, sharded_dim=[{"axis": axis, "simple_sharding": factors}], **groups)


def describe(spec: ShardingSpecProto | None) -> tuple[Any, ...]:
    """Return the parts (size, shards) of the axis, the devices and the groups of a specification."""
    assert spec is not None
    parts = [(part.dim_value, part.num_shards) for item in spec.sharded_dim for part in item.simple_sharding]
    groups = {entry.key: list(entry.value) for entry in spec.index_to_device_group_map}
    return parts, list(spec.device), groups


@pytest.mark.parametrize(
    ("layout", "size", "division", "expected"),
    [
        (REPLICATED, 8, EVEN, ([], [-1], {-1: [0, 1]})),
        (Layout(1, 1, 2), 8, EVEN, ([(8, 2)], [0, 1], {})),
        (Layout(1, 1, 4), 8, Division((3.0, 1.0)), ([(8, 4)], [0, 0, 0, 1], {})),
        (Layout(1, 3, 2), 24, EVEN, ([(3, 1), (8, 2)], [0, 1], {})),
        (Layout(1, -4, 2), 8, EVEN, ([(0, 1), (4, 2)], [0, 1], {})),
        (Layout(1, 1, 2), 8, Division((1.0,) * 4), ([(8, 2)], [-1, -2], {-1: [0, 1], -2: [2, 3]})),
        (Layout(1, rows=((0, 5), (3, 8))), 8, EVEN, ([(8, 8)], [0, 0, 0, -1, -1, 1, 1, 1], {-1: [0, 1]})),
    ],
    ids=["replicated", "even", "uneven", "fused", "runs", "copies", "overlapping"],
)
def test_layouts_are_written_as_shards_on_devices_and_groups(layout, size, division, expected) -> None:
    spec = specify("y", layout, [3, size], division)
    assert describe(spec) == expected
    assert read_layout(spec, [3, size], division) == layout


@given(
    divisions | even, st.integers(1, 60), st.integers(1, 4), st.integers(0, 8), st.integers(0, 2), st.integers(0, 20),
    st.booleans(),
)  # fmt: skip
def test_layouts_are_read_as_they_were_written(
    division: Division, inner: int, outer: int, blocks: int, axis: int, first: int, in_runs: bool
) -> None:
    shape = [5, 5, 5]
    shape[axis] = inner * outer
    layout = division.split(axis, shape[axis], outer, blocks)
    if layout is None:
        return
    if in_runs:
        layout = layout.in_runs(shape[axis])
    devices = range(first, first + division.count)
    spec = specify("y", layout, shape, division, devices)
    assert spec is not None
    assert set(spec.device) <= {*devices} | {-1 - index for index in range(division.count)}
    again = ShardingSpecProto.FromString(spec.SerializeToString())
    assert read_layout(again, shape, division, devices) == layout


@given(divisions, st.data())
def test_rows_that_overlap_are_read_as_they_were_written(division: Division, data: st.DataObject) -> None:
    size, count = data.draw(st.integers(division.count, 30)), division.count
    bounds = st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1, unique=True).map(sorted)
    lows, highs = [0, *data.draw(bounds)], [*data.draw(bounds), size]
    rows = list(zip(lows, highs))
    if any(low >= high for low, high in rows) or any(low > end for (_, end), (low, _) in pairwise(rows)):
        return
    layout = division.hold(2, size, rows)
    assert read_layout(specify("y", layout, [1, 1, size], division), [1, 1, size], division) == layout


def test_partial_values_invalid_rows_and_very_fine_cuts_are_not_written() -> None:
    assert specify("y", PARTIAL, [8], EVEN) is None
    assert specify("y", Layout(0, rows=((0, 5), (3, 8)), valid=((0, 4), (4, 8))), [8], EVEN) is None
    size = 2 * sharding_specs.MAX_SHARDS + 1
    layout = EVEN.split(0, size)
    assert layout is not None
    assert specify("y", layout, [size], EVEN) is None
    assert read_layout(split(0, (size, 2)), [size], EVEN) == layout, "the backend cuts it"


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (sharding(), REPLICATED),
        (sharding(device=[0, 1]), REPLICATED),
        (sharding(device=[-7], index_to_device_group_map=[{"key": -7, "value": [1, 0, 1]}]), REPLICATED),
        (split(0, (8, 1)), REPLICATED),
        (split(-1, (8, 2)), Layout(0, 1, 2)),
        (split(0, (0, 2), device=()), Layout(0, 1, 2)),
        (split(0, (8, 4), device=(0, 0, 1, 1)), Layout(0, 1, 2)),
        (split(0, (4, 2), (2, 1)), Layout(0, 1, 2)),
        (split(0, (2, 1), (0, 2)), Layout(0, 2, 2)),
        (split(0, (0, 1), (2, 2), (2, 1)), Layout(0, -4, 2)),
        (split(0, (8, 4), device=(0, 0, 0, 1)), Layout(0, rows=((0, 6), (6, 8)))),
        (split(0, (8, 2), device=(-1, -1), index_to_device_group_map=[{"key": -1, "value": [0, 1]}]), REPLICATED),
        (split(0, (8, 2), device=(0, 4), index_to_device_group_map=[{"key": 4, "value": [1]}]), Layout(0, 1, 2)),
    ],
)  # fmt: skip
def test_specifications_of_others_are_read(spec: ShardingSpecProto, expected: Layout) -> None:
    assert read_layout(spec, [8], EVEN) == expected


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (split(1, (8, 2)), "shape [8] has no rows along axis 1 in 1 factor"),
        (split(0, *((1 << 60, 1),) * 100000, (0, 2)), "shape [8] has no rows along axis 0 in 100001 factors"),
        (split(0, (9, 2)), "axis 0 has 9 rows, and not 8"),
        (split(0, (0, 1), (0, 2)), "axis 0 has ? times ? rows, and not 8"),
        (split(0, (-2, 1), (0, 2)), "-4 rows in 2 shards are no run of equal ones"),
        (split(0, (2, 2), (4, 2), device=(0, 1, 0, 1)), "[2, 2] shards are on 4 devices or groups"),
        (split(0, (8, 0)), "[0] shards are on 2 devices or groups"),
        (split(0, (8, -2)), "[-2] shards are on 2 devices or groups"),
        (split(0, (8, 4)), "[4] shards are on 2 devices or groups"),
        (split(0, (8, 3), device=(0, 1, 1)), "8 rows in 3 shards are no run of equal ones"),
        (split(0, (8, 16), device=(0,) * 8 + (1,) * 8), "8 rows in 16 shards are no run of equal ones"),
        (split(0, (8, 2), device=(1, 0)), "no layout has rows 4-8, 0-4 of 8 on its devices"),
        (split(0, (8, 4), device=(0, 1, 0, 1)), "8 rows in 4 shards are no run of equal ones on each device"),
        (split(0, (8, 2), device=(0, 0)), "it is on devices [0], expected [0, 1]"),
        (split(0, (8, 2), device=(0, 2)), "it is on devices [0, 2], expected [0, 1]"),
        (sharding(device=[-1]), "it is on devices [-1], expected [0, 1]"),
        (sharding(device=[-1], index_to_device_group_map=[{"key": -1, "value": [-1]}]), "it is on devices [-1], expe"),
        (sharding(device=[0], index_to_device_group_map=[{"key": 0}]), "it is on devices [0], expected [0, 1]"),
    ],
)  # fmt: skip
def test_specifications_that_are_no_layout_say_why(spec: ShardingSpecProto, reason: str) -> None:
    assert str(read_layout(spec, [8], EVEN)).startswith(reason)


def test_an_axis_is_not_split_twice() -> None:
    spec = split(0, (8, 2))
    spec.sharded_dim.append(split(1, (8, 2)).sharded_dim[0])
    assert (
        read_layout(spec, [8, 8], EVEN)
        == "[2, 2] shards are on 2 devices or groups, expected shards of one axis with one each"
    )
