"""Why a node or value is where it is: what each other device, and each other layout, would cost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.driver.candidates import Candidate, Result
from onnxplace.errors import UsageError
from onnxplace.facts import Groups, LayoutAlternative, Placement, Profile, Schedule, is_refused
from onnxplace.graph.op_graph import Ints
from onnxplace.model.model import Model
from onnxplace.model.node_metadata import match_nodes, suggest_nodes
from onnxplace.problem import describe_shortage, device_seconds
from onnxplace.simulation.simulator import Simulation, simulate
from onnxplace.state import State


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
    """Return the nodes and values of these names, and the nodes that other names match as patterns, or whose modules.

    Raises UsageError for a name that matches no node (U020), or is not a regular expression (U023).
    """
    nodes, where, subjects = [node.name for node in model.nodes], "--explain", list[Subject]()
    values: dict[str, int] = {}
    for index, reads in reversed(list(enumerate(model.reads))):
        values.update(dict.fromkeys(reads, index))
    values.update({name: index for index, node in enumerate(model.nodes) for name in node.output if name})
    for name in names:
        if name in values and name not in nodes:
            subjects.append(Subject(name, values[name], name))
            continue
        matches = [nodes.index(name)] if name in nodes else match_nodes([name], nodes, where)[0]
        if not matches:
            message = f"no node, module or value of the optimised model matches {name!r}"
            raise UsageError("U020", message, where=where, hint=suggest_nodes(name, nodes, values))
        subjects += [Subject(nodes[index], index, "") for index in matches]
    return tuple(subjects)


def explain_subjects(state: State, subjects: Sequence[Subject], results: Sequence[Result]) -> tuple[Explanation, ...]:
    """Return why nodes and values are where they are.

    Devices are compared in the placement of whole operators, layouts in the fastest strategy that splits operators.

    Args:
        state: The profiled model, before strategies.
        subjects: Nodes and values of that model.
        results: All strategies.
    """
    built = [item for item in results if isinstance(item, Candidate)]
    placed = next((item for item in built if item.strategy.kind == "placed"), None)
    sharded = min((item for item in built if item.layouts), key=lambda item: item.step_seconds, default=None)
    layouts = sharded.layouts if sharded else None
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
                problem=describe_shortage(target, step.peak_bytes, step.pool_peak_bytes),
            )
        )
    return sorted(alternatives, key=lambda other: (not other.is_kept, other.step_seconds is None, other.step_seconds))
