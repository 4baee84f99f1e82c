"""Which weights may stream, in which parts of a schedule, and from where."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from onnx import TensorProto

from onnxplace.facts import Profile
from onnxplace.graph.lifetimes import sum_alive
from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs, sum_by
from onnxplace.model.model import Model
from onnxplace.passes.profiling.streamed_nodes import MIN_STREAMED_BYTES
from onnxplace.passes.streaming.source_program import RESIDENT, Choice, SourceProblem
from onnxplace.problem import PlacementProblem
from onnxplace.simulation.weight_streams import PAGE_BYTES, measure_block

# Types whose elements are no whole bytes, or no bytes at all: ONNX Runtime takes them as constants only.
_CONSTANT_TYPES = frozenset(
    getattr(TensorProto, name)
    for name in ("STRING", "INT4", "UINT4", "FLOAT4E2M1", "INT2", "UINT2")
    if hasattr(TensorProto, name)
)


@dataclass(frozen=True)
class StreamableWeights:
    """The weights of a placement problem that may stream, and the slots of its schedule.

    A weight may stream if it is a large constant that a single unit of the problem reads. On processors, weights that
    only `Gather` reads stay: ONNX Runtime maps them from the file, and reads the rows that it needs.
    """

    model: Model
    profile: Profile
    problem: PlacementProblem
    factors: Mapping[str, Floats]
    """Cost class -> per node, its time with weights as inputs over that with constants."""
    pool_bytes: int
    """Kernels with more bytes of weights keep them; 0 for no limit."""

    @cached_property
    def is_single(self) -> Bools:
        """Return, per weight, whether exactly one unit of the problem reads it."""
        weights = self.profile.graph.weights
        pairs = np.unique(np.stack([weights.items, self.problem.members[weights.rows]]), axis=1)
        single: Bools = np.bincount(pairs[0], minlength=len(self.profile.graph.weight_names)) == 1
        return single

    @cached_property
    def block_bytes(self) -> Longs:
        """Return, per kernel, the bytes of its weights that would stream together, whatever the pool."""
        weights, unit = self.profile.graph.weights, self.profile.unit
        size = np.where(self._is_large, -(-self.profile.graph.weight_bytes // PAGE_BYTES) * PAGE_BYTES, 0)
        pairs = np.unique(np.stack([unit[weights.rows], weights.items]), axis=1)
        return np.bincount(pairs[0], size[pairs[1]], int(unit.max(initial=-1)) + 1).astype(np.int64)

    @cached_property
    def _is_large(self) -> Bools:
        graph = self.profile.graph
        tensors = [self.model.constants.get(name) for name in graph.weight_names]
        is_constant = [tensor is not None and tensor.data_type not in _CONSTANT_TYPES for tensor in tensors]
        # Where all devices are processors, nothing streams that is only looked up, such as a table of embeddings.
        stays = self.is_looked_up & all(device.is_host for device in self.problem.target.devices)
        is_free = np.array(is_constant, dtype=bool) & ~stays
        return is_free & self.is_single & (graph.weight_bytes >= MIN_STREAMED_BYTES)

    @cached_property
    def may_stream(self) -> Bools:
        """Return, per weight, whether it may stream to some device."""
        weights, may = self.profile.graph.weights, self._is_large.copy()
        if self.pool_bytes:
            may[weights.items[self.block_bytes[self.profile.unit[weights.rows]] > self.pool_bytes]] = False
        return may

    @cached_property
    def is_looked_up(self) -> Bools:
        """Return, per weight, whether its readers only look up some of its rows."""
        graph = self.profile.graph
        looked_up = np.ones(len(graph.weight_names), dtype=bool)
        is_gather = np.array([op == "Gather" for op in graph.ops], dtype=bool)
        looked_up[graph.weights.items[~is_gather[graph.weights.rows]]] = False
        return looked_up & (graph.weight_bytes >= MIN_STREAMED_BYTES)

    def streams_to(self, device: int) -> Bools:
        """Return, per weight, whether it may stream to a device."""
        return self.may_stream & ~(self.is_looked_up & self.problem.target.devices[device].is_host)

    def held_by(self, device: int) -> Longs:
        """Return, per weight, its bytes where it stays on a device."""
        is_mapped = self.is_looked_up & self.problem.target.devices[device].is_host
        return np.where(is_mapped, 0, self.profile.graph.weight_bytes)

    @cached_property
    def slot(self) -> Ints:
        """Return the slot of each unit of the problem.

        A slot ends before the next unit whose weights may stream, and where other devices are allowed.
        """
        problem, members = self.problem, self.problem.members
        weights = self.profile.graph.weights
        reads = np.zeros(len(problem.graph), dtype=bool)
        reads[members[weights.rows[self.may_stream[weights.items]]]] = True
        order, pinned = problem.graph.order, problem.pinned[problem.group]
        several = np.bincount(problem.group)[problem.group] > 1
        marks = [(problem.refused[:, unit].tobytes(), int(pinned[unit])) for unit in range(len(reads))]
        slot, current, has_weights, before = np.zeros(len(reads), dtype=np.int32), -1, False, None
        for unit in order.tolist():
            mark = (*marks[unit], int(problem.group[unit]) if several[unit] else -1)
            if mark != before or (has_weights and reads[unit]):
                current, has_weights, before = current + 1, False, mark
            has_weights |= bool(reads[unit])
            slot[unit] = current
        return slot

    def build_problem(self, rates: Floats, host_bytes: float, *, always: bool) -> SourceProblem:
        """Return the choice of devices and sources of all slots; with `always`, what may stream has to.

        `rates` and `host_bytes` are those of `SourceProblem`.
        """
        problem, graph, slot = self.problem, self.profile.graph, self.slot
        slots, devices = int(slot.max(initial=-1)) + 1, len(problem.target.devices)
        slot_of_weight = np.zeros(len(graph.weight_names), dtype=np.int32)
        slot_of_weight[graph.weights.items] = slot[problem.members[graph.weights.rows]]
        read = np.unique(graph.weights.items)
        seconds, streaming = np.zeros((2, devices, slots))
        held, streamed = np.zeros((2, devices, slots), dtype=np.int64)
        shared = np.zeros(devices, dtype=np.int64)
        pinned = problem.pinned[problem.group]
        for device, item in enumerate(problem.target.devices):
            is_allowed = ~problem.refused[device] & ((pinned < 0) | (pinned == device))
            factor = self.factors.get(item.cost_class, np.ones(len(graph)))
            node_seconds = self.profile.seconds[item.cost_class]
            with_inputs = np.full(len(graph), np.inf)
            np.multiply(node_seconds, factor, out=with_inputs, where=np.isfinite(factor))
            with_inputs = sum_by(problem.members, with_inputs, len(problem.graph))
            seconds[device] = sum_by(slot, np.where(is_allowed, problem.seconds[device], np.inf), slots)
            streaming[device] = sum_by(slot, np.where(is_allowed, with_inputs, np.inf), slots)
            size, streams = self.held_by(device), self.streams_to(device)
            own = read[self.is_single[read]]
            held[device] = sum_by(slot_of_weight[own], np.where(streams[own], 0, size[own]), slots)
            streamed[device] = sum_by(slot_of_weight[own], np.where(streams[own], size[own], 0), slots)
            shared[device] = size[read[~self.is_single[read]]].sum()
        streaming = np.where(streamed > 0, streaming, np.inf)
        seconds = np.where(always & (streamed > 0), np.inf, seconds)
        group = np.zeros(slots, dtype=np.int32)
        group[slot] = problem.group
        return SourceProblem(
            seconds=seconds,
            streaming_seconds=streaming,
            held_bytes=held,
            streamed_bytes=streamed,
            crossing_seconds=self._find_crossings(slots),
            room_bytes=problem.limit_bytes - self.value_bytes - shared,
            pool_bytes=np.full(devices, self.pool_bytes),
            host_bytes=host_bytes,
            rates=rates,
            group=np.unique(group, return_inverse=True)[1].astype(np.int32),
        )

    @cached_property
    def value_bytes(self) -> Longs:
        """Return, per device, what values and workspaces need with all nodes on it."""
        return self.problem.alone_bytes() - self.problem.graph.total_weight_bytes

    def _find_crossings(self, slots: int) -> Floats:
        """Return, per device and slot, the time for what later slots read from earlier ones to come from elsewhere."""
        graph, slot = self.problem.graph, self.slot
        made = graph.producer >= 0
        last = np.full(len(graph.value_names), -1, dtype=np.int64)
        np.maximum.at(last, graph.inputs.items, slot[graph.inputs.rows])
        values = np.flatnonzero(made & (last > np.where(made, slot[graph.producer], 0)))
        spans = slot[graph.producer[values]] + 1, last[values] + 1
        count, size = (sum_alive(*spans, item, slots) for item in (np.ones(len(values)), graph.value_bytes[values]))
        latency, per_byte = self.problem.target.link_arrays()
        times = latency[:, :, None] * count + per_byte[:, :, None] * size  # [source, destination, slot]
        times[np.eye(len(times), dtype=bool)] = np.inf
        crossing: Floats = times.min(axis=0)
        return np.where(np.isfinite(crossing), crossing, 0.0)

    def list_streamed(self, choice: Choice) -> dict[int, list[int]]:
        """Return, per device, the weights that stream to it."""
        graph = self.profile.graph
        streamed: dict[int, list[int]] = {}
        for device in np.unique(choice.device).tolist():
            moves = (choice.device == device) & (choice.source != RESIDENT)
            reads = moves[self.slot[self.problem.members[graph.weights.rows]]]
            own = np.unique(graph.weights.items[reads])
            if len(own := own[self.streams_to(device)[own]]):
                streamed[device] = own.tolist()
        return streamed

    def hold_small_streams(self, choice: Choice) -> Choice:
        """Return the choice with all held by devices to which no more streams than their pool has room for."""
        size = self.profile.graph.weight_bytes
        streamed = self.list_streamed(choice).items()
        holding = [device for device, own in streamed if measure_block(size[own].tolist()) <= self.pool_bytes]
        return replace(choice, source=np.where(np.isin(choice.device, holding), RESIDENT, choice.source))
