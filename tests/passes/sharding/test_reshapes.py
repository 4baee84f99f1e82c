"""Properties of cuts under reshapes: reshaping a part gives the part of the reshaped tensor."""

import math

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from onnx import TensorProto, helper, parser

from onnxplace.passes.sharding.rules.layouts import Division, Layout
from onnxplace.passes.sharding.rules.reshape_rules import reshape_layout
from tests.support.forced_sharding import try_strategies

SHARES = st.sampled_from([(1.0, 1.0), (1.0, 1.0, 1.0), (3.0, 1.0), (1.0, 2.0, 3.0)])


@st.composite
def groupings(draw, factors: list[int]) -> tuple[int, ...]:
    """Return a shape of these factors in order: neighbours are merged, and ones added."""
    shape: list[int] = []
    for factor in factors:
        if shape and draw(st.booleans()):
            shape[-1] *= factor
        else:
            shape += [1] * draw(st.integers(0, 1)) + [factor]
    return tuple(shape + [1] * draw(st.integers(0, 1)))


@st.composite
def reshapes(draw) -> tuple[tuple[int, ...], tuple[int, ...]]:
    factors = draw(st.lists(st.integers(2, 4), min_size=1, max_size=5))
    return draw(groupings(factors)), draw(groupings(factors))


def parts(array: np.ndarray, layout: Layout, division: Division) -> list[np.ndarray]:
    size = array.shape[layout.axis]
    return [
        np.concatenate(
            [array.take(range(low, high), layout.axis) for low, high in division.ranges(layout, size, device)],
            layout.axis,
        )
        for device in range(division.count)
    ]


@st.composite
def layouts(draw, shape: tuple[int, ...], division: Division) -> Layout:
    axis = draw(st.integers(0, len(shape) - 1))
    divisors = [outer for outer in range(1, shape[axis] + 1) if shape[axis] % outer == 0]
    outer = draw(st.sampled_from(divisors))
    inner = shape[axis] // outer
    blocks = draw(st.sampled_from([0, *(count for count in range(1, inner + 1) if inner % count == 0)]))
    layout = division.split(axis, shape[axis], outer, blocks)
    assume(layout is not None)
    assert layout is not None
    return layout


@given(st.data(), reshapes(), SHARES)
@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_a_reshaped_part_is_the_part_of_the_reshaped_tensor(data, shapes, shares):
    source, result = shapes
    division = Division(shares)
    layout = data.draw(layouts(source, division))
    reshaped = reshape_layout(source, result, layout, division)
    assume(reshaped is not None)
    whole = np.arange(math.prod(source)).reshape(source)
    expected = parts(whole.reshape(result), reshaped, division)
    for device, part in enumerate(parts(whole, layout, division)):
        local = division.local_shape(reshaped, result, device)
        np.testing.assert_array_equal(part.reshape(local), expected[device])


@given(st.data(), reshapes(), SHARES)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
def test_reshaping_there_and_back_keeps_the_cut(data, shapes, shares):
    source, result = shapes
    division = Division(shares)
    layout = data.draw(layouts(source, division))
    reshaped = reshape_layout(source, result, layout, division)
    assume(reshaped is not None)
    assert reshape_layout(result, source, reshaped, division) in (layout, None)


@given(st.data(), SHARES, st.lists(st.integers(1, 12), min_size=1, max_size=3))
@settings(max_examples=100, deadline=None)
def test_the_parts_of_a_layout_cover_an_axis_once(data, shares, shape):
    division = Division(shares)
    layout = data.draw(layouts(tuple(shape), division))
    size = shape[layout.axis]
    covered = [
        index
        for device in range(division.count)
        for low, high in division.ranges(layout, size, device)
        for index in range(low, high)
    ]
    assert sorted(covered) == list(range(size))
    assert sum(division.local_size(layout, size, device) for device in range(division.count)) == size
    assert sum(division.fraction(layout, device) for device in range(division.count)) == pytest.approx(1)


@given(st.data(), reshapes())
@settings(max_examples=25, deadline=None)
def test_a_reshape_with_zeros_and_minus_one_computes_what_the_whole_one_does(data, shapes):
    source, result = shapes
    target = [
        0 if index < len(source) and size == source[index] and data.draw(st.booleans()) else size
        for index, size in enumerate(result)
    ]
    if data.draw(st.booleans()):
        target[data.draw(st.integers(0, len(target) - 1))] = -1
    node = helper.make_node("Reshape", ["x", "s"], ["y"])
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, source)],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, result)],
        [helper.make_tensor("s", TensorProto.INT64, [len(target)], target)],
    )
    model = helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)])
    feeds = {"x": np.arange(math.prod(source), dtype=np.float32).reshape(source)}
    assert [trial for trial in try_strategies(model, [feeds]) if trial.problem] == []


COMPUTED = {
    "a zero where the cut axis was": """(float[n,4,6] x) => (float[m,4,3,2] y)
        <int64[1] z = {0}, int64[1] f = {4}, int64[2] t = {3, 2}> {
        s = Shape<start=0,end=1>(x) p = Neg(s) q = Neg(p) c = Concat<axis=0>(q, z, t) y = Reshape(x, c) }""",
    "the size of the whole": """(float[n,4,6] x) => (float[m,24] y) <int64[1] k = {-1}> {
        s = Shape<start=0,end=1>(x) c = Concat<axis=0>(s, k) y = Reshape(x, c) }""",
    "heads": """(float[n,5,12] x) => (float[n,3,5,4] y) <int64[4] t = {0, -1, 3, 4}> {
        r = Reshape(x, t) y = Transpose<perm=[0,2,1,3]>(r) }""",
    "merged with a symbolic axis": """(float[n,4,6] x) => (float[m,6] y) <int64[2] t = {-1, 6}> {
        y = Reshape(x, t) }""",
    "expanded": """(float[n,1,6] x) => (float[n,4,6] y) <int64[2] t = {4, 1}> {
        s = Shape<start=0,end=1>(x) c = Concat<axis=0>(s, t) y = Expand(x, c) }""",
    "sliced by a shape": """(float[n,8,6] x) => (float[n,m,6] y) <int64[1] z = {0}, int64[1] a = {1}> {
        s = Shape<start=2,end=3>(x) y = Slice(x, z, s, a) }""",
}


@pytest.mark.parametrize("name", COMPUTED)
def test_a_model_split_at_one_size_computes_other_sizes_too(name):
    model = parser.parse_model(f'<ir_version: 10, opset_import: ["": 21]> g {COMPUTED[name]}')
    shape = [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]
    feeds = [{"x": np.random.default_rng(n).normal(size=(n, *shape[1:])).astype(np.float32)} for n in (4, 6, 1)]
    trials = list(try_strategies(model, feeds))
    assert [trial for trial in trials if trial.problem] == []
    assert trials
