"""What `verify` makes of an output: how far off it may be, and what of it random numbers leave to compare."""

from __future__ import annotations

import json
import os

os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from onnx import ModelProto, numpy_helper, parser

from onnxplace.evaluation import OutputDifference, lineages_of_bundle
from onnxplace.evaluation.compare import compare_output
from onnxplace.model import Lineage, is_quantising
from tests.conftest import Ran
from tests.end_to_end.test_split_property import RandomPlacement, compiled_with

HEAD = '<ir_version: 10, opset_import: ["": 21, "com.microsoft": 1]> g '


def model(text: str) -> ModelProto:
    return parser.parse_model(HEAD + text)


def traced(text: str, states: Mapping[str, str] | None = None) -> dict[str, Lineage]:
    return lineages_of_bundle(model(text), states or {})


# ------------------------------------------------------------------------------------------------------------ types


@pytest.mark.parametrize(
    ("text", "types"),
    [
        ("(float[4] x) => (float[4] y) { y = Neg(x) }", {"float32"}),
        ("(float[4] x) => (float[4] y) { h = Cast<to=10>(x) n = Neg(h) y = Cast<to=1>(n) }", {"float16", "float32"}),
        ("(float[4] x) => (float[4] y) { h = Cast<to=16>(x) y = CastLike(h, x) }", {"bfloat16", "float32"}),
        ("(double[4] x) => (double[4] y) { h = Cast<to=1>(x) y = Cast<to=11>(h) }", {"float32", "float64"}),
        # Neither constants nor inputs are rounded differently when the model is cut.
        ("(float[4] x) => (float[4] y) <float16[4] w = {1, 2, 3, 4}> { v = Cast<to=1>(w) y = Mul(x, v) }", {"float32"}),
        ("(float16[4] x) => (float[4] y) { y = Cast<to=1>(x) }", {"float32"}),
        # The elements of `h` do not matter to `y`.
        (
            "(float[4] x) => (float[4] y) { h = Cast<to=10>(x) s = Shape(h) f = Cast<to=1>(s) y = Mul(x, f) }",
            {"float32", "int64"},
        ),
        (
            """(float[4] x, bool c) => (float[4] y) { y = If(c) <
                then_branch = t () => (float[4] u) { h = Cast<to=10>(x) u = Cast<to=1>(h) },
                else_branch = f () => (float[4] v) { v = Neg(x) }> }""",
            {"float16", "float32"},
        ),
    ],
)
def test_the_types_of_an_output_are_those_its_values_are_rounded_to_on_the_way(text: str, types: set[str]):
    assert traced(text)["y"].types - {"bool"} == types


def test_a_state_brings_the_types_and_random_numbers_of_the_step_before():
    text = """(float[4] x, float[4] past) => (float[4] y, float[4] present) {
        y = Add(x, past)
        h = Cast<to=10>(x)
        n = RandomNormalLike(h)
        present = Cast<to=1>(n)
    }"""
    assert traced(text)["y"] == Lineage(frozenset({"float32"}))
    carried = traced(text, {"past": "present"})["y"]
    assert carried.types == {"float16", "float32"}
    assert len(carried.random_nodes) == 1


@pytest.mark.parametrize(("through", "error"), [("float16", 1e-2), ("bfloat16", 4e-2), ("float8_e5m2", 0.2)])
def test_the_coarsest_type_on_the_way_decides_how_far_off_an_output_may_be(through: str, error: float):
    want = np.array([1.0, -4.0], np.float32)
    got = want * np.float32(1 + error)
    assert not compare_output("y", got, want).equal
    assert compare_output("y", got, want, Lineage(frozenset({"float32", through}))).equal
    assert not compare_output("y", got * 2, want, Lineage(frozenset({"float32", through}))).equal
    assert not compare_output("y", np.array([1]), np.array([2]), Lineage(frozenset({through}))).equal


def half_precision() -> ModelProto:
    """Return products in float16 whose input and output are float32."""
    proto = model(
        """(float[8, 64] x) => (float[8, 64] y) {
            a = Cast<to=10>(x) b = MatMul(a, v) c = Tanh(b) d = MatMul(c, w) y = Cast<to=1>(d)
        }"""
    )
    random = np.random.default_rng(0)
    for name in "vw":
        array = random.standard_normal((64, 64)).astype(np.float16)
        proto.graph.initializer.append(numpy_helper.from_array(array, name))
    return proto


def test_a_model_that_computes_in_float16_and_returns_float32_is_called_equal(
    tmp_path: Path, run_cli: Callable[..., Ran], monkeypatch: pytest.MonkeyPatch
):
    bundle = compiled_with(half_precision(), RandomPlacement((0, 1)), tmp_path)
    # The difference depends on the kernels of this machine: let it be what the tester saw.
    from onnxplace.evaluation import compare

    seen: list[OutputDifference] = []

    def off(name: str, got: object, want: np.ndarray, lineage: Lineage | None = None) -> OutputDifference:
        seen.append(compare_output(name, want * np.float32(1.0016), want, lineage))
        return seen[-1]

    monkeypatch.setattr(compare, "compare_output", off)
    ran = run_cli("verify", bundle.path)
    assert ran.code == 0, ran.out
    assert seen[0].max_rel_error == pytest.approx(0.0016, rel=0.01)


# ------------------------------------------------------------------------------------------------------ quantisation


@pytest.mark.parametrize(
    ("node", "rounds"),
    [
        ("y = Neg(x)", False),
        ("y = Cast<to=10>(x)", False),
        ("y = Cast<to=9>(x)", False),
        ("y = Cast<to=3>(x)", True),
        ("y = DequantizeLinear(x, s)", True),
        ("y = QuantizeLinear(x, s)", True),
        ("y = com.microsoft.MatMulNBits<K=64, N=64, bits=4, block_size=32>(x, w, s)", True),
        ("y = com.microsoft.QAttention(x, w)", True),
        ("y = com.microsoft.QuickGelu(x)", False),
        ("y = MatMulInteger(x, w)", True),
    ],
)
def test_models_that_round_to_few_values_are_known_by_their_nodes(node: str, rounds: bool):
    text = f"(float[4] x, float s, uint8[4] w) => (float[4] y) {{ {node} }}"
    assert is_quantising(model(text)) is rounds
    inside = f"(float[4] x, float s, uint8[4] w, bool c) => (float[4] z) {{ z = If(c) <then_branch = t () => (y) {{ {node} }}, else_branch = f () => (u) {{ u = Neg(x) }}> }}"  # noqa: E501 - one line is easier to read here
    assert is_quantising(model(inside)) is rounds


# --------------------------------------------------------------------------------------------------- random numbers

# Unless it has a seed, ONNX Runtime seeds a random node by its number: the first node of each model makes these differ.
DRAWING = {
    "normal": "(float[4] x) => (float[4] y) { a = Neg(x) [noise] r = RandomNormal<shape=[4]>() y = Add(a, r) }",
    "normal like": "(float[4] x) => (float[4] y) { a = Neg(x) [noise] r = RandomNormalLike(a) y = Add(x, r) }",
    "uniform": "(float[4] x) => (float[4] y) { a = Neg(x) [noise] r = RandomUniform<shape=[4]>() y = Add(a, r) }",
    "uniform like": "(float[4] x) => (float[4] y) { a = Neg(x) [noise] r = RandomUniformLike(a) y = Add(x, r) }",
    "multinomial": """(float[4, 50] x) => (int32[4, 9] y) { a = Neg(x)
        [noise] y = Multinomial<sample_size=9>(a) }""",
    "bernoulli": "(float[400] x) => (float[400] y) { s = Sigmoid(x) [noise] y = Bernoulli(s) }",
    "dropout": """(float[400] x) => (float[400] y) <float r = {0.5}, bool t = {1}> { a = Neg(x)
        [noise] d = Dropout(a, r, t) y = Neg(d) }""",
    "in a body": """(float[4] x) => (float[4] y) <bool c = {1}> { a = Neg(x) y = If(c) <
        then_branch = t () => (float[4] u) { b = Abs(a) [noise] r = RandomNormalLike(b) u = Add(b, r) },
        else_branch = f () => (float[4] v) { v = Neg(x) }> }""",
    "number of elements": """(float[400] x) => (int64[1, n] y) { s = Sigmoid(x) [noise] b = Bernoulli(s)
        y = NonZero(b) }""",
}


@pytest.mark.parametrize("text", DRAWING.values(), ids=[*DRAWING])
def test_an_output_that_depends_on_random_numbers_is_named_and_not_called_different(
    tmp_path: Path, run_cli: Callable[..., Ran], text: str
):
    bundle = compiled_with(model(text), RandomPlacement((0, 1)), tmp_path)
    ran = run_cli("verify", bundle.path)
    assert ran.code == 0, ran.out
    assert ran.out.startswith("random y  depends on random numbers of 'noise'")
    assert "elements are not compared" in ran.out
    ran = run_cli("verify", bundle.path, "--json")
    found = json.loads(ran.out)
    assert (ran.code, found["equal"]) == (0, True)
    assert found["outputs"] == [
        {"name": "y", "equal": True, "max_abs_error": None, "max_rel_error": None, "random_nodes": ["noise"]}
    ]


def test_outputs_beside_random_ones_are_compared_as_ever(tmp_path: Path, run_cli: Callable[..., Ran]):
    text = """(float[4] x) => (float[4] y, float[4] z) <float[4] w = {WEIGHTS}> {
        m = Mul(x, w) z = Neg(m) [noise] r = RandomNormalLike(z) y = Add(x, r) }"""
    bundle = compiled_with(model(text.replace("WEIGHTS", "1, 2, 3, 4")), RandomPlacement((0, 1)), tmp_path)
    (tmp_path / "other.onnx").write_bytes(model(text.replace("WEIGHTS", "1, 2, 3, 5")).SerializeToString())
    assert "equal  z" in run_cli("verify", bundle.path).out
    ran = run_cli("verify", bundle.path, "--against", tmp_path / "other.onnx")
    assert ran.code == 1
    assert "DIFFERS z" in ran.out
    assert "random y" in ran.out


@pytest.mark.parametrize(
    "text",
    [
        "(float[4] x) => (float[4] y) <float r = {0.5}, bool t = {0}> { y = Dropout(x, r, t) }",
        "(float[4] x) => (float[4] y) { y = Dropout(x) }",
        "(float[4] x) => (float[4] y) { [noise] r = RandomNormalLike(x) s = Shape(r) y = Expand(x, s) }",
        "(float[4] x) => (float[4] y, float[4] z) { [noise] z = RandomNormalLike(x) y = Neg(x) }",
    ],
    ids=["dropout of inference", "dropout without a mode", "only the shape", "another output"],
)
def test_what_does_not_depend_on_random_numbers_is_not_called_random(text: str):
    assert traced(text)["y"].random_nodes == frozenset()


def test_random_outputs_must_agree_in_type_shape_and_finiteness():
    drawn = Lineage(frozenset({"float32"}), frozenset({"noise"}))
    want = np.array([1.0, 2.0], np.float32)
    assert compare_output("y", want + 1, want, drawn) == OutputDifference("y", True, np.inf, np.inf, ("noise",))
    assert compare_output("y", want, want, drawn) == compare_output("y", want, want)
    assert compare_output("y", want + np.nan, want + np.nan, drawn).equal
    for wrong in (want.astype(np.float64), want[:1], want + np.inf, want * np.nan, None, [want]):
        assert not compare_output("y", wrong, want, drawn).equal
    assert compare_output("y", [want, want + 1], [want, want], drawn).random_nodes == ("noise",)
    assert not compare_output("y", [want], [want, want], drawn).equal
    longer = Lineage(frozenset({"float32"}), frozenset({"noise"}), shape_is_drawn=True)
    assert compare_output("y", want[:1], want, longer).equal
    assert compare_output("y", [want + 1], [want, want], longer).equal


def test_maps_are_compared_key_by_key_within_tolerance_and_kinds_are_not_mixed():
    want = [{"a": 1.0, "b": 2.0}, {"a": 3.0}]
    near = Lineage(frozenset({"float32"}))
    assert compare_output("y", [{"a": 1.0001, "b": 2.0}, {"a": 3.0}], want, near).equal
    assert not compare_output("y", [{"a": 1.1, "b": 2.0}, {"a": 3.0}], want, near).equal
    assert not compare_output("y", [{"a": 1.0}, {"a": 3.0}], want, near).equal
    assert not compare_output("y", [{"a": 1.0, "c": 2.0}, {"a": 3.0}], want, near).equal
    array = np.ones(2, np.float32)
    for one, other in ((None, array), (array, [array, array[:1]]), ({"a": 1.0}, array), (None, [])):
        assert compare_output("y", one, other).equal is False
        assert compare_output("y", other, one).equal is False
    assert compare_output("y", None, None).equal is True


def test_an_error_that_is_no_number_is_null_in_json(tmp_path: Path, run_cli: Callable[..., Ran]):
    text = "(float[4] x) => (float[4] y) <float[4] w = {WEIGHTS}> { m = Mul(x, w) y = Neg(m) }"
    bundle = compiled_with(model(text.replace("WEIGHTS", "1, 2, 3, nan")), RandomPlacement((0, 1)), tmp_path)
    (tmp_path / "other.onnx").write_bytes(model(text.replace("WEIGHTS", "1, 2, 3, 4")).SerializeToString())
    ran = run_cli("verify", bundle.path, "--against", tmp_path / "other.onnx", "--json")
    found = json.loads(ran.out, parse_constant=lambda text: pytest.fail(f"{text} is no JSON"))
    assert (ran.code, found["outputs"][0]["max_abs_error"]) == (1, None)


def test_whole_numbers_that_differ_say_by_how_much():
    found = compare_output("n", np.array([2, 5]), np.array([2, 4]))
    assert (found.equal, found.max_abs_error, found.max_rel_error) == (False, 1.0, 0.25)
    large = np.array([1 << 62, (1 << 62) + 1])
    assert not compare_output("n", large, large[::-1]).equal
