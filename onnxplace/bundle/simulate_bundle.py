"""A bundle in simulated time: the compiler's own simulator over its segments."""

from __future__ import annotations

import numpy as np

from onnxplace.bundle.manifest import Manifest
from onnxplace.graph import Csr, OpGraph
from onnxplace.simulation import Simulation, simulate


def segment_graph(manifest: Manifest) -> OpGraph:
    """Return the graph whose nodes are the bundle's segments."""
    segment_index = {segment.id: index for index, segment in enumerate(manifest.segments)}
    value_index = {name: index for index, name in enumerate(manifest.values)}
    returned = {item.value for item in manifest.outputs}
    values = manifest.values.values()
    return OpGraph(
        names=tuple(segment.id for segment in manifest.segments),
        ops=("segment",) * len(manifest.segments),
        value_names=tuple(value_index),
        value_bytes=np.array([value.bytes for value in values], dtype=np.int64),
        producer=np.array([segment_index[v.producer] if v.producer else -1 for v in values], dtype=np.int32),
        is_output=np.array([name in returned for name in value_index], dtype=bool),
        alias=np.full(len(value_index), -1, dtype=np.int32),
        inputs=Csr.of([[value_index[name] for name in segment.inputs] for segment in manifest.segments]),
        weight_names=tuple(segment.id for segment in manifest.segments),
        weight_bytes=np.array([segment.weights_bytes for segment in manifest.segments], dtype=np.int64),
        weights=Csr.of([[index] for index in range(len(manifest.segments))]),
        workspace_bytes=np.array([segment.workspace_bytes for segment in manifest.segments], dtype=np.int64),
    )


def simulate_manifest(manifest: Manifest) -> Simulation:
    """Run a bundle's segments in simulated time.

    What devices do to each other while both are busy is in the segments' seconds. What a request takes before the first
    segment and after the last is not in the simulation.
    """
    target = manifest.target.target()
    device = np.array([target.position(segment.device) for segment in manifest.segments], dtype=np.int32)
    each = np.array([segment.seconds for segment in manifest.segments], dtype=np.float64)
    seconds = np.broadcast_to(each, (len(target.devices), len(each)))
    return simulate(segment_graph(manifest), seconds, target, device, np.arange(len(device), dtype=np.int32))
