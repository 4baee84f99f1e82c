"""The time of parts of operators, as a share of the whole."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from onnx import numpy_helper, parser

from onnxplace.passes.profiling.roofline import PeakRates
from onnxplace.passes.sharding.rules.layouts import PARTIAL, Layout
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy
from onnxplace.passes.sharding.space.sharding_costs import (
    STREAMED_BYTES_PER_SECOND,
    WorkCosts,
    local_shapes,
    peak_rates,
    rows_outside,
)
from onnxplace.passes.sharding.space.strategy_space import StrategySpace
from onnxplace.target.product_times import ProductTimes
from onnxplace.target.target import Device
from tests.support.shardings import make_costs, make_space

PEAKS = PeakRates(operations_per_second=1e9, bytes_per_second=1e9, kernel_seconds=1e-9)
PRODUCT = """
<ir_version: 8, opset_import: ["": 18]>
g (float[64, 256] x, float[256, 128] w) => (z) { y = MatMul(x, w) z = Shape(y) }
"""
IMAGE = """
<ir_version: 8, opset_import: ["": 18]>
g (float[1, 3, 16, 16] x, float[5, 3, 3, 3] w) => (z)
{ h = Relu(x) y = Conv <pads = [1, 1, 1, 1]> (h, w) z = Relu(y) }
"""


def space_of(text: str, *shares: float) -> StrategySpace:
    return make_space(parser.parse_model(text), {}, shares or (1.0, 1.0))


def costs_of(space: StrategySpace) -> WorkCosts:
    return WorkCosts(space, (PEAKS,) * space.division.count)


def find(space: StrategySpace, index: int, axis: int) -> NodeStrategy:
    """Return the first strategy of a node whose result is split along an axis; -2 for summands."""
    return next(item for item in space.strategies[index] if item.outputs[0] and item.outputs[0].axis == axis)


def test_parts_of_a_product_take_their_share_of_its_operations() -> None:
    space = space_of(PRODUCT, 3.0, 1.0)
    work = costs_of(space)
    for axis in (0, 1, PARTIAL.axis):
        strategy = find(space, 0, axis)
        assert work.part_seconds(0, strategy, 0, 1.0) == pytest.approx(0.75, rel=1e-3)
        assert work.part_seconds(0, strategy, 1, 1.0) == pytest.approx(0.25, rel=1e-3)


def test_parts_of_a_measured_product_take_what_its_coefficients_say() -> None:
    space = space_of(PRODUCT, 3.0, 1.0)
    times = ProductTimes(1e-6, 4e-6, 1000.0, 0.8, 0.9, 2.0)
    work = WorkCosts(space, (replace(PEAKS, products={"tf32": times}),) * 2)

    def seconds(m: int, n: int, k: int) -> float:
        return times.seconds(2e-9 * m * n * k, 4e-9 * (m * k + k * n + m * n), k)

    assert work.whole_seconds(0) == pytest.approx(seconds(64, 128, 256))
    for axis, part in ((0, (48, 128, 256)), (1, (64, 96, 256)), (PARTIAL.axis, (64, 128, 192))):
        share = work.part_seconds(0, find(space, 0, axis), 0, 1.0)
        assert share == pytest.approx(seconds(*part) / seconds(64, 128, 256))


def test_whole_nodes_take_the_whole_time() -> None:
    space = space_of(PRODUCT)
    assert costs_of(space).part_seconds(0, space.strategies[0][0], 1, 1.0) == 1.0


def test_a_part_never_takes_less_than_a_kernel_nor_more_than_the_whole() -> None:
    space = space_of(PRODUCT)
    slow = PeakRates(operations_per_second=1e15, bytes_per_second=1e15, kernel_seconds=1.0)
    work = WorkCosts(space, (slow, slow))
    assert all(0.99 < work.part_seconds(0, strategy, 0, 1.0) <= 1.0 for strategy in space.strategies[0])


def test_the_slowest_device_counts() -> None:
    space = space_of(PRODUCT, 3.0, 1.0)
    work = costs_of(space)
    options = list(space.strategies[0])
    seconds = np.array([[1.0, 0.0], [9.0, 0.0]])  # [device, node]
    table = work.table(seconds, make_costs(2))
    assert table[0][options.index(find(space, 0, 0))] == pytest.approx(9 * 0.25, rel=1e-3)
    assert table[0][0] == 9.0


def test_shapes_of_parts_follow_the_layouts() -> None:
    space = space_of(PRODUCT, 3.0, 1.0)
    view = space.views[0]
    assert view is not None
    assert local_shapes(space.division, view, find(space, 0, 1), 1) == (((64, 256), (256, 32)), ((64, 32),))
    assert local_shapes(space.division, view, find(space, 0, PARTIAL.axis), 0) == (
        ((64, 192), (192, 128)),
        ((64, 128),),
    )


def test_windows_have_halos_whose_rows_are_computed_twice() -> None:
    space = space_of(IMAGE, 1.0, 1.0, 1.0)
    view = space.views[1]
    assert view is not None
    strategies = [strategy for strategy in space.strategies[1] if strategy.outputs[0].axis == 2]
    no_more, more = (next(s for s in strategies if bool(s.outputs[0].rows) == overlaps) for overlaps in (False, True))
    assert [local_shapes(space.division, view, no_more, item)[0][0][2] for item in range(3)] == [6, 8, 6]
    work = costs_of(space)
    table = dict(zip(space.strategies[1], work.table(np.ones((3, 3)), make_costs(3))[1]))
    # The device in the middle has two neighbours.
    assert table[more] == work.part_seconds(1, more, 1, 1.0) > work.part_seconds(1, more, 0, 1.0)
    assert table[no_more] < table[more] < 1.0


def test_rows_outside_of_a_part_are_counted() -> None:
    assert rows_outside((2, 9), (3, 8)) == 2
    assert rows_outside((3, 8), (0, 16)) == 0
    assert rows_outside((0, 4), (6, 8)) == 4


def test_cores_multiply_the_peak_of_a_cpu_only() -> None:
    one, four = (peak_rates(Device("cpu:0", 1 << 30, cores=cores)) for cores in (1, 4))
    assert four.operations_per_second == 4 * one.operations_per_second
    assert four.bytes_per_second == one.bytes_per_second
    assert peak_rates(Device("cuda:0", 1 << 30)).operations_per_second > one.operations_per_second


def test_parts_of_a_measured_product_read_all_weights_that_they_share() -> None:
    text = "(float[64,256] x) => (float[64,256] y) { y = MatMul(x, w) }"
    model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> g {text}')
    model.graph.initializer.append(numpy_helper.from_array(np.zeros((256, 256), np.float32), "w"))
    space = make_space(model, {}, (1.0, 1.0))
    work = WorkCosts(space, (PeakRates(1e11, 1e9, 1e-6),) * 2, measured=(True, True))
    seconds = {strategy.outputs[0]: work.part_seconds(0, strategy, 0, 1e-3) for strategy in space.strategies[0][1:]}
    rows, columns = seconds[Layout(0, 1, 2)], seconds[Layout(1, 1, 2)]
    assert columns == pytest.approx(0.5e-3, rel=0.01)
    assert rows == pytest.approx(columns + 256 * 256 * 4 / STREAMED_BYTES_PER_SECOND / 2, rel=0.01)
