"""Steady-state loads: how busy devices and channels are when many requests are pipelined through a placement.

The objective of Tarnawski, Phanishayee, Devanur, Mahajan and Nina Paravecino, "Efficient Algorithms for Device
Placement of DNN Graph Operators" (NeurIPS 2020): with requests in flight everywhere, a result comes out once per
interval, and the interval is the largest load. Order and latency within one request do not matter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from onnxplace.graph import Floats, Ints, OpGraph, sum_by
from onnxplace.simulation.simulator import Simulation
from onnxplace.target import LinkModel, Target

Count = Literal["max", "sum"]
"""Whether devices compute while they transfer (`max`), or do one after the other (`sum`)."""


@dataclass(frozen=True)
class Loads:
    """Seconds of work that one request brings to each device and to its channels."""

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
        """Return, per kind of resource, the load (seconds) of that of each device.

        With `max`, computing is one resource, and so is each channel: two for each device in a duplex target, one
        in a sequential one, none in a parallel one, where transfers do not contend. With `sum`, all that a device
        computes, sends and receives is one load, whatever the link model: the device itself is taken to do it.
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
        return float(max(row.max() for row in self.by_resource.values()))

    @property
    def largest(self) -> tuple[int, str]:
        """Return the device with the largest load, and what it does for so long; the first of several."""
        by_resource = self.by_resource
        what = max(by_resource, key=lambda name: float(by_resource[name].max()))
        return int(by_resource[what].argmax()), what


def steady_state_loads(graph: OpGraph, seconds: Floats, target: Target, device: Ints, count: Count = "max") -> Loads:
    """Return the steady-state loads of a placement: `seconds` is [device, node], `device` per node. O(N + E)."""
    devices = len(target.devices)
    own_seconds = seconds[device, np.arange(len(graph))]
    value, source, destination = list_transfers(graph, device, devices)
    latency, per_byte = target.link_arrays()
    took = latency[source, destination] + graph.value_bytes[value] * per_byte[source, destination]
    return Loads(
        sum_by(device, own_seconds, devices),
        sum_by(source, took, devices),
        sum_by(destination, took, devices),
        target.link_model,
        count,
    )


def loads_of_simulation(simulation: Simulation, target: Target) -> Loads:
    """Return the steady-state loads of a step that was simulated: what it computes and sends, if it repeats."""
    devices, sent = len(target.devices), simulation.transfers
    took = sent.finish_seconds - sent.start_seconds
    return Loads(
        simulation.compute_seconds,
        sum_by(sent.source, took, devices),
        sum_by(sent.destination, took, devices),
        target.link_model,
        "max",
    )


def list_transfers(graph: OpGraph, device: Ints, device_count: int) -> tuple[Ints, Ints, Ints]:
    """Return what crosses between devices as parallel arrays: value, source, destination; each pair of them once."""
    value, reader = graph.readers.rows, graph.readers.items
    made = graph.producer[value] >= 0
    value, reader = value[made], reader[made]
    source, destination = device[graph.producer[value]], device[reader]
    away = source != destination
    pairs = np.unique(value[away].astype(np.int64) * device_count + destination[away])
    crossing = (pairs // device_count).astype(np.int32)
    return crossing, device[graph.producer[crossing]].astype(np.int32), (pairs % device_count).astype(np.int32)
