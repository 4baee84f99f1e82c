"""Why a step takes as long as it does, and why a node or value is where it is: what other devices and layouts cost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.driver.decision import BuiltStrategy, Result
from onnxplace.errors import UsageError, suggest_nearest
from onnxplace.facts import (
    Groups,
    LayoutAlternative,
    Placement,
    Profile,
    Schedule,
    Segments,
    Source,
    Streaming,
    is_refused,
)
from onnxplace.graph import Floats, Ints
from onnxplace.model import Model
from onnxplace.passes.profiling import device_peaks
from onnxplace.passes.sharding import LayoutExplainer
from onnxplace.problem import describe_shortage, device_seconds, predict_step_seconds, predict_waiting_seconds
from onnxplace.reports import PlacedStep, walk_back
from onnxplace.simulation import Simulation, memory_share, simulate
from onnxplace.state import State

# The share of its peak rate at which a node moves bytes if memory limits it: an estimate assumes the peak, and real
# kernels come close to half of it or more.
ESTIMATED_SHARE, MEASURED_SHARE = 0.99, 0.5


@dataclass(frozen=True)
class StepPart:
    """A part of a predicted step."""

    kind: str
    """`launches` of nodes; `memory rate`: what they wait for memory; `computes`: what they compute; `copies` between
    devices, and `waits` for them; `streamed weights` that are waited for; `calls` of segments and of the request."""
    seconds: float
    count: int
    """Number of nodes, copies, waits or segments."""


def list_step_parts(state: State) -> tuple[StepPart, ...]:
    """Return the parts of the predicted step of a split model, the longest first; together they are the step.

    They are those of the chain of nodes and copies that determines its length. What segments add to it are calls.
    """
    target, device, schedule = state.target, state[Placement].device, state[Schedule]
    step = PlacedStep(
        graph=state[Profile].graph,
        seconds=device_seconds(state[Profile], target),
        target=target,
        device_names=tuple(item.id for item in target.devices),
        device=device,
        order=schedule.order,
        simulation=schedule.simulation,
        details=(),
    )
    divided, parts = (
        _divide_nodes(state, step.seconds[device, np.arange(len(device))]),
        defaultdict[str, list[float]](list),
    )
    for event in walk_back(step):
        if event.kind != "compute":
            parts["copies" if event.kind == "transfer" else "waits"].append(event.seconds)
            continue
        for kind, seconds in divided.items():
            parts[kind].append(float(seconds[event.node]))
    parts["streamed weights"] = [predict_waiting_seconds(state)] if Streaming in state else []
    calls = predict_step_seconds(state) - sum(map(sum, parts.values()))
    parts["calls"] = [calls / len(state[Segments].segments)] * len(state[Segments].segments)
    items = [StepPart(kind, sum(times), sum(time > 0 for time in times)) for kind, times in parts.items()]
    return tuple(sorted((item for item in items if item.seconds > 0), key=lambda item: -item.seconds))


def _divide_nodes(state: State, own_seconds: Floats) -> dict[str, Floats]:
    """Return what the time of each node on its device consists of.

    By a roofline, what follows the launch waits for memory if the bytes that it moves take that long.
    """
    profile, device, devices = state[Profile], state[Placement].device, state.target.devices
    peaks = [device_peaks(item) for item in devices]
    launches = np.minimum(own_seconds, np.array([item.kernel_seconds for item in peaks])[device])
    rest, rate = own_seconds - launches, np.array([item.bytes_per_second for item in peaks])[device]
    sources = np.stack([profile.sources[item.cost_class] for item in devices])[device, np.arange(len(device))]
    least = np.where(sources == Source.ESTIMATED, ESTIMATED_SHARE, MEASURED_SHARE)
    waits = memory_share(profile.graph, rest * rate, 1.0) >= least
    return {"launches": launches, "memory rate": rest * waits, "computes": rest * ~waits}


@dataclass(frozen=True)
class DeviceAlternative:
    """A device for a node and those that must be with it, with all other nodes where they are."""

    device: str
    is_kept: bool
    step_seconds: float | None
    """The simulated step, node by node; None if the device does not take one of the nodes."""
    transfers: int = 0
    """Number of transfers in a step."""
    transfer_bytes: int = 0
    problem: str = ""
    """Why it is impossible: a node that the device does not take, or missing memory; empty if it is possible."""


@dataclass(frozen=True)
class Explanation:
    """Why a node or value is where it is, among whole operators placed, and where operators are split."""

    name: str
    """Of the node or value, as it was asked for."""
    node: str
    """The node that decides: itself, the one that makes the value, or the first that reads an input or weight."""
    op: str
    together: int
    """Number of nodes that must be on one device with it, itself included."""
    reason: str
    """Why these must be together; empty if it is free of others."""
    placed: str
    """The strategy whose placement is explained; empty if none places whole operators."""
    devices: tuple[DeviceAlternative, ...]
    """The kept one first, then by the step."""
    sharded: str
    """The strategy whose layouts are explained, the fastest that splits operators; empty if none does."""
    layouts: tuple[LayoutAlternative, ...]
    """The kept one first, then by the step."""


@dataclass(frozen=True)
class Subject:
    """A node or value to explain."""

    name: str
    node: int
    """Index of the node that decides."""
    value: str
    """The value; empty for a node."""


def find_subjects(model: Model, names: Sequence[str]) -> tuple[Subject, ...]:
    """Return the nodes and values of these names; raises UsageError for an unknown one."""
    nodes = {node.name: index for index, node in reversed(list(enumerate(model.nodes)))}
    values: dict[str, int] = {}
    for index, reads in reversed(list(enumerate(model.reads))):
        values.update(dict.fromkeys(reads, index))
    values.update({name: index for index, node in enumerate(model.nodes) for name in node.output if name})
    for name in names:
        if name not in nodes and name not in values:
            message = f"no node or value of the optimised model has the name {name!r}"
            raise UsageError("U020", message, where="--explain", hint=suggest_nearest(name, [*nodes, *values]))
    return tuple(Subject(name, nodes.get(name, values.get(name, 0)), "" if name in nodes else name) for name in names)


def explain_subjects(state: State, subjects: Sequence[Subject], results: Sequence[Result]) -> tuple[Explanation, ...]:
    """Return why nodes and values are where they are.

    Devices are compared in the placement of whole operators, layouts in the fastest strategy that splits operators.

    Args:
        state: The profiled model, before strategies.
        subjects: Nodes and values of that model.
        results: All strategies.
    """
    built = [item for item in results if isinstance(item, BuiltStrategy)]
    placed = next((item for item in built if item.strategy.kind == "placed"), None)
    sharded = min((item for item in built if item.layouts), key=lambda item: item.step_seconds, default=None)
    layouts = LayoutExplainer(sharded.layouts) if sharded and subjects else None
    explanations = []
    for subject in subjects:
        node = state[Model].nodes[subject.node]
        members, reason = _find_group(placed.state[Groups], subject.node) if placed else (np.array([subject.node]), "")
        explanations.append(
            Explanation(
                name=subject.name,
                node=node.name,
                op=node.op_type,
                together=len(members),
                reason=reason,
                placed=placed.name if placed else "",
                devices=tuple(_list_devices(placed.state, members)) if placed else (),
                sharded=sharded.name if sharded else "",
                layouts=layouts.list_alternatives(node.name, subject.value) if layouts else (),
            )
        )
    return tuple(explanations)


def _find_group(groups: Groups, node: int) -> tuple[Ints, str]:
    """Return the nodes that must be on one device with a node, and why."""
    group = int(groups.group[node])
    return np.flatnonzero(groups.group == group).astype(np.int32), groups.reasons[group]


def _list_devices(state: State, members: Ints) -> list[DeviceAlternative]:
    """Return the step with some nodes on each device, in the order of the schedule."""
    target, graph, order = state.target, state[Profile].graph, state[Schedule].order
    seconds, device = device_seconds(state[Profile], target), state[Placement].device
    home = int(device[members[0]])
    alternatives = []
    for index, item in enumerate(target.devices):
        refused = members[is_refused(seconds[index, members])]
        if len(refused):
            problem = f"it does not take {graph.ops[refused[0]]} {graph.names[refused[0]]!r}"
            alternatives.append(DeviceAlternative(item.id, is_kept=False, step_seconds=None, problem=problem))
            continue
        moved = device.copy()
        moved[members] = index
        step: Simulation = simulate(graph, seconds, target, moved, order)
        alternatives.append(
            DeviceAlternative(
                device=item.id,
                is_kept=index == home,
                step_seconds=step.makespan_seconds,
                transfers=len(step.transfers),
                transfer_bytes=int(graph.value_bytes[step.transfers.value].sum()),
                problem=describe_shortage(target, step.peak_bytes),
            )
        )
    return sorted(alternatives, key=lambda other: (not other.is_kept, other.step_seconds is None, other.step_seconds))
