"""Coarser versions of a problem: what is cheaper to move together than apart becomes one node."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from onnxplace.costs import Problem
from onnxplace.graph import Ints
from onnxplace.passes._contraction import contract
from onnxplace.passes._grouping import Union, first_alike, only_readers

# A level with fewer nodes is searched as it is; one that shrinks by less than this share is not worth having.
SMALL = 400
SHRINKS = 0.85


@dataclass(frozen=True)
class Level:
    """A problem, and how it came from the finer one."""

    problem: Problem
    cluster: Ints
    """The node here of each node of the finer level."""


def levels(asked: Problem) -> list[Level]:
    """Return the problem itself and its coarser versions, the coarsest last."""
    found = [Level(asked, np.arange(len(asked.graph), dtype=np.int32))]
    if len(asked.target.devices) < 2:
        return found
    for always in (False, True, True, True):
        fine = found[-1].problem
        if len(fine.graph) <= SMALL and len(found) > 1:
            break
        coarse = _coarser(fine, always)
        if len(coarse.problem.graph) > SHRINKS * len(fine.graph):
            continue
        found.append(coarse)
    return found


def _coarser(fine: Problem, always: bool) -> Level:
    """Join nodes to their only reader, if sending takes longer than computing or `always`; contract what is acyclic.

    Two groups of several nodes each are never joined: they may well do better apart.
    """
    graph, count = fine.graph, len(fine.graph)
    size, own_pin = np.bincount(fine.group, minlength=len(fine.pinned)), fine.pinned[fine.group]
    # What must not be joined has a color of its own: groups of several nodes, and nodes that are pinned.
    color = np.where(size[fine.group] > 1, fine.group, -1)
    color = np.where((color < 0) & (own_pin >= 0), len(fine.pinned) + np.arange(count), color).astype(np.int32)
    union = Union(color)
    union.join(first_alike(fine.group), np.arange(count), "grouped before")
    union.join(*only_readers(graph, fine.seconds, fine.target, np.ones(count, dtype=bool), always), "its only reader")
    group = union.groups().group
    cluster = contract(group, np.arange(count, dtype=np.int32), graph.producer, graph.inputs.starts, graph.inputs.items)
    pinned = np.full(int(group.max(initial=-1)) + 1, -1, dtype=np.int32)
    np.maximum.at(pinned, group, own_pin.astype(np.int32))
    return Level(replace(fine, group=group, pinned=pinned).contracted(cluster), cluster)
