"""Compare strategies for a model on a target, without building a bundle."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxplace.driver.choose_target import choose_target
from onnxplace.driver.step_strategies import predict_steps
from onnxplace.driver.strategies import Prediction, Refusal, Strategy, list_strategies, predict_fitting
from onnxplace.errors import Diagnostic
from onnxplace.facts import Profile, Schedule, Segments, Shards, Source
from onnxplace.model import Model, StateRequest, bind, bind_states, load
from onnxplace.pipeline import Observer, PassSpec, Pipeline, format_pipeline
from onnxplace.problem import predict_step_seconds
from onnxplace.state import State
from onnxplace.target import Target


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
    """What `onnxplace compile --pipeline` takes to build it."""


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
    target: Target | str | Path | None = None,
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
        target: Devices and links, of this or another machine, or their file, instead.
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
    if observer:
        observer("profile", 0, 1)
    profiled, _ = Pipeline.parse(format_pipeline(front)).run(State(target).having(bound))
    strategies = _predict_all(profiled, front, observer)
    sources = profiled[Profile].sources
    is_measured = all(bool((sources[device.cost_class] != Source.ESTIMATED).all()) for device in target.devices)
    return Plan(bound.name or Path(model).name, is_measured, tuple(strategies), profiled.diagnostics)


def _predict_all(state: State, front: Sequence[PassSpec], observer: Observer | None) -> Sequence[PlannedStrategy]:
    """Return the strategies with their predictions; of copies of stages, only the best one.

    For a training step, these are those of `--objective step`.
    """
    place = [PassSpec("coplace", {"join": "never"}), PassSpec("fuse")]
    if state[Profile].training is not None:
        return [_describe_result(item, front) for item in predict_steps(state, place, observer)]
    stages = PassSpec("stages", {"seconds": "2"})
    strategies = list_strategies(state.target, place, stages, are_copies_allowed=not state[Model].states)
    auto = Strategy("whole operators placed", "placed", (*place, PassSpec("auto"), PassSpec("split")))
    strategies[1:1] = [auto] if len(strategies) > 1 else []
    results = list(predict_fitting(strategies, state, observer))
    partitions = [item for item in results if item.strategy.kind == "copied stages"]
    fitting = [item for item in partitions if isinstance(item, Prediction)]
    best = min(fitting, key=lambda item: item.interval_seconds, default=None)
    shown = [best] if best is not None else partitions[:1]
    return [_describe_result(item, front) for item in results if item not in partitions or item in shown]


def _describe_result(item: Prediction | Refusal, front: Sequence[PassSpec]) -> PlannedStrategy:
    """Return the figures of a strategy, or why it is impossible."""
    if isinstance(item, Prediction):
        return _describe(item, front)
    return _unplanned(item.strategy.name, item.problem.message)


def _describe(prediction: Prediction, front: Sequence[PassSpec]) -> PlannedStrategy:
    """Return the figures of a prediction."""
    state = prediction.state
    return PlannedStrategy(
        name=prediction.strategy.name,
        devices=prediction.devices,
        step_seconds=predict_step_seconds(state),
        interval_seconds=prediction.interval_seconds,
        peak_bytes=int(state[Schedule].simulation.peak_bytes.max()),
        weight_bytes=int(state[Segments].simulation.weights_bytes.max()),
        exchanges=dict(state[Shards].exchanges) if prediction.strategy.is_sharded else {},
        pipeline=format_pipeline([*front, *prediction.specs, PassSpec("emit")]),
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
