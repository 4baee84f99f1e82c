"""Measure how far off nodes are on a device, and choose those that have to stay off it.

Nodes of one kernel are a group. All groups of a part of the model are opened as one session on the device, side by
side: what one reads from another is an input of the session, and gets the exact value, which the CPU has computed. So a
single run tells the error that each group adds, without those of the groups before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
from onnx import NodeProto, ValueInfoProto, helper

from onnxplace.devices import DeviceAddress
from onnxplace.errors import OnnxplaceError
from onnxplace.graph import Bools, Floats, Ints, OpGraph, sum_by
from onnxplace.machine import available_cores, make_runner, make_session_options, open_session, pin_thread
from onnxplace.model import Model, iterate_reads, rename_reads, store_for_session
from onnxplace.passes.profiling.chunks import cut_into_chunks
from onnxplace.target import Device
from onnxplace.utils import progress_part, relative_error, temporary_folder

# Weights and values of a part of the model, all of which are held at once.
MAX_PART_BYTES = 1 << 30
# Nodes that a device computes no faster count as saving this time: they get what others leave of the maximum.
MIN_SAVED_SECONDS = 1e-9
# Ends the names of values that the device computes; those of the CPU have the model's names.
_ENDING = "@device"


def measure_errors(model: Model, graph: OpGraph, feeds: Mapping[str, Any], device: Device, group: Ints) -> Floats:
    """Return, per node, the error of its group on a device, over the largest magnitude of what the group computes.

    Args:
        model: The model.
        graph: Its operator graph.
        feeds: Inputs of the model.
        device: A device of this machine.
        group: Per node, the id of its kernel; -1 for a node that is not measured, whose error is 0.

    Raises:
        ModelError: the CPU cannot run the model with these inputs.
    """
    errors, values = np.zeros(len(graph)), dict(feeds)
    last = {name: int(graph.readers[value].max(initial=-1)) for value, name in enumerate(graph.value_names)}
    parts = cut_into_chunks(graph, (), min(device.memory_bytes, MAX_PART_BYTES))
    for number, part in enumerate(parts):
        members: dict[int, list[int]] = {}
        for node in part:
            members.setdefault(int(group[node]), []).append(node)
        members.pop(-1, None)
        with progress_part(number, len(parts)):
            nodes = model.nodes[part.start : part.stop]
            values |= _run_nodes(model, nodes, [name for node in nodes for name in node.output if name], values)
            groups = list(members.values())
            for nodes_of_group, error in zip(groups, _measure_groups(model, graph, groups, values, device)):
                errors[nodes_of_group] = error
        values = {name: value for name, value in values.items() if last.get(name, -1) >= part.stop}
    return errors


def _measure_groups(
    model: Model, graph: OpGraph, groups: Sequence[Sequence[int]], values: Mapping[str, Any], device: Device
) -> list[float]:
    """Return the error of each group of nodes; infinite for one that cannot be run alone."""
    leaving = [_list_leaving(graph, group) for group in groups]
    names = [f"{name}{_ENDING}" for of_group in leaving for name in of_group]
    nodes = [node for group in groups for node in _rename_results([model.nodes[index] for index in group])]
    try:
        results = _run_nodes(model, nodes, names, values, device) if names else {}
    except OnnxplaceError:  # one group may be to blame for all
        if len(groups) == 1:
            return [np.inf]
        middle = len(groups) // 2
        halves = (groups[:middle], groups[middle:])
        return [error for half in halves for error in _measure_groups(model, graph, half, values, device)]
    pairs = [[(results[f"{name}{_ENDING}"], values[name]) for name in of_group] for of_group in leaving]
    return [max((relative_error(*pair) for pair in of_group), default=0.0) for of_group in pairs]


def _list_leaving(graph: OpGraph, group: Sequence[int]) -> list[str]:
    """Return the values of a group that are outputs, or that nodes outside of it read."""
    values = (value for node in group for value in graph.outputs[node].tolist())
    outside = (
        value for value in values if graph.is_output[value] or not set(group).issuperset(graph.readers[value].tolist())
    )
    return [graph.value_names[value] for value in outside]


def _rename_results(nodes: Sequence[NodeProto]) -> list[NodeProto]:
    """Return copies of nodes that compute values of other names, and read those of each other."""
    new_names = {name: f"{name}{_ENDING}" for node in nodes for name in node.output if name}
    copies = [NodeProto.FromString(node.SerializeToString()) for node in nodes]
    for copy in copies:
        rename_reads(copy, new_names)
        copy.output[:] = [new_names.get(name, "") for name in copy.output]
    return copies


def _run_nodes(
    model: Model,
    nodes: Sequence[NodeProto],
    names: Sequence[str],
    values: Mapping[str, Any],
    device: Device | None = None,
) -> dict[str, Any]:
    """Run nodes in a session of their own, on a device or one by one on the CPU; return some of what they compute."""
    inner = {name for node in nodes for name in node.output}
    reads = dict.fromkeys(name for node in nodes for name in iterate_reads(node) if name not in inner)
    feeds = {name: values[name] for name in reads if name in values}
    part = replace(
        model,
        nodes=tuple(nodes),
        initializers=MappingProxyType({name: model.initializers[name] for name in reads if name not in feeds}),
        inputs=tuple(_declare(model, name, value) for name, value in feeds.items()),
        outputs=tuple(ValueInfoProto(name=name) for name in names),
        sources=MappingProxyType({}),
    )
    cores = available_cores()[: device.cores] if device else available_cores()
    address = device.address if device else DeviceAddress("cpu", 0)
    with temporary_folder() as folder, pin_thread(cores):
        source, entries = store_for_session(part, folder)
        options = make_session_options(cores, None if device else "none", entries)
        run = make_runner(open_session(source, options, address, model.name), model.name)
        results = run(feeds)
        del run
    return dict(zip(names, results))


def _declare(model: Model, name: str, value: Any) -> ValueInfoProto:
    """Return the declaration of an input, with fixed sizes, which some providers need."""
    if isinstance(value, np.ndarray) and value.dtype.kind not in "OUS":
        return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)
    return ValueInfoProto(name=name, type=model.types[name])


def choose_refused(
    seconds: Mapping[str, Floats], errors: Mapping[str, Floats], unit: Ints, maximum: float
) -> dict[str, Bools]:
    """Return the nodes that have to stay off the devices of a class, for each class with errors.

    The others may be there all at once: the root of the sum of their squared errors is at most `maximum`. Roundings of
    different values are nearly independent, and add up like this rather than one to the other (Higham and Mary, SIAM J.
    Sci. Comput. 41, 2019). How much the model amplifies each is unknown, so a bundle has to be compared as a whole, and
    `maximum` lowered where that is not enough. Of the units of nodes, those get a share that save most time for it.

    Args:
        seconds: Cost class -> seconds, per node.
        errors: Cost class -> relative error, per node, of those classes that are not exact.
        unit: Dense id per node; nodes with one id stay together.
        maximum: The largest error of all together.
    """
    count, exact = int(unit.max(initial=-1)) + 1, [seconds[name] for name in seconds if name not in errors]
    elsewhere = np.min(exact or [np.max(list(seconds.values()), axis=0)], axis=0)
    square, saved = np.zeros((len(errors), count)), np.zeros((len(errors), count))
    for row, (name, error) in enumerate(errors.items()):
        np.maximum.at(square[row], unit, error**2)
        saved[row] = sum_by(unit, elsewhere - seconds[name], count)
    left, is_refused = maximum**2, square > np.inf
    for index in np.argsort((square / np.maximum(saved, MIN_SAVED_SECONDS)).ravel(), kind="stable"):
        is_refused.flat[index] = square.flat[index] > left
        left -= 0 if is_refused.flat[index] else square.flat[index]
    return {name: refused[unit] for name, refused in zip(errors, is_refused)}
