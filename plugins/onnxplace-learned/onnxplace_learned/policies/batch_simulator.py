"""Simulate many placements of one graph, as `simulate` does one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from onnxplace.graph.op_graph import Floats, Ints, Longs, OpGraph
from onnxplace.simulation.channel_kernels import GAP
from onnxplace.simulation.step_kernels import DEVICE
from onnxplace.simulation.weight_streams import BLOCK
from onnxplace.target.target import LINK_MODELS, Target
from onnxplace_learned.policies.batch_kernels import (
    BatchGraph,
    BatchScratch,
    MemoryScratch,
    simulate_many,
    simulate_many_with_peaks,
)


@dataclass(frozen=True)
class BatchSteps:
    """Simulated steps of several placements."""

    makespan_seconds: Floats
    """Per placement."""
    start_seconds: Floats
    """[placement, node]."""
    finish_seconds: Floats
    peak_bytes: Longs | None
    """[placement, device], weights included; None unless requested."""


@dataclass(frozen=True)
class BatchSimulator:
    """A graph on a target, ready to simulate many placements.

    Every figure equals that of `simulate` to the last bit. O((N + E) log N) for each placement, without allocations.

    >>> from onnxplace.testing import random_graph, random_target
    >>> graph = random_graph(seed=1, nodes=4)
    >>> simulator = BatchSimulator(graph, np.ones((2, 4)), random_target(1, devices=2))
    >>> simulator.simulate(np.zeros((3, 4), dtype=np.int32)).makespan_seconds.tolist()
    [4.0, 4.0, 4.0]
    """

    graph: OpGraph
    seconds: Floats
    """[device, node]."""
    target: Target

    @cached_property
    def arrays(self) -> BatchGraph:
        """Return the arrays that compiled loops read."""
        graph, (latency, per_byte) = self.graph, self.target.link_arrays()
        return BatchGraph(
            seconds=np.ascontiguousarray(self.seconds, dtype=np.float64),
            producer=graph.producer,
            value_bytes=graph.value_bytes,
            out_starts=graph.outputs.starts,
            outs=graph.outputs.items,
            read_starts=graph.readers.starts,
            readers=graph.readers.items,
            alias=graph.alias,
            is_output=graph.is_output,
            weight_bytes=graph.weight_bytes,
            weight_starts=graph.weights.starts,
            weights=graph.weights.items,
            workspace_bytes=graph.workspace_bytes,
            latency=latency,
            per_byte=per_byte,
            conflicts=self.target.conflicts,
            link_model=LINK_MODELS.index(self.target.link_model),
            waiting=np.bincount(
                graph.inputs.rows[graph.producer[graph.inputs.items] >= 0], minlength=len(graph)
            ).astype(np.int64),
        )

    def simulate(
        self, devices: Ints, orders: Ints | None = None, *, memory: bool = False, threads: int = 1
    ) -> BatchSteps:
        """Simulate placements in which each device runs its nodes in the given order.

        Args:
            devices: [placement, node], indices into the target.
            orders: [node] for all placements, or [placement, node]; each node once. Topological by default.
            memory: Whether to compute the peaks of the devices, too.
            threads: That work at the same time. The result does not depend on it.

        Raises:
            ValueError: A device would wait forever for a node that is later in its order.
        """
        devices = np.ascontiguousarray(devices, dtype=np.int32)
        orders = np.ascontiguousarray(self.graph.order if orders is None else orders, dtype=np.int32)
        orders = orders[None] if orders.ndim == 1 else orders
        count, (_, nodes) = len(devices), devices.shape
        steps = BatchSteps(
            makespan_seconds=np.zeros(count),
            start_seconds=np.empty((count, nodes)),
            finish_seconds=np.empty((count, nodes)),
            peak_bytes=np.zeros((count, len(self.target.devices)), dtype=np.int64) if memory else None,
        )
        share = -(-count // threads)
        slices = [slice(first, first + share) for first in range(0, count, max(share, 1))]
        if len(slices) > 1:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(lambda part: self._simulate_slice(devices, orders, part, steps), slices))
        elif slices:
            self._simulate_slice(devices, orders, slices[0], steps)
        if count and steps.makespan_seconds.min() < 0:
            raise ValueError(f"the order of placement {int(steps.makespan_seconds.argmin())} cannot be run")
        return steps

    def _simulate_slice(self, devices: Ints, orders: Ints, part: slice, steps: BatchSteps) -> None:
        """Fill the results of some placements."""
        own_orders = orders[part] if len(orders) > 1 else orders
        scratch = new_batch_scratch(self.graph, self.target)
        results = steps.start_seconds[part], steps.finish_seconds[part], steps.makespan_seconds[part]
        if steps.peak_bytes is None:
            simulate_many(self.arrays, devices[part], own_orders, scratch, *results)
        else:
            memory = new_memory_scratch(self.graph, len(self.target.devices))
            peaks = steps.peak_bytes[part]
            simulate_many_with_peaks(self.arrays, devices[part], own_orders, scratch, memory, *results, peaks)


def new_batch_scratch(graph: OpGraph, target: Target) -> BatchScratch:
    """Return arrays for simulations of a graph on a target."""
    nodes, reads, devices = len(graph), len(graph.inputs.items), len(target.devices)
    records = np.zeros(devices, DEVICE)
    records["shares"] = target.conflicts.sum(axis=0) > 1
    return BatchScratch(
        queue=np.zeros(nodes, dtype=np.int32),
        queue_starts=np.zeros(devices + 1, dtype=np.int64),
        own_seconds=np.zeros(nodes),
        waiting=np.zeros(nodes, dtype=np.int64),
        available=np.zeros(nodes),
        devices=records,
        gaps=np.zeros(devices + reads + 1, GAP),
        blocks=np.zeros(0, BLOCK),
        sent_nodes=np.zeros((3, reads), dtype=np.int32),
        sent_times=np.zeros((3, reads)),
    )


def new_memory_scratch(graph: OpGraph, devices: int) -> MemoryScratch:
    """Return further arrays, for memory peaks."""
    nodes, values, copies = len(graph), len(graph.producer), len(graph.inputs.items)
    buffers = values + copies
    events = 2 * (buffers + nodes)

    def longs(length: int) -> Longs:
        return np.zeros(length, dtype=np.int64)

    return MemoryScratch(
        rank=longs(nodes),
        copy_starts=longs(values + 1),
        copy_value=np.zeros(copies, dtype=np.int32),
        copy_device=np.zeros(copies, dtype=np.int32),
        copy_begin=np.zeros(copies),
        copy_end=np.zeros(copies),
        birth=np.zeros(buffers),
        death=np.zeros(buffers),
        birth_rank=longs(buffers),
        death_rank=longs(buffers),
        root=longs(buffers),
        stored=np.full((devices, len(graph.weight_bytes)), -1, dtype=np.int32),
        event_time=np.zeros(events),
        event_rank=longs(events),
        event_device=np.zeros(events, dtype=np.int32),
        change=longs(events),
        events=longs(events),
        live=longs(devices),
    )
