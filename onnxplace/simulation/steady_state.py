"""Steady-state loads: seconds of devices and channels per request, when requests are pipelined.

The objective of Tarnawski, Phanishayee, Devanur, Mahajan and Nina Paravecino, "Efficient Algorithms for Device
Placement of DNN Graph Operators" (NeurIPS 2020): with requests in flight everywhere, a result comes out once per
interval, and the interval is the largest load. Order and latency within one request do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from onnxplace.graph import Floats, Ints, OpGraph, sum_by
from onnxplace.target import LinkModel, Target

Count = Literal["max", "sum"]
"""Whether devices compute while they transfer (`max`), or do one after the other (`sum`)."""


@dataclass(frozen=True)
class Loads:
    """Seconds that one request takes on each device and on its channels."""

    compute_seconds: Floats
    """Per device."""
    sent_seconds: Floats
    """Per device: its outgoing transfers, each value once per destination device."""
    received_seconds: Floats
    """Per device: its incoming transfers."""
    link_model: LinkModel
    count: Count

    @property
    def by_resource(self) -> dict[str, Floats]:
        """Return, per kind of resource, its load on each device in seconds.

        With `max`, computing is one resource, and so is each channel: two for each device in a duplex target, one
        in a sequential one, none in a parallel one, where transfers do not contend. With `sum`, compute, sends and
        receives of a device are one load in any link model: the device itself is busy with all of them.
        """
        if self.count == "sum":
            return {"computes and transfers": self.compute_seconds + self.sent_seconds + self.received_seconds}
        if self.link_model == "duplex":
            channels = {"sends": self.sent_seconds, "receives": self.received_seconds}
        elif self.link_model == "sequential":
            channels = {"sends and receives": self.sent_seconds + self.received_seconds}
        else:
            channels = {}
        return {"computes": self.compute_seconds, **channels}

    @property
    def interval_seconds(self) -> float:
        """Return the time between two results in steady state: the largest load."""
        return float(max(loads.max() for loads in self.by_resource.values()))

    @property
    def largest(self) -> tuple[int, str]:
        """Return the device with the largest load, and its activity; the first of several."""
        by_resource = self.by_resource
        activity = max(by_resource, key=lambda name: float(by_resource[name].max()))
        return int(by_resource[activity].argmax()), activity


def steady_state_loads(graph: OpGraph, seconds: Floats, target: Target, device: Ints, count: Count = "max") -> Loads:
    """Return the steady-state loads of a placement: `seconds` is [device, node], `device` per node. O(N + E)."""
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
    )


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
