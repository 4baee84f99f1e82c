"""Ways to use the devices of a target, and what is predicted of each.

A `Strategy` is a list of passes that turn a profiled model into segments. Run on the model, it is a `Candidate`, with
its state and predictions, or an `InfeasibleStrategy` with the reason. `onnxplace.driver.choose` proposes strategies and
chooses candidates. Nothing is written and nothing runs before `onnxplace.driver.trials` has them: a prediction takes
milliseconds to seconds, a trial takes seconds of all devices.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.bundle.bundle import Bundle
from onnxplace.errors import Diagnostic, InfeasibleError
from onnxplace.facts import (
    Emitted,
    Layouts,
    MicroBatches,
    Placement,
    Profile,
    Routes,
    Segments,
    Shards,
    Streaming,
    is_refused,
)
from onnxplace.graph.op_graph import Floats, OpGraph, sum_by
from onnxplace.model.model import Model
from onnxplace.pipeline.pipeline import Observer, Pipeline, Timing
from onnxplace.pipeline.registry import find_plugin
from onnxplace.problem import (
    bound_step_seconds,
    describe_shortage,
    fits_single_device,
    list_transfer_bytes,
    predict_step_seconds,
)
from onnxplace.simulation.simulated_contention import simulate_with_contention
from onnxplace.state import Pass, State

# The code of the note that lists the placers that `auto` tried.
PLACERS_TRIED = "P040"


def create_pass(name: str, **options: Any) -> Pass:
    """Return a pass by name; its options are its fields."""
    created: Pass = find_plugin("passes", name)(**options)
    return created


def set_options(step: Pass, **options: Any) -> Pass:
    """Return a pass with other options."""
    return replace(step, **options)


@dataclass(frozen=True)
class Profiled:
    """A model with its costs, between the passes that led to it and those that place it."""

    front: tuple[Pass, ...]
    """The passes so far."""
    state: State
    rest: tuple[Pass, ...]
    """The passes that place and split it, as the user or the default pipeline has them."""
    emit: Pass
    """The pass that writes bundles, with the options of the user."""
    links_weights: bool = False
    """Whether bundles refer to the model's own weights files, whatever the options of `emit` are."""
    timings: tuple[Timing, ...] = ()
    """Times of the passes so far."""

    @property
    def placer(self) -> Pass:
        """Return the placer."""
        return next(step for step in self.rest if Placement in step.provides)

    @property
    def seed(self) -> int:
        """Return the seed of the inputs that costs are measured with, and that trials run with."""
        return next((int(getattr(step, "seed", 0)) for step in self.front if Profile in step.provides), 0)

    def replace_placer(self, placer: Pass) -> tuple[Pass, ...]:
        """Return the rest with another placer."""
        return tuple(placer if step is self.placer else step for step in self.rest)

    def advance(self, observer: Observer | None) -> Profiled:
        """Return the model after the next pass."""
        step, *rest = self.rest
        if observer:
            observer(step.name, len(self.front), len(self.front) + len(self.rest) + 1)
        state, timings = Pipeline((step,)).run(self.state)
        front = (*self.front, step)
        return replace(self, front=front, state=state, rest=tuple(rest), timings=self.timings + timings)

    def choose_devices(self, device_ids: Collection[str]) -> Profiled:
        """Return the model for some devices of its target; for all of them if none is named."""
        chosen = self.state.target.choose_devices(device_ids) if device_ids else self.state.target
        return replace(self, state=replace(self.state, target=chosen))

    def insert(self, step: Pass, observer: Observer | None) -> Profiled:
        """Return the model after one more pass, which changes it and its costs."""
        return replace(self, rest=(step, *self.rest)).advance(observer)


@dataclass(frozen=True)
class Strategy:
    """A way to use the devices of a target."""

    name: str
    kind: str
    """Its family, of which often only the best one is tried: `one device`, `placed`, `sharded`, `streamed`, `copies`,
    `stages` or `copied stages`; objectives of plugins may have others."""
    passes: tuple[Pass, ...]
    """The passes after `profile`, up to `split`; sharded strategies begin with the pass that splits operators."""
    groups: tuple[tuple[int, ...], ...] = ()
    """Devices of which each may take the place of the first one; empty where the passes use all devices."""
    everywhere: bool = False
    """Whether each device with room gets a copy of the whole model."""
    min_gain: float = 0.0
    """Share by which its step must be shorter than that of a strategy that needs no gain."""
    max_seconds: float = math.inf
    """A split model whose step has a lower bound of so much is no use: others are predicted to be as good."""
    devices: tuple[str, ...] = ()
    """The only devices that it uses, where others are further ways to use the same hardware; empty for all."""


@dataclass(frozen=True)
class Candidate:
    """A strategy that fits: the model placed and split, with predictions."""

    strategy: Strategy
    profiled: Profiled
    state: State
    """State after the passes of the strategy; once written, with the path of the bundle."""
    timings: tuple[Timing, ...] = ()

    @property
    def name(self) -> str:
        """Return the name of the strategy."""
        return self.strategy.name

    @property
    def pipeline(self) -> Pipeline:
        """Return the passes that build it, as its bundle records them."""
        return Pipeline((*self.profiled.front, *self.strategy.passes, self.profiled.emit))

    @property
    def is_rewritten(self) -> bool:
        """Return whether operators or batches are split."""
        return MicroBatches in self.state or (Shards in self.state and self.state[Shards].ways > 1)

    @property
    def unsharded(self) -> State:
        """Return the state with the model as it was before operators or batches were split, and all weights held."""
        return self.profiled.state if self.is_rewritten or Streaming in self.state else self.state

    @property
    def step_seconds(self) -> float:
        """Return the predicted step, from the call to the last output."""
        return predict_step_seconds(self.state)

    @cached_property
    def routes(self) -> Routes:
        """Return the routes of requests in flight; raises InfeasibleError without room for them."""
        replicate = Pipeline((create_pass("replicate"),))
        return (self.state if Routes in self.state else replicate.run(self.state)[0])[Routes]

    @property
    def interval_seconds(self) -> float:
        """Return the time between two results with requests in flight; raises InfeasibleError without room for them."""
        return self.routes.interval_seconds

    @property
    def sent_bytes(self) -> int:
        """Return the bytes that devices send each other in a step."""
        return sum(list_transfer_bytes(self.state))

    @property
    def devices(self) -> int:
        """Return the number of devices that get work."""
        used = set(self.state[Placement].device.tolist())
        for route in self.state[Routes].routes if Routes in self.state else ():
            used |= set(route.device[route.device >= 0].tolist())
        return len(used)

    @cached_property
    def bundle(self) -> Bundle:
        """Return the bundle that it was written to."""
        return Bundle.open(self.state[Emitted].path)

    def with_notes(self, *notes: Diagnostic) -> Candidate:
        """Return it with notes for the user."""
        return replace(self, state=self.state.with_notes(*notes))

    def write(self, path: Path, observer: Observer | None = None) -> Candidate:
        """Write its bundle to a path."""
        options = {"link_weights": True} if self.profiled.links_weights else {}
        emit = set_options(self.profiled.emit, path=str(path), pipeline=str(self.pipeline), **options)
        if observer:
            observer(emit.name, len(self.pipeline.passes) - 1, len(self.pipeline.passes))
        state, timings = Pipeline((emit,)).run(self.state)
        return replace(self, state=state, timings=self.timings + timings)

    @property
    def layouts(self) -> Layouts | None:
        """Return the choice of layouts for the profiled model; None if its operators are not split before all else."""
        return self.state[Shards].choice if self.strategy.passes[0].name == "shard" else None


@dataclass(frozen=True)
class InfeasibleStrategy:
    """A strategy that is impossible, and why."""

    strategy: Strategy
    problem: InfeasibleError


Result = Candidate | InfeasibleStrategy
ProposeStrategies = Callable[[Profiled, Sequence[Result]], Iterator[Sequence[Strategy]]]
"""Yields strategies in rounds, and gets the results of all rounds before: some strategies are only worth a prediction
if others do not fit."""


def predict_all(
    propose: ProposeStrategies, profiled: Profiled, observer: Observer | None = None, *, is_exploring: bool = True
) -> list[Result]:
    """Return the prediction of each strategy, or why it is impossible, round by round."""
    results: list[Result] = []
    for strategies in propose(profiled, results):
        for position, strategy in enumerate(strategies):
            if observer and is_exploring:
                observer(strategy.name, position, len(strategies))
            try:
                candidate = predict(strategy, profiled, None if is_exploring else observer)
                _ = is_exploring and candidate.interval_seconds  # memory may not suffice with requests in flight
                results.append(candidate)
            except InfeasibleError as problem:
                results.append(InfeasibleStrategy(strategy, problem))
    return results


def predict(strategy: Strategy, profiled: Profiled, observer: Observer | None = None) -> Candidate:
    """Run the passes of a strategy on a profiled model.

    Raises InfeasibleError if it does not fit, or if there is nothing to split or to copy.
    """
    profiled = profiled.choose_devices(strategy.devices)
    placed = replace(profiled, rest=strategy.passes, timings=())
    while placed.rest:
        placed = placed.advance(observer)
        # What is no use is seen before it is placed, which takes long.
        if strategy.kind == "sharded" and placed.front[-1] is strategy.passes[0]:
            shards, limit = placed.state[Shards], strategy.max_seconds
            pins = np.arange(len(shards.device), dtype=np.int32), shards.device
            if shards.ways == 1 or bound_step_seconds(placed.state, limit, *pins) >= limit:
                raise InfeasibleError("P064", "splitting operators gains nothing", where=strategy.passes[0].name)
    state = placed.state
    if Shards in state and state[Shards].ways > 1:
        # Parts have their devices: which placer was kept says nothing of a sharded model.
        notes = tuple(note for note in state.diagnostics if note.code != PLACERS_TRIED)
        state = replace(state, diagnostics=notes)
    if strategy.everywhere or strategy.groups:
        strategy, state = _add_routes(strategy, state)
    return Candidate(strategy, profiled, state, placed.timings)


@dataclass(frozen=True)
class PredictedStep:
    """A step of a candidate at other sizes than its own."""

    seconds: float
    """Infinite where memory is too small, and for a candidate of fixed sizes."""
    peak_bytes: Mapping[str, int] = field(default_factory=dict)
    """Device -> the most that weights and values take."""


def predict_elsewhere(candidate: Candidate, profiled: Profiled) -> PredictedStep:
    """Predict a step of a candidate with requests of the sizes of another profile.

    Its segments stay as they are. What is exact, and what an estimate:

    - Whole operators: each node takes the time that the other profile has for it on its device.
    - Operators or batches in parts, values computed again: nodes grow as the whole model does on their class of device,
      and values as all values together. Latencies and calls stay as they are.
    - Weights that stream: a step takes at least as long as at the candidate's own size, since they take as long.
    - Several routes: a request takes the first one.
    """
    own, other, state, segments = candidate.profiled.state, profiled.state, candidate.state, candidate.state[Segments]
    is_fixed = any(
        getattr(step, name, False) for step in candidate.pipeline.passes for name in ("fixed_sizes", "fixed")
    )
    if is_fixed and own[Model].input_shapes() != other[Model].input_shapes():
        return PredictedStep(math.inf)
    graph, changes = _resize(state[Profile], own[Profile], other[Profile])
    segment_of, home = np.zeros(len(graph), dtype=np.int32), np.zeros(len(segments.segments), dtype=np.int32)
    for index, segment in enumerate(segments.segments):
        segment_of[segment.nodes], home[index] = index, segment.device
    rows = [sum_by(segment_of, changes[device.cost_class], len(home)) for device in state.target.devices]
    coarse, seconds = graph.contract(segment_of), segments.seconds + np.stack(rows)
    step = simulate_with_contention(coarse, seconds, state.target, home, np.arange(len(home), dtype=np.int32))
    if describe_shortage(state.target, step.peak_bytes, step.pool_peak_bytes):
        return PredictedStep(math.inf)
    more_seconds = step.makespan_seconds - segments.simulation.makespan_seconds
    more_seconds = max(more_seconds, 0.0) if Streaming in state else more_seconds
    peaks = {device.id: int(peak) for device, peak in zip(state.target.devices, step.peak_bytes)}
    return PredictedStep(candidate.step_seconds + more_seconds, peaks)


def _resize(profile: Profile, own: Profile, other: Profile) -> tuple[OpGraph, dict[str, Floats]]:
    """Return the graph of a profile at another size, and by class of device what its nodes take more there.

    Args:
        profile: Of what was placed.
        own: Of the model that it was made of, at the same size.
        other: Of the model at the other size.
    """
    graph, graphs = profile.graph, {(item.graph.names, item.graph.value_names) for item in (profile, own, other)}
    if len(graphs) == 1 and own.seconds.keys() <= other.seconds.keys():
        values, workspace = other.graph.value_bytes, other.graph.workspace_bytes
        changes = {name: other.seconds[name] - seconds for name, seconds in own.seconds.items()}
    else:
        growth = float(other.graph.value_bytes.sum() / max(own.graph.value_bytes.sum(), 1))
        values, workspace = ((size * growth).astype(np.int64) for size in (graph.value_bytes, graph.workspace_bytes))
        before, after = ({name: s[~is_refused(s)].sum() for name, s in item.seconds.items()} for item in (own, other))
        ratios = {name: after.get(name, min(after.values())) / max(total, 1e-12) for name, total in before.items()}
        changes = {name: (ratios[name] - 1) * seconds for name, seconds in profile.seconds.items()}
    return replace(graph, value_bytes=values, workspace_bytes=workspace), changes


def _add_routes(strategy: Strategy, state: State) -> tuple[Strategy, State]:
    """Return a strategy with the pass that copies segments to further devices, and the state after it."""
    routes = _list_routes(strategy, state)
    if not routes:
        has_work = any(state[Segments].programs)
        reason = "there is no room for a second copy" if has_work else "the model has no nodes to copy"
        profile = state[Profile]
        if profile.needs_host or any(is_refused(seconds).any() for seconds in profile.seconds.values()):
            reason = "no other device takes all nodes of a copy and has room for it"
        raise InfeasibleError("P001", reason, where="replicate")
    replicate = create_pass("replicate", routes=tuple(routes))
    state, _ = Pipeline((replicate,)).run(state)
    name = re.sub(r"^\d+", str(len(routes) + 1), strategy.name) if strategy.everywhere else strategy.name
    return replace(strategy, name=name, passes=(*strategy.passes, replicate)), state


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


def place_on_one_device(profiled: Profiled) -> Strategy:
    """Return the strategy with all nodes on the best single device."""
    return Strategy("one device", "one device", profiled.replace_placer(create_pass("single")))
