"""What a process takes to run segments on CPU devices: more than the weights and values that a schedule counts.

The rules follow what ONNX Runtime 1.31 does on Linux; the constants are measured by benchmarks/memory.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from onnxplace.facts import Segment
from onnxplace.graph import Ints, OpGraph
from onnxplace.machine import RUNTIME_BYTES
from onnxplace.simulation import Simulation
from onnxplace.target import Target

# Code of kernels that is read from ONNX Runtime's library as they are first used.
KERNELS_BYTES = 2 << 20
# What holes in the arena come to, which all CPU devices share, and buffers that change the layout of values around
# convolutions: as a share of what values take on the device that has most.
HOLES = 0.5
SESSION_BYTES = 128 << 10
# ONNX Runtime's own record of a node: its attributes, names, kernel and buffers.
NODE_BYTES = 5 << 10
# Weights of convolutions are rewritten, as a whole, while a session is opened: what that takes beside the result, as a
# share of them, and where a normalisation is folded into them before.
REWRITTEN = 1.0
FOLDED_AND_REWRITTEN = 2.0
_CONVOLUTIONS = {"Conv", "ConvTranspose", "FusedConv"}
# These read rows of a weight where it lies in the file: pages that the system may drop at any time.
_LOOK_UP = {"Gather", "GatherElements", "GatherND"}


@dataclass(frozen=True)
class Footprint:
    """The memory of a process that has a bundle open; GPUs have their own and count for nothing."""

    device_bytes: tuple[int, ...]
    """Per device, if it were alone in the process: its sessions with their copies of weights, and values with holes."""
    running_bytes: int
    """Of the process while it runs steps, Python and ONNX Runtime included."""
    opening_bytes: int
    """Of the process at most while it opens sessions, one after the other."""


@dataclass(frozen=True)
class _Opened:
    """What a session takes: when it is open, and at most on the way."""

    kept_bytes: int
    peak_bytes: int


def footprint(graph: OpGraph, segments: Sequence[Segment], simulation: Simulation, target: Target) -> Footprint:
    """Predict what a process takes that opens these segments in order and runs them; O(N + E).

    A weight that two segments read is there twice, since each session keeps a copy in the layout of its kernels.
    """
    on_host = np.array([device.kind == "cpu" for device in target.devices])
    values = np.where(on_host, simulation.peak_bytes - simulation.weights_bytes, 0)
    device_bytes = (values + np.rint(HOLES * values).astype(np.int64)).tolist()
    opened = opening = RUNTIME_BYTES + KERNELS_BYTES
    normalised = _normalised(graph)
    for segment in segments:
        if on_host[segment.device]:
            session = _open(graph, segment.nodes, normalised)
            opening = max(opening, opened + session.peak_bytes)
            opened += session.kept_bytes
            device_bytes[segment.device] += session.kept_bytes
    running = opened + int(values.sum() + HOLES * values.max(initial=0))
    return Footprint(tuple(device_bytes), running, opening)


def _normalised(graph: OpGraph) -> set[int]:
    """Return the nodes into whose weights a BatchNormalization that reads them is folded."""
    norms = [node for node, op in enumerate(graph.ops) if op == "BatchNormalization"]
    return {int(graph.producer[value]) for node in norms for value in graph.inputs[node]}


def _open(graph: OpGraph, nodes: Ints, normalised: set[int]) -> _Opened:
    """Return what opening a session over `nodes` takes.

    First all convolutions are rewritten. Then the other weights are packed in the order of their readers: each is
    there twice for a moment, in the file's pages and in the copy.
    """
    own = SESSION_BYTES + NODE_BYTES * len(nodes)
    seen: set[int] = set()
    rewritten, beside, packed = 0, 0.0, []
    for node in nodes.tolist():
        if graph.ops[node] in _LOOK_UP:
            continue
        new = [weight for weight in graph.weights[node].tolist() if weight not in seen]
        seen.update(new)
        sizes = graph.weight_bytes[new].tolist()
        if graph.ops[node] in _CONVOLUTIONS:
            rewritten += sum(sizes)
            beside += sum(sizes) * (FOLDED_AND_REWRITTEN if node in normalised else REWRITTEN)
        else:
            packed += sizes
    sizes = np.array(packed, dtype=np.int64)
    twice = int((np.cumsum(sizes) + sizes).max(initial=0))
    return _Opened(own + rewritten + int(sizes.sum()), own + rewritten + int(beside) + twice)
