"""Layouts cover each axis once, and know the parts of all devices."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
from hypothesis import given, strategies as st

from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Division, Layout

divisions = st.lists(st.sampled_from((1.0, 2.0, 3.0, 0.5)), min_size=1, max_size=5).map(tuple).map(Division)


@given(divisions, st.integers(0, 48), st.integers(1, 6), st.integers(0, 12))
def test_the_parts_of_a_split_axis_cover_it_once(division: Division, size: int, outer: int, blocks: int) -> None:
    layout = division.split(1, size, outer, blocks)
    if layout is None:
        return
    ranges = [item for device in range(division.count) for item in division.ranges(layout, size, device)]
    assert sorted(index for low, high in ranges for index in range(low, high)) == list(range(size))
    assert all(low < high for low, high in ranges)
    for device in range(division.count):
        own = division.ranges(layout, size, device)
        assert len(own) == outer
        assert sum(high - low for low, high in own) == division.local_size(layout, size, device)
        assert division.local_shape(layout, (3, size), device) == (3, division.local_size(layout, size, device))
        assert division.fraction(layout, device) * size == pytest.approx(division.local_size(layout, size, device))
    assert math.fsum(division.fraction(layout, device) for device in range(division.count)) == pytest.approx(1.0)


@given(divisions, st.integers(1, 48), st.integers(1, 6), st.integers(1, 12))
def test_equal_cuts_are_equal_layouts(division: Division, size: int, outer: int, blocks: int) -> None:
    layout = division.split(0, size, outer, blocks)
    if layout is not None:
        assert division.split(0, size, layout.outer, layout.blocks) == layout
        assert blocks % layout.blocks == 0


@given(divisions, st.integers(1, 48), st.sampled_from((2, 3, 5)))
def test_larger_axes_are_cut_in_proportion(division: Division, size: int, factor: int) -> None:
    layout = division.split(0, size)
    if layout is not None:
        cuts = [division.ranges(layout, size, device)[0][0] for device in range(division.count)]
        larger = [division.ranges(layout, factor * size, device)[0][0] for device in range(division.count)]
        assert larger == [factor * cut for cut in cuts]


@given(divisions, st.integers(0, 64))
def test_cuts_rise_and_follow_the_shares(division: Division, blocks: int) -> None:
    cuts = division.cuts(blocks)
    assert (cuts[0], cuts[-1]) == (0, blocks)
    total = sum(division.shares)
    for (low, high), share in zip(pairwise(cuts), division.shares):
        assert 0 <= high - low <= blocks * share / total + 1


def test_a_division_is_even_if_all_shares_are_equal() -> None:
    assert Division((2.0, 2.0)).is_even
    assert not Division((2.0, 1.0)).is_even


@pytest.mark.parametrize(
    ("size", "outer", "blocks"),
    [(1, 1, 0), (0, 1, 0), (0, 1, 2), (6, 4, 0), (6, 3, 3), (8, 1, 3), (6, 0, 0)],
    ids=[
        "one element",
        "empty",
        "empty blocks",
        "outer does not divide",
        "too few blocks",
        "blocks do not divide",
        "no outer",
    ],
)
def test_axes_that_leave_a_device_without_work_are_not_split(size: int, outer: int, blocks: int) -> None:
    assert Division((1.0, 1.0)).split(0, size, outer, blocks) is None


def test_a_share_that_is_too_small_for_a_block_is_not_split() -> None:
    division = Division((9.0, 1.0))
    assert division.split(0, 4) is None
    assert division.split(0, 10) is not None


def test_blocks_keep_heads_together() -> None:
    division = Division((1.0, 1.0))
    layout = division.split(2, 100, 1, 25)
    assert layout is not None
    assert [division.local_size(layout, 100, device) for device in (0, 1)] == [52, 48]


def test_rows_that_blocks_would_have_are_no_other_layout() -> None:
    """14 patches of 16 rows, on three devices; 224 rows would be cut elsewhere."""
    division = Division((1.0,) * 3)
    layout = division.hold(2, 224, [(0, 80), (80, 144), (144, 224)])
    assert layout == division.split(2, 224, 1, 14)
    assert layout != division.split(2, 224)


def test_outer_splits_each_of_several_tensors_in_one_axis() -> None:
    division = Division((1.0, 1.0))
    layout = division.split(0, 12, 3)
    assert layout is not None
    assert division.ranges(layout, 12, 1) == [(2, 4), (6, 8), (10, 12)]


def test_only_split_values_have_smaller_parts() -> None:
    division = Division((1.0, 3.0))
    for layout in (REPLICATED, PARTIAL):
        assert division.local_shape(layout, (4, 4), 0) == (4, 4)
        assert division.largest_fraction(layout) == 1.0
    assert division.largest_fraction(Layout(0, 1, 4)) == 0.75
    assert division.largest_fraction(None) == 1.0


def test_layouts_are_described_in_words() -> None:
    assert [str(layout) for layout in (REPLICATED, PARTIAL, Layout(1, 1, 2), Layout(2, 3, 2))] == [
        "replicated",
        "partial",
        "axis 1",
        "axis 2 in 3 parts",
    ]


def test_overlapping_rows_are_no_part_of_a_layout_with_copies() -> None:
    division, rows = Division((1.0,) * 8), ((0, 2), (0, 2), (0, 3), (0, 3), (1, 4), (1, 4), (2, 4), (2, 4))
    assert not division.holds(Layout(2, 1, 4), Layout(2, rows=rows))
    assert division.holds(Layout(2, 1, 2), Layout(2, 1, 4))
