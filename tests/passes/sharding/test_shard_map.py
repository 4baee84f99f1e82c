"""Shard maps: which strategies they leave, and what is wrong with them."""

from __future__ import annotations

from pathlib import Path

import pytest
from onnx import parser

from onnxplace.errors import InputError, UsageError
from onnxplace.passes.sharding.rules.layouts import PARTIAL
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy
from onnxplace.passes.sharding.space.strategy_space import KINDS, StrategySpace, restrict_space
from tests.support.shardings import make_space

MODEL = """
<ir_version: 8, opset_import: ["": 18]>
g (float[4, 6, 8] x, float[8, 10] w, float[2, 4, 8, 8] image, float[6, 4, 3, 3] k) => (y, z)
{
    [product] h = MatMul(x, w)
    [relu] y = Relu(h)
    [conv] z = Conv <pads = [1, 1, 1, 1]> (image, k)
}
"""


@pytest.fixture(scope="module")
def space() -> StrategySpace:
    return make_space(parser.parse_model(MODEL), {})


def results(space: StrategySpace, name: str) -> list[NodeStrategy]:
    names = [node.name for node in space.facts.model.nodes]
    return list(space.strategies[names.index(name)])


def layouts(space: StrategySpace, name: str) -> set[int]:
    """Return the split axes of the results that a node may have; negative for whole ones and summands."""
    return {layout.axis for strategy in results(space, name) for layout in strategy.outputs if layout is not None}


@pytest.mark.parametrize(
    ("kind", "product", "conv"),
    [
        ("whole", {-1}, {-1}),
        ("split", {0, 1, 2, -2}, {0, 1, 2, -2}),
        ("batch", {0}, {0}),
        ("rows", {1}, {2}),
        ("columns", {2}, {1}),
        ("sum", {-2}, {-2}),
        ("axis 1", {1}, {1}),
    ],
)
def test_a_kind_leaves_the_strategies_of_its_axis(
    space: StrategySpace, kind: str, product: set[int], conv: set[int]
) -> None:
    restricted = restrict_space(space, f'{{"product|conv": "{kind}"}}')
    assert layouts(restricted, "product") == product
    assert layouts(restricted, "conv") == conv
    assert restricted.strategies[1] is space.strategies[1]


def test_every_kind_is_documented_and_accepted(space: StrategySpace) -> None:
    for kind in KINDS:
        assert results(restrict_space(space, f'{{"product": "{kind}"}}'), "product")


def test_the_first_pattern_of_a_node_counts(space: StrategySpace) -> None:
    restricted = restrict_space(space, '{"product": "sum", ".*": "whole"}')
    assert all(PARTIAL in strategy.outputs for strategy in results(restricted, "product"))
    assert layouts(restricted, "relu") == {-1}


def test_nodes_that_cannot_be_split_so_stay_free_if_others_can(space: StrategySpace) -> None:
    restricted = restrict_space(space, '{".*": "sum"}')
    assert layouts(restricted, "product") == {-2}
    assert restricted.strategies[1] is space.strategies[1]


def test_a_map_may_be_a_file(space: StrategySpace, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text('{"product": "columns"}')
    assert layouts(restrict_space(space, str(path)), "product") == {2}


def fail(space: StrategySpace, text: str) -> InputError:
    with pytest.raises(InputError) as caught:
        restrict_space(space, text)
    return caught.value


def test_a_pattern_without_nodes_is_refused(space: StrategySpace) -> None:
    problem = fail(space, '{"layers.*": "columns", "heads": "whole", "product": "whole"}')
    assert isinstance(problem, UsageError)
    assert problem.code == "U020"
    assert str(problem.message) == "no node or module matches 'layers.*', 'heads'"
    assert problem.hint == "names look like 'product', 'relu', 'conv'"


@pytest.mark.parametrize("kind", ["sum", "axis 7"])
def test_a_split_that_no_node_has_is_refused(space: StrategySpace, kind: str) -> None:
    problem = fail(space, f'{{"relu": "{kind}"}}')
    assert problem.code == "U023"
    assert str(problem.message) == f"node 'relu' (Relu) cannot be split by '{kind}' in 2 ways"
    assert problem.where == "--shard-map 'relu'"
    assert problem.hint == (
        "it can be: whole, split, batch, rows, columns; its result has the shape [4, 6, 10], and each device needs a "
        "part of its own"
    )


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ('{"a": 1}', "expected a map of patterns to kinds of split", 'write {"layers'),
        ("{}", "expected a map of patterns to kinds of split", 'write {"layers'),
        ('{"a": ["whole"]}', "expected a map of patterns to kinds of split", 'write {"layers'),
        ('{"a": "colums"}', "unknown kind of split 'colums'", "columns"),
        ('{"a": "axis x"}', "unknown kind of split 'axis x'", "'axis 1'"),
        ('{"a": "axis -1"}', "unknown kind of split 'axis -1'", "'axis 1'"),
        ('{"a": ', "not a shard map: invalid JSON at line 1, column 7", ""),
    ],
)
def test_malformed_maps_are_refused(space: StrategySpace, text: str, message: str, hint: str) -> None:
    problem = fail(space, text)
    assert problem.code == "U023"
    assert message in str(problem.message)
    assert hint in (problem.hint or "")


def test_a_missing_file_is_refused(space: StrategySpace, tmp_path: Path) -> None:
    problem = fail(space, str(tmp_path / "missing.json"))
    assert (problem.code, problem.message) == ("U023", "there is no such file")


def test_a_file_with_another_kind_of_data_is_named(space: StrategySpace, tmp_path: Path) -> None:
    path = tmp_path / "map.json"
    path.write_text("[]")
    problem = fail(space, str(path))
    assert (problem.code, problem.where) == ("U023", str(path))
