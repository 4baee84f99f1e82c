"""Place a cost graph, no ONNX needed: what `onnxplace place` and benchmarks do."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from onnxplace.cost_graph import CostGraph
from onnxplace.driver.first_use import compile_loops
from onnxplace.errors import Diagnostic, InputError, counted, nearest
from onnxplace.facts import Groups, Placement, Schedule
from onnxplace.graph import Floats, Longs
from onnxplace.pipeline import (
    BAECHI,
    USE_FEWER_DEVICES,
    Objective,
    PassSpec,
    Pipeline,
    Timing,
    choose_placer,
    format_pipeline,
    report_idle_devices,
    require_all_devices_used,
)
from onnxplace.state import State
from onnxplace.target import LinkModel, Target, require_device_limit
from onnxplace.utils import budget_clock, read_json

Grouping = Literal["none", "given", "coplace", "given+coplace"]
Adjustment = Literal["compute", "memory", "majority"]
GROUPINGS: tuple[Grouping, ...] = ("none", "given", "coplace", "given+coplace")
_COPLACE: Mapping[Grouping, Mapping[str, str]] = {
    "none": {"join": "never", "given": "false"},
    "given": {"join": "never"},
    "coplace": {"join": "always", "given": "false"},
    "given+coplace": {"join": "always"},
}
# More than any machine has, so that a placement can be scored whatever it needs.
ENOUGH_BYTES = 1 << 60


def place_cost_graph(
    graph: CostGraph,
    placer: str | None = None,
    *,
    objective: Objective = "latency",
    links: LinkModel = "duplex",
    groups: Grouping | None = None,
    fuse: bool | None = None,
    forward_only: bool = False,
    post_adjust: Adjustment | None = None,
    budget_seconds: float | None = None,
    seed: int | None = None,
    strict: bool = False,
) -> PlacementResult:
    """Place a cost graph; raises InfeasibleError if nothing fits, UsageError for what contradicts itself.

    `placer` may carry options: `m-sct{threshold=0.5}`; default: the one for the `objective`. `groups` defaults to the
    graph's own, and for Baechi's placers also to those of nodes with a single reader, contracted (`fuse`) as published.
    `forward_only`: backward nodes follow the forward node they belong to. `post_adjust`: the placer ignores groups,
    then each is moved as a whole to the device with most of its seconds, bytes or nodes. A device without work gets a
    note, with `strict` it is an InfeasibleError.
    """
    spec = choose_placer(placer, objective, budget_seconds, seed)
    groups = groups or ("given+coplace" if spec.name in BAECHI else "given")
    options = dict(_COPLACE[groups]) | ({"backward": "follow"} if forward_only else {})
    steps = [spec]
    if post_adjust:
        steps.append(PassSpec("adjust", {"by": post_adjust, **options}))
    elif groups != "none" or forward_only:
        contract = "coplace" in groups if fuse is None else fuse
        steps = [PassSpec("coplace", options), *([PassSpec("fuse")] if contract else []), spec]
    pipeline = Pipeline.parse(format_pipeline(steps))
    state = replace(graph, target=replace(graph.target, link_model=links)).state()
    compile_loops(step.name for step in steps)
    began = budget_clock()
    state, timings = pipeline.run(state)
    return _placed(graph, state, budget_clock() - began, timings, spec.name, strict)


def evaluate_placement(
    graph: CostGraph, placement: Mapping[str, Hashable], *, links: LinkModel = "duplex", strict: bool = False
) -> PlacementResult:
    """Score a given placement, node id -> device id; it need not fit. Each device runs its nodes earliest first.

    Raises InputError for nodes that are missing or unknown, and for unknown devices; `strict` as for
    `place_cost_graph`.
    """
    index = {str(device): position for position, device in enumerate(graph.device_ids)}
    nodes = {str(node) for node in graph.ids}
    if missing := sorted(nodes - placement.keys()):
        raise InputError(
            "D007", f"no device for {counted(len(missing), 'node')}, such as {missing[0]!r}", where="--placement"
        )
    if unknown := sorted(placement.keys() - nodes):
        raise InputError(
            "D007", f"there is no node {unknown[0]!r}", where="--placement", hint=nearest(unknown[0], nodes)
        )
    for node, device in placement.items():
        if str(device) not in index:
            raise InputError(
                "D007", f"node {node!r} is put on {device!r}", where="--placement", hint=nearest(str(device), index)
            )
    pinned = np.array([index[str(placement[str(node)])] for node in graph.ids], dtype=np.int32)
    single = np.arange(len(pinned), dtype=np.int32)
    roomy = graph.target.limiting({device.id: ENOUGH_BYTES for device in graph.target.devices})
    state = replace(graph, target=replace(roomy, link_model=links)).state()
    state = state.having(Groups(single, pinned, ("",) * len(pinned)))
    began = budget_clock()
    state, timings = Pipeline.parse("m-etf").run(state)
    state = state.having(replace(state[Placement], placer="given"))
    return _placed(graph, state, budget_clock() - began, timings, "given", strict)


def _placed(
    graph: CostGraph, state: State, seconds: float, timings: tuple[Timing, ...], placer: str, strict: bool
) -> PlacementResult:
    unused = report_idle_devices(state, graph.device_ids)
    if strict:
        require_all_devices_used(unused, USE_FEWER_DEVICES)
    schedule = state[Schedule]
    peaks = schedule.simulation.peak_bytes
    fits = all(int(peak) <= device.memory_bytes for peak, device in zip(peaks, graph.target.devices))
    return PlacementResult(
        placer=placer,
        makespan_seconds=schedule.simulation.makespan_seconds,
        lower_bound_seconds=schedule.lower_bound_seconds,
        feasible=fits,
        peak_bytes=peaks,
        seconds=seconds,
        placement=graph.device_of(state[Placement].device),
        start_seconds=schedule.simulation.start_seconds,
        finish_seconds=schedule.simulation.finish_seconds,
        passes=timings,
        diagnostics=(*state.diagnostics, *unused),
    )


def with_devices(graph: CostGraph, count: int | None, memory_bytes: int | None) -> CostGraph:
    """Return the cost graph on another number of devices, or with other limits; links are those of its first pair."""
    devices = list(graph.target.devices)
    count = count or len(devices)
    require_device_limit(count, "--devices")
    memory = [
        memory_bytes if memory_bytes is not None else devices[min(i, len(devices) - 1)].memory_bytes
        for i in range(count)
    ]
    made = tuple(replace(devices[0], id=f"cuda:{index}", memory_bytes=size) for index, size in enumerate(memory))
    pattern = graph.link
    links = tuple(replace(pattern, source=a.id, destination=b.id) for a in made for b in made if a is not b)
    ids = graph.device_ids if count == len(graph.device_ids) else tuple(range(count))
    target = Target(made, links, graph.target.link_model)
    return replace(graph, target=target, device_ids=ids)


def read_placement(path: str | Path) -> dict[str, Hashable]:
    """Read a placement, {node id: device id}, from JSON; a result of `onnxplace place --json` will do."""
    data = read_json(path, "D007", "a placement")
    table = data.get("placement", data) if isinstance(data, dict) else None
    if not isinstance(table, dict) or not all(isinstance(device, (str, int)) for device in table.values()):
        raise InputError("D007", "not a placement", where=str(path), hint='write it like {"node id": 0}')
    return table


@dataclass(frozen=True)
class PlacementResult:
    """A placement of a cost graph, and how good it is."""

    placer: str
    makespan_seconds: float
    lower_bound_seconds: float
    feasible: bool
    peak_bytes: Longs
    """Per device."""
    seconds: float
    """What placing took, from cost graph to schedule, without compiling the kernels that were used first."""
    placement: Mapping[str, Hashable]
    """Node id -> device id, as the cost graph names them."""
    start_seconds: Floats
    """Per node of the cost graph, in its order."""
    finish_seconds: Floats
    passes: tuple[Timing, ...]
    diagnostics: tuple[Diagnostic, ...] = ()
