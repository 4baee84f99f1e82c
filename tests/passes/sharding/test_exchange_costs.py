"""What it costs to change a layout."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest

from onnxplace.passes.sharding.rules.convolution_rules import list_overlaps
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Division, Layout
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts
from onnxplace.target.target import Device, Link, Target

ROWS, COLUMNS = Layout(0, 1, 24), Layout(1, 1, 24)
LAYOUTS = (REPLICATED, PARTIAL, ROWS, COLUMNS)


def make_costs(count: int = 2) -> ExchangeCosts:
    return ExchangeCosts(
        count=count,
        latency_seconds=1e-5,
        seconds_per_byte=1e-9,
        segment_seconds=2e-5,
        copy_seconds_per_byte=1e-10,
        kernel_seconds=1e-6,
    )


@pytest.mark.parametrize("count", [2, 3, 8])
def test_only_copies_become_summands(count: int) -> None:
    costs = make_costs(count)
    for source, result in itertools.product(LAYOUTS, LAYOUTS):
        is_possible = result != PARTIAL or source in (PARTIAL, REPLICATED)
        assert math.isfinite(costs.seconds(source, result, 1000)) == is_possible


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_layout_that_stays_costs_nothing(layout: Layout) -> None:
    assert make_costs().seconds(layout, layout, 1 << 30) == 0.0


@pytest.mark.parametrize("count", [2, 3, 8])
def test_more_bytes_never_cost_less(count: int) -> None:
    costs = make_costs(count)
    for source, result in itertools.product(LAYOUTS, LAYOUTS):
        seconds = [costs.seconds(source, result, size) for size in (0, 1, 1000, 10**6, 10**9)]
        assert seconds == sorted(seconds)
        assert all(item >= 0 for item in seconds)


def test_slices_of_copies_need_no_message() -> None:
    assert make_costs().seconds(REPLICATED, ROWS, 0) == pytest.approx(1e-6)
    assert make_costs().seconds(ROWS, REPLICATED, 0) == pytest.approx(3e-5 + 1e-6)


@pytest.mark.parametrize("count", [2, 4])
def test_exchanges_are_ordered_by_what_they_send(count: int) -> None:
    """An all-to-all sends less than an all-gather, and a reduce-scatter less than an all-reduce."""
    costs, size = make_costs(count), 10**6
    assert costs.seconds(ROWS, COLUMNS, size) < costs.seconds(ROWS, REPLICATED, size)
    assert costs.seconds(PARTIAL, ROWS, size) < costs.seconds(PARTIAL, REPLICATED, size)


def test_large_sums_of_many_devices_take_two_steps() -> None:
    assert make_costs(8).takes_two_rounds(PARTIAL, REPLICATED, 10**7)
    assert not make_costs(8).takes_two_rounds(PARTIAL, REPLICATED, 100)
    assert not make_costs(2).takes_two_rounds(PARTIAL, REPLICATED, 10**9)


def test_rows_that_are_missing_cost_an_exchange() -> None:
    costs, division, size = make_costs(), Division((1.0, 1.0)), 32_000
    even, wrong, one, _, _, two = list_overlaps(division, 32)[:6]
    assert costs.overlap_seconds(division, one, wrong, size) == 0.0  # as many rows
    cut = costs.overlap_seconds(division, two, one, size)
    assert cut == pytest.approx(1e-6 + 2 * 17_000 * 1e-10)
    halo = costs.overlap_seconds(division, even, one, size)
    slicing, joining = 1e-6 + 2 * 1_000 * 1e-10, 1e-6 + 2 * 17_000 * 1e-10
    assert halo == pytest.approx(slicing + 3e-5 + 1_000 * 1e-9 + joining)
    assert cut < halo < costs.overlap_seconds(division, even, two, size)
    # Wrong rows are received once more.
    assert costs.overlap_seconds(division, wrong, one, size) == halo
    assert costs.overlap_seconds(division, one, REPLICATED, size) == costs.seconds(one, REPLICATED, size)


def test_cutting_within_a_session_reorders_what_is_cut() -> None:
    division, (even, _, one) = Division((1.0, 1.0)), list_overlaps(Division((1.0, 1.0)), 32)[:3]
    costs = replace(make_costs(), reorder_seconds_per_byte=1e-9)
    more = costs.overlap_seconds(division, one, even, 32_000) - make_costs().overlap_seconds(
        division, one, even, 32_000
    )
    assert more == pytest.approx(16_000 * 1e-9)


def test_a_group_costs_what_its_slowest_link_and_device_cost() -> None:
    devices = tuple(Device(f"cpu:{index}", 1 << 30, segment_seconds=index * 1e-5) for index in range(3))
    links = (
        Link("cpu:0", "cpu:1", latency_seconds=1e-6, bytes_per_second=1e9),
        Link("cpu:1", "cpu:0", latency_seconds=3e-6, bytes_per_second=1e8),
        Link("cpu:0", "cpu:2", latency_seconds=1.0, bytes_per_second=1.0),
    )
    costs = ExchangeCosts.of(Target(devices, links), (0, 1), copy_bytes_per_second=1e10, kernel_seconds=1e-6)
    assert costs.count == 2
    assert costs.latency_seconds == pytest.approx(3e-6)
    assert costs.seconds_per_byte == pytest.approx(1e-8)
    assert costs.segment_seconds == pytest.approx(1e-5)
    assert costs.copy_seconds_per_byte == pytest.approx(1e-10)


def test_parts_cross_between_hosts_once_where_that_is_shorter() -> None:
    near, far = (1e-6, 1e11), (1e-5, 1e9)
    devices = tuple(Device(f"{host}/cuda:{index}", 1 << 30, segment_seconds=0.0) for host in "ab" for index in range(4))
    links = tuple(
        Link(a.id, b.id, *(near if a.host == b.host else far)) for a in devices for b in devices if a is not b
    )
    target = Target(devices, links)
    costs = ExchangeCosts.of(target, range(8), copy_bytes_per_second=1e12, kernel_seconds=1e-6)
    assert costs.hosts == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert costs.takes_two_rounds(ROWS, REPLICATED, 10**7)
    assert costs.takes_two_rounds(PARTIAL, ROWS, 10**7)
    # As many devices on each host, or parts have no place there.
    uneven = ExchangeCosts.of(target, range(7), copy_bytes_per_second=1e12, kernel_seconds=1e-6)
    assert uneven.hosts == ()
    one_host = ExchangeCosts.of(target, range(4), copy_bytes_per_second=1e12, kernel_seconds=1e-6)
    assert not one_host.takes_two_rounds(ROWS, REPLICATED, 10**7)
    assert costs.seconds(ROWS, REPLICATED, 10**7) < uneven.seconds(ROWS, REPLICATED, 10**7)
