"""Measure how far off nodes are on a device, and choose those that have to stay off it.

Nodes of one kernel are a group. All groups of a part of the model are opened as one session on the device, side by
side: what one reads from another is an input of the session, and gets the exact value, which the CPU has computed. So a
single run tells the error that each group adds, without those of the groups before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from onnx import NodeProto

from onnxplace.errors import OnnxplaceError
from onnxplace.graph.op_graph import Bools, Floats, Ints, OpGraph, sum_by
from onnxplace.machine.hardware import available_cores
from onnxplace.machine.isolated_sessions import open_session
from onnxplace.machine.ort_sessions import make_session_options
from onnxplace.machine.ort_values import make_runner
from onnxplace.model.model import Model, store_for_session
from onnxplace.model.nested_graphs import rename_reads
from onnxplace.passes.profiling.chunks import cut_into_chunks, extract_nodes, list_last_readers, list_outputs
from onnxplace.target.device_kinds import DeviceAddress
from onnxplace.utils.differences import relative_error
from onnxplace.utils.file_locks import temporary_folder
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.progress import progress_part

Values = Mapping[str, Any]
# Weights and values of a part of the model, all of which are held at once.
MAX_PART_BYTES = 1 << 30
# Nodes that a device computes no faster count as saving this time: they get what others leave of the maximum.
MIN_SAVED_SECONDS = 1e-9
# Ends the names of values that the device computes; those of the CPU have the model's names.
_ENDING = "@device"


def measure_errors(model: Model, graph: OpGraph, feeds: Values, device: DeviceAddress, group: Ints) -> Floats:
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
    errors, values, separate = np.zeros(len(graph)), dict(feeds), _separate_groups(model, group)
    last = list_last_readers(graph)
    parts = cut_into_chunks(graph, (), MAX_PART_BYTES)
    for number, part in enumerate(parts):
        members = group_pairs((int(group[node]), node) for node in part)
        members.pop(-1, None)
        with progress_part(number, len(parts)):
            names = [name for node in part for name in model.nodes[node].output if name]
            values |= run_nodes(model, part, names, values, DeviceAddress.of("cpu:0"), "none")
            for nodes, error in _compare_groups(separate, graph, list(members.values()), values, device):
                errors[nodes] = error
        values = {name: value for name, value in values.items() if last.get(name, -1) >= part.stop}
    return errors


def _separate_groups(model: Model, group: Ints) -> Model:
    """Return the model with other names for what nodes compute, by which only nodes of the same group read it."""
    copies, names = [], defaultdict[int, dict[str, str]](dict)
    for index, node in zip(group.tolist(), model.nodes):
        copy = NodeProto.FromString(node.SerializeToString())
        rename_reads(copy, names[index])
        names[index] |= {name: f"{name}{_ENDING}" for name in node.output if name}
        copy.output[:] = [names[index].get(name, "") for name in node.output]
        copies.append(copy)
    separate = replace(model, nodes=tuple(copies))
    vars(separate)["types"] = model.types  # of the values that are fed, which have no producer now
    return separate


def _compare_groups(
    model: Model, graph: OpGraph, groups: Sequence[list[int]], values: Values, device: DeviceAddress
) -> list[tuple[list[int], float]]:
    """Return each group of nodes with its error; infinite for one that cannot be run alone."""
    leaving = [[graph.value_names[value] for value in list_outputs(graph, group)[1]] for group in groups]
    names = [f"{name}{_ENDING}" for of_group in leaving for name in of_group]
    try:
        nodes = [node for group in groups for node in group]
        results = run_nodes(model, nodes, names, values, device, "all") if names else {}
    except OnnxplaceError:  # one group may be to blame for all
        if len(groups) == 1:
            return [(groups[0], np.inf)]
        halves = groups[: len(groups) // 2], groups[len(groups) // 2 :]
        return [pair for half in halves for pair in _compare_groups(model, graph, half, values, device)]
    errors = {name: relative_error(results[f"{name}{_ENDING}"], values[name]) for names in leaving for name in names}
    return [(group, max((errors[name] for name in of_group), default=0.0)) for group, of_group in zip(groups, leaving)]


def run_nodes(
    model: Model, nodes: Sequence[int], names: Sequence[str], values: Values, device: DeviceAddress, level: Any
) -> dict[str, Any]:
    """Run nodes in their own session, and return some of what they compute."""
    part, feeds = extract_nodes(model, nodes, names, values, is_static=True)
    with temporary_folder() as folder:
        source, entries = store_for_session(part, folder)
        options = make_session_options(available_cores(), level, entries)
        results = make_runner(open_session(source, options, device, model.name), model.name)(feeds)
    return dict(zip(names, results))


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
    elsewhere = np.min(exact or list(seconds.values()), axis=0)
    square, saved = np.zeros((2, len(errors), count))
    for row, (name, error) in enumerate(errors.items()):
        np.maximum.at(square[row], unit, error**2)
        saved[row] = sum_by(unit, elsewhere - seconds[name], count)
    left, is_refused = maximum**2, square > np.inf
    for index in np.argsort((square / np.maximum(saved, MIN_SAVED_SECONDS)).ravel(), kind="stable"):
        is_refused.flat[index] = square.flat[index] > left
        left -= 0 if is_refused.flat[index] else square.flat[index]
    return {name: refused[unit] for name, refused in zip(errors, is_refused)}
