"""The memory of a choice over time: as the simulator counts it, and within the limit."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

import numpy as np
import pytest
from onnx import ModelProto, parser

from benchmarks.sharding_scale import make_densenet, make_detr, make_inception, make_transformer
from onnxplace.model.lowering import build_op_graph, value_bytes
from onnxplace.passes.sharding.apply.sharded_model import write_sharded_model
from onnxplace.passes.sharding.choose.layout_choice import ChoiceProblem, LayoutChoice, is_sharded
from onnxplace.passes.sharding.space.known_shapes import infer_all_shapes
from onnxplace.passes.sharding.space.strategy_space import StrategySpace
from onnxplace.simulation.simulator import simulate
from onnxplace.target.target import Device, Target
from tests.support.shardable_models import make_model
from tests.support.shardings import SHARES, make_costs, make_space

HUGE = 1 << 40
# Shapes, masks and zeros that the writer adds are no part of the account; readers of several layouts are not told
# apart. Both weigh the most in models of a few values of a few numbers.
MIN_RATIO, MAX_RATIO = 0.75, 2.0
CONSTANT_BYTES = 400


def make_problem(space: StrategySpace, seed: int) -> ChoiceProblem:
    """Return a problem with random times, in which exchanges cost nothing, little or much."""
    random = Random(seed)
    seconds = []
    for options in space.strategies:
        whole = random.choice((1e-6, 1e-5, 1e-4))
        seconds.append([whole * (0.4 + 0.4 * random.random() if item.is_split else 1.0) for item in options])
    return ChoiceProblem(space, seconds, make_costs(space.division.count, random.choice((0.0, 1e-6, 1e-4))))


def simulate_peaks(problem: ChoiceProblem, choice: LayoutChoice) -> list[int]:
    """Return the peak of each device that runs the sharded model in the order in which it is written."""
    sharded = write_sharded_model(problem.space, choice, problem.costs)
    graph = build_op_graph(sharded.model, value_bytes(sharded.model, infer_all_shapes(sharded.model)))
    count = problem.space.division.count
    target = Target(tuple(Device(f"cpu:{index}", HUGE) for index in range(count)))
    device = np.array([origin.device for origin in sharded.origins], dtype=np.int32)
    peaks: list[int] = simulate(
        graph, np.full((count, len(graph)), 1e-3), target, device, graph.order
    ).peak_bytes.tolist()
    return peaks


def solve_within(problem: ChoiceProblem, limit_bytes: float) -> LayoutChoice | None:
    return problem.solve([int(limit_bytes)] * problem.space.division.count)


def drop_unused(proto: ModelProto) -> ModelProto:
    """Return the model without nodes that no output needs, which the pass `optimize` drops too."""
    needed, kept = {item.name for item in proto.graph.output}, []
    for node in reversed(proto.graph.node):
        if not needed.isdisjoint(node.output):
            kept.append(node)
            needed.update(node.input)
            needed.update(name for part in node.attribute for inner in part.g.node for name in inner.input)
    result = ModelProto()
    result.CopyFrom(proto)
    del result.graph.node[:]
    result.graph.node.extend(reversed(kept))
    return result


@pytest.mark.parametrize("seeds", [20, pytest.param(60, marks=pytest.mark.slow)])
def test_the_account_of_random_models_is_about_that_of_the_simulator(seeds: int) -> None:
    ratios = []
    for seed in range(seeds):
        model = make_model(Random(seed))
        problem = make_problem(make_space(drop_unused(model.proto), model.dimensions[0], SHARES[seed % 4]), seed)
        choice = solve_within(problem, HUGE)
        assert choice is not None
        peak = max(simulate_peaks(problem, choice))
        assert choice.peak_bytes + CONSTANT_BYTES >= MIN_RATIO * peak, f"seed {seed}"
        assert choice.peak_bytes <= MAX_RATIO * peak + CONSTANT_BYTES, f"seed {seed}"
        ratios.append((choice.peak_bytes + 1) / (peak + 1))
    assert 0.98 < float(np.median(ratios)) < 1.05


@pytest.mark.parametrize("ways", [2, 4])
@pytest.mark.parametrize(
    "make", [make_transformer, make_detr, pytest.param(make_densenet, marks=pytest.mark.slow), make_inception]
)
def test_the_account_of_layers_bounds_that_of_the_simulator(make: Callable[[int], ModelProto], ways: int) -> None:
    problem = make_problem(make_space(make(60), {}, (1.0,) * ways), 0)
    choice = solve_within(problem, HUGE)
    assert choice is not None
    peak = max(simulate_peaks(problem, choice))
    # Convolutions by rows count some parts longer than they are held.
    assert 0.95 * peak <= choice.peak_bytes <= 1.4 * peak


# Rows that readers cut off parts which overlap are not in the account.
@pytest.mark.parametrize(("make", "excess"), [(make_transformer, 1.05), (make_inception, 1.2)])
def test_less_memory_takes_more_time_and_is_kept(make: Callable[[int], ModelProto], excess: float) -> None:
    problem = make_problem(make_space(make(30), {}), 0)
    free = solve_within(problem, HUGE)
    assert free is not None
    assert solve_within(problem, free.peak_bytes) == free
    seconds = [free.seconds]
    for share in (0.95, 0.9, 0.85):
        choice = solve_within(problem, share * free.peak_bytes)
        if choice is None:
            break
        assert choice.peak_bytes <= share * free.peak_bytes
        assert max(simulate_peaks(problem, choice)) <= excess * share * free.peak_bytes
        assert free.seconds <= choice.lower_bound_seconds * (1 + 1e-9) <= choice.seconds * (1 + 2e-9)
        seconds.append(choice.seconds)
    assert len(seconds) > 1
    assert solve_within(problem, 0.1 * free.peak_bytes) is None


# Each value takes 8 KiB, and the weights take nothing next to them.
LONG = """
<ir_version: 8, opset_import: ["": 18]>
g (float[64, 32] x) => (d)
{
    a = Tanh(x)
    b = Exp(x)
    c = Add(a, b)
    d = ReduceSum(c)
}
"""


def solve_slow_splits(text: str, limit_bytes: Sequence[int]) -> LayoutChoice | None:
    """Return the choice where splitting takes twice the time of whole nodes."""
    space = make_space(parser.parse_model(text), {})
    seconds = [[2e-5 if item.is_split else 1e-5 for item in options] for options in space.strategies]
    return ChoiceProblem(space, seconds, make_costs(2)).solve(limit_bytes)


def test_values_that_do_not_fit_are_split() -> None:
    whole = solve_slow_splits(LONG, (25_000, 25_000))
    assert whole is not None
    assert not is_sharded(whole)
    parts = solve_slow_splits(LONG, (21_000, 21_000))
    assert parts is not None
    assert is_sharded(parts)
    assert parts.peak_bytes <= 21_000
    # The device with less memory decides.
    uneven = solve_slow_splits(LONG, (21_000, 1_000_000))
    assert uneven is not None
    assert uneven.strategies == parts.strategies
    assert solve_slow_splits(LONG, (8_000, 1_000_000)) is None


# Both products read the weight, which is held once if they read it in one layout.
TIED = """
<ir_version: 8, opset_import: ["": 18]>
g (float[4, 16] x) => (c) <float[16, 16] w = {WEIGHT}>
{
    a = MatMul(x, w)
    b = Relu(a)
    c = MatMul(b, w)
}
""".replace("WEIGHT", ", ".join("0.5" for _ in range(256)))


def test_a_weight_that_several_nodes_read_is_held_once() -> None:
    whole = solve_slow_splits(TIED, (1024 + 3 * 256, 1024 + 3 * 256))
    assert whole is not None
    assert not is_sharded(whole)
    assert whole.peak_bytes == 1024 + 3 * 256 - 256
    parts = solve_slow_splits(TIED, (1024, 1024))
    assert parts is None or parts.weight_bytes <= 1024
