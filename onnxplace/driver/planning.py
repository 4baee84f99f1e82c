"""Compare strategies for a model on a target, without building a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from onnxplace.driver.choose_target import choose_target
from onnxplace.driver.first_use import compile_loops
from onnxplace.driver.sharding import SHARD
from onnxplace.errors import Diagnostic, InfeasibleError
from onnxplace.facts import Placement, Profile, Schedule, Segments, Shards, Source
from onnxplace.model import StateRequest, bind, bind_states, load
from onnxplace.pipeline import Observer, PassSpec, Pipeline, format_pipeline
from onnxplace.simulation import loads_of_simulation
from onnxplace.state import State
from onnxplace.target import Target, request_overhead_seconds


@dataclass(frozen=True)
class PlannedStrategy:
    """A strategy with its predicted times and memory."""

    name: str
    devices: int
    """Devices that get work."""
    step_seconds: float | None
    """From the call to the last output, one request at a time; None if it does not fit."""
    interval_seconds: float | None
    """Between two results, with requests in flight."""
    peak_bytes: int | None
    """Memory on the device that needs most: weights and values."""
    weight_bytes: int | None
    """Weights on the device that has most."""
    exchanges: Mapping[str, int]
    """Kind of exchange between parts of operators -> number."""
    problem: str = ""
    """Why there is no prediction."""
    pipeline: str = ""
    """What `onnxplace compile --pipeline` takes to build it; empty for copies on several devices."""


@dataclass(frozen=True)
class Plan:
    """Strategies for a model on a target."""

    model: str
    is_measured: bool
    """Whether all costs were measured; otherwise some are estimates."""
    strategies: tuple[PlannedStrategy, ...]
    diagnostics: tuple[Diagnostic, ...]


def plan_model(
    model: str | Path,
    *,
    devices: str | None = None,
    target: Target | None = None,
    max_memory: str | None = None,
    shape: Mapping[str, int] | None = None,
    state: StateRequest = (),
    costs: str = "",
    cache: bool = True,
    estimate: bool = False,
    observer: Observer | None = None,
) -> Plan:
    """Predict the strategies that `onnxplace plan` lists.

    Args:
        model: Path of a model.
        devices: Devices of this machine; by default all GPUs, else two cores.
        target: Devices and links, of this or another machine, instead.
        max_memory: Limit of each device.
        shape: Sizes of symbolic dimensions.
        state: Carried states, as for `compile`.
        costs: A cost file to use instead of measuring.
        cache: Whether earlier measurements may be used.
        estimate: Measure nothing.
        observer: Called before each strategy with its name, its position and their number.

    Raises:
        OnnxplaceError: the model, the costs or the target cannot be used.
    """
    target = choose_target(devices, target, max_memory)
    bound = bind_states(bind(load(model), shape or {}, {}), state)
    options = {"costs": costs, "cache": "" if cache else "false", "estimate": "true" if estimate else ""}
    front = [PassSpec("optimize"), PassSpec("profile", {key: text for key, text in options.items() if text})]
    compile_loops(["profile", "coplace", "fuse", "auto"])
    if observer:
        observer("profile", 0, 1)
    profiled, _ = Pipeline.parse(format_pipeline(front)).run(State(target).having(bound))
    strategies = []
    candidates = _list_strategies(target)
    for position, (name, specs, copies) in enumerate(candidates):
        if observer:
            observer(name, position, len(candidates))
        strategies.append(_copy(_predict(name, profiled, specs, front), copies))
    sources = profiled[Profile].sources
    is_measured = all(bool((sources[device.cost_class] != Source.ESTIMATED).all()) for device in target.devices)
    return Plan(bound.name or Path(model).name, is_measured, tuple(strategies), profiled.diagnostics)


def _list_strategies(target: Target) -> list[tuple[str, list[PassSpec], int]]:
    """Return (name, passes after `profile`, number of copies) of each strategy."""
    count = len(target.devices)
    place = [PassSpec("coplace", {"join": "never"}), PassSpec("fuse")]
    single = [*place, PassSpec("single"), PassSpec("split")]
    strategies: list[tuple[str, list[PassSpec], int]] = [("one device", single, 1)]
    if count == 1:
        return strategies
    auto = [*place, PassSpec("auto"), PassSpec("split")]
    strategies.append(("whole operators placed", auto, 1))
    # Parts have their devices: only their order is searched.
    quick = [PassSpec("auto", {"seconds": "0.5"}), PassSpec("split")]
    ways = sorted({size for size in (2, 4, 8, 16, 32, 64) if size < count} | {count})
    for way in ways:
        shard = PassSpec(SHARD, {"ways": str(way), "exact": "true"})
        strategies.append((f"sharded {way} ways", [shard, *place, *quick], 1))
    strategies.append(("stages", [*place, PassSpec("stages", {"seconds": "2"}), PassSpec("split")], 1))
    for way in ways:
        if count % way == 0 and count // way > 1:
            stages = PassSpec(SHARD, {"ways": str(way), "stages": str(count // way), "exact": "true"})
            name = f"{count // way} stages, each sharded {way} ways"
            strategies.append((name, [stages, *place, *quick], 1))
    strategies.append((f"{count} copies of one device", single, count))
    return strategies


def _predict(name: str, state: State, specs: Sequence[PassSpec], front: Sequence[PassSpec]) -> PlannedStrategy:
    """Return the prediction for a strategy, or why there is none."""
    asks_for_shards = specs[0].name == SHARD
    try:
        after, _ = Pipeline.parse(format_pipeline(specs)).run(state)
    except InfeasibleError as problem:
        return _unplanned(name, problem.message)
    if asks_for_shards and after[Shards].ways == 1:
        return _unplanned(name, "splitting operators gains nothing")
    simulation, target = after[Segments].simulation, after.target
    devices = len(set(after[Placement].device.tolist()))
    text = format_pipeline([*front, *specs, PassSpec("emit")])
    return PlannedStrategy(
        name=name,
        devices=devices,
        step_seconds=simulation.makespan_seconds + request_overhead_seconds(devices),
        interval_seconds=loads_of_simulation(simulation, target).interval_seconds,
        peak_bytes=int(after[Schedule].simulation.peak_bytes.max()),
        weight_bytes=int(simulation.weights_bytes.max()),
        exchanges=dict(after[Shards].exchanges) if asks_for_shards else {},
        pipeline=text,
    )


def _unplanned(name: str, problem: str) -> PlannedStrategy:
    """Return a strategy without a prediction."""
    return PlannedStrategy(
        name=name,
        devices=0,
        step_seconds=None,
        interval_seconds=None,
        peak_bytes=None,
        weight_bytes=None,
        exchanges={},
        problem=problem,
    )


def _copy(planned: PlannedStrategy, copies: int) -> PlannedStrategy:
    """Return the strategy of several copies of the model, each on a device of its own, with requests of their own."""
    if copies == 1 or planned.interval_seconds is None:
        return planned
    interval = planned.interval_seconds / copies
    return replace(planned, devices=copies, interval_seconds=interval, pipeline="")
