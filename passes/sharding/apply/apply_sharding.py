"""Shard a model: try groups of devices, choose layouts, and write the model.

With several stages, each of the consecutive parts of the sharded model has its group of devices.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np

from onnxplace.bundle.manifest import ShardedKindRecord, SplitStateRecord
from onnxplace.errors import Diagnostic, UsageError
from onnxplace.facts import Original, Profile, Shards, Source, is_refused
from onnxplace.graph.op_graph import Floats, Ints
from onnxplace.model.device_metadata import ShardedNode, read_device_metadata
from onnxplace.model.model import Model
from onnxplace.passes.sharding.apply.derived_facts import annotate_model, build_whole_model, scale_profile
from onnxplace.passes.sharding.apply.given_layouts import find_shares, restrict_layouts
from onnxplace.passes.sharding.apply.group_choice import GroupChoice, GroupProblem, describe_strategy
from onnxplace.passes.sharding.apply.sharded_model import ShardedModel, write_sharded_model
from onnxplace.passes.sharding.choose.layout_choice import ChoiceProblem, LayoutChoice, is_sharded
from onnxplace.passes.sharding.choose.step_estimate import estimate_step_seconds
from onnxplace.passes.sharding.rules.layouts import Division
from onnxplace.passes.sharding.space.known_shapes import fix_sizes, report_fixed_sizes
from onnxplace.passes.sharding.space.sharding_costs import ExchangeCosts, WorkCosts, peak_rates
from onnxplace.passes.sharding.space.strategy_space import StrategySpace, build_space, restrict_space
from onnxplace.passes.sharding.space.tensor_facts import TensorFacts
from onnxplace.problem import device_seconds, fits_single_device, placement_problem, sum_node_seconds
from onnxplace.state import State
from onnxplace.target.target import Target

# A sharded step is worth its exchanges only if it is clearly shorter than that of one device.
CLEAR_GAIN = 0.99
# On a CPU, ONNX Runtime keeps the values between convolutions in a blocked layout. A cut there reorders on both sides
# what is alive, and no longer fuses additions into convolutions. By its profiler, blocks of ResNet-50 on one core take
# so much longer per byte: 0.58 ms for 1.6 MB, 0.26 ms for 0.8 MB, 0.13 ms for 0.4 MB.
REORDER_SECONDS_PER_BYTE = 3.3e-10
# What else a cut of ResNet-50 (batch 1) was measured to cost, such as that the parts of devices are not equally long.
CONVOLUTION_CUT_SECONDS = 150e-6
CONVOLUTIONAL_SHARE = 0.4


# How often a choice is made again, within less memory, where the simulated peak of its model exceeds a limit.
MEMORY_ROUNDS = 4
# How far a new choice stays below the memory that should just do.
MEMORY_MARGIN = 0.99


@dataclass(frozen=True)
class ShardingOptions:
    """The options of the pass `shard`."""

    ways: int = 0
    stages: int = 1
    exact: bool = False
    weights: Literal["fit", "least"] = "fit"
    fixed: bool = False
    metadata: bool = False
    map: str = ""
    given: Mapping[str, ShardedNode] | None = None
    """The nodes with layouts of a map that is a model."""

    @property
    def may_leave_whole(self) -> bool:
        """Return whether the model stays as it is where one device is faster: if nothing asks for parts."""
        return not (self.exact or self.stages != 1 or self.weights != "fit" or self.map)


@dataclass(frozen=True)
class _Written:
    """The model that a choice makes, on its devices."""

    sharded: ShardedModel
    profile: Profile
    groups: Sequence[tuple[int, ...]]
    """The devices of each stage."""
    stage: Ints
    """Per node."""
    device: Ints
    """Per node."""
    used_share: float
    """The largest share of a device's memory that it takes at one time, by simulation."""


def shard_state(state: State, options: ShardingOptions) -> State:
    """Return the state with the sharded model, its profile and `Shards`; see the pass `shard`.

    If some device holds the whole model, the choice is made without limits, and within them if it does not fit. The
    simulated peak decides; where it is above the account that the choice goes by, the next one has less memory.
    """
    if options.fixed:
        fixed = fix_sizes(state[Model])
        notes = report_fixed_sizes(state[Model], fixed, "split batches")
        state = state.with_facts(fixed, state[Profile]).with_notes(*notes)
    seconds = device_seconds(state[Profile], state.target)
    facts = state[Model].derive(TensorFacts.of)
    if options.map.lower().endswith(".onnx"):
        options = replace(options, exact=True, given=read_device_metadata(Path(options.map)).sharded)
    groups = _list_groups(state.target, seconds, options)
    problems = [_build_problem(facts, state, seconds, group, options) for group in groups]
    fits_alone = bool(fits_single_device(state).any())
    share, tightest = math.inf if fits_alone else 1.0, None
    for _ in range(MEMORY_ROUNDS):
        candidates = [_choose(problem, options, share) for problem in problems]
        useful = [candidate for candidate in candidates if candidate is not None and is_sharded(candidate.choice)]
        if not useful:
            if tightest is not None:
                break
            note = _report_nothing_split(candidates, bool(is_refused(seconds).any()))
            return _leave_whole(state).with_notes(note)
        best = min(useful, key=lambda candidate: candidate.step_seconds)
        alone = float(sum_node_seconds(state[Profile], state.target).min())
        if options.may_leave_whole and fits_alone and best.step_seconds > CLEAR_GAIN * alone:
            return _leave_whole(state).with_notes(_report_no_gain(alone, best))
        written = _write(state, best, options)
        if tightest is None or written.used_share < tightest[1].used_share:
            tightest = best, written
        if written.used_share <= 1 or options.weights == "least":
            break
        limit = problems[candidates.index(best)].limit_bytes
        counted = best.choice.peak_bytes / min(limit)  # 0 if there was no limit
        share = MEMORY_MARGIN * min(share, counted / written.used_share) if counted else 1.0
    # If none fits, placers and the cut into segments may still find an order that does, and report it if not.
    assert tightest is not None
    return _apply(state, *tightest, options)


def _list_groups(target: Target, seconds: Floats, options: ShardingOptions) -> list[tuple[int, ...]]:
    """Return the groups of devices to try: the fastest two, four and so on, and as many as may be used.

    No two of them share a processor. With several stages there is one size: that of the groups.
    """
    # Each device of a group computes a part of every node, or the whole node, at the same time.
    totals, parallel = seconds.sum(axis=1), target.independent_devices
    taking = [index for index in np.argsort(totals, kind="stable").tolist() if not is_refused(totals)[index]]
    order = [index for index in taking if index in parallel]
    most = min(options.ways or len(order), len(order))
    if options.exact and options.stages == 1:
        return [tuple(sorted(order[:most]))] if most > 1 else []
    if options.stages != 1:
        group = tuple(sorted(order[: options.ways or len(order) // max(options.stages, 1)]))
        return [group] if len(group) >= min(options.ways, len(parallel)) else []
    sizes = sorted({size for size in (2, 4, 8, 16, 32) if size < most} | {most})
    return [tuple(sorted(order[:size])) for size in sizes if size > 1]


def _build_problem(
    facts: TensorFacts, state: State, seconds: Floats, group: tuple[int, ...], options: ShardingOptions
) -> GroupProblem:
    """Return the choice for a group of devices."""
    target = state.target
    group_seconds = seconds[list(group)]
    given, shares = options.given, _shares(group_seconds)
    division = Division(shares if given is None else find_shares(given, shares, options.map))
    space = build_space(facts, division)
    if options.map:
        space = restrict_space(space, options.map) if given is None else restrict_layouts(space, given, options.map)
    peaks = tuple(peak_rates(target.devices[device]) for device in group)
    costs = ExchangeCosts.of(
        target, group, min(peak.bytes_per_second for peak in peaks), max(peak.kernel_seconds for peak in peaks)
    )
    if _is_convolutional(facts.model, group_seconds) and all(target.devices[d].kind == "cpu" for d in group):
        costs = replace(
            costs,
            segment_seconds=costs.segment_seconds + CONVOLUTION_CUT_SECONDS,
            reorder_seconds_per_byte=REORDER_SECONDS_PER_BYTE,
        )
    sources = state[Profile].sources
    measured = tuple(
        bool(np.isin(sources[target.devices[device].cost_class], (Source.MEASURED, Source.KNOWN)).all())
        for device in group
    )
    work = WorkCosts(space, peaks, measured)
    problem = ChoiceProblem(space, work.table(group_seconds, costs), costs)
    # Each stage has its share of the weights, and of the values.
    stages = len(list_stage_groups(target, group, options.stages))
    # The devices of a pool hold equal parts.
    pooled = target.pool_bytes[target.pool_of] / np.bincount(target.pool_of)[target.pool_of]
    limit = tuple(stages * int(min(target.devices[device].memory_bytes, pooled[device])) for device in group)
    return GroupProblem(group, work, problem, limit)


def _choose(group: GroupProblem, options: ShardingOptions, share: float) -> GroupChoice | None:
    """Return the best choice within a share of the memory of a group of devices; None if none fits."""
    limit = None if share == math.inf else [int(share * limit) for limit in group.limit_bytes]

    def solve(problem: ChoiceProblem) -> LayoutChoice | None:
        return problem.solve_least_weights() if options.weights == "least" else problem.solve(limit)

    choice = solve(group.problem)
    if choice is None:
        return None
    problem = group.problem
    step_seconds = estimate_step_seconds(problem.space, choice, problem.strategy_seconds, problem.costs)
    return GroupChoice(**vars(group), choice=choice, solve=solve, step_seconds=step_seconds)


def _is_convolutional(model: Model, seconds: Floats) -> bool:
    """Return whether convolutions take most of the time."""
    is_convolution = np.array([node.op_type == "Conv" for node in model.nodes], dtype=bool)
    total = seconds.sum(axis=1)
    return bool((seconds[:, is_convolution].sum(axis=1) > CONVOLUTIONAL_SHARE * total).any())


def _shares(seconds: Floats) -> tuple[float, ...]:
    """Return the share of the work of each device: by its speed on the whole model; equal for like devices."""
    totals = seconds.sum(axis=1)
    if not (totals > 0).all() or totals.max() <= totals.min() * (1 + 1e-9):
        return (1.0,) * len(totals)
    return tuple(float(totals.min() / total) for total in totals)


def _leave_whole(state: State) -> State:
    """Return the state as it is, with the fact that nothing is sharded."""
    free = np.full(len(state[Profile].graph), -1, dtype=np.int32)
    return state.with_facts(Shards(device=free), Original.of(state))


def _report_no_gain(alone: float, best: GroupChoice) -> Diagnostic:
    message = (
        f"no operator is split: a step would take {best.step_seconds * 1e3:.3g} ms on {len(best.devices)} devices, "
        f"and {alone * 1e3:.3g} ms on one"
    )
    return Diagnostic("P064", message, hint="shard{exact=true} in a --pipeline splits all the same")


def _report_nothing_split(candidates: Sequence[GroupChoice | None], has_refusals: bool) -> Diagnostic:
    """Return why nothing is split: devices refuse nodes, no operator has a rule, exchanges cost more, or memory."""
    if has_refusals and not candidates:
        return Diagnostic("P064", "no operator is split: fewer than two devices take every node", hint="add devices")
    if candidates and all(candidate is None for candidate in candidates):
        message = "no operator is split: even in parts, the model does not fit"
        return Diagnostic("P064", message, hint="add devices, or raise --max-memory")
    return Diagnostic("P064", "no operator is split: none has a rule and gains more than its exchanges cost")


def _write(state: State, candidate: GroupChoice, options: ShardingOptions) -> _Written:
    target = state.target
    groups = list_stage_groups(target, candidate.devices, options.stages)
    sharded = write_sharded_model(candidate.space, candidate.choice, candidate.problem.costs)
    profile = scale_profile(state[Profile], sharded, candidate.choice, candidate.work, target, candidate.devices)
    seconds = device_seconds(profile, target)
    position = np.array([origin.device for origin in sharded.origins], dtype=np.int32)
    stage = cut_into_stages(sharded, seconds[candidate.devices[0]], position, len(groups))
    device = np.array(groups, dtype=np.int32)[stage, position]
    problem = placement_problem(state.with_facts(profile))
    step = problem.simulate(device, profile.graph.order)
    shares = [*(step.peak_bytes / problem.limit_bytes), *(step.pool_peak_bytes / target.pool_bytes[:-1])]
    return _Written(sharded, profile, groups, stage, device, float(max(shares)))


def _apply(state: State, candidate: GroupChoice, written: _Written, options: ShardingOptions) -> State:
    sharded = written.sharded
    kinds, unsplit = _summarise(state, candidate)
    shards = Shards(
        device=written.device,
        ways=len(candidate.devices),
        stages=len(written.groups),
        kinds=kinds,
        choice=candidate,
        exchanges=MappingProxyType(dict(sharded.exchanges)),
        seconds=candidate.step_seconds + max(state.target.devices[d].segment_seconds for d in candidate.devices),
        lower_bound_seconds=min(candidate.choice.lower_bound_seconds, candidate.step_seconds),
        split_states=_split_states(sharded, candidate.space),
    )
    original = Original(
        model=_build_whole(state, written, candidate, options, from_parts=False),
        profile=state[Profile],
        joined_model=_build_whole(state, written, candidate, options, from_parts=True),
    )
    notes = [_note(candidate, shards), *unsplit]
    return state.with_facts(sharded.model, written.profile, shards, original).with_notes(*notes)


def _build_whole(
    state: State, written: _Written, candidate: GroupChoice, options: ShardingOptions, *, from_parts: bool
) -> Model:
    """Return the unsharded model that the bundle keeps as its reference."""
    whole = build_whole_model(state[Model], written.sharded, candidate.space, from_parts=from_parts)
    if not options.metadata:
        return whole
    ids = [state.target.devices[device].id for group in written.groups for device in group]
    steps = zip(written.sharded.origins, written.stage.tolist() if len(written.groups) > 1 else [])
    stages = {origin.source: stage for origin, stage in steps}
    return annotate_model(whole, candidate.space, candidate.choice.strategies, ids, stages)


def _split_states(sharded: ShardedModel, space: StrategySpace) -> tuple[SplitStateRecord, ...]:
    states, division = [], space.division
    for name, parts in sharded.split_states.items():
        layout, shape = parts.layout, space.facts.shapes[name]
        devices = range(division.count) if layout.is_split else ()
        states.append(
            SplitStateRecord(
                input=name,
                output=parts.output,
                axis=layout.axis,
                inputs=parts.inputs,
                outputs=parts.outputs,
                sizes=tuple(division.local_size(layout, shape[layout.axis], device) for device in devices),
                copies=division.copies(layout),
            )
        )
    return tuple(states)


def _note(candidate: GroupChoice, shards: Shards) -> Diagnostic:
    exchanges = ", ".join(f"{count} {kind}" for kind, count in shards.exchanges.items()) or "no exchanges"
    kinds = "; ".join(f"{item.count} {item.op}: {item.layout}" for item in shards.kinds[:4])
    stages = f" in each of {shards.stages} stages" if shards.stages > 1 else ""
    return Diagnostic("P060", f"operators are split over {shards.ways} devices{stages} ({exchanges}): {kinds}")


def _summarise(state: State, candidate: GroupChoice) -> tuple[tuple[ShardedKindRecord, ...], list[Diagnostic]]:
    """Return what was split how, by operator, and a note on expensive operators that were not."""
    seconds = device_seconds(state[Profile], state.target)[list(candidate.devices)].max(axis=0)
    counts: Counter[tuple[str, str]] = Counter()
    times: Counter[tuple[str, str]] = Counter()
    largest: dict[tuple[str, str], tuple[float, str]] = {}
    for node, strategy, time in zip(state[Model].nodes, candidate.choice.strategies, seconds.tolist()):
        key = node.op_type, describe_strategy(strategy)
        counts[key] += 1
        times[key] += time
        largest[key] = max(largest.get(key, (-1.0, "")), (time, node.name), key=lambda item: item[0])
    kinds = tuple(
        ShardedKindRecord(op=op, layout=layout, count=counts[op, layout], seconds=time, node=largest[op, layout][1])
        for (op, layout), time in times.most_common()
    )
    whole = [kind for kind in kinds if kind.layout == "whole" and kind.seconds > 0.02 * float(seconds.sum())]
    if not whole:
        return kinds, []
    listed = ", ".join(f"{kind.count} {kind.op} ({kind.seconds * 1e3:.3g} ms)" for kind in whole[:3])
    message = f"these operators are computed on every device: {listed}"
    return kinds, [Diagnostic("P061", message, hint="no rule splits them, or exchanges would cost more")]


def list_stage_groups(target: Target, first: Sequence[int], stages: int) -> list[tuple[int, ...]]:
    """Return the group of devices of each stage; the first one is given, the others are like it.

    Raises UsageError if there are too few devices like those of the first group.
    """
    groups = [tuple(first)]
    kinds = sorted(target.devices[device].cost_class for device in first)
    remaining = [index for index in target.independent_devices if index not in set(first)]
    while len(remaining) >= len(first) and (stages == 0 or len(groups) < stages):
        group = tuple(remaining[: len(first)])
        if sorted(target.devices[device].cost_class for device in group) != kinds:
            break
        groups.append(group)
        remaining = remaining[len(first) :]
    if stages and len(groups) < stages:
        message = f"{stages} stages of {len(first)} devices need {stages * len(first)} devices of one kind"
        hint = f"there are {len(groups) * len(first)}: ask for {len(groups)} stages, or for fewer ways"
        raise UsageError("U075", message, where="shard", hint=hint)
    return groups


def cut_into_stages(sharded: ShardedModel, seconds: Floats, position: Ints, stages: int) -> Ints:
    """Return the stage of each node: consecutive nodes, of about equal time on the busiest device of the group.

    No cut separates the producer of a carried state from its readers in the next call, nor the parts of an operator.

    Args:
        sharded: The sharded model.
        seconds: Time of each node on its device.
        position: Position of each node's device in its group.
        stages: Number of stages.
    """
    result = np.zeros(len(position), dtype=np.int32)
    if stages == 1:
        return result
    busiest = int(np.bincount(position, weights=seconds).argmax())
    elapsed_seconds = np.cumsum(np.where(position == busiest, seconds, 0.0))
    allowed = np.flatnonzero(_may_cut_before(sharded))
    for stage in range(1, stages):
        if not len(allowed):
            break
        goal_seconds = elapsed_seconds[-1] * stage / stages
        before = np.where(allowed > 0, elapsed_seconds[np.maximum(allowed - 1, 0)], 0.0)
        cut = int(allowed[np.abs(before - goal_seconds).argmin()])
        result[cut:] = np.maximum(result[cut:], stage)
    return result


def _may_cut_before(sharded: ShardedModel) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return, per node, whether a stage may begin with it."""
    model, first = sharded.model, dict[int, int]()
    may = np.ones(len(model.nodes), dtype=bool)
    may[:1] = False
    for index, origin in enumerate(sharded.origins):
        if origin.source >= 0:
            may[first.setdefault(origin.source, index) + 1 : index + 1] = False
    producer = {name: index for index, node in enumerate(model.nodes) for name in node.output}
    for name, output in model.states.items():
        ends = [*model.readers.get(name, ()), producer[model.sources.get(output, output)]]
        may[min(ends) + 1 : max(ends) + 1] = False
    return may
