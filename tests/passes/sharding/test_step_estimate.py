"""What a choice of layouts promises."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from onnx import numpy_helper, parser

from onnxplace.model.loading import load
from onnxplace.passes.sharding.apply.sharded_model import write_sharded_model
from onnxplace.passes.sharding.choose.layout_choice import ChoiceProblem
from onnxplace.passes.sharding.choose.step_estimate import estimate_step_seconds
from onnxplace.passes.sharding.rules.layouts import Division
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts
from onnxplace.passes.sharding.space.strategy_space import build_space, restrict_space
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts
from tests.passes.sharding.test_random_sharding import assert_close, run_sizes
from tests.support.random_models import run_plain
from tests.support.shardable_models import make_model
from tests.support.shardings import check_structure, choose_randomly, make_costs, make_space

# The product of b needs nothing of a, which is exchanged meanwhile.
BRANCHES = """
<ir_version: 8, opset_import: ["": 18]>
g (float[64, 64] x) => (float[64, 64] y)
{
    a = MatMul(x, u)
    b = MatMul(x, v)
    y = MatMul(a, b)
}
"""


def test_an_exchange_overlaps_with_work_that_does_not_need_it() -> None:
    proto = parser.parse_model(BRANCHES)
    proto.graph.initializer.extend(numpy_helper.from_array(np.zeros((64, 64), np.float32), name) for name in "uv")
    facts = TensorFacts.of(load(proto))
    space = restrict_space(build_space(facts, Division((1.0, 1.0))), '{"MatMul_0": "columns", ".*": "whole"}')
    costs = make_costs(2)
    problem = ChoiceProblem(space, [[1e-4] * len(options) for options in space.strategies], costs)
    choice = problem.solve()
    assert choice is not None
    estimate = estimate_step_seconds(space, choice, problem.strategy_seconds, costs)
    assert 3e-4 < estimate < choice.seconds
    # All of the exchange but the concatenation is hidden; the call of a segment is not.
    assert estimate == pytest.approx(3e-4 + costs.segment_seconds, abs=3e-6)


@pytest.mark.parametrize("count", [2, 4])
def test_a_promise_is_between_the_work_alone_and_exchanges_one_after_the_other(count: int) -> None:
    for seed in range(12):
        model = make_model(Random(seed))
        space = make_space(model.proto, model.dimensions[0], (1.0,) * count)
        costs = make_costs(count)
        problem = ChoiceProblem(space, [[1e-5] * len(options) for options in space.strategies], costs)
        choice = problem.solve()
        assert choice is not None
        estimate = estimate_step_seconds(space, choice, problem.strategy_seconds, costs)
        assert 1e-5 * len(space.strategies) * (1 - 1e-9) <= estimate <= choice.seconds * (1 + 1e-9), f"seed {seed}"


def test_exchanges_by_host_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ExchangeCosts, "takes_two_rounds", lambda *_: True)
    relays = 0
    for seed in range(20):
        random = Random(seed)
        model = make_model(random)
        # TopK of ONNX Runtime 1.30 ends the process for empty inputs.
        feeds = tuple(item for item in model.feeds if all(np.size(value) for value in item.values()))
        if not (results := run_sizes(model.proto, feeds)):
            continue
        space = make_space(model.proto, model.dimensions[0], (1.0,) * 4)
        costs = make_costs(4, hosts=((0, 1), (2, 3)))
        sharded = write_sharded_model(space, choose_randomly(space, random), costs)
        check_structure(space.facts.model, sharded)
        relays += sum("/relayed" in name for node in sharded.model.nodes for name in node.output)
        proto = sharded.model.whole_proto().SerializeToString()
        for feeds, expected in results:
            assert_close(run_plain(proto, [feeds])[0], expected, model.tolerance)
    assert relays > 3
