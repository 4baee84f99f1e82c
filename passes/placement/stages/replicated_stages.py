"""Stages that several devices work on, each for its share of the requests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from onnxplace.errors import UsageError
from onnxplace.graph import Ints
from onnxplace.problem import PlacementProblem
from onnxplace.target import Link


def find_first_devices(replicas: Sequence[int]) -> Ints:
    """Return the first device of each group of consecutive devices.

    >>> find_first_devices((1, 3, 2)).tolist()
    [0, 1, 4]
    """
    return np.concatenate([[0], np.cumsum(replicas)[:-1]]).astype(np.int32)


def merge_devices(problem: PlacementProblem, replicas: Sequence[int]) -> PlacementProblem:
    """Return a problem whose devices are groups of consecutive devices, which share the requests.

    A group of r equal devices takes 1 / r of the time for a request, and so do its channels. Its memory is that of the
    smallest one, since each holds the whole stage. Nodes that are pinned to a device outside of all groups fit nowhere.

    Raises UsageError if there are fewer devices than the groups need.
    """
    target = problem.target
    if sum(replicas) > len(target.devices):
        message = f"stages on {' + '.join(map(str, replicas))} devices need {sum(replicas)}, there are"
        hint = "name more devices with --devices"
        raise UsageError("U075", f"{message} {len(target.devices)}", where="stages", hint=hint)
    firsts = find_first_devices(replicas).tolist()
    groups = [list(range(first, first + count)) for first, count in zip(firsts, replicas)]
    with np.errstate(divide="ignore"):
        seconds = np.stack([1.0 / (1.0 / problem.seconds[group]).sum(axis=0) for group in groups])
    limits = [int(problem.limit_bytes[group].min()) for group in groups]
    devices = tuple(replace(target.devices[first], memory_bytes=limit) for first, limit in zip(firsts, limits))
    latency, per_byte = target.link_arrays()
    links = []
    for i, source in enumerate(firsts):
        for j, destination in enumerate(firsts):
            if i != j:
                ways = min(replicas[i], replicas[j])
                rate = per_byte[source, destination] / ways
                bytes_per_second = 1.0 / rate if rate > 0 else np.inf
                link = Link(devices[i].id, devices[j].id, latency[source, destination] / ways, bytes_per_second)
                links.append(link)
    group_of = np.full(len(target.devices), len(groups), dtype=np.int32)
    for index, group in enumerate(groups):
        group_of[group] = index
    return replace(
        problem,
        seconds=seconds,
        target=replace(target, devices=devices, links=tuple(links), shared=()),
        limit_bytes=np.array(limits, dtype=np.int64),
        pinned=np.where(problem.pinned >= 0, group_of[problem.pinned], -1).astype(problem.pinned.dtype),
    )
