"""Random shardings of models, to test that rewriting keeps what a model computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random

import onnx
from onnx import ModelProto

from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.model.model import Model
from onnxplace.passes.sharding.apply.sharded_model import ShardedModel, ShardedModelWriter
from onnxplace.passes.sharding.choose.layout_choice import ChoiceProblem, LayoutChoice
from onnxplace.passes.sharding.rules.layouts import REPLICATED, Division, Layout
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts
from onnxplace.passes.sharding.space.strategy_space import StrategySpace, build_space
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts

SHARES = ((1.0, 1.0), (1.0, 1.0, 1.0), (3.0, 1.0), (2.0, 1.0, 1.0), (1.0,) * 4)
"""Shares of the work of two to four devices, equal and not."""
WIDE_SHARES = (*SHARES, (1.0,) * 5, (1.0,) * 6, (1.0,) * 8, (1.0,) * 8, (2.0, 1.0, 1.0, 2.0, 1.0, 1.0))
"""Shares of up to eight devices."""


def make_space(proto: ModelProto, dimensions: Mapping[str, int], shares: Sequence[float] = (1.0, 1.0)) -> StrategySpace:
    """Return the strategies of a model at some sizes of its symbols."""
    return build_space(TensorFacts.of(bind(load(proto), dimensions, {})), Division(tuple(shares)))


def make_costs(count: int, latency_seconds: float = 1e-6, hosts: tuple[tuple[int, ...], ...] = ()) -> ExchangeCosts:
    """Return costs of exchanges; messages between hosts, if there are some, cost much more than within."""
    return ExchangeCosts(
        count=count,
        latency_seconds=latency_seconds * (100 if hosts else 1),
        seconds_per_byte=1e-10,
        segment_seconds=latency_seconds,
        copy_seconds_per_byte=1e-11,
        kernel_seconds=1e-6,
        hosts=hosts,
        near_latency_seconds=latency_seconds,
        near_seconds_per_byte=1e-10,
    )


def is_in_runs(strategy: NodeStrategy) -> bool:
    """Return whether a strategy has a layout that changes to no other one, so that its neighbours must follow."""
    return any(layout is not None and layout.is_in_runs for layout in (*strategy.inputs, *strategy.outputs))


def complete_choice(
    space: StrategySpace, forced: Mapping[int, NodeStrategy], seconds: Callable[[bool], float]
) -> LayoutChoice | None:
    """Return the cheapest choice with these strategies, by a time for whole and split nodes; None if there is none."""
    options = tuple((forced[index],) if index in forced else own for index, own in enumerate(space.strategies))
    times = [[seconds(item.is_split) for item in own] for own in options]
    problem = ChoiceProblem(replace(space, strategies=options), times, make_costs(space.division.count))
    choice = problem.solve()
    return choice if choice is not None and choice.seconds < 1e9 else None


def choose_randomly(space: StrategySpace, random: Random) -> LayoutChoice:
    """Return a choice of a random strategy per node."""
    if any(is_in_runs(strategy) for options in space.strategies for strategy in options) and random.random() < 0.5:
        weight = random.random()
        choice = complete_choice(space, {}, lambda is_split: random.random() * (weight if is_split else 1.0))
        if choice is not None:  # restricted spaces may have none
            return choice
    share = min(1.0, 2 * random.random())  # of split nodes
    strategies = []
    for every in space.strategies:
        # A space restricted to runs is an alternative to a choice: it is compared with it, but never written.
        options = [strategy for strategy in every if not is_in_runs(strategy)] or list(every)
        is_split = len(options) > 1 and random.random() < share
        strategies.append(options[random.randrange(1, len(options))] if is_split else options[0])
    return LayoutChoice(tuple(strategies), {}, 0.0, 0.0, 0)


class ReturningWriter(ShardedModelWriter):
    """Returns what one device has of the outputs: those of the first say nothing of parts that it never reads."""

    def __init__(self, space: StrategySpace, choice: LayoutChoice, costs: ExchangeCosts, device: int) -> None:
        super().__init__(space, choice, costs)
        self._returning = device
        self._moves = False

    def finish(self, split_inputs: Mapping[str, tuple[str, ...]]) -> ShardedModel:
        self._moves = True
        return super().finish(split_inputs)

    def get(self, name: str, layout: Layout, device: int) -> str:
        if not self._moves:
            return super().get(name, layout, device)
        self._moves = False
        part = super().get(name, layout, self._returning if layout == REPLICATED else device)
        self._moves = True
        return part


def shard_randomly(space: StrategySpace, random: Random) -> ShardedModel:
    """Return a model with a random strategy per node, whose outputs are those of a random device."""
    costs = make_costs(space.division.count, random.choice((0.0, 1.0)))
    choice = choose_randomly(space, random)
    return ReturningWriter(space, choice, costs, random.randrange(space.division.count)).write()


def check_structure(original: Model, sharded: ShardedModel) -> None:
    """Raise AssertionError unless a sharded model is well-formed."""
    model = sharded.model
    names = [node.name for node in model.nodes]
    assert len(set(names)) == len(names)
    assert all(names)
    results = [name for node in model.nodes for name in node.output if name]
    assert len(set(results)) == len(results)
    assert not set(results) & (set(model.initializers) | model.input_names)
    assert len(sharded.origins) == len(model.nodes)
    model.check(None)  # type: ignore[arg-type]
    onnx.checker.check_model(model.whole_proto())
    assert [value.name for value in model.inputs] == [value.name for value in original.inputs]
    assert [value.name for value in model.outputs] == [value.name for value in original.outputs]
