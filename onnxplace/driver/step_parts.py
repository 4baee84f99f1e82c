"""What a predicted step consists of: the parts of the chain of events that determines its length."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass

import numpy as np

from onnxplace.facts import Placement, Profile, Segments, Source
from onnxplace.graph import Floats, sum_by
from onnxplace.passes.profiling import device_peaks
from onnxplace.problem import device_seconds, index_segments, predict_request_seconds
from onnxplace.reports import PlacedStep, walk_back
from onnxplace.simulation import memory_share
from onnxplace.state import State

# What a node does, next to names of events in the chain.
NODE_PARTS, CHAIN_PARTS = ("launches", "memory rate", "computes"), {"transfer": "copies", "weights": "streamed weights"}
# The share of its peak rate at which a node moves bytes if memory limits it: an estimate assumes the peak, and real
# kernels come close to half of it or more.
ESTIMATED_SHARE, MEASURED_SHARE = 0.99, 0.5


@dataclass(frozen=True)
class StepPart:
    """A part of a predicted step."""

    kind: str
    """`launches` of nodes, `memory rate` where they wait for bytes, `computes`; `calls` of segments and of the request;
    `copies` between devices, `streamed weights` that are waited for, and `waits`."""
    seconds: float
    count: int
    """Number of nodes, calls, copies or waits."""


def list_step_parts(state: State) -> tuple[StepPart, ...]:
    """Return the parts of the predicted step of a split model, the longest first; together they are the step."""
    segments, simulation, graph = state[Segments].segments, state[Segments].simulation, state[Profile].graph
    segment_of, home = index_segments(segments, len(graph)), [segment.device for segment in segments]
    step = PlacedStep(
        graph=graph.contract(segment_of),
        seconds=np.zeros((0, len(segments))),
        target=state.target,
        device_names=tuple(device.id for device in state.target.devices),
        device=np.array(home, dtype=np.int32),
        order=np.arange(len(segments), dtype=np.int32),
        simulation=simulation,
        details=(),
    )
    node_seconds = _divide_nodes(state)
    in_segments = np.stack([sum_by(segment_of, row, len(segments)) for row in node_seconds])
    counts = np.stack([np.bincount(segment_of, row > 0, len(segments)) for row in node_seconds]).astype(int)
    seconds, number = defaultdict[str, float](float), Counter[str]()
    for event in walk_back(step):
        if event.kind != "compute":
            seconds[kind := CHAIN_PARTS.get(event.kind, "waits")] += event.seconds
            number[kind] += 1
            continue
        # Where devices slow each other down, a segment takes longer than its nodes and its call.
        own = in_segments[:, event.node]
        call = state.target.devices[home[event.node]].segment_seconds if own.sum() else event.seconds
        stretch = (event.seconds - call) / (own.sum() or 1.0)
        for kind, part, count in zip(
            (*NODE_PARTS, "calls"), (*(own * stretch).tolist(), call), (*counts[:, event.node].tolist(), 1)
        ):
            seconds[kind] += part
            number[kind] += count
    if segments:
        seconds["calls"] += predict_request_seconds(state)
        number["calls"] += 1
    parts = [StepPart(kind, time, number[kind]) for kind, time in seconds.items() if time > 0]
    return tuple(sorted(parts, key=lambda part: -part.seconds))


def _divide_nodes(state: State) -> Floats:
    """Return the seconds of each node on its device: [its launch, waiting for memory, computing; node].

    By a roofline, what follows the launch waits for memory if the bytes that it moves take that long.
    """
    profile, device, devices = state[Profile], state[Placement].device, state.target.devices
    nodes, peaks = np.arange(len(device)), [device_peaks(item) for item in devices]
    seconds = device_seconds(profile, state.target)[device, nodes]
    launches = np.minimum(seconds, np.array([item.kernel_seconds for item in peaks])[device])
    rest, rate = seconds - launches, np.array([item.bytes_per_second for item in peaks])[device]
    sources = np.stack([profile.sources[item.cost_class] for item in devices])[device, nodes]
    least = np.where(sources == Source.ESTIMATED, ESTIMATED_SHARE, MEASURED_SHARE)
    waits = memory_share(profile.graph, rest * rate, 1.0) >= least
    return np.stack([launches, rest * waits, rest * ~waits])
