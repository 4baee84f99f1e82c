"""Local functions: defaults of attributes, overloads, opsets, and names of operators."""

import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from onnx import AttributeProto, ModelProto, helper, numpy_helper, parser

from onnxplace.driver.sources import ModelSource, bind_source
from onnxplace.errors import ModelError
from onnxplace.model.loading import load
from tests.support.random_functions import SIZE, draw_model
from tests.support.random_models import reference
from tests.support.random_placements import RandomPlacement, assert_same, compiled_with, run_together

X = np.random.default_rng(0).standard_normal((SIZE, SIZE)).astype(np.float32)
SOFTMAX = "f <axis: int = 0> (x) => (y) { y = Softmax<axis: int = @axis>(x) }"


def parse_calls(body: str, *functions: str, opset: int = 17, function_opset: int = 17) -> ModelProto:
    text = f'<ir_version: 10, opset_import: ["": {opset}, "own": 1]> g (float[3, 3] x) => (float[3, 3] y) {{ {body} }}'
    for function in functions:
        text += f'\n<domain: "own", opset_import: ["": {function_opset}, "own": 1]> {function}'
    return parser.parse_model(text)


def softmax(values: np.ndarray, axis: int) -> np.ndarray:
    powers = np.exp(values)
    return powers / powers.sum(axis, keepdims=True)


def compute(model: ModelProto) -> np.ndarray:
    (outputs,) = reference(model, [{"x": X}])
    return outputs[0]


def check_inlined(model: ModelProto) -> np.ndarray:
    """Compare a model without its functions with the model as ONNX Runtime runs it, and return the result."""
    inlined, expected = load(model), compute(model)
    assert not any(node.domain == "own" for node in inlined.nodes)
    np.testing.assert_allclose(compute(inlined.whole_proto()), expected, rtol=1e-5, atol=1e-6)
    return expected


# --- defaults of attributes ---------------------------------------------------------------------------------------


@settings(max_examples=200)
@given(st.integers(0, 2**32))
def test_functions_of_random_models_compute_what_onnx_runtime_computes(seed: int):
    check_inlined(draw_model(seed))


@pytest.mark.parametrize(
    ("body", "functions", "axis"),
    [
        ("y = own.f(x)", [SOFTMAX], 0),
        ("y = own.f<axis: int = 1>(x)", [SOFTMAX], 1),
        # The default of the caller is passed on ...
        ("y = own.g(x)", ["g <a: int = 0> (x) => (y) { y = own.f<axis: int = @a>(x) }", SOFTMAX.replace("0", "1")], 0),
        # ... and an attribute that the caller does not have leaves the default of the called one.
        ("y = own.g(x)", ["g <a> (x) => (y) { y = own.f<axis: int = @a>(x) }", SOFTMAX], 0),
        (
            "y = own.h(x)",
            [
                "h <a> (x) => (y) { y = own.g<a: int = @a>(x) }",
                "g <a> (x) => (y) { y = own.f<axis: int = @a>(x) }",
                SOFTMAX,
            ],
            0,
        ),
        ("y = own.f(x)", ["f <axis> (x) => (y) { y = Softmax<axis: int = @axis>(x) }"], 1),
        # Functions may be in any order.
        ("y = own.g(x)", [SOFTMAX, "g (x) => (y) { y = own.f(x) }"], 0),
        (
            "t = Constant<value = bool {1}>() y = If(t) <then_branch = t () => (u) { u = own.f(x) }, "
            "else_branch = e () => (v) { v = own.f<axis: int = 1>(x) }>",
            [SOFTMAX],
            0,
        ),
    ],
)
def test_a_call_without_an_attribute_takes_the_default(body: str, functions: list[str], axis: int):
    np.testing.assert_allclose(check_inlined(parse_calls(body, *functions)), softmax(X, axis), rtol=1e-5)


def test_a_bundle_computes_defaults_of_functions(tmp_path: Path):
    model = parse_calls("a = Abs(x) b = own.f(a) y = Neg(b)", SOFTMAX)
    bundle = compiled_with(model, RandomPlacement((0, 1)), tmp_path, optimized=False)
    assert_same(run_together(bundle, [{"x": X}]), reference(model, [{"x": X}]))


def test_a_constant_has_the_default_of_its_function():
    model = parse_calls(
        "y = own.f(x)",
        "f <n: int = 3> (x) => (y) { c = Constant<value_int: int = @n>() d = CastLike(c, x) y = Mul(x, d) }",
    )
    np.testing.assert_array_equal(check_inlined(model), 3 * X)


@pytest.mark.parametrize("is_default", [True, False])
def test_sparse_tensors_are_attributes_of_functions(is_default: bool):
    model = parse_calls("y = own.f(x)", "f (x) => (y) { c = Constant<value_int: int = @c>() y = Add(x, c) }")
    function, indices = model.functions[0], numpy_helper.from_array(np.array([2]), "places")
    sparse = helper.make_sparse_tensor(numpy_helper.from_array(np.array([7], np.float32), "values"), indices, [SIZE])
    reference_to_c = AttributeProto(name="sparse_value", ref_attr_name="c", type=AttributeProto.SPARSE_TENSOR)
    function.node[0].attribute[0].CopyFrom(reference_to_c)
    if is_default:
        function.attribute_proto.append(helper.make_attribute("c", sparse))
    else:
        function.attribute.append("c")
        model.graph.node[0].attribute.append(helper.make_attribute("c", sparse))
    np.testing.assert_array_equal(check_inlined(model), X + np.array([0, 0, 7], np.float32))


@pytest.mark.parametrize("is_default", [True, False])
def test_graphs_that_are_attributes_may_call_functions(is_default: bool):
    model = parse_calls(
        "y = own.g(x)",
        """g (x) => (y) {
            t = Constant<value = bool {1}>()
            y = If(t) <then_branch = t () => (u) { u = Neg(x) }, else_branch = e () => (v) { v = Abs(x) }>
        }""",
        SOFTMAX,
    )
    branch = parser.parse_graph(
        "b () => (float[3, 3] o) { k = Constant<value = float[3, 3] {1, 2, 3, 4, 5, 6, 7, 8, 9}>() }"
    )
    branch.node.append(helper.make_node("f", ["k"], ["o"], domain="own"))
    chosen = next(item for item in model.functions[0].node[1].attribute if item.name == "then_branch")
    chosen.CopyFrom(AttributeProto(name="then_branch", ref_attr_name="b", type=AttributeProto.GRAPH))
    if is_default:
        model.functions[0].attribute_proto.append(helper.make_attribute("b", branch))
    else:
        model.functions[0].attribute.append("b")
        model.graph.node[0].attribute.append(helper.make_attribute("b", branch))
    constant = np.arange(1, 10, dtype=np.float32).reshape(3, 3)
    np.testing.assert_allclose(check_inlined(model), softmax(constant, 0), rtol=1e-5)


# --- overloads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("overload", ["", "other"])
def test_a_call_names_the_overload_of_a_function(overload: str):
    model = parse_calls("y = own.f(x)", SOFTMAX, SOFTMAX.replace("0", "1"))
    model.functions[1].overload = "other"
    model.graph.node[0].overload = overload
    np.testing.assert_allclose(check_inlined(model), softmax(X, 1 if overload else 0), rtol=1e-5)


def test_an_overload_may_call_another_one():
    model = parse_calls("y = own.f(x)", "f (x) => (y) { h = own.f(x) y = Neg(h) }", SOFTMAX)
    model.functions[0].overload = model.graph.node[0].overload = "outer"
    np.testing.assert_allclose(check_inlined(model), -softmax(X, 0), rtol=1e-5)


# --- opsets -------------------------------------------------------------------------------------------------------


PAD = 'f (x) => (y) {{ p = Constant<value_ints = [0, 1, 0, 1]>() y = Pad<mode = "{mode}">(x, p) }}'
RESHAPED = """f (x) => (y) {
    t = Transpose<perm = [1, 0]>(x) s = Shape(t) z = Constant<value_ints = [-1, 1]>()
    r = Reshape(t, z) y = Reshape(r, s)
}"""


@pytest.mark.parametrize("opset", [17, 18, 21])
@pytest.mark.parametrize("function_opset", [17, 18, 19, 23])
@pytest.mark.parametrize("function", [PAD.format(mode="edge"), PAD.format(mode="reflect"), RESHAPED])
def test_an_operator_that_only_got_types_runs_in_the_opset_of_the_model(function: str, opset: int, function_opset: int):
    check_inlined(parse_calls("y = own.f(x)", function, opset=opset, function_opset=function_opset))


def test_an_operator_that_changed_is_converted():
    model = parse_calls("y = own.f(x)", SOFTMAX, function_opset=11)  # which flattens to two axes
    np.testing.assert_allclose(compute(load(model).whole_proto()), np.exp(X) / np.exp(X).sum(), rtol=1e-5)


def test_a_refusal_names_the_function():
    axes = "f (x) => (y) { p = Constant<value_ints = [0, 1]>() a = Constant<value_ints = [1]>() y = Pad(x, p, , a) }"
    with pytest.raises(ModelError, match="functions cannot be inlined: 'f'; operators"):
        load(parse_calls("y = own.f(x)", axes, function_opset=18))


def test_a_function_that_is_not_called_is_not_converted():
    axes = "f (x) => (y) { p = Constant<value_ints = [0, 1]>() a = Constant<value_ints = [1]>() y = Pad(x, p, , a) }"
    check_inlined(parse_calls("y = Neg(x)", axes, function_opset=18))


# --- names of operators -------------------------------------------------------------------------------------------


def test_a_note_says_that_a_function_has_the_name_of_an_operator():
    model = parser.parse_model(
        """<ir_version: 10, opset_import: ["": 17, "com.microsoft": 1]>
        g (float[3, 3] x) => (float[3, 3] y) { y = com.microsoft.Gelu(x) }
        <domain: "com.microsoft", opset_import: ["": 17]> Gelu (x) => (y) { y = Neg(x) }"""
    )
    loaded = load(model)
    _, notes = bind_source(ModelSource(model, model), loaded, shape=None, inputs=None, state={}, llm=False)
    (note,) = [item for item in notes if item.code == "M010"]
    assert "'com.microsoft.Gelu'" in note.message
    assert not load(parse_calls("y = own.f(x)", SOFTMAX)).notes
    assert compute(loaded.whole_proto())[0, 0] == -X[0, 0]
