"""From the choice of devices and sources to a placement, with what streams, its predicted step, and a note about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from onnxplace.bundle.manifest import StreamRecord
from onnxplace.errors import Diagnostic, format_count
from onnxplace.facts import Original, Placement, Profile, Streaming, WeightSource
from onnxplace.graph.op_graph import Bools, Csr, Floats, Ints, OpGraph
from onnxplace.passes.segments.cut_segments import cut_into_segments
from onnxplace.passes.segments.memory_limits import simulate_segments
from onnxplace.passes.segments.streamed_blocks import cut_blocks
from onnxplace.passes.streaming.source_program import DISK, HOST, Choice
from onnxplace.passes.streaming.streamable_weights import StreamableWeights
from onnxplace.problem import commit_placement, placement_problem
from onnxplace.simulation.weight_streams import measure_block
from onnxplace.state import State
from onnxplace.utils.quantities import format_bytes

_SOURCES: Mapping[int, WeightSource] = {HOST: "host", DISK: "disk"}


def apply_choice(state: State, weights: StreamableWeights, choice: Choice, rates: Floats, placer: str) -> State:
    """Return the state with nodes placed and weights streaming as chosen.

    In its profile, weights that stream have no bytes, nodes take the time that they take with such weights, and a pool
    counts as a weight of each device to which some stream: it is no larger than these. Raises InfeasibleError if a
    device lacks memory.
    """
    profile, problem, target = weights.profile, weights.problem, state.target
    graph, slot = profile.graph, weights.slot
    devices, streamed = choice.device[slot], weights.list_streamed(choice)
    fine_device = devices[problem.members]
    slot_of_weight = np.zeros(len(graph.weight_names), dtype=np.int32)
    slot_of_weight[graph.weights.items] = slot[problem.members[graph.weights.rows]]
    sources, sizes = dict[str, WeightSource](), dict[str, int]()
    for weight in sorted(weight for own in streamed.values() for weight in own):
        sources[graph.weight_names[weight]] = _SOURCES[int(choice.source[slot_of_weight[weight]])]
        sizes[graph.weight_names[weight]] = int(graph.weight_bytes[weight])
    from_disk = sum(bool((choice.source[slot_of_weight[own]] == DISK).any()) for own in streamed.values())
    streams = {
        device: StreamRecord(
            device=target.devices[device].id,
            pool_bytes=min(weights.pool_bytes, measure_block(graph.weight_bytes[own].tolist())),
            bytes_per_second={
                # Several devices share the disk.
                _SOURCES[source]: float(rates[source, device]) / (from_disk if source == DISK else 1)
                for source in np.unique(choice.source[slot_of_weight[own]]).tolist()
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
    thin = _without_streamed(weights, gone, fine_device, streams)
    original = Original.of(state)
    state = state.with_facts(replace(profile, graph=thin, seconds=seconds))
    problem = placement_problem(state)
    start = problem.simulate(devices, problem.graph.order).start_seconds
    state = commit_placement(state, problem, devices, start, placer)
    return state.with_facts(Streaming(sources, sizes, streams), original)


def _without_streamed(
    weights: StreamableWeights, gone: Bools, device: Ints, streams: Mapping[int, StreamRecord]
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
    for number, index in enumerate(streams):
        first = next(node for node in graph.order.tolist() if device[node] == index and gone[lists[node]].any())
        lists[first].append(len(size) + number)
    return replace(
        graph,
        weight_names=(*graph.weight_names, *(f"pool of {devices[index].id}" for index in streams)),
        weight_bytes=np.append(size, np.array([item.pool_bytes for item in streams.values()], dtype=np.int64)),
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
        count = sum(name in streaming.sources for name in names)
        held = int(graph.weight_bytes[own].sum())
        nodes = format_count(int((device == index).sum()), "node")
        text = f"{devices[index].id} computes {nodes} and holds {format_bytes(held)} of weights"
        if stream := streaming.streams.get(index):
            places = {"host": "the host's memory", "disk": "disk"}
            sources = " and ".join(places[source] for source in stream.bytes_per_second)
            moving = f"{format_count(count, 'weight')} with {format_bytes(size)} come from {sources}"
            text += f", of which {format_bytes(stream.pool_bytes)} are a pool, through which {moving}"
        texts.append(text)
    message = f"{'; '.join(texts)}; at most {choice.gap:.1%} from the best choice"
    return Diagnostic("P067", message, where=state[Placement].placer)
