"""Compare strategies for a model on a target, without building a bundle."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from itertools import product
from pathlib import Path

import numpy as np

from onnxplace.driver.candidates import (
    Candidate,
    Profiled,
    Result,
    Strategy,
    create_pass,
    place_on_one_device,
    predict,
    predict_all,
    predict_elsewhere,
)
from onnxplace.driver.choose import (
    StreamPoint,
    find_objective,
    format_rate,
    list_copied_stages,
    list_device_sets,
    list_sharded,
    list_simple,
    list_streamed,
    needs_streaming,
    restrict_strategy,
    stream_curve,
)
from onnxplace.driver.explaining import Explanation, explain_subjects, find_subjects
from onnxplace.driver.plan_memory import PlanMemory, fits_together, hold_on, hold_together
from onnxplace.driver.plan_sets import PlanSet, predict_moves, rank_sets
from onnxplace.driver.settings import EFFORTS, CompileSettings, Effort, choose_streaming, choose_target, require_effort
from onnxplace.driver.sources import SizesRequest, bind_source, open_source, require_one_size
from onnxplace.driver.step_parts import StepPart, list_step_parts, suggest_fixed_sizes
from onnxplace.errors import Diagnostic, InfeasibleError
from onnxplace.facts import Prediction, Profile, Schedule, Segments, Shards, Source
from onnxplace.feeds.feeds import Array
from onnxplace.measure.host_nodes import report_core_shortage
from onnxplace.model.loading import load
from onnxplace.model.model import Model
from onnxplace.model.state_binding import StateRequest
from onnxplace.pipeline.pipeline import Observer, Pipeline, make_pass
from onnxplace.state import Pass, State
from onnxplace.target.target import Target
from onnxplace.utils.quantities import format_milliseconds, format_object, format_time, list_first

# How long each placement of stages is searched.
STAGES_SECONDS: Mapping[Effort, float] = {"low": 0.2, "default": 2, "high": 10}
# Of each size, so many strategies are combined with those of others. So many sets of at most `MAX_PLANS` plans are
# listed, next to those in which each plan is on one device.
MAX_COMBINED, MAX_LISTED, MAX_PLANS = 3, 5, 3
# One request takes one copy.
COPIES = ("copies", "copied stages")


@dataclass(frozen=True)
class PlannedStrategy:
    """A strategy with its predicted times and memory."""

    name: str
    devices: int = 0
    """Number of devices that get work."""
    step_seconds: float | None = None
    """Time from the call to the last output, one request at a time; None if it does not fit."""
    interval_seconds: float | None = None
    """Time between two results, with requests in flight."""
    limit: str = ""
    """What takes all of that time: `Python`, or what the busiest device does: `computes`, `sends`, `receives`."""
    parts: tuple[StepPart, ...] = ()
    """What the latency consists of, the longest part first."""
    peak_bytes: int | None = None
    """Memory on the device that needs most: weights and values."""
    weight_bytes: int | None = None
    """Weights on the device that has most."""
    exchanges: Mapping[str, int] = field(default_factory=dict)
    """Kind of exchange between parts of operators -> number."""
    problem: str = ""
    """Reason why there is no prediction."""
    pipeline: str = ""
    """Text with which `onnxplace compile --pipeline` builds it."""
    plans: tuple[str, ...] = ()
    """Of a set of plans: that of each size."""
    steps: tuple[float, ...] = ()
    """Of a set of plans: seconds of each size."""
    move_seconds: float = 0.0
    """What it takes to move states between two plans."""

    @property
    def limited_by(self) -> str:
        """Return the longest part of its latency in a few words, such as `launches 71 %: 1422 at 5 us`."""
        if not self.parts or not self.step_seconds:
            return "-"
        kind, seconds, count = astuple(self.parts[0])
        number = f": {count} at {format_time(seconds / count)}" if kind in ("launches", "calls", "copies") else ""
        return f"{kind} {100 * seconds / self.step_seconds:.0f} %{number}"

    @property
    def times(self) -> tuple[str, str]:
        """Return its latency and its requests per second, as texts."""
        return format_milliseconds(self.step_seconds or 0.0), format_rate(self.interval_seconds or 0.0)

    def describe(self) -> str:
        """Return its name and times in a few words."""
        return "{}, {}, {} requests/s".format(self.name, *self.times)


@dataclass(frozen=True, repr=False)
class Plan:
    """Strategies for a model on a target; the fields are those of `onnxplace plan --json`."""

    model: str
    is_measured: bool
    """Whether all costs were measured; otherwise some are estimates."""
    strategies: tuple[PlannedStrategy, ...]
    diagnostics: tuple[Diagnostic, ...]
    request: str = ""
    """What the latency and the rate are of: the sizes of a request, such as `a batch of 32`."""
    advice: tuple[str, ...] = ()
    """What would make the least latency shorter."""
    stream_curve: tuple[StreamPoint, ...] = ()
    """Steps for several memory limits, with weights that stream; only if asked for."""
    explanations: tuple[Explanation, ...] = ()
    """Why nodes and values are where they are; only if asked for."""
    others: tuple[Plan, ...] = ()
    """The same for each further size of requests."""
    sets: tuple[PlannedStrategy, ...] = ()
    """Plans for all sizes together, the best set first; only for several sizes. The latency is that of the slowest
    size, and the interval a mean step, by how often each size is, with the moves of states."""

    def find_best(self) -> tuple[PlannedStrategy | None, PlannedStrategy | None]:
        """Return the strategies of least latency and of most requests, of those that fit; None if none does."""
        fitting = [item for item in self.strategies if item.step_seconds is not None]
        fastest = min(fitting, key=lambda item: item.step_seconds or 0.0, default=None)
        return fastest, min(fitting, key=lambda item: item.interval_seconds or 0.0, default=None)

    def __repr__(self) -> str:
        fastest, most = self.find_best()
        basis = "costs measured" if self.is_measured else "costs are estimates"
        return format_object(
            f"Plan of {self.model!r}: {len(self.strategies)} strategies, {basis}",
            f"least latency: {fastest.describe()}" if fastest else f"nothing fits: {self.strategies[0].problem}",
            *([f"most requests: {most.describe()}"] if most else []),
        )


def plan_model(
    model: str | Path,
    *,
    devices: str | Sequence[str] | None = None,
    target: Target | str | Path | None = None,
    machine: str | None = None,
    providers: str | Sequence[str] = (),
    max_memory: str | int | None = None,
    shape: SizesRequest = None,
    inputs: Mapping[str, Array] | None = None,
    state: StateRequest = (),
    llm: bool = False,
    fixed_sizes: bool = False,
    costs: str | Path = "",
    cache: bool = True,
    estimate: bool = False,
    effort: Effort = "default",
    stream: bool = False,
    explain: str | Sequence[str] = (),
    observer: Observer | None = None,
) -> Plan:
    """Predict the strategies that `onnxplace plan` lists, without building a bundle.

    Args:
        model: Path of a model, as for `compile`.
        devices: Devices of this machine; by default all GPUs, else two cores.
        target: Devices and links, of this or another machine, or their file, instead.
        machine: The name of a machine instead, such as 8xH100-NVLink.
        providers: Further execution providers for the hardware of the devices, as for `compile`.
        max_memory: Limit of each device.
        shape: Sizes of symbolic dimensions; for several sizes, sets of plans are predicted too (`Plan.sets`).
        inputs: Arrays by name, for measurements.
        state: Carried states, as for `compile`.
        llm: Whether states and sizes of a decoder are recognised, of a token and of a prompt.
        fixed_sizes: Whether bundles would take these sizes alone.
        costs: A cost file to use instead of measuring.
        cache: Whether earlier measurements may be used.
        estimate: Measure nothing.
        effort: How long to measure and to search, as for `compile`.
        stream: Predict the step for several memory limits, with weights that stream, too (`Plan.stream_curve`).
        explain: Names of nodes and values whose devices and layouts are compared with the others that they could have
            (`Plan.explanations`); or modules and patterns, for all their nodes.
        observer: Called before each strategy with its name, its position and their number.

    Raises:
        OnnxplaceError: the model, the costs or the target cannot be used, or a name to explain is unknown.

    >>> plan = onnxplace.plan("model.onnx", devices="cpu:0,cpu:1", shape={"batch": 8})  # doctest: +SKIP
    >>> [(item.name, item.step_seconds) for item in plan.strategies]  # doctest: +SKIP
    """
    require_effort(effort)
    settings = CompileSettings(target=target, machine=machine, max_memory=max_memory, cache=cache)
    target = choose_target(devices, target, max_memory, machine, providers)
    is_estimated = estimate or effort == "low"
    options = {**EFFORTS[effort].get("profile", {}), "costs": str(costs), "cache": cache, "estimate": is_estimated}
    optimize, profile = make_pass("optimize", {"fixed_sizes": fixed_sizes}), make_pass("profile", options)
    with open_source(model) as source:
        loaded = load(source.path, may_lack_weights=True)
        sized, notes = bind_source(source, loaded, shape=shape, inputs=inputs, state=state, llm=llm)
        require_one_size(sized, costs, "--costs has those of one")
        bound = sized[0].model
        is_measured = settings.target is None and settings.machine is None and not is_estimated
        shortage = report_core_shortage(target, bound.name) if is_measured else None
        notes = (*notes, *([shortage] if shortage else []))
        starts = [State(target).with_facts(item.model).with_notes(*notes) for item in sized]
        starts = [Pipeline((optimize,)).run(state)[0] for state in starts]
        subjects = find_subjects(starts[0][Model], [explain] if isinstance(explain, str) else explain)
        for number, state_of_size in enumerate(starts):
            if observer:
                observer("profile", number, len(sized))
            starts[number], _ = Pipeline((profile,)).run(state_of_size)
    stages = create_pass("stages", seconds=STAGES_SECONDS[effort])
    rest = (create_pass("coplace", join="never"), create_pass("fuse"), stages, create_pass("split"))
    profiled = [Profiled((optimize, profile), start, rest, make_pass("emit")) for start in starts]
    streaming = choose_streaming(settings, target)
    predicted = [_predict_strategies(part, streaming, stream, effort, observer) for part in profiled]
    first, *others = (
        _summarise(part, results, item.model, str(model), stream)
        for part, results, item in zip(profiled, predicted, sized)
    )
    return replace(
        first,
        explanations=explain_subjects(starts[0], subjects, predicted[0]),
        others=tuple(others),
        sets=tuple(_predict_sets(predicted, profiled, [item.weight for item in sized])) if others else (),
    )


def _summarise(profiled: Profiled, results: Sequence[Result], model: Model, path: str, has_curve: bool) -> Plan:
    """Return the strategies for one size."""
    state = profiled.state
    built = [item for item in results if isinstance(item, Candidate)]
    fastest = min(built, key=lambda item: item.step_seconds, default=None)
    streamed = next((item for item in built if has_curve and item.strategy.kind == "streamed"), None)
    sources = [state[Profile].sources[device.cost_class] for device in state.target.devices]
    return Plan(
        model=model.name or Path(path).name,
        is_measured=all(bool((source != Source.ESTIMATED).all()) for source in sources),
        strategies=tuple(_describe(item, results[0]) for item in _omit_copied_stages(results)),
        diagnostics=state.diagnostics,
        request=_describe_request(model),
        advice=tuple(note.message for note in suggest_fixed_sizes(fastest)) if fastest else (),
        stream_curve=tuple(stream_curve(streamed)) if streamed else (),
    )


def _predict_strategies(
    profiled: Profiled, streaming: Pass | None, has_curve: bool, effort: Effort, observer: Observer | None
) -> list[Result]:
    """Predict all strategies, the one with weights that stream where it is useful or its curve is asked for."""
    step = find_objective("step", profiled) if profiled.state[Profile].training is not None else None

    def propose(profiled: Profiled, results: Sequence[Result]) -> Iterator[Sequence[Strategy]]:
        yield from step.propose(profiled, results) if step else _list_strategies(profiled, results, effort)
        if streaming and (has_curve or needs_streaming(profiled, results)):
            yield list_streamed(profiled, streaming)

    return predict_all(propose, profiled, observer)


def _predict_sets(
    results: Sequence[Sequence[Result]], profiled: Sequence[Profiled], weights: Sequence[float]
) -> Iterator[PlannedStrategy]:
    """Yield the best set of plans first, then others by their mean step, and all of plans on one device."""
    target, plans = profiled[0].state.target, list(_list_plans(results, profiled))
    predicted = [[predict_elsewhere(item, part) for part in profiled] for item in plans]
    steps = np.array([[step.seconds for step in row] for row in predicted])
    predictions = [Pipeline((create_pass("predict"),)).run(item.state)[0][Prediction] for item in plans]
    memory = [PlanMemory(item.devices, target, {}) for item in predictions]

    def fits(item: PlanSet) -> bool:
        return fits_together(item.hold(memory, predicted))

    sets, moves = list[PlanSet](), predict_moves(plans, target)
    with suppress(InfeasibleError):
        sets = rank_sets(steps, np.array(weights), MAX_PLANS, fits, move_seconds=moves)
    useful = [item for item in sets if set(item.fastest) == set(item.plans)]
    alone = [item for item in useful if len(item.plans) == 1]
    pairs = [item for item in useful if all(plans[index].devices == 1 for index in item.plans)]
    for item in {item.plans: item for item in (*useful[:MAX_LISTED], *alone[:1], *pairs)}.values():
        names, together = [plans[index].name for index in item.fastest], item.hold(memory, predicted)
        held = {name: record.peak_bytes for name, record in hold_together(together).items()}
        pools = [hold_on(pool.devices, together).peak_bytes for pool in target.pools]
        yield PlannedStrategy(
            name=" + ".join(dict.fromkeys(names)),
            devices=len({device.id for part in together for device in part.devices if device.nodes}),
            step_seconds=float(item.seconds.max()),
            interval_seconds=item.loss / sum(weights),
            peak_bytes=max(*(held[device.id] for device in target.devices), *pools, 0),
            plans=tuple(names),
            steps=tuple(item.seconds.tolist()),
            move_seconds=item.move_seconds,
        )


def _list_plans(results: Sequence[Sequence[Result]], profiled: Sequence[Profiled]) -> Iterator[Candidate]:
    """Yield one device of each class alone, then the fastest ways of each size to use several devices.

    Where sizes are fixed, each size has its own plan on a device.
    """
    is_fixed = any(getattr(step, "fixed_sizes", False) for step in profiled[0].front)
    names = {device.cost_class: device.id for device in reversed(profiled[0].state.target.devices)}.values()
    for part, name in product(profiled if is_fixed else profiled[:1], names):
        with suppress(InfeasibleError):  # it has no room for the whole model
            yield predict(replace(place_on_one_device(part), name=name, devices=(name,)), part)
    for number, items in enumerate(results, 1):
        built = (item for item in items if isinstance(item, Candidate) and item.strategy.kind not in COPIES)
        several = sorted((item for item in built if item.devices > 1), key=lambda item: item.step_seconds)
        for item in several[:MAX_COMBINED]:
            yield replace(item, strategy=replace(item.strategy, name=f"{item.name}, as for size {number}"))


def _describe_request(model: Model) -> str:
    """Return the sizes of symbolic dimensions, or else the shapes of inputs."""
    shapes = {name: list(shape) for name, shape in model.input_shapes().items()}
    texts = list_first([f"{name}={size}" for name, size in (model.dimensions or shapes).items()], 3)
    return f"a batch of {model.dimensions['batch']}" if [*model.dimensions] == ["batch"] else f"of {', '.join(texts)}"


def _list_strategies(profiled: Profiled, results: Sequence[Result], effort: Effort) -> Iterator[Sequence[Strategy]]:
    """Yield all strategies for requests in flight, and whole operators placed.

    Of devices that share processors, all are for sets that compute side by side, and few for other sets.
    """
    placer = make_pass("auto", EFFORTS[effort].get("auto", {}))
    sets = list_device_sets(profiled.state.target)
    for ids in sets:
        part = profiled.choose_devices(ids)
        one_device, *others = list_simple(part)
        auto = Strategy("whole operators placed", "placed", part.replace_placer(placer))
        if not ids and len(sets) > 1:
            yield [restrict_strategy(auto, ids, sets)]
            continue
        rounds: list[Sequence[Strategy]] = [[one_device, auto, *others] if others else [one_device]]
        rounds += [*([] if ids else list_copied_stages(part, results)), list_sharded(part)]
        for strategies in rounds:
            yield [restrict_strategy(item, ids, sets) for item in strategies]


def _omit_copied_stages(results: Sequence[Result]) -> list[Result]:
    """Return the results with the best of copied stages only, or the first if none fits."""
    copied = [item for item in results if item.strategy.kind == "copied stages"]
    fitting = [item for item in copied if isinstance(item, Candidate)]
    shown: Result | None = min(fitting, key=lambda item: item.interval_seconds) if fitting else next(iter(copied), None)
    return [item for item in results if item.strategy.kind != "copied stages" or item is shown]


def _is_worse(result: Candidate, other: Candidate) -> bool:
    return result.step_seconds >= other.step_seconds and result.interval_seconds > other.interval_seconds


def _describe(result: Result, one_device: Result) -> PlannedStrategy:
    """Return the figures of a strategy, or why it is impossible, or why it is no use next to one device."""
    if not isinstance(result, Candidate):
        return PlannedStrategy(result.strategy.name, problem=result.problem.message)
    if result.routes.limit == "Python" and isinstance(one_device, Candidate) and _is_worse(result, one_device):
        return PlannedStrategy(result.name, problem="Python hands on requests more slowly than one device answers them")
    state = result.state
    return PlannedStrategy(
        name=result.name,
        devices=result.devices,
        step_seconds=result.step_seconds,
        interval_seconds=result.interval_seconds,
        limit=result.routes.limit,
        parts=list_step_parts(result),
        peak_bytes=int(state[Schedule].simulation.peak_bytes.max()),
        weight_bytes=int(state[Segments].simulation.weights_bytes.max()),
        exchanges=dict(state[Shards].exchanges) if result.strategy.kind == "sharded" else {},
        pipeline=str(result.pipeline),
    )
