"""Micro-batches of a training step: choose what is computed per part, write the model, and scale its costs.

Along a batch, activations are split, and weights, states and what follows from them alone stay whole. Layouts that hold
samples begin at the inputs of the model. They spread through the rules of operators, from inputs to outputs and from
outputs to inputs of nodes, so that values whose producer mixes all samples (a contrastive loss) are split again behind
it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

import numpy as np

from onnxplace.errors import Diagnostic, InfeasibleError, UsageError
from onnxplace.facts import MicroBatches, Original, Profile, Shards
from onnxplace.graph.op_graph import Bools, Floats, Ints
from onnxplace.model.model import Model
from onnxplace.passes.sharding.apply.derived_facts import build_whole_model, scale_profile
from onnxplace.passes.sharding.apply.sharded_model import ShardedModel
from onnxplace.passes.sharding.choose.layout_choice import ChoiceProblem, LayoutChoice, is_sharded
from onnxplace.passes.sharding.rules.layouts import PARTIAL, REPLICATED, Division, Layout
from onnxplace.passes.sharding.space.known_shapes import fix_sizes, report_fixed_sizes
from onnxplace.passes.sharding.space.node_strategies import NodeStrategy
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts, WorkCosts, peak_rates
from onnxplace.passes.sharding.space.strategy_space import StrategySpace, build_space, visit_until_stable
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts
from onnxplace.problem import device_seconds
from onnxplace.state import State
from onnxplace_training.microbatch_model import (
    assign_replicas,
    divide_parts,
    find_dependent_values,
    write_parts,
)

_WHERE = "microbatch"
# Nodes between parts that are computed whole let no part overlap with another one. Above this share of the time,
# nothing is gained.
MAX_WHOLE_SHARE = 0.5
# Share of the time of sums that counts in the choice.
SUM_SHARE = 1e-3
# A note names the operators that are computed whole from this share on.
_NOTED_SHARE = 0.02


@dataclass(frozen=True)
class _BarrierCosts(ExchangeCosts):
    """Costs of exchanges between parts on one device: a value that is put together waits for all parts."""

    def seconds(self, source: Layout, result: Layout, size_bytes: int) -> float:
        if source == PARTIAL and result == REPLICATED:
            # The sum of a gradient, which only its update reads. It is the price of parts, which were asked for; of
            # several places to add up, the one with the fewest bytes is taken.
            return SUM_SHARE * self.count * size_bytes * self.copy_seconds_per_byte
        return super().seconds(source, result, size_bytes)


def microbatch_state(state: State, count: int, replicas: int = 1) -> State:
    """Return the state with a model that computes its batch in `count` parts; see the pass `microbatch`.

    Raises InfeasibleError if the model has no batch, one of fewer samples, or operators that mix its samples.
    """
    speeds = _replica_speeds(state, count, replicas)
    of_part = divide_parts(count, speeds)
    model, profile = state[Model], state[Profile]
    fixed = fix_sizes(model)
    axes = _require_samples(model, fixed, count)
    seconds = device_seconds(profile, state.target).min(axis=0)
    # Carried states are inputs and outputs like others.
    facts = TensorFacts.of(replace(fixed, states=MappingProxyType({})))
    every = build_space(facts, Division((1.0,) * count))
    space = _SampleLayouts(every, axes, frozenset(fixed.states)).restrict()
    choice, work, costs = _choose(state, space, seconds)
    whole_seconds = _require_overlap(space, choice, axes, seconds)
    written = write_parts(space, choice, costs, of_part.tolist())
    written = replace(written, model=replace(written.model, states=model.states))
    replicated = assign_replicas(written, model.states, profile, seconds, of_part, speeds, space.facts, axes)
    sharded = replicated.sharded
    scaled = scale_profile(profile, sharded, choice, work, state.target, [0] * count)
    parts = MicroBatches(
        count=count,
        part=np.array([max(origin.device, -1) for origin in sharded.origins], dtype=np.int32),
        source=np.array([origin.source for origin in sharded.origins], dtype=np.int32),
        replica=replicated.replica,
        replicas=replicas,
    )
    provided = (
        parts,
        Shards(device=np.full(len(sharded.origins), -1, dtype=np.int32)),
        _keep_original(state, fixed, space, sharded),
    )
    notes = [
        _report(space, choice, of_part),
        *_report_whole(whole_seconds, seconds),
        *report_fixed_sizes(model, fixed, "micro-batches"),
    ]
    undivided = MappingProxyType({name: float(seconds.sum()) for name, seconds in profile.seconds.items()})
    return state.with_facts(sharded.model, replace(scaled, unsharded_seconds=undivided), *provided).with_notes(*notes)


def _require_samples(model: Model, fixed: Model, count: int) -> dict[str, int]:
    """Return the axis with the samples by input; raises InfeasibleError without enough of them."""
    axes = find_sample_inputs(model)
    if not axes:
        hint = "inputs that are neither states nor have default values need a first axis"
        raise InfeasibleError("L060", "no input holds a batch of samples", where=_WHERE, hint=hint)
    shapes = fixed.input_shapes()
    name, axis = next(iter(axes.items()))
    size = shapes[name][axis]
    if size < count:
        message = f"expected at least {count} samples for {count} micro-batches, got {size} in input {name!r}"
        hint = "--shape gives the size of the batch, as in --shape batch=8; or ask for fewer micro-batches"
        raise InfeasibleError("L060", message, where=_WHERE, hint=hint)
    return axes


def _choose(state: State, space: StrategySpace, seconds: Floats) -> tuple[LayoutChoice, WorkCosts, ExchangeCosts]:
    """Return the choice of what is computed in parts: as much as possible, with few values put together."""
    count = space.division.count
    stages = min(max(len(state.target.independent_devices), 2), count)
    device = state.target.devices[0]
    peaks = peak_rates(device)
    work = WorkCosts(space, (peaks,) * count)
    # Parts were asked for: small nodes are computed in parts too, although that takes longer than the whole.
    times = np.maximum(seconds, peaks.kernel_seconds)
    costs = _BarrierCosts(
        count=count,
        latency_seconds=0.0,
        seconds_per_byte=0.0,
        # A value that is put together lets stages run empty and fill again: about a part's time on one stage.
        segment_seconds=float(times.sum()) / (2 * count * stages),
        copy_seconds_per_byte=1.0 / peaks.bytes_per_second,
        kernel_seconds=peaks.kernel_seconds,
    )
    table = [
        [_strategy_seconds(strategy, time, count, stages) for strategy in options]
        for options, time in zip(space.strategies, times.tolist())
    ]
    choice = ChoiceProblem(space, table, costs).solve()
    assert choice is not None
    return choice, work, costs


def _strategy_seconds(strategy: NodeStrategy, whole: float, count: int, stages: int) -> float:
    """Return what a strategy counts: parts overlap with those of other stages, whole nodes do not."""
    if strategy.is_split:
        return whole / stages
    if PARTIAL in strategy.outputs:
        return 1.1 * whole * count / stages  # once per part; where there are as many stages, gradients are added first
    return whole


def _find_barriers(space: StrategySpace, choice: LayoutChoice, axes: Mapping[str, int]) -> Bools:
    """Return, per node, whether it is computed from all samples at once, and parts need its results."""
    model = space.facts.model
    in_parts = [item.is_split or PARTIAL in item.outputs for item in choice.strategies]
    varying = find_dependent_values(model, frozenset(axes))
    needed = set[str]()
    barriers = np.zeros(len(model.nodes), dtype=bool)
    for index in range(len(model.nodes) - 1, -1, -1):
        outputs, is_needed = model.nodes[index].output, not needed.isdisjoint(model.nodes[index].output)
        barriers[index] = is_needed and not in_parts[index] and not varying.isdisjoint(outputs)
        if in_parts[index] or is_needed:
            needed.update(model.reads[index])
    return barriers


def _find_mixing(space: StrategySpace, axes: Mapping[str, int]) -> Bools:
    """Return, per node, whether it reads samples that could be apart, and cannot keep them apart."""
    apart, mixes = set(axes), []
    for node, reads, options in zip(space.facts.model.nodes, space.facts.model.reads, space.strategies):
        can_split = any(item.is_split for item in options)
        mixes.append(not can_split and not apart.isdisjoint(reads))
        if can_split:
            apart.update(filter(None, node.output))
    return np.array(mixes, dtype=bool)


def _require_overlap(
    space: StrategySpace, choice: LayoutChoice, axes: Mapping[str, int], seconds: Floats
) -> dict[str, float]:
    """Return the seconds of operators that wait for all parts; raises InfeasibleError if they are most of the step."""
    nodes = space.facts.model.nodes
    barriers = _find_barriers(space, choice, axes)
    varying = [not strategy.is_whole for strategy in choice.strategies]
    if not is_sharded(choice):
        heaviest = [f", such as {nodes[index].op_type} {nodes[index].name!r}" for index in np.argsort(-seconds)[:1]]
        message = f"no operator can be computed in parts of the batch{''.join(heaviest)}"
        hint = "no rule splits these operators; onnxplace compile without micro-batches"
        raise InfeasibleError("L060", message, where=_WHERE, hint=hint)
    total = float(seconds[np.array(varying) | barriers].sum())
    if float(seconds[barriers].sum()) > MAX_WHOLE_SHARE * total:
        mixes = barriers & _find_mixing(space, axes)
        worst = nodes[int(np.where(mixes if mixes.any() else barriers, seconds, -1.0).argmax())]
        share = float(seconds[barriers].sum()) / total
        message = f"{worst.op_type} {worst.name!r} mixes the samples of a batch: {share:.0%} of the step waits for all"
        raise InfeasibleError(
            "L060", message, where=_WHERE, hint="split it otherwise: --shard, or place whole operators"
        )
    times: dict[str, float] = {}
    for index in np.flatnonzero(barriers).tolist():
        times[nodes[index].op_type] = times.get(nodes[index].op_type, 0.0) + float(seconds[index])
    return times


def _replica_speeds(state: State, count: int, replicas: int) -> list[float]:
    """Return the steps per second that the devices of each replica make together; consecutive devices are a replica.

    Raises UsageError unless devices and parts can be divided among the replicas.
    """
    usable = list(state.target.independent_devices)
    devices = len(usable)
    if count < replicas:
        message = f"expected at least one micro-batch for each of {replicas} replicas, got {count}"
        raise UsageError("U075", message, where=_WHERE, hint=f"microbatch{{count={replicas},replicas={replicas}}}")
    if devices % replicas:
        message = f"expected a number of devices that {replicas} replicas can share evenly, got {devices}"
        raise UsageError("U075", message, where=_WHERE, hint="use another number of devices or of replicas")
    totals = np.maximum(device_seconds(state[Profile], state.target)[usable].sum(axis=1), 1e-30)
    speeds: Floats = (1.0 / totals).reshape(replicas, -1).sum(axis=1)
    return [float(speed) for speed in speeds]


def _keep_original(state: State, fixed: Model, space: StrategySpace, sharded: ShardedModel) -> Original:
    """Return the undivided model as the reference of the bundle."""
    model = replace(fixed, states=MappingProxyType({}))
    joined = build_whole_model(model, sharded, space, from_parts=True)
    return Original(model=fixed, profile=state[Profile], joined_model=replace(joined, states=fixed.states))


def _report(space: StrategySpace, choice: LayoutChoice, of_part: Ints) -> Diagnostic:
    parts = sum(not strategy.is_whole for strategy in choice.strategies)
    replicas = int(of_part.max()) + 1
    where = f" on {replicas} replicas ({', '.join(map(str, np.bincount(of_part)))})" if replicas > 1 else ""
    message = (
        f"the batch is computed in {len(of_part)} micro-batches{where}: {parts} of {len(choice.strategies)} nodes once "
        "for each, and gradients are added up"
    )
    return Diagnostic("L063", message, where=_WHERE)


def _report_whole(whole_seconds: Mapping[str, float], seconds: Floats) -> list[Diagnostic]:
    noted = {op: time for op, time in whole_seconds.items() if time > _NOTED_SHARE * float(seconds.sum())}
    if not noted:
        return []
    listed = ", ".join(f"{op} ({time * 1e3:.3g} ms)" for op, time in sorted(noted.items(), key=lambda item: -item[1]))
    message = f"these operators wait for all micro-batches, since they mix samples or have no rule: {listed}"
    return [Diagnostic("L063", message, where=_WHERE)]


# --- layouts that hold samples ---


def find_sample_inputs(model: Model) -> dict[str, int]:
    """Return the inputs that hold a sample per index of an axis, with that axis.

    These are the inputs with the first symbolic dimension of a first axis. A model without symbolic dimensions has
    samples along the first axis of all inputs that have the same size there, the size of the first input with an axis.
    States and inputs with a default value hold none.
    """
    candidates = [
        value for value in model.inputs if value.name not in model.states and not model.overridable(value.name)
    ]
    dims = {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in candidates
        if value.type.HasField("tensor_type")
    }
    firsts = [sizes[0] for sizes in dims.values() if sizes]
    if not firsts:
        return {}
    batch = next((size for size in firsts if isinstance(size, str)), firsts[0])
    return {name: sizes.index(batch) for name, sizes in dims.items() if batch in sizes}


class _SampleLayouts:
    """Finds the strategies that split samples, in the space of all strategies of a division into micro-batches.

    Args:
        space: All strategies.
        axes: Input -> axis with the samples.
        states: Inputs that hold parameters and other carried states.
    """

    def __init__(self, space: StrategySpace, axes: Mapping[str, int], states: frozenset[str]) -> None:
        self._space, self._model = space, space.facts.model
        self._varying = find_dependent_values(self._model, frozenset(axes))
        states |= {name for name in self._model.input_names if self._model.overridable(name)}
        # Parameters, and what follows from them without a sample.
        self._kept = find_dependent_values(self._model, states) - self._varying
        self._layouts: dict[str, set[Layout]] = defaultdict(set)
        self._users: dict[str, list[int]] = defaultdict(list)
        for index, node in enumerate(self._model.nodes):
            for name in dict.fromkeys((*self._model.operands[index], *node.output)):
                if name:
                    self._users[name].append(index)
        shapes, division = space.facts.shapes, space.division
        for name, axis in axes.items():
            if name in shapes and (layout := division.split(axis, shapes[name][axis])) is not None:
                self._layouts[name].add(layout)

    def restrict(self) -> StrategySpace:
        """Return the space with the strategies that split samples, those that pass gradients on, and the whole ones."""
        visit_until_stable(len(self._model.nodes), self._spread)
        # Equal nodes share a sequence, which also tells the choice that their tables are equal.
        shared: dict[object, Sequence[NodeStrategy]] = {}
        strategies = []
        for index, options in enumerate(self._space.strategies):
            kept = tuple(number for number, item in enumerate(options) if number == 0 or self._is_allowed(index, item))
            key = id(options), kept
            strategies.append(shared.setdefault(key, tuple(options[number] for number in kept)))
        return replace(self._space, strategies=tuple(strategies))

    def _spread(self, index: int) -> list[int]:
        """Add the sample layouts that a node carries from value to value; return the nodes next to those values."""
        touched = list[int]()
        for strategy in self._space.strategies[index]:
            if not strategy.is_split or not self._is_allowed(index, strategy):
                continue
            for name, layout in self._space.list_split(index, strategy):
                if layout not in self._layouts[name]:
                    self._layouts[name].add(layout)
                    touched += self._users[name]
        return touched

    def _is_allowed(self, index: int, strategy: NodeStrategy) -> bool:
        """Return whether a strategy splits samples, or passes summands on."""
        node = self._model.nodes[index]
        if self._varying.isdisjoint(node.output) or strategy.overlaps or strategy.shares_range:
            return False
        if not strategy.is_split:
            return True
        pairs = self._space.list_split(index, strategy)
        if any(name in self._kept for name, _ in pairs):
            return False
        return any(layout in self._layouts[name] for name, layout in pairs)
