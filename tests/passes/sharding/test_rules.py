"""Each rule: which splits it gives, and that every one computes what the whole operator does."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from onnx import ModelProto, helper, parser

from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.passes.sharding.rules.layouts import PARTIAL, Layout
from onnxplace.passes.sharding.rules.rule_table import RULES, list_axis_rules
from onnxplace.passes.sharding.space.strategy_space import build_space
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts
from tests.support.forced_sharding import DIVISIONS, Feeds, PlainSession, Trial, fed_names, try_strategies, with_weights
from tests.support.sharding_cases.attention import ATTENTION
from tests.support.sharding_cases.bodies import BODIES
from tests.support.sharding_cases.convolutions import CONVOLUTIONS
from tests.support.sharding_cases.moves import MOVES
from tests.support.sharding_cases.normalizations import NORMALIZATIONS
from tests.support.sharding_cases.pointwise import POINTWISE
from tests.support.sharding_cases.products import PRODUCTS
from tests.support.sharding_cases.recurrent import RECURRENT
from tests.support.sharding_cases.reductions import REDUCTIONS
from tests.support.sharding_cases.rule_case import RuleCase

CASES = {
    **PRODUCTS,
    **CONVOLUTIONS,
    **NORMALIZATIONS,
    **REDUCTIONS,
    **MOVES,
    **POINTWISE,
    **ATTENTION,
    **RECURRENT,
    **BODIES,
}


def parse(case: RuleCase) -> ModelProto:
    header = f'<ir_version: 10, opset_import: ["": {case.opset}, "com.microsoft": 1]>'
    return parser.parse_model(f"{header} g {case.text}")


def draw_feeds(model: ModelProto, case: RuleCase) -> Feeds:
    """Return random inputs: small indices, scales near one, and the case's own."""
    random = np.random.default_rng(0)
    feeds = {}
    for value in model.graph.input:
        kind = value.type.tensor_type
        shape = [dim.dim_value for dim in kind.shape.dim]
        dtype = helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if dtype.kind == "f":
            array = random.uniform(0.5, 1.5, shape) if len(shape) < 2 else random.normal(size=shape)
        elif dtype.itemsize == 1:
            array = random.integers(0, 2 if dtype.kind == "b" else 100, shape)
        else:
            array = random.integers(0, 3, shape)
        feeds[value.name] = np.asarray(case.feeds.get(value.name, array)).astype(dtype)
    return feeds


def splits(model: ModelProto, case: RuleCase) -> str:
    facts = TensorFacts.of(bind(load(model), {}, dict(draw_feeds(model, case))))
    strategies = build_space(facts, DIVISIONS["2 ways"]).strategies[0]
    texts = (f"{_axes(item.inputs)} -> {_axes(item.outputs)}" for item in strategies[1:])
    return ", ".join(sorted(set(texts)))


def _axes(layouts: tuple[Layout | None, ...]) -> str:
    return "".join(
        "-" if item is None else "+" if item == PARTIAL else str(item.axis) if item.is_split else "."
        for item in layouts
    )


def run_all(model: ModelProto, feeds: Feeds) -> dict[str, Any]:
    """Return the outputs by name."""
    results = PlainSession(model, optimized=False).run([feeds[name] for name in fed_names(model)])
    return dict(zip((value.name for value in model.graph.output), results))


def trials(case: RuleCase) -> Iterator[tuple[str, list[Trial]]]:
    """Yield the trials of a case with all inputs given, and with all but the first as weights."""
    model = parse(case)
    feeds = draw_feeds(model, case)
    yield "given", list(try_strategies(model, [feeds], case.returns_all))
    if (fixed := with_weights(model, feeds)) is not None:
        first = fixed.graph.input[0].name
        yield "weights", list(try_strategies(fixed, [{first: feeds[first]}], case.returns_all))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(5)
def test_a_rule_gives_these_splits(name: str):
    case = CASES[name]
    assert splits(parse(case), case) == case.splits


@pytest.mark.parametrize("name", CASES)
@pytest.mark.sampled(5)
def test_every_split_computes_what_the_whole_operator_does(name: str):
    for form, results in trials(CASES[name]):
        assert [(form, item) for item in results if item.problem] == []


def test_each_rule_has_a_case_except_those_of_single_elements():
    tried = {(node.domain, node.op_type) for case in CASES.values() for node in parse(case).graph.node}
    by_element = {key for key, rule in RULES.items() if rule in (RULES["", "Abs"], RULES["", "Mul"])}
    assert {*RULES} - tried - by_element == set()


def test_operators_without_a_rule_stay_whole():
    for op in ("NonZero", "Compress", "EyeLike", "Range", "ConstantOfShape", "Unique"):
        assert ("", op) not in RULES


@pytest.mark.parametrize("name", [name for name in CASES if name != "RoiAlign"])  # it refuses infinite regions
@pytest.mark.sampled(5)
def test_no_part_touches_the_numbers_of_another(name: str):
    """An infinite number in the first part of what is cut leaves all other parts as they are: 0 * inf is NaN."""
    case = CASES[name]
    model = parse(case)
    feeds = draw_feeds(model, case)
    facts = TensorFacts.of(bind(load(model), {}, dict(feeds)))
    for view in filter(None, (facts.view(index) for index in range(len(facts.model.nodes)))):
        names = [item for item in view.node.input if item]
        if not set(names) <= feeds.keys() | set(facts.model.initializers):
            continue
        for rule in list_axis_rules(view):
            if rule.effect != "map" or rule.fused or rule.shares_range:
                continue
            altered = dict(feeds)
            for position, axis in rule.inputs.items():
                if not view.has(position):
                    continue
                given, size = view.node.input[position], view.shape(position)[axis]
                if given in feeds and feeds[given].dtype.kind == "f" and size:
                    altered[given] = feeds[given].copy()
                    np.moveaxis(altered[given], axis, 0)[: size // (rule.units or size)] = np.inf
            expected, actual = (run_all(model, item) for item in (feeds, altered))
            for position, axis in rule.outputs.items():
                output = view.node.output[position]
                if output in expected:
                    size = view.result(position)[axis]
                    rest = range(size // (rule.units or size or 1), size)
                    first, second = (item[output].take(rest, axis) for item in (expected, actual))
                    np.testing.assert_allclose(second, first, rtol=1e-5, atol=1e-5, err_msg=f"{rule}")
