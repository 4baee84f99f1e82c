"""What sharding knows of values: shapes behind operators of other domains, and values that cannot be cut or summed."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from onnx import ModelProto, TensorProto, parser

from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.passes.sharding.rules.layouts import PARTIAL, Layout
from onnxplace.passes.sharding.space import known_shapes
from onnxplace.passes.sharding.space.known_shapes import infer_all_shapes
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy
from onnxplace.passes.sharding.space.strategy_space import StrategySpace, build_space
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts
from tests.support.forced_sharding import DIVISIONS, try_strategies, with_weights


def parse(text: str, opset: int = 21) -> ModelProto:
    return parser.parse_model(f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]> g {text}')


def space_of(text: str, opset: int = 21, **sizes: int) -> StrategySpace:
    return build_space(TensorFacts.of(bind(load(parse(text, opset)), sizes, {})), DIVISIONS["2 ways"])


def layouts(strategies: tuple[NodeStrategy, ...]) -> set[Layout | None]:
    return {layout for strategy in strategies for layout in (*strategy.inputs, *strategy.outputs)}


def test_shapes_and_types_are_known_behind_operators_of_onnxruntime():
    text = """(float[n,4,8] x, float[8] b) => (float[m,4,8] y) {
        g = com.microsoft.BiasGelu(x, b) h = Relu(g) y = com.microsoft.FastGelu(h) }"""
    facts = TensorFacts.of(bind(load(parse(text)), {"n": 2}, {}))
    assert {name: facts.shapes[name] for name in "ghy"} == dict.fromkeys("ghy", (2, 4, 8))
    assert {facts.types[name] for name in "ghy"} == {TensorProto.FLOAT}
    assert facts.fixed["h"] == (False, True, True)


COMPUTED_SLICE = f"""(float[n,4] x) => (float[n,4] y) <int64[1] zero = {{0}}, float[8,4] table = {{{"0," * 31}0}}> {{
    rows = Shape <start = 0, end = 1> (x) more = Add(rows, zero)
    part = Slice(table, zero, more) y = Add(x, part) }}"""


def bind_slice(rows: int) -> Model:
    return bind(load(parse(COMPUTED_SLICE)), {"n": rows}, {})


def test_one_inference_suffices_where_shapes_follow_from_those_of_inputs(monkeypatch):
    asked, infer = [], known_shapes.infer_static_shapes
    monkeypatch.setattr(known_shapes, "infer_static_shapes", lambda model: asked.append(1) or infer(model))
    assert infer_all_shapes(bind_slice(3))["part"] == (3, 4)
    assert len(asked) == 1


def test_sizes_that_are_impossible_do_not_hide_what_does_not_depend_on_values():
    assert infer_all_shapes(bind_slice(9))["y"] == (9, 4)  # although the table has eight rows


def test_what_is_derived_from_a_model_is_derived_once():
    model, asked = bind_slice(3), list[Model]()

    def derive(given: Model) -> int:
        asked.append(given)
        return len(asked)

    assert (model.derive(derive), model.derive(derive)) == (1, 1)
    assert replace(model).derive(derive) == 2
    assert asked[0] is model


def test_shapes_are_known_behind_functions_that_onnx_does_not_infer():
    text = """(float[2,4,3] x, float[4] s, float[4] b) => (float[2,4,3] y) {
        g = GroupNormalization<num_groups=2>(x, s, b) y = Relu(g) }"""
    assert TensorFacts.of(bind(load(parse(text)), {}, {})).shapes["g"] == (2, 4, 3)


def test_unknown_operators_leave_shapes_unknown():
    text = "(float[2,4] x) => (float[2,4] y) { g = com.microsoft.NoSuchOperator(x) y = Relu(g) }"
    facts = TensorFacts.of(bind(load(parse(text)), {}, {}))
    assert "g" not in facts.shapes
    assert facts.view(0) is None


def test_values_of_few_bits_are_not_cut_but_weights_are():
    model = parse("""(int4[6,8] v, int4[6,8] w, float[8] s) => (float[6,8] y) {
        a = DequantizeLinear(v, s) b = DequantizeLinear(w, s) y = Add(a, b) }""")
    fours = np.ones((6, 8), ml_dtypes.int4)
    fixed = with_weights(model, {"v": fours, "w": fours, "s": np.ones(8, np.float32)})
    given, weight, _ = build_space(TensorFacts.of(bind(load(fixed), {}, {})), DIVISIONS["2 ways"]).strategies
    assert not any(strategy.is_split for strategy in given)
    assert any(strategy.is_split for strategy in weight)


def test_four_bits_are_cut_between_bytes():
    model = parse("""(float[4,6] x, int4[6,7] w, float[7] s) => (float[4,7] y) {
        d = DequantizeLinear(w, s) y = MatMul(x, d) }""")
    numbers = (np.arange(42).reshape(6, 7) % 15 - 7).astype(ml_dtypes.int4)
    x = np.ones((4, 6), np.float32)
    trials = list(try_strategies(with_weights(model, {"x": x, "w": numbers, "s": np.ones(7, np.float32)}), [{"x": x}]))
    assert [trial for trial in trials if trial.problem] == []
    assert sum(name == "DequantizeLinear" for trial in trials for name in trial.nodes) > 3


def test_old_opsets_have_no_summands():
    text = "(float[4,6] x, float[6,8] w) => (float[4,8] y) { y = MatMul(x, w) }"
    assert PARTIAL in layouts(tuple(space_of(text, opset=9).strategies[0]))
    assert PARTIAL not in layouts(tuple(space_of(text, opset=8).strategies[0]))


def test_booleans_are_not_cut_before_concat_takes_them():
    text = "(bool[4,6] x) => (bool[4,6] y) { y = Not(x) }"
    assert not any(strategy.is_split for strategy in space_of(text, opset=3).strategies[0])
    assert any(strategy.is_split for strategy in space_of(text, opset=4).strategies[0])


def test_a_returned_weight_stays_whole():
    text = "(float[4] x) => (float[4] y, float[4] w) <float[4] w = {1, 2, 3, 4}> { y = Add(x, w) }"
    trials = list(try_strategies(parse(text), [{"x": np.ones(4, np.float32)}]))
    assert [trial for trial in trials if trial.problem] == []
    assert trials


@pytest.mark.parametrize(("formula", "factor"), [("Div(s, d)", 0), ("Mul(s, d)", np.inf), ("Mul(d, s)", -np.inf)])
@pytest.mark.parametrize("known", [False, True])
def test_summands_go_through_no_factor_that_makes_them_infinite(formula, factor, known):
    model = parse(f"(float[4] x, float d) => (float y) {{ s = ReduceSum<keepdims=0>(x) y = {formula} }}")
    x, d = np.array([3, 4, -1, -2], np.float32), np.array(factor, np.float32)
    if known:
        trials = list(try_strategies(with_weights(model, {"x": x, "d": d}), [{"x": x}]))
    else:
        trials = list(try_strategies(model, [{"x": x, "d": d}]))
    assert [trial for trial in trials if trial.problem] == []
    assert trials


@pytest.mark.parametrize("text", ["Mul(s, c)", "Mul(c, s)", "Div(s, c)"])
@pytest.mark.parametrize(
    ("factor", "is_passed"), [(0.125, True), (-3, True), (0, False), (np.inf, False), (np.nan, False)]
)
def test_summands_go_through_known_scales(text, factor, is_passed):
    model = with_weights(
        parse(f"(float[4] x, float c) => (float y) {{ s = ReduceSum<keepdims=0>(x) y = {text} }}"),
        {"x": 0, "c": np.array(factor, np.float32)},
    )
    space = build_space(TensorFacts.of(bind(load(model), {}, {})), DIVISIONS["2 ways"])
    assert (PARTIAL in layouts(tuple(space.strategies[1]))) is is_passed


@pytest.mark.parametrize(("rows", "expected"), [(20, (2, 4, 14)), (4, None), (1, None)])
def test_slices_behind_operators_of_onnx_runtime_are_inferred_at_possible_sizes_alone(
    rows: int, expected: tuple[int, ...] | None
) -> None:
    """ONNX Runtime ends the process, too, at a Slice of an axis with a negative size."""
    proto = parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]>
        g (float[N, 4, L] x, float[4, 4, 3] w) => (y) <int64[1] s = {0}, int64[1] e = {-1}, int64[1] a = {2}> {
            g = com.microsoft.Gelu(x) c = Conv(g, w) d = Slice(c, s, e, a)
            h = com.microsoft.Gelu(d) i = Conv(h, w) y = Slice(i, s, e, a) }""")
    model = bind(load(proto), {"N": 2, "L": rows}, {})
    shapes = infer_all_shapes(model)
    assert shapes.get("y") == expected
