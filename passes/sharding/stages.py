"""Pipelines of sharded stages: consecutive parts of a sharded model, each on a group of devices of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from onnxplace.errors import UsageError
from onnxplace.graph import Floats, Ints
from onnxplace.model import Model
from onnxplace.target import Target


def list_stage_groups(target: Target, first: Sequence[int], stages: int) -> list[tuple[int, ...]]:
    """Return the group of devices of each stage; the first one is given, the others are like it.

    Raises UsageError if there are too few devices like those of the first group.
    """
    groups = [tuple(first)]
    if stages == 1:
        return groups
    kinds = sorted(target.devices[device].cost_class for device in first)
    remaining = [index for index in range(len(target.devices)) if index not in set(first)]
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


def cut_into_stages(model: Model, seconds: Floats, position: Ints, stages: int) -> Ints:
    """Return the stage of each node: consecutive nodes, of about equal time on the busiest device of the group.

    No cut separates the producer of a carried state from its readers in the next call.

    Args:
        model: The sharded model.
        seconds: Of each node on its device.
        position: Of each node's device in its group.
        stages: Number of stages.
    """
    result = np.zeros(len(model.nodes), dtype=np.int32)
    if stages == 1:
        return result
    busiest = int(np.bincount(position, weights=seconds).argmax())
    elapsed_seconds = np.cumsum(np.where(position == busiest, seconds, 0.0))
    allowed = np.flatnonzero(_may_cut_before(model))
    for stage in range(1, stages):
        if not len(allowed):
            break
        goal_seconds = elapsed_seconds[-1] * stage / stages
        before = np.where(allowed > 0, elapsed_seconds[np.maximum(allowed - 1, 0)], 0.0)
        cut = int(allowed[np.abs(before - goal_seconds).argmin()])
        result[cut:] = np.maximum(result[cut:], stage)
    return result


def _may_cut_before(model: Model) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return, per node, whether a stage may begin with it."""
    may = np.ones(len(model.nodes), dtype=bool)
    may[:1] = False
    producer = {name: index for index, node in enumerate(model.nodes) for name in node.output}
    users: dict[str, list[int]] = {name: [] for name in model.states}
    for index, reads in enumerate(model.reads):
        for name in reads:
            if name in users:
                users[name].append(index)
    for name, output in model.states.items():
        ends = [*users[name], producer[model.sources.get(output, output)]]
        may[min(ends) + 1 : max(ends) + 1] = False
    return may
