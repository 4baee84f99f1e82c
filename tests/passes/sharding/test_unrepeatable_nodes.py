"""Nodes that run once: two devices that both ran them would have two values."""

import pytest
from onnx import helper

from onnxplace.model.lineage import RANDOM_OPERATORS
from onnxplace.passes.sharding.space.strategy_space import is_unrepeatable


@pytest.mark.parametrize("operator", sorted(RANDOM_OPERATORS))
@pytest.mark.parametrize("domain", ["", "com.microsoft"])
def test_random_operators_run_once(operator, domain):
    assert is_unrepeatable(helper.make_node(operator, ["x"], ["y"], domain=domain))


def test_operators_of_unknown_domains_run_once():
    assert is_unrepeatable(helper.make_node("Relu", ["x"], ["y"], domain="custom"))


def test_dropout_runs_once_only_where_it_may_train():
    assert is_unrepeatable(helper.make_node("Dropout", ["x", "ratio", "mode"], ["y"]))
    assert not is_unrepeatable(helper.make_node("Dropout", ["x", "ratio"], ["y"]))


def test_a_node_around_a_random_one_runs_once():
    inner = helper.make_graph([helper.make_node("RandomUniform", [], ["u"], shape=[2])], "inner", [], [])
    assert is_unrepeatable(helper.make_node("If", ["c"], ["y"], then_branch=inner, else_branch=inner))
