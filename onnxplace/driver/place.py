"""Place a cost graph without ONNX, for `onnxplace place` and benchmarks."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Hashable, Mapping
from dataclasses import KW_ONLY, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from onnxplace.cost_graph.data import CostGraph
from onnxplace.errors import Diagnostic, InfeasibleError, InputError, UsageError, format_count, suggest_nearest
from onnxplace.facts import Groups, Placement, Schedule
from onnxplace.graph.op_graph import Floats, Ints, Longs
from onnxplace.pipeline.pipeline import Pipeline, Timing
from onnxplace.pipeline.select_placer import (
    BAECHI,
    USE_FEWER_DEVICES,
    ObjectiveName,
    choose_placer,
    report_idle_devices,
    require_all_devices_used,
)
from onnxplace.pipeline.text_form import PassSpec
from onnxplace.problem import bound_step_seconds, find_excess
from onnxplace.state import State
from onnxplace.target.limits import require_device_limit
from onnxplace.target.target import LinkModel, Target
from onnxplace.utils.files import read_json
from onnxplace.utils.jit import budget_clock
from onnxplace.utils.keywords import takes_fields_of
from onnxplace.utils.quantities import format_bytes, format_first, format_milliseconds, format_object

if TYPE_CHECKING:
    from onnxplace.reports.page_data import PlacedGraph

Grouping = Literal["none", "given", "coplace", "given+coplace"]
Adjustment = Literal["compute", "memory", "majority"]
# Groups that a placer joins are remarked on if they make a step longer by more than this share.
MIN_GROUPING_COST = 0.1
_COPLACE_OPTIONS: Mapping[Grouping, Mapping[str, str]] = {
    "none": {"join": "never", "given": "false"},
    "given": {"join": "never"},
    "coplace": {"join": "always", "given": "false"},
    "given+coplace": {"join": "always"},
}
# More memory than any machine has: a given placement is scored even if it does not fit.
UNLIMITED_BYTES = 1 << 60


@dataclass(frozen=True)
class PlacementResult:
    """A placement of a cost graph, with its simulated step."""

    placer: str
    makespan_seconds: float
    lower_bound_seconds: float
    feasible: bool
    peak_bytes: Longs
    """Peak memory of each device."""
    seconds: float
    """Time to place, from cost graph to schedule, without the compilation of loops on first use."""
    placement: Mapping[str, Hashable]
    """Node id -> device id, as in the cost graph."""
    start_seconds: Floats
    """Start of each node of the cost graph, in its order."""
    finish_seconds: Floats
    device: Ints
    """Index of the device of each node."""
    schedule: Schedule
    passes: tuple[Timing, ...]
    graph: CostGraph
    diagnostics: tuple[Diagnostic, ...] = ()

    def __repr__(self) -> str:
        counts = Counter(self.device.tolist())
        devices = [
            f"{name}: {format_count(counts[index], 'node')}, peak {format_bytes(int(peak))}"
            for index, (name, peak) in enumerate(zip(self.graph.device_ids, self.peak_bytes))
        ]
        step, bound = format_milliseconds(self.makespan_seconds), format_milliseconds(self.lower_bound_seconds)
        return format_object(
            f"Placement of {self.graph.name!r} by {self.placer}{'' if self.feasible else ', DOES NOT FIT'}",
            format_first(devices),
            f"step {step}, lower bound {bound}",
        )

    def _repr_html_(self) -> str | None:
        from onnxplace.reports.page_data import describe_placement
        from onnxplace.reports.page_rendering import embed_page

        return embed_page([describe_placement(self.describe())])

    def describe(self, options: Mapping[str, str] | None = None) -> PlacedGraph:
        """Return what a report shows, with the options that the user gave."""
        from onnxplace.reports.page_data import PlacedGraph

        return PlacedGraph(
            graph=self.graph,
            placer=self.placer,
            device=self.device,
            schedule=self.schedule,
            is_feasible=self.feasible,
            seconds=self.seconds,
            diagnostics=self.diagnostics,
            passes=tuple(timing.name for timing in self.passes),
            options=options or {},
        )


@dataclass(frozen=True)
class PlaceSettings:
    """The arguments of `place_cost_graph`, which documents them, behind the cost graph."""

    placer: str | None = None
    _: KW_ONLY
    objective: ObjectiveName = "latency"
    links: LinkModel = "duplex"
    groups: Grouping | None = None
    fuse: bool | None = None
    forward_only: bool = False
    post_adjust: Adjustment | None = None
    budget_seconds: float | None = None
    seed: int | None = None
    strict: bool = False


@takes_fields_of(PlaceSettings)
def place_cost_graph(graph: CostGraph, settings: PlaceSettings) -> PlacementResult:
    """Place a cost graph; raises InfeasibleError if no placement fits.

    `placer` may carry options, `m-sct{threshold=0.5}`; the default is the one for the `objective`. Options:

    - `links`: how transfers share links; `seed` and `budget_seconds`: for placers that search.
    - `groups`: nodes that share a device; default: the groups of the graph. Baechi's placers also join nodes with a
      single reader to it, and contract groups (`fuse`), as published.
    - `forward_only`: each backward node follows its forward node.
    - `post_adjust`: the placer ignores groups; then each group moves to the device with most of its seconds, bytes or
      nodes.
    - `strict`: an idle device is an InfeasibleError; by default it gets a note.

    Raises UsageError for options that contradict each other.

    >>> from onnxplace.cost_graph import GENERATORS
    >>> place_cost_graph(GENERATORS["layered"](20, seed=0), "m-etf").placer
    'm-etf'
    """
    if settings.objective == "worst-ratio":
        raise UsageError("U042", "worst-ratio compares sizes of a model", where="--objective", hint="choose latency")
    spec = choose_placer(settings.placer, settings.objective, settings.budget_seconds, settings.seed)
    steps = _list_passes(spec, settings)
    pipeline = Pipeline.of(steps)
    base = replace(graph, target=replace(graph.target, link_model=settings.links)).state()
    start = budget_clock()
    state, timings = pipeline.run(base)
    elapsed = budget_clock() - start
    if settings.groups is None and spec.name in BAECHI and not settings.post_adjust:
        state = _compare_without_joining(base, state, replace(settings, groups="given", placer="m-etf"))
    return _build_result(graph, state, elapsed, timings, spec.name, settings.strict)


def _compare_without_joining(base: State, joined: State, settings: PlaceSettings) -> State:
    """Return a placement of groups that a placer joined, with the bound of the graph that the user gave.

    Where m-ETF without these groups is shorter by more than a tenth, a note says what they cost.
    """
    steps = _list_passes(PassSpec("m-etf"), settings)
    try:
        apart, _ = Pipeline.of(steps).run(base)
    except InfeasibleError:  # so that nothing is known without them
        return joined
    schedule, step = joined[Schedule], joined[Schedule].simulation.makespan_seconds
    shorter = apart[Schedule].simulation.makespan_seconds
    bound = min(schedule.lower_bound_seconds, apart[Schedule].lower_bound_seconds)
    joined = joined.with_facts(replace(schedule, lower_bound_seconds=bound))
    if shorter * (1 + MIN_GROUPING_COST) >= step:
        return joined
    times = f"{format_milliseconds(step)} a step, and {format_milliseconds(shorter)} with m-etf without them"
    message = f"the groups of nodes that {joined[Placement].placer} joined cost {step / shorter - 1:.0%}: {times}"
    return joined.with_notes(Diagnostic("P021", message, where=joined[Placement].placer, hint="--groups given"))


def _list_passes(placer: PassSpec, settings: PlaceSettings) -> list[PassSpec]:
    """Return the placer with the passes for groups around it."""
    groups = settings.groups or ("given+coplace" if placer.name in BAECHI else "given")
    options = dict(_COPLACE_OPTIONS[groups]) | ({"backward": "follow"} if settings.forward_only else {})
    if settings.post_adjust:
        return [placer, PassSpec("adjust", {"by": settings.post_adjust, **options})]
    if groups == "none" and not settings.forward_only:
        return [placer]
    contract = "coplace" in groups if settings.fuse is None else settings.fuse
    return [PassSpec("coplace", options), *([PassSpec("fuse")] if contract else []), placer]


def evaluate_placement(
    graph: CostGraph, placement: Mapping[str, Hashable], *, links: LinkModel = "duplex", strict: bool = False
) -> PlacementResult:
    """Score a given placement, node id -> device id.

    It need not fit. Each device runs its nodes earliest first. The lower bound is that of the graph, not of this
    placement: it holds for every placement on these devices. Raises InputError for nodes that are missing or unknown,
    and for unknown devices; `strict` as for `place_cost_graph`.
    """
    index = {str(device): position for position, device in enumerate(graph.device_ids)}
    nodes = {str(node) for node in graph.ids}
    if missing := sorted(nodes - placement.keys()):
        message = f"no device for {format_count(len(missing), 'node')}, such as {missing[0]!r}"
        hint = f"write ids, not names: {json.dumps({missing[0]: graph.device_ids[0]}, default=str)} ..."
        raise InputError("D007", message, where="--placement", hint=hint)
    if unknown := sorted(placement.keys() - nodes):
        hint = suggest_nearest(unknown[0], nodes)
        raise InputError("D007", f"unknown node {unknown[0]!r}", where="--placement", hint=hint)
    for node, device in placement.items():
        if str(device) not in index:
            message, hint = f"node {node!r} is on unknown device {device!r}", suggest_nearest(str(device), index)
            raise InputError("D007", message, where="--placement", hint=hint)
    pinned = np.array([index[str(placement[str(node)])] for node in graph.ids], dtype=np.int32)
    single = np.arange(len(pinned), dtype=np.int32)
    roomy = graph.target.limiting({device.id: UNLIMITED_BYTES for device in graph.target.devices})
    pools = tuple(replace(pool, memory_bytes=UNLIMITED_BYTES) for pool in roomy.pools)
    state = replace(graph, target=replace(roomy, link_model=links, pools=pools)).state()
    state = state.with_facts(Groups(single, pinned, ("",) * len(pinned)))
    start = budget_clock()
    state, timings = Pipeline.parse("m-etf").run(state)
    schedule = state[Schedule]
    bound = bound_step_seconds(state, schedule.simulation.makespan_seconds)
    state = state.with_facts(replace(state[Placement], placer="given"), replace(schedule, lower_bound_seconds=bound))
    return _build_result(graph, state, budget_clock() - start, timings, "given", strict)


def _build_result(
    graph: CostGraph, state: State, seconds: float, timings: tuple[Timing, ...], placer: str, strict: bool
) -> PlacementResult:
    unused = report_idle_devices(state, graph.device_ids)
    if strict:
        require_all_devices_used(unused, USE_FEWER_DEVICES)
    schedule = state[Schedule]
    peaks = schedule.simulation.peak_bytes
    return PlacementResult(
        placer=placer,
        makespan_seconds=schedule.simulation.makespan_seconds,
        lower_bound_seconds=schedule.lower_bound_seconds,
        feasible=not find_excess(graph.target, graph.target.limit_bytes, schedule.simulation, peaks).any(),
        peak_bytes=peaks,
        seconds=seconds,
        placement=graph.device_of(state[Placement].device),
        start_seconds=schedule.simulation.start_seconds,
        finish_seconds=schedule.simulation.finish_seconds,
        device=state[Placement].device,
        schedule=schedule,
        passes=timings,
        graph=graph,
        diagnostics=(*state.diagnostics, *unused),
    )


def apply_target(graph: CostGraph, target: Target) -> CostGraph:
    """Return the cost graph on the devices of a target: their number, memory, links and relative speeds.

    The costs of the graph's first device hold for the fastest device of the target. Another one takes longer by the
    ratio of their `operations_per_second`, where the target gives it for both, and else as long.
    """
    first = graph.target.devices[0].cost_class
    rates = [device.operations_per_second for device in target.devices]
    slowdowns = [max(rates) / rate if rate > 0 else 1.0 for rate in rates]
    # Costs are equal within a class, so each speed has its own class.
    devices = tuple(
        replace(graph.target.devices[0], id=f"cuda:{index}", memory_bytes=device.memory_bytes, model=f"{slowdown:.6g}")
        for index, (device, slowdown) in enumerate(zip(target.devices, slowdowns))
    )
    renamed = dict(zip((device.id for device in target.devices), (device.id for device in devices)))
    links = tuple(
        replace(link, source=renamed[link.source], destination=renamed[link.destination])
        for link in target.with_all_links().links
    )
    classes = {device.cost_class: slowdown for device, slowdown in zip(devices, slowdowns)}
    profile = replace(
        graph.profile,
        seconds={name: graph.profile.seconds[first] * slowdown for name, slowdown in classes.items()},
        sources=dict.fromkeys(classes, graph.profile.sources[first]),
    )
    ids = tuple(device.id for device in target.devices)
    pools = tuple(replace(pool, devices=tuple(renamed[name] for name in pool.devices)) for pool in target.pools)
    placed = Target(devices, links, target.link_model, pools=pools)
    return replace(graph, profile=profile, target=placed, device_ids=ids)


def replace_devices(graph: CostGraph, count: int | None, memory_bytes: int | None) -> CostGraph:
    """Return the cost graph on `count` devices, with other memory limits.

    All links are like the link between its first two devices.
    """
    devices = list(graph.target.devices)
    count = count or len(devices)
    require_device_limit(count, "--devices")
    memory = [
        memory_bytes if memory_bytes is not None else devices[min(i, len(devices) - 1)].memory_bytes
        for i in range(count)
    ]
    copies = tuple(replace(devices[0], id=f"cuda:{index}", memory_bytes=size) for index, size in enumerate(memory))
    pattern = graph.link
    links = tuple(replace(pattern, source=a.id, destination=b.id) for a in copies for b in copies if a is not b)
    ids = graph.device_ids if count == len(graph.device_ids) else tuple(range(count))
    target = Target(copies, links, graph.target.link_model)
    return replace(graph, target=target, device_ids=ids)


def read_placement(path: str | Path) -> dict[str, Hashable]:
    """Read a placement, {node id: device id}, from JSON.

    The output of `onnxplace place --json` is accepted too.
    """
    data = read_json(path, "D007", "a placement")
    table = data.get("placement", data) if isinstance(data, dict) else None
    if not isinstance(table, dict) or not all(isinstance(device, (str, int)) for device in table.values()):
        raise InputError("D007", "not a placement", where=str(path), hint='write it as {"node id": 0}')
    return table
