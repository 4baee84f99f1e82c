"""The steady state with requests in flight everywhere: loads of devices and channels, and requests per second.

The objective of Tarnawski, Phanishayee, Devanur, Mahajan and Nina Paravecino, "Efficient Algorithms for Device
Placement of DNN Graph Operators" (NeurIPS 2020): a result comes out once per interval, and the interval is the largest
load. Order and latency within one request do not matter where values run forward through the devices. Where they come
back, a device waits within a request: it ends its part of one before it begins the next. So the interval is also at
least the largest mean of a cycle of such waits. Where requests take one of several routes, a linear program divides
them, such that no processor and no channel has more than a second of work per second.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from onnxplace.graph.op_graph import Bools, Floats, Ints, OpGraph, sum_by
from onnxplace.simulation.simulated_contention import busy_slowdowns
from onnxplace.target.target import LinkModel, Target
from onnxplace.utils.linear_programs import LinearProgram

Count = Literal["max", "sum"]
"""Whether devices compute while they transfer (`max`), or do one after the other (`sum`)."""

# Rounds end when the interval changes by less than this share of itself.
RELATIVE_TOLERANCE, MAX_ROUNDS = 1e-6, 60
# Of the largest rate that the even distribution over routes may cost; and of two times that are sums in other orders.
RATE_TOLERANCE = 1e-9
# The activity of a device between the start and the end of its part of a request.
WAITS = "waits for within a request"

# Python's part of a request on one device; and for each device and segment of it, where threads of several devices
# hand the interpreter on. Least time between results of chains of Relu of 8 numbers on two cores, with 8 and 4
# requests in flight: 35 and 37 us on one device; 84 and 93 us for two copies; 199 and 216, 325 and 347, 457 and 457 us
# for 2, 4 and 8 segments that alternate between two devices.
QUEUED_REQUEST_SECONDS, HANDOVER_SECONDS = 36e-6, 50e-6


@dataclass(frozen=True)
class Loads:
    """Seconds that one request takes on each device, its processors and its channels."""

    compute_seconds: Floats
    """Per device."""
    sent_seconds: Floats
    """Per device: its outgoing transfers, each value once per destination device."""
    received_seconds: Floats
    """Per device: its incoming transfers."""
    link_model: LinkModel
    count: Count
    processors: Bools
    """[device, processor]."""
    span_seconds: Floats
    """[first, last]: longest path from the start of one device's part of a request to the end of another's; minus
    infinity where there is none."""

    @property
    def by_resource(self) -> dict[str, Floats]:
        """Return, per kind of resource, the load of each processor, or of each device's channel, in seconds.

        With `max`, computing is one resource, and so is each channel: two for each device in a duplex target, one
        in a sequential one, none in a parallel one, where transfers do not contend. With `sum`, compute, sends and
        receives of a device are one load in any link model: its processors are busy with all of them. Each device is
        also taken from the start to the end of its part of a request.
        """
        spans = {WAITS: self.span_seconds.diagonal()}
        if self.count == "sum":
            busy_seconds = self.compute_seconds + self.sent_seconds + self.received_seconds
            return {"computes and transfers": busy_seconds @ self.processors, **spans}
        channels = {}
        if self.link_model == "duplex":
            channels = {"sends": self.sent_seconds, "receives": self.received_seconds}
        elif self.link_model == "sequential":
            channels = {"sends and receives": self.sent_seconds + self.received_seconds}
        return {"computes": self.compute_seconds @ self.processors, **channels, **spans}

    @cached_property
    def cycle_seconds(self) -> float:
        """Return the time between two requests, if each device ends its part of one before it begins the next.

        With `end[k]` as the times at which devices end their parts of request k, `end[k + 1]` is the maximum over
        `first` of `end[k][first] + span_seconds[first]`. Such times grow by the largest mean of a cycle of spans:

            cpu:0  a1 . . c1 a2 . . c2       b needs a, and c needs b: cpu:0 cannot begin a2 before it ended c1
            cpu:1     b1 . . . b2 . .        span of cpu:0: a + b + c

        Karp, "A characterization of the minimum cycle mean in a digraph" (1978). O(D^3) for D devices.
        """
        count = len(self.span_seconds)
        walks = np.zeros((count + 1, count))  # the longest walks of so many spans, by their last device
        for length in range(count):
            walks[length + 1] = (walks[length][:, None] + self.span_seconds).max(axis=0)
        means = (walks[-1] - walks[:-1]) / np.arange(count, 0, -1)[:, None]
        return float(means.min(axis=0).max())

    @property
    def interval_seconds(self) -> float:
        """Return the time between two results in steady state: the largest load, or the waits for values."""
        return max(add_routes([self], [1.0]).values())

    @property
    def largest(self) -> tuple[int, str]:
        """Return the device with the largest load, and its activity; the first of several.

        Of devices on the busiest processor, it is the one that computes longest.
        """
        by_resource = self.by_resource
        activity = max(by_resource, key=lambda name: float(by_resource[name].max()))
        index = int(by_resource[activity].argmax())
        if "computes" in activity:
            users = np.flatnonzero(self.processors[:, index])
            index = int(users[self.compute_seconds[users].argmax()])
        return index, activity


def steady_state_loads(
    graph: OpGraph, seconds: Floats, target: Target, device: Ints, count: Count = "max", order: Ints | None = None
) -> Loads:
    """Return the steady-state loads of a placement: `seconds` is [device, node], `device` per node. O(D (N + E)).

    In a request, devices run their nodes in this `order`, a topological one; without it, their waits do not count.
    """
    devices = len(target.devices)
    own_seconds = seconds[device, np.arange(len(graph))]
    value, source, destination = list_transfers(graph, device, devices)
    latency, per_byte = target.link_arrays()
    transfer_seconds = latency[source, destination] + graph.value_bytes[value] * per_byte[source, destination]
    return Loads(
        compute_seconds=sum_by(device, own_seconds, devices),
        sent_seconds=sum_by(source, transfer_seconds, devices),
        received_seconds=sum_by(destination, transfer_seconds, devices),
        link_model=target.link_model,
        count=count,
        processors=target.processors,
        span_seconds=_measure_spans(graph, own_seconds, target, device, () if order is None else order.tolist()),
    )


def add_routes(loads: Sequence[Loads], shares: Sequence[float]) -> dict[str, float]:
    """Return, per activity, the largest load of a resource if routes take these shares of the requests."""
    tables = [load.by_resource for load in loads]
    totals = {name: float((np.array(shares) @ [table[name] for table in tables]).max()) for name in tables[0]}
    return totals | {WAITS: max(totals[WAITS], *(share * load.cycle_seconds for share, load in zip(shares, loads)))}


def _measure_spans(graph: OpGraph, own_seconds: Floats, target: Target, device: Ints, order: Sequence[int]) -> Floats:
    """Return the longest paths between devices, as `Loads.span_seconds` has them, over nodes in this order."""
    latency, per_byte = target.link_arrays()
    reads, producer = graph.inputs, graph.producer[graph.inputs.items]
    link = device[producer], device[reads.rows]
    transfer_seconds = latency[link] + graph.value_bytes[reads.items] * per_byte[link]
    delay = np.where(producer >= 0, transfer_seconds, -np.inf)[:, None]  # inputs of the model are there from the start
    # Per node, and per device the last node so far: when it ends after the start of each device's part.
    node_ends = np.zeros((len(graph), len(latency)))
    device_ends = np.where(np.eye(len(latency), dtype=bool), 0.0, -np.inf)
    for node in order:
        home, own = device[node], slice(reads.starts[node], reads.starts[node + 1])
        arrival = (node_ends[producer[own]] + delay[own]).max(axis=0, initial=-np.inf)
        node_ends[node] = device_ends[home] = np.maximum(device_ends[home], arrival) + own_seconds[node]
    # Without waits, a span is what a device computes, which is then to be the larger one of the two.
    return np.asarray(device_ends.T * (1 - RATE_TOLERANCE))


def list_transfers(graph: OpGraph, device: Ints, device_count: int) -> tuple[Ints, Ints, Ints]:
    """Return transfers as parallel arrays of value, source and destination; each value once per destination."""
    value, reader = graph.readers.rows, graph.readers.items
    is_produced = graph.producer[value] >= 0
    value, reader = value[is_produced], reader[is_produced]
    source, destination = device[graph.producer[value]], device[reader]
    crosses = source != destination
    pairs = np.unique(value[crosses].astype(np.int64) * device_count + destination[crosses])
    crossing = (pairs // device_count).astype(np.int32)
    return crossing, device[graph.producer[crossing]].astype(np.int32), (pairs % device_count).astype(np.int32)


@dataclass(frozen=True)
class RequestRates:
    """The steady state of requests on several routes."""

    shares: Floats
    """Per route, the share of the requests that take it."""
    interval_seconds: float
    """Between two results, over all routes."""
    limit: str
    """The activity of the busiest resource, as `Loads.by_resource` names it."""


def predict_request_rates(graph: OpGraph, seconds: Floats, target: Target, devices: Sequence[Ints]) -> RequestRates:
    """Return the largest rate of requests, and how they divide over routes.

    The rate is bounded by processors and channels: each has one second per second; and on each route, by devices that
    wait for values within a request. Nodes are in topological order, in which devices run them. Where devices share
    memory, each slows the others down by the share of its time in which it is busy. Rate and slowdowns depend on each
    other: they are a fixed point. Equally good divisions are made even.

    Args:
        graph: The nodes, such as segments.
        seconds: [device, node], each device alone.
        target: Its devices and links.
        devices: Per route, the device of each node.

    >>> from onnxplace.cost_graph import GENERATORS
    >>> state = GENERATORS["layered"](20, seed=0).state()  # doctest: +SKIP
    """
    nodes = np.arange(len(graph), dtype=np.int32)
    busy = np.zeros(len(target.devices))
    interval = 0.0
    for _ in range(MAX_ROUNDS):
        slowed = seconds * busy_slowdowns(graph, seconds, target, busy) if target.shared else seconds
        loads = [steady_state_loads(graph, slowed, target, device, order=nodes) for device in devices]
        rates = divide_requests(loads)
        previous, interval = interval, 1.0 / total if (total := float(rates.sum())) > 0 else 0.0
        compute = sum(
            (rate * load.compute_seconds for rate, load in zip(rates.tolist(), loads)), np.zeros(len(target.devices))
        )
        if abs(interval - previous) <= RELATIVE_TOLERANCE * interval:
            break
        # Half a step: where the bottleneck alternates, full steps would too.
        busy = (busy + np.minimum(compute, 1.0)) / 2 if previous else np.minimum(compute, 1.0)
    shares = rates / total if total > 0 else np.full(len(devices), 1 / len(devices))
    totals = add_routes(loads, shares.tolist())
    return RequestRates(shares, interval, limit=max(totals, key=lambda name: totals[name]))


def predict_python_seconds(target: Target, devices: Sequence[Ints | list[str]]) -> float:
    """Return Python's part of a request, which no other request overlaps.

    Interpreters of several hosts work side by side, so that their handovers are not counted.

    Args:
        target: Its devices.
        devices: Per route, the device of each segment: its index or its id.
    """
    if target.hosts or len(np.unique(np.concatenate(devices))) < 2:
        return QUEUED_REQUEST_SECONDS
    return HANDOVER_SECONDS * (len(np.unique(devices[0])) + len(devices[0]))


def divide_requests(loads: Sequence[Loads]) -> Floats:
    """Return requests per second on each route: the largest sum that processors, channels and waits allow, else even.

    A linear program, solved by HiGHS. Infinite loads, which no placement has, are not allowed.
    """
    table = np.stack([np.concatenate(list(load.by_resource.values())) for load in loads], axis=1)
    table = np.vstack([table, np.diag([load.cycle_seconds for load in loads])])
    table = table[table.max(axis=1) > 0]
    count = table.shape[1]
    if not len(table):
        return np.full(count, 1e12)  # nothing takes any time
    if count == 1:
        return np.array([1.0 / table.max()])
    scale = float(table.max())
    # Columns: the rate of each route, and the least of them.
    no_more_than_one = np.column_stack([table / scale, np.zeros(len(table))])
    least_below_each = np.column_stack([-np.eye(count), np.ones(count)])
    rows = np.vstack([no_more_than_one, least_below_each, [*np.ones(count), 0.0]])
    upper = np.concatenate([np.ones(len(table)), np.zeros(count), [np.inf]])
    lower = np.full(len(rows), -np.inf)
    best = _maximise(np.array([*np.ones(count), 0.0]), rows, lower, upper)
    lower[-1] = best[:count].sum() * (1 - RATE_TOLERANCE)
    even = _maximise(np.array([*np.zeros(count), 1.0]), rows, lower, upper)
    rates: Floats = np.maximum(even[:count], 0.0) / scale
    return rates


def _maximise(objective: Floats, rows: Floats, lower: Floats, upper: Floats) -> Floats:
    """Return non-negative columns with the largest objective, where `lower <= rows @ columns <= upper`."""
    program = LinearProgram()
    columns = program.add_columns(len(objective), cost=-objective)
    for row, least, most in zip(rows, lower, upper):
        used = np.flatnonzero(row)
        program.add_rows(columns[used], row[used], lower=least, upper=most)
    solution: Floats = np.array(program.solve().getSolution().col_value)
    return solution
