"""Nodes with numbers that a device may change are found, and sizes and indices are left alone."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from onnx import parser

from onnxplace.machine.ort_sessions import make_session_options, open_session
from onnxplace.model.loading import load
from onnxplace.model.whole_numbers import MAX_INDEX, find_changed_nodes
from onnxplace.passes.sharding.space.known_shapes import infer_shapes_and_values

HEADER = '<ir_version: 8, opset_import: ["": 17]> g '


def find_names(text: str, name: str = "int64", found: str = "int32", **dimensions: int) -> set[str]:
    """Return the names of the nodes that a device with `found` in place of a type has to refuse."""
    model = replace(load(parser.parse_model(HEADER + text)), dimensions=dimensions)
    changed = find_changed_nodes(model, name, found, infer_shapes_and_values(model)[1])
    return {node.name for node, is_changed in zip(model.nodes, changed) if is_changed}


TABLE = "<float[4, 2] table = {1, 2, 3, 4, 5, 6, 7, 8}>"


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ("(int64[3] x) => (int64[3] y) { [add] y = Add(x, x) }", {"add"}),
        ("(int64[3] x) => (float[3] y) { [cast] y = Cast<to=1>(x) }", {"cast"}),
        ("(int64[3] x) => (bool[3] y) { [cast] y = Cast<to=9>(x) }", {"cast"}),
        ("(int64[3] x) => (int64[1, 3] y) <int64[1] axes = {0}> { [move] y = Unsqueeze(x, axes) }", {"move"}),
        ("(float[3] x) => (int64[3] y) { [cast] y = Cast<to=7>(x) }", {"cast"}),
        ("(float[3] x) => (float[3] y) { [relu] y = Relu(x) }", set()),
        # Tokens: rows of a table.
        (f"(int64[3] x) => (float[3, 2] y) {TABLE} {{ [take] y = Gather(table, x) }}", set()),
        # What is added to a token, or computed from it, is as large.
        (
            f"(int64[3] x) => (float[3, 2] y) {TABLE[:-1]}, int64 one = {{1}}> "
            "{ [add] a = Add(x, one) [take] y = Gather(table, a) }",
            set(),
        ),
        (
            f"(int64[3] x) => (float[3, 2] y, float[3] z) {TABLE} "
            "{ [take] y = Gather(table, x) [cast] z = Cast<to=1>(x) }",
            set(),
        ),
        # Of two numbers that are large, the difference may be small.
        (
            f"(int64[3] x, int64[3] z) => (float[3, 2] y) {TABLE} "
            "{ [sub] a = Sub(x, z) [take] y = Gather(table, a) }",
            {"sub"},
        ),
        # What a Where does not take may be large. A condition says nothing about the number that it was.
        (
            f"(int64[3] x, int64[3] a, int64[3] b) => (float[3, 2] y) {TABLE} "
            "{ [cast] c = Cast<to=9>(x) [where] i = Where(c, a, b) [take] y = Gather(table, i) }",
            {"cast", "where"},
        ),
        (
            "(int64[3] x) => (bool[1, 3] y) <int64[1] axes = {0}> "
            "{ [cast] c = Cast<to=9>(x) [move] y = Unsqueeze(c, axes) }",
            {"cast"},
        ),
        (
            f"(int64[3] x) => (float[3, 2] y) {TABLE} {{ [cast] c = Cast<to=6>(x) [take] y = Gather(table, c) }}",
            set(),
        ),
        ("(int64[3] x) => (int32[3] y) { [cast] y = Cast<to=6>(x) }", {"cast"}),
        (
            f"(int64[3] x) => (float[3, 2] y) {TABLE} "
            "{ [shorten] a = Cast<to=5>(x) [widen] b = Cast<to=7>(a) [take] y = Gather(table, b) }",
            {"shorten"},
        ),
        # Small types stay small.
        ("(bool[3] x) => (int64[3] y) { [cast] y = Cast<to=7>(x) }", set()),
        ("(int32[3] x) => (int64[3] y) { [cast] a = Cast<to=7>(x) [neg] y = Neg(a) }", set()),
        ("(uint32[3] x) => (int64[3] y) { [cast] y = Cast<to=7>(x) }", {"cast"}),
        ("(int32[3] x) => (int64[3] y) { [cast] a = Cast<to=7>(x) [mul] y = Mul(a, a) }", {"mul"}),
        # Constants are known.
        (
            "(bool[3] c, int64[3] x) => (int64[3] y) <int64 big = {4294967296}> { [where] y = Where(c, big, x) }",
            {"where"},
        ),
        (
            "(bool[3] c) => (int64[3] y) <int64 big = {4294967296}, int64 a = {1}> { [where] y = Where(c, big, a) }",
            {"where"},
        ),
        ("(bool[3] c) => (int64[3] y) <int64 two = {2}, int64 one = {1}> { [where] y = Where(c, two, one) }", set()),
        # To the end of an axis, however long that is.
        (
            "(float[3] x) => (float[2] y) <int64[1] start = {1}, int64[1] end = {9223372036854775807}> "
            "{ [cut] y = Slice(x, start, end) }",
            set(),
        ),
        # Positions of elements.
        ("(float[3, 4] x) => (int64[3, 1] y) { [first] y = ArgMax<axis=1>(x) }", set()),
        (
            "(int64[4] x) => (int64[2] y, int64[2] z) <int64[1] k = {2}> { [top] y, z = TopK(x, k) }",
            {"top"},
        ),
        ("(float[4] x) => (float[2] y, int64[2] z) <int64[1] k = {2}> { [top] y, z = TopK(x, k) }", set()),
        # Another operator of this name.
        ("(double[3] x) => (double[3] y) { [relu] y = Relu(x) }", set()),
    ],
)
def test_numbers_of_64_bits_are_left_to_others_unless_they_are_small(text, refused):
    assert find_names(text) == refused


def test_sizes_are_computed_by_any_device():
    text = """(float[batch, 6] x) => (float[batch, 3, 2] y)
        <int64 zero = {0}, int64[1] axes = {0}, int64[2] rest = {3, 2}> {
        [shape] s = Shape(x) [take] b = Gather(s, zero) [widen] c = Unsqueeze(b, axes)
        [join] t = Concat<axis=0>(c, rest) [fold] y = Reshape(x, t) }"""
    assert find_names(text, batch=4) == set()


def test_sizes_that_are_too_large_are_refused():
    text = """(float[batch] x) => (int64[1] y) { [shape] s = Shape(x) [square] y = Mul(s, s) }"""
    assert find_names(text, batch=50_000) == {"square"}
    assert find_names(text, batch=40_000) == set()


def test_a_device_that_computes_whole_numbers_in_floats_has_smaller_ones():
    text = f"(int64[3] x) => (float[3, 2] y) {TABLE} {{ [take] y = Gather(table, x) }}"
    assert find_names(text, found="float32") == {"take"}
    assert find_names("(int32[3] x) => (int64[3] y) { [cast] y = Cast<to=7>(x) }", found="float32") == {"cast"}
    assert find_names("(int32[3] x) => (int64[3] y) { [cast] y = Cast<to=7>(x) }", found="float64") == set()
    assert find_names("(int16[3] x) => (int64[3] y) { [cast] y = Cast<to=7>(x) }", found="float32") == set()
    assert find_names("(bool[3] x) => (int64[3] y) { [cast] y = Cast<to=7>(x) }", found="few bits") == {"cast"}


def test_all_floats_of_a_type_are_refused():
    text = "(double[3] x) => (float[3] y) { [relu] a = Relu(x) [cast] b = Cast<to=1>(a) [neg] y = Neg(b) }"
    assert find_names(text, "double", "float32") == {"relu", "cast"}
    assert find_names(text, "float16", "bfloat16") == set()


# ------------------------------------------------------------------------------------------------------------- property


OPERATORS = ("Add", "Sub", "Mul", "Neg", "Abs", "Max", "Min", "Concat", "Where", "Cast", "Identity", "Gather", "take")
CONSTANTS = {"zero": [0], "three": [3], "table": [5, 7, 1, 0]}


def write_nodes(operator: str, a: str, b: str, out: str) -> list[str]:
    """Return one or two nodes that compute a vector of three numbers from others, as text."""
    if operator == "Concat":
        return [f"{out}c = Concat<axis=0>({a}, {b})", f"{out} = Slice({out}c, zero, three)"]
    if operator == "Where":
        return [f"{out}c = Cast<to=9>({b})", f"{out} = Where({out}c, {a}, {b})"]
    if operator == "Cast":
        return [f"{out}c = Cast<to=5>({a})", f"{out} = Cast<to=7>({out}c)"]
    if operator == "take":
        return [f"{out} = Gather(table, {a})"]
    return [f"{out} = {operator}({a})" if operator in ("Neg", "Abs", "Identity") else f"{out} = {operator}({a}, {b})"]


@st.composite
def whole_models(draw: st.DrawFn) -> tuple[list[str], dict[str, np.ndarray]]:
    """Draw a model of vectors of whole numbers, some of which are indices of a table, and inputs of all sizes."""
    names, nodes = ["x0", "x1"], []
    for index in range(draw(st.integers(1, 8))):
        sources = [draw(st.sampled_from(names)) for _ in range(2)]
        nodes += write_nodes(draw(st.sampled_from(OPERATORS)), *sources, f"v{index}")
        names.append(f"v{index}")
    numbers = st.one_of(st.integers(-3, 2), st.integers(-(1 << 40), 1 << 40))
    return nodes, {name: np.array([draw(numbers) for _ in range(3)], np.int64) for name in names[:2]}


@settings(max_examples=300, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(whole_models())
def test_nodes_that_are_not_refused_have_small_numbers_whatever_the_inputs(drawn):
    nodes, feeds = drawn
    names = [node.split()[0] for node in nodes]
    types = ["int16" if "to=5" in node else "bool" if "to=9" in node else "int64" for node in nodes]
    sizes = [6 if "Concat" in node else 3 for node in nodes]
    outputs = ", ".join(f"{kind}[{size}] {name}" for kind, size, name in zip(types, sizes, names))
    weights = ", ".join(f"int64[{len(v)}] {name} = {{{', '.join(map(str, v))}}}" for name, v in CONSTANTS.items())
    text = f"(int64[3] x0, int64[3] x1) => ({outputs}) <{weights}> {{ {' '.join(nodes)} }}"
    proto = parser.parse_model(HEADER + text)
    try:
        session = open_session(proto.SerializeToString(), make_session_options([0], "none"))
        results = session.run(None, feeds)
    except Exception:  # noqa: BLE001 - an index beyond a table is an error on any device
        assume(False)
    values, model = {**feeds, **dict(zip(names, results))}, load(proto)
    changed = find_changed_nodes(model, "int64", "int32", infer_shapes_and_values(model)[1])
    for node, is_changed in zip(model.nodes, changed):
        for name in () if is_changed else {*node.input, *node.output} & values.keys():
            if values[name].dtype == np.int64:
                # What a few additions make of numbers within range counts as within range.
                assert abs(values[name]).max() < 16 * MAX_INDEX, (node, values[name])
