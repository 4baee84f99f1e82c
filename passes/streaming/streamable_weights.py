"""Which weights may stream, in which parts of a schedule, and from where; and the placement that a choice gives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from onnx import TensorProto

from onnxplace.errors import Diagnostic, format_count
from onnxplace.facts import DeviceStream, Home, Placement, Profile, Streaming
from onnxplace.graph import Bools, Csr, Floats, Ints, Longs, OpGraph, sum_by
from onnxplace.model import Model
from onnxplace.passes.profiling import MIN_STREAMED_BYTES
from onnxplace.passes.segments import cut_blocks, cut_into_segments, simulate_segments
from onnxplace.passes.streaming.homes_program import DISK, HELD, HOST, Choice, HomesProblem
from onnxplace.problem import PlacementProblem, commit_placement, placement_problem
from onnxplace.simulation import PAGE_BYTES
from onnxplace.state import State
from onnxplace.utils import format_bytes

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
        model, graph = self.model, self.profile.graph
        tensors = [model.initializers.get(name) for name in graph.weight_names]
        is_constant = [
            tensor is not None and tensor.data_type not in _CONSTANT_TYPES and not model.overridable(tensor.name)
            for tensor in tensors
        ]
        return np.array(is_constant, dtype=bool) & self.is_single & (graph.weight_bytes >= MIN_STREAMED_BYTES)

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

    def pose(self, rates: Floats, pool_bytes: int, host_bytes: float, *, always: bool) -> HomesProblem:
        """Return the choice of devices and homes of all slots; with `always`, what may stream has to.

        `rates` are those of `HomesProblem`, and so are `pool_bytes`, of each device, and `host_bytes`.
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
        return HomesProblem(
            seconds=seconds,
            streaming_seconds=streaming,
            held_bytes=held,
            streamed_bytes=streamed,
            crossing_seconds=self._find_crossings(slots),
            room_bytes=problem.limit_bytes - self.value_bytes - shared,
            pool_bytes=np.full(devices, pool_bytes),
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
        change = np.zeros((2, slots + 1))
        made = graph.producer >= 0
        last = np.full(len(graph.value_names), -1, dtype=np.int64)
        np.maximum.at(last, graph.inputs.items, slot[graph.inputs.rows])
        for value in np.flatnonzero(made & (last > np.where(made, slot[graph.producer], 0))).tolist():
            for row, amount in enumerate((1, graph.value_bytes[value])):
                change[row, slot[graph.producer[value]] + 1] += amount
                change[row, last[value] + 1] -= amount
        count, size = np.cumsum(change, axis=1)[:, :slots]
        latency, per_byte = self.problem.target.link_arrays()
        times = latency[:, :, None] * count + per_byte[:, :, None] * size  # [source, destination, slot]
        for device in range(len(times)):
            times[device, device] = np.inf
        crossing: Floats = times.min(axis=0)
        return np.where(np.isfinite(crossing), crossing, 0.0)

    def list_streamed(self, choice: Choice) -> dict[int, list[int]]:
        """Return, per device, the weights that stream to it."""
        graph = self.profile.graph
        streamed: dict[int, list[int]] = {}
        for device in np.unique(choice.device).tolist():
            moves = (choice.device == device) & (choice.home != HELD)
            reads = moves[self.slot[self.problem.members[graph.weights.rows]]]
            own = np.unique(graph.weights.items[reads])
            if len(own := own[self.streams_to(device)[own]]):
                streamed[device] = own.tolist()
        return streamed


# ----------------------------------------------------------------------------------------- from a choice to a placement


_HOMES: Mapping[int, Home] = {HOST: "host", DISK: "disk"}


def apply_choice(
    state: State, weights: StreamableWeights, choice: Choice, pool_bytes: int, rates: Floats, placer: str
) -> State:
    """Return the state with nodes placed and weights streaming as chosen.

    In its profile, weights that stream have no bytes, nodes take the time that they take with such weights, and a pool
    counts as a weight of each device to which some stream. Raises InfeasibleError if a device lacks memory.
    """
    profile, problem, target = weights.profile, weights.problem, state.target
    graph, slot = profile.graph, weights.slot
    devices, streamed = choice.device[slot], weights.list_streamed(choice)
    fine_device = devices[problem.members]
    slot_of_weight = np.zeros(len(graph.weight_names), dtype=np.int32)
    slot_of_weight[graph.weights.items] = slot[problem.members[graph.weights.rows]]
    homes, sizes = dict[str, Home](), dict[str, int]()
    for weight in sorted(weight for own in streamed.values() for weight in own):
        homes[graph.weight_names[weight]] = _HOMES[int(choice.home[slot_of_weight[weight]])]
        sizes[graph.weight_names[weight]] = int(graph.weight_bytes[weight])
    from_disk = sum(bool((choice.home[slot_of_weight[own]] == DISK).any()) for own in streamed.values())
    streams = {
        device: DeviceStream(
            pool_bytes,
            {
                # Several devices share the disk.
                _HOMES[home]: float(rates[home, device]) / (from_disk if home == DISK else 1)
                for home in np.unique(choice.home[slot_of_weight[own]]).tolist()
            },
        )
        for device, own in streamed.items()
    }
    gone = np.isin(np.arange(len(graph.weight_names)), [weight for own in streamed.values() for weight in own])
    seconds = dict(profile.seconds)
    moves = np.zeros(int(profile.unit.max(initial=-1)) + 1, dtype=bool)
    moves[profile.unit[graph.weights.rows[gone[graph.weights.items]]]] = True
    for device in streamed:
        name = target.devices[device].cost_class
        factor = weights.factors.get(name, np.ones(len(graph)))
        own = moves[profile.unit] & (fine_device == device)
        seconds[name] = np.where(own, profile.seconds[name] * np.where(own, factor, 1.0), seconds[name])
    thin = _without_streamed(weights, gone, fine_device, list(streams), pool_bytes)
    state = state.with_facts(replace(profile, graph=thin, seconds=seconds))
    problem = placement_problem(state)
    start = problem.simulate(devices, problem.graph.order).start_seconds
    state = commit_placement(state, problem, devices, start, placer)
    return state.with_facts(Streaming(homes, sizes, streams, profile))


def _without_streamed(
    weights: StreamableWeights, gone: Bools, device: Ints, pools: Sequence[int], pool_bytes: int
) -> OpGraph:
    """Return the graph without the bytes of some weights, in which the first reader of a device reads its pool.

    Weights that processors map from the file have no bytes either.
    """
    graph = weights.profile.graph
    devices = weights.problem.target.devices
    is_host = np.array([item.is_host for item in devices], dtype=bool)
    elsewhere = np.zeros(len(gone), dtype=bool)
    elsewhere[graph.weights.items[~is_host[device[graph.weights.rows]]]] = True
    size = np.where(gone | (weights.is_looked_up & ~elsewhere), 0, graph.weight_bytes)
    lists = [graph.weights[node].tolist() for node in range(len(graph))]
    for number, index in enumerate(pools):
        first = next(node for node in graph.order.tolist() if device[node] == index and gone[lists[node]].any())
        lists[first].append(len(size) + number)
    return replace(
        graph,
        weight_names=(*graph.weight_names, *(f"pool of {devices[index].id}" for index in pools)),
        weight_bytes=np.append(size, np.full(len(pools), pool_bytes, dtype=np.int64)),
        weights=Csr.of(lists),
    )


def predict_step(state: State) -> float:
    """Return about the step of segments that wait for their weights; `split` merges and cuts some of them further."""
    nodes = cut_into_segments(state)
    return simulate_segments(state, cut_blocks(state, nodes)).simulation.makespan_seconds


def describe_choice(state: State, choice: Choice) -> Diagnostic:
    """Return the note about what streams, what stays, and where the nodes run."""
    streaming, profile, devices = state[Streaming], state[Profile], state.target.devices
    graph, device = profile.graph, state[Placement].device
    texts = []
    for index in np.unique(device).tolist():
        own = np.unique(graph.weights.items[device[graph.weights.rows] == index])
        names = [graph.weight_names[weight] for weight in own.tolist()]
        size = sum(streaming.weight_bytes.get(name, 0) for name in names)
        count = sum(name in streaming.homes for name in names)
        held = int(graph.weight_bytes[own].sum())
        nodes = format_count(int((device == index).sum()), "node")
        text = f"{devices[index].id} computes {nodes} and holds {format_bytes(held)} of weights"
        if stream := streaming.streams.get(index):
            places = {"host": "the host's memory", "disk": "disk"}
            homes = " and ".join(places[home] for home in stream.bytes_per_second)
            moving = f"{format_count(count, 'weight')} with {format_bytes(size)} come from {homes}"
            text += f", of which {format_bytes(stream.pool_bytes)} are a pool, through which {moving}"
        texts.append(text)
    message = f"{'; '.join(texts)}; at most {choice.gap:.1%} from the best choice"
    return Diagnostic("P067", message, where=state[Placement].placer)
