"""Strategies to use several devices: copies, stages, copies of stages, split operators, and all of these together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import numpy as np

from onnxplace.driver.sharding import SHARD
from onnxplace.errors import InfeasibleError
from onnxplace.facts import Placement, Routes, Segments, Shards
from onnxplace.pipeline import PassSpec, Pipeline, format_pipeline, format_tuple
from onnxplace.problem import fits_single_device
from onnxplace.state import State
from onnxplace.target import Target

REPLICATE = "replicate"
"""The pass that copies segments to further devices."""
Kind = Literal["one device", "placed", "copies", "stages", "copied stages", "sharded", "replicas", "micro-batches"]
# Up to this number of devices, all ways to share them among stages are listed; beyond, only even ones.
MAX_PARTITIONED_DEVICES = 8
# Time for the stages of each way to share devices.
PARTITION_SECONDS = "0.5"
# Each is a search for layouts over the whole graph.
WAYS = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True)
class Strategy:
    """A way to use the devices of a target."""

    name: str
    kind: Kind
    specs: tuple[PassSpec, ...]
    """The passes after `profile`, up to `split`."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Devices of which each may take the place of the first one; empty where the passes use all devices."""
    everywhere: bool = False
    """Whether each device with room gets a copy of the whole model."""

    @property
    def is_sharded(self) -> bool:
        """Return whether operators are split."""
        return self.specs[0].name == SHARD

    @property
    def is_rewritten(self) -> bool:
        """Return whether the model is rewritten: operators or batches are split."""
        return self.is_sharded or self.kind in ("replicas", "micro-batches")


@dataclass(frozen=True)
class Prediction:
    """A strategy that fits, with its predicted steady state."""

    strategy: Strategy
    state: State
    """With Routes; without its bundle."""
    specs: tuple[PassSpec, ...]
    """The passes after `profile` that led to it."""

    @property
    def interval_seconds(self) -> float:
        """Return the time between two results with requests in flight."""
        return self.state[Routes].interval_seconds

    @property
    def devices(self) -> int:
        """Return the number of devices that get work."""
        used = set(self.state[Placement].device.tolist())
        for route in self.state[Routes].routes:
            used |= set(route.device[route.device >= 0].tolist())
        return len(used)


@dataclass(frozen=True)
class InfeasibleStrategy:
    """A strategy that is impossible, and why."""

    strategy: Strategy
    problem: InfeasibleError


def list_strategies(
    target: Target,
    place: Sequence[PassSpec],
    stages: PassSpec,
    *,
    is_sharding_allowed: bool = True,
    are_copies_allowed: bool = True,
) -> list[Strategy]:
    """Return the strategies for many requests in flight, the simple ones first.

    Args:
        target: The devices.
        place: The passes before the placer, such as `coplace`.
        stages: The placer of stages, with its options.
        is_sharding_allowed: Whether operators may be split.
        are_copies_allowed: Whether requests may take several routes; not with carried states, which are on the first.
    """
    count = len(target.devices)
    split = PassSpec("split")
    alone = (*place, PassSpec("single"), split)
    strategies = [Strategy("one device", "one device", alone)]
    if count == 1:
        return strategies
    strategies.append(Strategy(f"{count} copies of the model", "copies", alone, everywhere=True))
    strategies.append(Strategy("stages", "stages", (*place, stages, split)))
    free = PassSpec(stages.name, {**stages.options, "contiguous": "false"})
    strategies.append(Strategy("stages, not contiguous", "stages", (*place, free, split)))
    for parts in _list_partitions(count):
        options = {**stages.options, "seconds": PARTITION_SECONDS, "replicas": format_tuple(map(str, parts))}
        groups = tuple(_list_blocks(parts))
        name = _name_parts(parts)
        strategies.append(Strategy(name, "copied stages", (*place, PassSpec(stages.name, options), split), groups))
    strategies += _list_sharded(target, place) if is_sharding_allowed else []
    return [item for item in strategies if are_copies_allowed or not (item.everywhere or item.groups)]


def _list_sharded(target: Target, place: Sequence[PassSpec]) -> Iterator[Strategy]:
    """Yield strategies that split operators over a group of devices: copies of it, or stages of such groups."""
    count = len(target.devices)
    # Parts have their devices: only their order is searched.
    quick = (*place, PassSpec("auto", {"seconds": "0.5"}), PassSpec("split"))
    for ways in list_ways(count):
        options = {"ways": str(ways), "exact": "true"}
        copies = count // ways
        if copies > 1:
            groups = tuple(tuple(range(first, copies * ways, ways)) for first in range(ways))
            name = f"{copies} copies, each sharded {ways} ways"
            yield Strategy(name, "sharded", (PassSpec(SHARD, options), *quick), groups)
            if count % ways == 0:
                stages = PassSpec(SHARD, {**options, "stages": str(copies)})
                yield Strategy(f"{copies} stages, each sharded {ways} ways", "sharded", (stages, *quick))
        else:
            yield Strategy(f"sharded {ways} ways", "sharded", (PassSpec(SHARD, options), *quick))


def list_ways(count: int) -> list[int]:
    """Return the numbers of devices that may share operators.

    >>> list_ways(6)
    [2, 4, 6]
    """
    return sorted({size for size in WAYS if size < count} | {count})


def _list_partitions(count: int) -> list[tuple[int, ...]]:
    """Return ways to share devices among stages, without one device each and without copies of the whole model.

    Fewer stages come first. The stages choose among the groups, so their order does not matter.

    >>> _list_partitions(4)
    [(1, 3), (2, 2), (1, 1, 2)]
    """
    if count > MAX_PARTITIONED_DEVICES:
        sizes = [size for size in range(2, count) if count % size == 0]
        return [(count // size,) * size for size in sizes]
    parts = [part for part in _iterate_partitions(count, 1) if 1 < len(part) < count]
    return sorted(parts, key=lambda part: (len(part), part))


def _iterate_partitions(count: int, least: int) -> Iterator[tuple[int, ...]]:
    """Yield the partitions of a number into ascending parts of at least `least`."""
    yield (count,)
    for first in range(least, count // 2 + 1):
        for others in _iterate_partitions(count - first, first):
            yield (first, *others)


def _list_blocks(sizes: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """Yield consecutive devices in blocks of these sizes."""
    first = 0
    for size in sizes:
        yield tuple(range(first, first + size))
        first += size


def _name_parts(parts: Sequence[int]) -> str:
    """Return the name of stages on these numbers of devices."""
    if len(set(parts)) == 1:
        return f"{parts[0]} copies of {len(parts)} stages"
    return f"stages on {' + '.join(map(str, parts))} devices"


def predict_strategy(strategy: Strategy, state: State) -> Prediction:
    """Run the passes of a strategy on a profiled model, and predict its steady state.

    Raises InfeasibleError if it does not fit, or if there is nothing to split or to copy.
    """
    state, _ = Pipeline.parse(format_pipeline(strategy.specs)).run(state)
    if strategy.is_sharded and state[Shards].ways == 1:
        raise InfeasibleError("P064", "splitting operators gains nothing", where=SHARD)
    routes = _list_routes(strategy, state)
    is_copied = strategy.everywhere or bool(strategy.groups)
    if is_copied and not routes:
        has_work = any(state[Segments].programs)
        reason = "there is no room for a second copy" if has_work else "the model has no nodes to copy"
        raise InfeasibleError("P001", reason, where=REPLICATE)
    replicate = PassSpec(REPLICATE, {"routes": format_tuple(routes)} if routes else {})
    state, _ = Pipeline.parse(format_pipeline([replicate])).run(state)
    if strategy.everywhere:
        copies = len(state[Routes].routes) + 1
        strategy = replace(strategy, name=f"{copies} copies of the model")
    return Prediction(strategy, state, (*strategy.specs, replicate) if routes else strategy.specs)


def predict_fitting(
    strategies: Sequence[Strategy], state: State, observer: Callable[[str, int, int], object] | None = None
) -> Iterator[Prediction | InfeasibleStrategy]:
    """Yield the prediction of each strategy, or why it is impossible.

    Copies of stages with many stages are left out where fewer stages fit: each stage more costs transfers and balance.
    `observer` is called before each strategy with its name, its position and their number.
    """
    fewest_stages = 0
    for position, strategy in enumerate(strategies):
        if fewest_stages and strategy.kind == "copied stages" and len(strategy.groups) > fewest_stages + 1:
            continue
        if observer:
            observer(strategy.name, position, len(strategies))
        try:
            prediction = predict_strategy(strategy, state)
        except InfeasibleError as problem:
            yield InfeasibleStrategy(strategy, problem)
            continue
        if strategy.kind == "copied stages" and not fewest_stages:
            fewest_stages = len(strategy.groups)
        yield prediction


def _list_routes(strategy: Strategy, state: State) -> list[str]:
    """Return the further routes of a strategy, as the pass `replicate` takes them."""
    ids = [device.id for device in state.target.devices]
    used = [index for index, program in enumerate(state[Segments].programs) if program]
    if not used:  # outputs that are inputs: there is nothing to run
        return []
    if strategy.everywhere:
        (home,) = used
        return [ids[index] for index in np.flatnonzero(fits_single_device(state)).tolist() if index != home]
    group_of = {group[0]: group for group in strategy.groups}
    if not group_of.keys() >= set(used):
        return []
    ways = list_ways_through([group_of[home] for home in used])
    return ["+".join(ids[index] for index in devices) for devices in ways[1:]]


def list_ways_through(groups: Sequence[Sequence[int]]) -> list[tuple[int, ...]]:
    """Return ways through groups of equal devices, one of each, which load all devices of a group equally.

    With even shares of a group of r devices, each gets 1 / r of the requests: the bounds of all groups cut the requests
    into at most as many ways as there are devices.

    >>> list_ways_through([(0,), (1, 2)]), list_ways_through([(0, 1), (2, 3)])
    ([(0, 1), (0, 2)], [(0, 2), (1, 3)])
    """
    bounds = sorted({Fraction(part, len(group)) for group in groups for part in range(len(group))})
    return [tuple(group[int(bound * len(group))] for group in groups) for bound in bounds]
