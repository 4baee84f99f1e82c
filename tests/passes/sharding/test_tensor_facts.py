"""Shapes, and which axes keep their size when symbolic dimensions change."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.passes.sharding.space.known_shapes import infer_all_shapes
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts


def read_facts(text: str, **sizes: int) -> TensorFacts:
    return TensorFacts.of(bind(load(parser.parse_model(text)), sizes, {}))


def model_of(
    body: str, inputs: str = "float[seq, 16] x", weights: str = "int64[1] zero = {0}, int64[1] one = {1}"
) -> str:
    return f'<ir_version: 8, opset_import: ["": 18]> g ({inputs}) => (y) <{weights}> {{ {body} }}'


# Each gives `y` an axis 0 whose size depends on `seq`, though it is the same for many sizes.
VARYING = {
    "at most 64": "s = Shape <start = 0, end = 1> (x) n = Min(s, c) y = ConstantOfShape(n)",
    "modulo": "s = Shape <start = 0, end = 1> (x) n = Mod(s, c) y = ConstantOfShape(n)",
    "rounded": "s = Shape <start = 0, end = 1> (x) d = Div(s, c) n = Mul(d, c) y = ConstantOfShape(n)",
    "at least": "s = Shape <start = 0, end = 1> (x) n = Max(s, c) y = ConstantOfShape(n)",
    "one more": "s = Shape <start = 0, end = 1> (x) n = Add(s, c) y = ConstantOfShape(n)",
    "a slice": "y = Slice(x, zero, c, zero)",
    "a reshape": "y = Reshape(x, minus)",
}


@pytest.mark.parametrize("size", [1, 2, 3, 8, 64, 100])
@pytest.mark.parametrize("limit", [1, 2, 8, 64])
@pytest.mark.parametrize("kind", VARYING)
def test_an_axis_that_depends_on_a_symbol_is_not_fixed(kind: str, limit: int, size: int) -> None:
    weights = f"int64[1] zero = {{0}}, int64[1] c = {{{limit}}}, int64[1] minus = {{-1}}"
    facts = read_facts(model_of(VARYING[kind], weights=weights), seq=size)
    varies = not (limit == 1 and kind in ("modulo", "at least", "a slice", "at most 64"))
    if "y" in facts.shapes and varies:
        assert facts.fixed["y"][0] is False


def test_other_axes_of_a_value_with_a_symbol_are_fixed() -> None:
    body = """
    s = Shape <start = 0, end = 1> (x)
    target = Concat <axis = 0> (s, heads)
    y = Reshape(x, target)
    """
    facts = read_facts(model_of(body, weights="int64[2] heads = {4, 4}"), seq=10)
    assert facts.shapes["y"] == (10, 4, 4)
    assert facts.fixed["y"] == (False, True, True)
    assert facts.fixed["x"] == (False, True)


def test_axes_that_are_equal_only_at_the_bound_sizes_are_not_fixed() -> None:
    text = model_of("y = Concat <axis = 0> (x, z)", inputs="float[seq, 16] x, float[past, 16] z")
    facts = read_facts(text, seq=1, past=7)
    assert facts.shapes["y"] == (8, 16)
    assert facts.fixed["y"] == (False, True)


def test_without_symbols_every_axis_is_fixed() -> None:
    facts = read_facts(model_of("y = Relu(x)", inputs="float[4, 16] x"))
    assert facts.fixed["y"] == (True, True)


def test_a_size_that_depends_on_values_is_unknown() -> None:
    facts = read_facts(model_of("z = NonZero(x) y = Transpose(z)"), seq=4)
    assert "y" not in facts.shapes
    assert facts.view(1) is None


def test_shapes_follow_targets_that_are_computed_in_several_steps() -> None:
    body = """
    s = Shape (x)
    rows = Slice(s, zero, one, zero)
    half = Div(rows, two)
    pair = Mul(half, two)
    float_pair = Cast <to = 1> (pair)
    root = Sqrt(float_pair)
    back = Cast <to = 7> (root)
    target = Concat <axis = 0> (back, minus)
    first = Slice(x, zero, pair, zero)
    y = Reshape(first, target)
    """
    weights = "int64[1] zero = {0}, int64[1] one = {1}, int64[1] two = {2}, int64[1] minus = {-1}"
    facts = read_facts(model_of(body, weights=weights), seq=17)
    assert facts.shapes["first"] == (16, 16)
    assert facts.shapes["y"] == (4, 64)
    assert facts.fixed["y"] == (False, False)


def test_overridable_initializers_are_no_constants() -> None:
    proto = parser.parse_model(model_of("y = Reshape(x, target)", inputs="float[4, 16] x, int64[2] target", weights=""))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([8, 8]), "target"))
    facts = TensorFacts.of(bind(load(proto), {}, {}))
    assert "target" not in facts.constants
    assert "target" not in facts.is_weight
    assert "y" not in facts.shapes


def test_small_integer_weights_are_constants() -> None:
    facts = read_facts(model_of("y = Reshape(x, target)", weights="int64[2] target = {-1, 8}"), seq=4)
    np.testing.assert_array_equal(facts.constants["target"], [-1, 8])
    view = facts.view(0)
    assert view is not None
    np.testing.assert_array_equal(view.constants[1], [-1, 8])


def test_bytes_count_packed_elements_and_ignore_unknown_values() -> None:
    facts = read_facts(model_of("h = Cast <to = 10> (x) y = Relu(h)"), seq=4)
    assert (facts.bytes("x"), facts.bytes("h"), facts.bytes("missing")) == (256, 128, 0)


def test_folding_gives_up_on_values_that_onnx_runtime_refuses() -> None:
    """A Reshape into a shape that does not fit: inference stops there, without an error."""
    body = "s = Shape (x) n = Add(s, one) y = Reshape(x, n)"
    model = bind(load(parser.parse_model(model_of(body, inputs="float[4, 16] x"))), {}, {})
    shapes = infer_all_shapes(model)
    assert shapes["n"] == (2,)


def make_noisy_model() -> ModelProto:
    return parser.parse_model(model_of("s = Shape (x) r = RandomNormalLike (x) y = Add(x, r)"))


def test_random_values_are_never_folded() -> None:
    facts = TensorFacts.of(bind(load(make_noisy_model()), {"seq": 2}, {}))
    assert facts.shapes["y"] == (2, 16)
    assert "r" not in facts.constants


def test_large_values_of_unknown_shape_are_not_computed() -> None:
    """T5's table of relative positions has a value per pair of tokens: it was computed for a million tokens."""
    steps = """s = Shape<start = 0, end = 1>(x) n = Squeeze(s) p = Range(c0, n, c1)
        a = Unsqueeze(p, zero) b = Unsqueeze(p, one) d = Sub(a, b) e = Abs(d) f = Cast<to = 1>(e) y = Add(f, f)"""
    weights = "int64 c0 = {0}, int64 c1 = {1}, int64[1] zero = {0}, int64[1] one = {1}"
    tracemalloc.start()
    facts = read_facts(model_of(steps, weights=weights), seq=40)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 100 << 20
    assert not any(facts.fixed.get("y", (False,)))
