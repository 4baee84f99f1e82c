"""Contiguous splits: good ones of single topological orders, and the best one over all ideals, with its proof."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from onnxplace.graph import Floats, Ints
from onnxplace.passes.placement.stages.bounded_split import exact_split
from onnxplace.passes.placement.stages.ideal_kernels import SUM, TRAFFIC
from onnxplace.passes.placement.stages.local_search_kernels import LocalSearch
from onnxplace.passes.placement.stages.order_kernels import orders
from onnxplace.passes.placement.stages.stage_dp import (
    CROSSING_BYTES,
    Cutting,
    Lattice,
    Table,
    all_ideals,
    chain,
    tabulate,
    traced,
)
from onnxplace.problem import PlacementProblem
from onnxplace.simulation import list_transfers, steady_state_loads
from onnxplace.utils import budget_clock

# From this many ideals on, the dynamic program over all of them is not tried.
IDEALS = 50_000
# Steps of the dynamic program over one order: positions where it may be cut, times nodes.
STEPS = 20_000_000
ORDERS = 6
MAX_MOVES = 200_000
# What share of all outputs to count as staying where they are made, one try after the other, when the simulated peak
# exceeds what the split had counted; at the end with tighter limits too.
RESIDENT_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0, 1.0, 1.0)
# More than any load, and finite.
HUGE = 1e30


@dataclass(frozen=True)
class Split:
    """A contiguous split of a Cutting."""

    device: Ints
    """Per node of the cutting's graph."""
    value: float
    """Its largest load in seconds, or its traffic."""
    bound: float
    """No contiguous split within the limits has less; equal to `value` where that is proven to be the optimum."""


def device_costs(cut: Cutting, asked: PlacementProblem) -> Floats:
    """Return the seconds of each node of a cutting on each device of the target; infinite on those left out."""
    seconds = np.full((len(asked.target.devices), len(cut.graph)), np.inf)
    for kind, row in zip(cut.kinds, cut.seconds):
        seconds[list(kind)] = row
    return seconds


def value_of(cut: Cutting, asked: PlacementProblem, seconds: Floats, device: Ints) -> float:
    """Return the largest load of a placement of the cutting's graph, or its traffic."""
    if cut.rule == TRAFFIC:
        value, _, _ = list_transfers(cut.graph, device, len(seconds))
        return float((cut.graph.value_bytes[value] + CROSSING_BYTES).sum())
    return steady_state_loads(
        cut.graph, seconds, asked.target, device, "sum" if cut.rule == SUM else "max"
    ).interval_seconds


def split_into_stages(cut: Cutting, asked: PlacementProblem, deadline: float, seed: int) -> Split | None:
    """Return the best contiguous split that the time allows, None if none was found within the limits."""
    good = _of_orders(cut, asked, deadline, seed)
    lattice = all_ideals(cut.graph, IDEALS) if cut.exhaustive else None
    if lattice is None:
        return _bounded(good, _floor(cut))
    return _best(cut, asked, lattice, good, deadline)


def _of_orders(cut: Cutting, asked: PlacementProblem, deadline: float, seed: int) -> Split | None:
    """Cut several topological orders as well as each can be, then move nodes between stages."""
    nodes, seconds = len(cut.graph), device_costs(cut, asked)
    lattice = chain(nodes, max(64, STEPS // nodes))
    best: Split | None = None
    for number, order in enumerate(orders(cut.graph, ORDERS, seed)):
        if number and budget_clock() > deadline:
            break
        shuffled = cut.reordered(order)
        table = tabulate(
            shuffled, lattice, HUGE if best is None else 1.2 * best.value, max(deadline, HUGE * (not number))
        )
        found = None if table is None else traced(shuffled, lattice, table)
        if found is None:
            continue
        device, stage = np.empty_like(found), _stage_order(found, len(seconds))
        device[order] = found
        device, _ = _search(cut, asked, seconds).improve(device, stage, min(MAX_MOVES, 200 * nodes), seed + number)
        value = value_of(cut, asked, seconds, device)
        if best is None or value < best.value:
            best = Split(device, value, 0.0)
    return best


def _stage_order(device: Ints, devices: int) -> Ints:
    """Return the position of each device along an order; those without nodes come last."""
    first = np.full(devices, len(device), dtype=np.int64)
    np.minimum.at(first, device, np.arange(len(device)))
    stage = np.empty(devices, dtype=np.int32)
    stage[np.argsort(first, kind="stable")] = np.arange(devices, dtype=np.int32)
    return stage


def _search(cut: Cutting, asked: PlacementProblem, seconds: Floats) -> LocalSearch:
    """Return the local search for the loads (or the traffic) of a cutting."""
    limit = np.zeros(len(seconds), dtype=np.int64)
    for kind, amount in zip(cut.kinds, cut.limit_bytes):
        limit[list(kind)] = amount
    latency, per_byte = asked.target.link_arrays()
    if cut.rule == TRAFFIC:
        latency, per_byte = np.full_like(latency, CROSSING_BYTES), np.ones_like(per_byte)
    return LocalSearch(cut.graph, seconds, latency, per_byte, limit, cut.need_bytes, cut.rule)


def _best(cut: Cutting, asked: PlacementProblem, lattice: Lattice, good: Split | None, deadline: float) -> Split | None:
    """Search all contiguous splits, first those little above a lower bound, which are few; then others."""
    floor = _floor(cut)
    top = HUGE if good is None else good.value * (1 - 1e-9)
    if not np.isfinite(floor) or (good is not None and good.value <= floor * (1 + 1e-9)):
        return good if good is None else Split(good.device, good.value, good.value)
    above, reached = 0.01, floor
    while True:
        bound = floor * (1 + above)
        bound = top if bound <= 0 or bound > 0.9 * top or above > 8 else bound
        table = tabulate(cut, lattice, bound, deadline)
        if table is None or not table.complete:
            return _bounded(good, reached)
        if np.isfinite(table.least):
            return _verified(cut, asked, lattice, table, good, deadline)
        if bound == top:
            return _bounded(good, HUGE)
        above, reached = 4 * above, bound


def _floor(cut: Cutting) -> float:
    """Return what no split can go below: work spread evenly, or the largest node."""
    fastest = cut.seconds.min(axis=0)
    devices = sum(len(kind) for kind in cut.kinds)
    return 0.0 if cut.rule == TRAFFIC else float(max(fastest.sum() / devices, fastest.max()))


def _bounded(good: Split | None, bound: float) -> Split | None:
    return None if good is None else Split(good.device, good.value, min(bound, good.value))


def _verified(
    cut: Cutting, asked: PlacementProblem, lattice: Lattice, table: Table, good: Split | None, deadline: float
) -> Split | None:
    """Take the table's best split by its true loads; where they are above the table's, search for what is between.

    The table counts a value that several later stages read as sent once, so its best is a lower bound.
    """
    seconds = device_costs(cut, asked)
    device = traced(cut, lattice, table)
    assert device is not None
    value = value_of(cut, asked, seconds, device)
    if good is None or value < good.value:
        good = Split(device, value, table.least)
    if good.value <= table.least * (1 + 1e-9):
        return Split(good.device, good.value, good.value)
    if not cut.exact_receives:
        return _bounded(good, table.least)
    return _between(cut, asked, lattice, good, table.least, deadline)


def _between(
    cut: Cutting, asked: PlacementProblem, lattice: Lattice, good: Split, least: float, deadline: float
) -> Split:
    """Close the gap between the true loads of `good` and the lower bound `least`, if the time allows."""
    seconds = device_costs(cut, asked)
    while good.value > least * (1 + 1e-9):
        table = tabulate(cut, lattice, good.value * (1 - 1e-9), deadline)
        if table is None or not table.complete:
            return Split(good.device, good.value, least)
        device, exhausted = exact_split(cut, lattice, table, good.value * (1 - 1e-9), deadline)
        if device is None:
            return Split(good.device, good.value, good.value if exhausted else least)
        good = Split(device, value_of(cut, asked, seconds, device), least)
    return Split(good.device, good.value, good.value)
