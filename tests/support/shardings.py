"""Random shardings of models, to test that rewriting keeps what a model computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random

import onnx
from onnx import ModelProto

from onnxplace.model import Model, bind, load
from onnxplace.passes.sharding.layout_choice import LayoutChoice
from onnxplace.passes.sharding.layouts import Division
from onnxplace.passes.sharding.sharded_model import ShardedModel, write_sharded_model
from onnxplace.passes.sharding.sharding_costs import ExchangeCosts
from onnxplace.passes.sharding.strategy_space import StrategySpace, build_space
from onnxplace.passes.sharding.tensor_facts import TensorFacts

SHARES = ((1.0, 1.0), (1.0, 1.0, 1.0), (3.0, 1.0), (2.0, 1.0, 1.0))
"""Shares of the work of two and three devices, equal and not."""


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


def choose_randomly(space: StrategySpace, random: Random) -> LayoutChoice:
    """Return a choice of a random strategy per node."""
    share = min(1.0, 2 * random.random())  # of split nodes
    strategies = []
    for options in space.strategies:
        is_split = len(options) > 1 and random.random() < share
        strategies.append(options[random.randrange(1, len(options))] if is_split else options[0])
    return LayoutChoice(tuple(strategies), {}, 0.0, 0.0, 0)


def shard_randomly(space: StrategySpace, random: Random) -> ShardedModel:
    """Return a model with a random strategy per node."""
    costs = make_costs(space.division.count, random.choice((0.0, 1.0)))
    return write_sharded_model(space, choose_randomly(space, random), costs)


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
