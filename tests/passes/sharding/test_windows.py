"""Properties of operators by rows: windows with halos give the rows of the whole result."""

from typing import Any

import numpy as np
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from onnx import ModelProto, TensorProto, helper

from onnxplace.passes.sharding.rules.convolution_rules import ROW_AXIS, list_windows
from onnxplace.passes.sharding.rules.layouts import Division, Layout
from onnxplace.passes.sharding.rules.node_views import NodeView
from tests.support.forced_sharding import NotComparable, compare, try_strategies

PADDINGS = ("SAME_UPPER", "SAME_LOWER", "VALID", "NOTSET")


@st.composite
def geometries(draw, transposed: bool = False) -> dict[str, Any]:
    """Return kernel, strides, dilations and paddings of one or two spatial axes."""
    spatial = draw(st.integers(1, 2))
    each = {"min_size": spatial, "max_size": spatial}
    kernel = draw(st.lists(st.integers(1, 4), **each))
    strides = draw(st.lists(st.integers(1, 3), **each))
    attributes: dict[str, Any] = {"kernel_shape": kernel, "strides": strides}
    if draw(st.booleans()):
        attributes["dilations"] = draw(st.lists(st.integers(1, 2), **each))
    mode = "NOTSET" if transposed else draw(st.sampled_from(PADDINGS))
    if mode != "NOTSET":
        attributes["auto_pad"] = mode
    elif draw(st.booleans()):
        attributes["pads"] = [draw(st.integers(0, size - 1)) for size in kernel * 2]
    return attributes


def build(op: str, attributes: dict[str, Any], sizes: list[int]) -> tuple[ModelProto, dict[str, Any]]:
    random = np.random.default_rng(0)
    feeds = {"x": random.normal(size=(1, 2, *sizes)).astype(np.float32)}
    if "Conv" in op:
        feeds["w"] = random.normal(size=(2, 2, *attributes["kernel_shape"])).astype(np.float32)
    inputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, array.shape) for name, array in feeds.items()]
    output = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    node = helper.make_node(op, [*feeds], ["y"], **attributes)
    graph = helper.make_graph([node], "g", inputs, [output])
    return helper.make_model(graph, ir_version=10, opset_imports=[helper.make_opsetid("", 21)]), feeds


def check(op: str, attributes: dict[str, Any], sizes: list[int]) -> None:
    model, feeds = build(op, attributes, sizes)
    try:
        trials = list(try_strategies(model, [feeds]))
    except NotComparable:  # a kernel that does not fit into its input, or a form without an implementation
        assume(False)
    assert [trial for trial in trials if trial.problem] == []


SLOW = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.filter_too_much])
SIZES = st.lists(st.integers(4, 11), min_size=2, max_size=2)


@given(geometries(), SIZES, st.sampled_from(["Conv", "LpPool"]))
@SLOW
def test_convolutions_by_rows(attributes, sizes, op):
    if op == "LpPool":
        attributes["ceil_mode"] = int("auto_pad" not in attributes and sizes[0] % 2)
    check(op, attributes, sizes[: len(attributes["kernel_shape"])])


@given(geometries(), SIZES, st.sampled_from(["MaxPool", "AveragePool"]), st.booleans(), st.booleans())
@SLOW
def test_pools_by_rows(attributes, sizes, op, rounds_up, counts_padding):
    if rounds_up and "auto_pad" not in attributes:
        attributes["ceil_mode"] = 1
    if counts_padding and op == "AveragePool":
        attributes["count_include_pad"] = 1
    check(op, attributes, sizes[: len(attributes["kernel_shape"])])


@given(geometries(transposed=True), SIZES, st.integers(0, 2))
@SLOW
def test_transposed_convolutions_by_rows(attributes, sizes, extra):
    attributes["output_padding"] = [min(extra, stride - 1) for stride in attributes["strides"]]
    check("ConvTranspose", attributes, sizes[: len(attributes["kernel_shape"])])


def list_rows(view: NodeView) -> dict[Layout, Any]:
    """Return the rows of the input on two devices, by layout of a result whose rows are all right."""
    division, size = Division((1.0, 1.0)), view.shape(0)[ROW_AXIS]
    layouts = [pair[:2] for pair in list_windows(view, division) if pair[0].is_split and not pair[1].valid]
    return {result: tuple(division.held(source, size)) for source, result in layouts}


def test_a_device_reads_its_rows_and_those_under_its_windows():
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1])
    view = NodeView(node, ((1, 1, 8), (1, 1, 3)), ((1, 1, 8),), opset=21)
    rows = list_rows(view)
    assert rows[Layout(2, 1, 2)] == ((0, 5), (3, 8))
    assert rows[Layout(2, rows=((0, 5), (3, 8)))] == ((0, 6), (2, 8))


def test_a_transposed_convolution_reads_the_rows_that_reach_its_own():
    node = helper.make_node("ConvTranspose", ["x", "w"], ["y"], strides=[2], pads=[1, 1], output_padding=[1])
    view = NodeView(node, ((1, 1, 4), (1, 1, 3)), ((1, 1, 8),), opset=21)
    assert list_rows(view)[Layout(2, 1, 2)] == ((0, 3), (1, 4))


def test_windows_in_the_padding_alone_leave_a_device_without_rows():
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[4, 0])
    view = NodeView(node, ((1, 1, 2), (1, 1, 2)), ((1, 1, 5),), opset=21)
    assert Layout(2, 1, 5) not in list_rows(view)


def test_wrong_rows_are_kept_where_there_are_floats_alone():
    node = helper.make_node("Conv", ["x", "w"], ["y"], pads=[1, 1])
    for kind, may_be_wrong in ((TensorProto.FLOAT, True), (TensorProto.INT32, False)):
        view = NodeView(node, ((1, 1, 8), (1, 1, 3)), ((1, 1, 8),), opset=21, element_types=(kind,))
        assert any(result.valid for _, result, _ in list_windows(view, Division((1.0, 1.0)))) == may_be_wrong


def test_results_are_compared():
    assert compare(np.float32([1]), np.float32([2]))
