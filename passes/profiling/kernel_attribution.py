"""Trace each kernel of ONNX Runtime back to its nodes.

Two graphs that ONNX Runtime saves are read. After all fusions except those of memory layout, every kernel computes a
value of the model from other values of it, so the nodes between them are one kernel, a *unit*
(docs/decisions/0003-fusion.md). The graph after all optimisations is the one that runs. Most values of convolutional
networks are renamed there; a kernel is located by the value or node that it was named after.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from onnxplace.graph.op_graph import Bools, Floats, Ints
from onnxplace.model.model import Model

# Suffixes that ONNX Runtime appends to make a name unique, and to the value of a kernel for blocked layouts; and the
# kernels that it inserts to change a layout.
_TOKEN_SUFFIX, _BLOCKED_SUFFIX = re.compile(r"_token_\d+$"), re.compile(r"_nchwc$")
_LAYOUT_KERNELS = ("ReorderInput", "ReorderOutput", "Transpose")
PROFILER_SECONDS = 2.5e-6
"""What the profiler adds to the time of a kernel, measured."""
# More than it adds; a larger excess has another cause.
MAX_OVERHEAD_SECONDS = 2 * PROFILER_SECONDS
# A kernel keeps at least this share of its time when overhead is taken off.
MIN_KEPT_SHARE = 0.1


@dataclass(frozen=True)
class Attribution:
    """The unit of each kernel and node."""

    kernel: Ints
    """Per kernel that ran, its unit, -1 for none."""
    unit: Ints
    """Dense id per node: nodes of one unit."""
    ran: Bools
    """Per node: False if ONNX Runtime folded it away."""

    def per_node(self, amounts: Floats) -> Floats:
        """Distribute an amount per kernel equally over its nodes."""
        known = self.kernel >= 0
        count = int(self.unit.max(initial=-1)) + 1
        units = np.bincount(self.kernel[known], amounts[known], count)
        sharing = np.bincount(self.unit, minlength=count)
        shares: Floats = (units / np.maximum(sharing, 1))[self.unit]
        return shares


def attribute_kernels(model: Model, fused: onnx.ModelProto, ran: onnx.ModelProto) -> Attribution:
    """Find the unit of each node and of each kernel.

    Args:
        model: The model that was run.
        fused: Its graph after all fusions except those of memory layout.
        ran: Its graph after all optimisations, which ran.
    """
    producer = {name: i for i, node in enumerate(model.nodes) for name in node.output if name}
    owner = _owning_kernels(model, producer, fused)
    cluster = _cluster_kernels(fused, producer.keys())
    key = [cluster[k] if k >= 0 else -1 - n for n, k in enumerate(owner)]
    kernels, is_clear = _locate_kernels(fused, cluster, ran)
    merged = _merge_orphans(fused, cluster, ran, kernels) if is_clear else {}
    units, unit = np.unique([merged.get(k, k) for k in key], return_inverse=True)
    unit_number = {int(k): index for index, k in enumerate(units)}
    kernel = np.array([-1 if k is None else unit_number.get(merged.get(k, k), -1) for k in kernels], dtype=np.int32)
    return Attribution(kernel, unit.astype(np.int32), np.array([k >= 0 for k in owner], dtype=bool))


def _owning_kernels(model: Model, producer: Mapping[str, int], fused: onnx.ModelProto) -> list[int]:
    """Return, per node, the kernel that does its work, -1 for none."""
    alive = {name for kernel in fused.graph.node for name in kernel.output if name}
    owner = [-1] * len(model.nodes)
    for index, kernel in enumerate(fused.graph.node):
        stack = [producer[name] for name in kernel.output if name in producer]
        while stack:
            node = stack.pop()
            if owner[node] < 0:
                owner[node] = index
                stack += [producer[name] for name in model.reads[node] if name in producer and name not in alive]
    return owner


def _cluster_kernels(fused: onnx.ModelProto, names: Iterable[str]) -> list[int]:
    """Return a cluster per kernel.

    A kernel whose outputs the model does not have, such as an inserted reshape or cast, joins the one that reads them.
    """
    model_values, reader = set(names), _first_readers(fused.graph.node)
    kernels = fused.graph.node
    cluster = list(range(len(kernels)))
    for index in range(len(kernels) - 1, -1, -1):
        if not model_values.intersection(kernels[index].output):
            following = [reader[name] for name in kernels[index].output if name in reader]
            cluster[index] = cluster[following[0]] if following else index
    return cluster


def _first_readers(kernels: Sequence[onnx.NodeProto]) -> dict[str, int]:
    """Return the first kernel that reads each value."""
    return {name: index for index in reversed(range(len(kernels))) for name in kernels[index].input}


def _locate_kernels(
    fused: onnx.ModelProto, cluster: Sequence[int], ran: onnx.ModelProto
) -> tuple[list[int | None], bool]:
    """Return the cluster of each kernel, and whether all were located.

    Kernels that only change a layout need not be located. A kernel belongs to the cluster of its output, or of the
    kernel or value it is named after, or else of the kernel that reads its output.
    """
    cluster_of_kernel = {kernel.name: cluster[index] for index, kernel in enumerate(fused.graph.node) if kernel.name}
    cluster_of_value = {
        name: cluster[index] for index, kernel in enumerate(fused.graph.node) for name in kernel.output if name
    }
    kernels, reader = ran.graph.node, _first_readers(ran.graph.node)
    clusters: list[int | None] = [None] * len(kernels)
    is_clear = True
    for index in range(len(kernels) - 1, -1, -1):
        kernel = kernels[index]
        base_name = _TOKEN_SUFFIX.sub("", kernel.name)
        candidates = [
            *map(cluster_of_value.get, kernel.output),
            cluster_of_kernel.get(kernel.name),
            cluster_of_kernel.get(base_name),
            cluster_of_value.get(_BLOCKED_SUFFIX.sub("", base_name)),
        ]
        clusters[index] = next((candidate for candidate in candidates if candidate is not None), None)
        if clusters[index] is None:
            is_clear = is_clear and kernel.op_type in _LAYOUT_KERNELS
            clusters[index] = next((clusters[reader[name]] for name in kernel.output if name in reader), None)
    return clusters, is_clear


def _merge_orphans(
    fused: onnx.ModelProto, cluster: Sequence[int], ran: onnx.ModelProto, kernels: Sequence[int | None]
) -> dict[int, int]:
    """Return, per cluster without a kernel, the cluster that computes it.

    That cluster makes a value that the orphan reads, and its kernel reads everything else that the orphan reads; a
    convolution with an addition, for example. Joined units are convex, since ONNX Runtime's own graph has no cycle.
    """
    with_kernel = {kernel for kernel in kernels if kernel is not None}
    reads = _source_clusters(ran.graph.node, kernels)
    needed = _source_clusters(fused.graph.node, cluster)
    merged: dict[int, int] = {}
    for orphan in sorted(set(cluster) - with_kernel):
        sources = sorted({merged.get(k, k) for k in needed.get(orphan, ())})
        for source in reversed(sources):
            if source in with_kernel and set(sources) - {source} <= {merged.get(k, k) for k in reads.get(source, ())}:
                merged[orphan] = source
                break
    return merged


def _source_clusters(kernels: Sequence[onnx.NodeProto], cluster: Sequence[int | None]) -> dict[int, set[int]]:
    """Return, per cluster, the other clusters that it reads values of."""
    producer = {name: cluster[index] for index, kernel in enumerate(kernels) for name in kernel.output if name}
    sources: dict[int, set[int]] = {}
    for index, kernel in enumerate(kernels):
        reader = cluster[index]
        if reader is not None:
            read_clusters = {producer[name] for name in kernel.input if name in producer}
            sources.setdefault(reader, set()).update(
                other for other in read_clusters if other is not None and other != reader
            )
    return sources


def remove_overhead(seconds: Floats, whole_seconds: float) -> tuple[Floats, float]:
    """Scale kernel times to an unprofiled run, without the profiler's overhead.

    Returns the times, and the overhead taken off each kernel. The profiler adds about the same to every kernel; any
    other difference is spread in proportion.
    """
    excess = float(seconds.sum()) - whole_seconds
    overhead = 0.0
    if excess > 0:
        low, high = 0.0, MAX_OVERHEAD_SECONDS
        for _ in range(50):
            overhead = (low + high) / 2
            exceeds = float(np.minimum(overhead, (1 - MIN_KEPT_SHARE) * seconds).sum()) > excess
            low, high = (low, overhead) if exceeds else (overhead, high)
    corrected = seconds - np.minimum(overhead, (1 - MIN_KEPT_SHARE) * seconds)
    total = float(corrected.sum())
    return (corrected * (whole_seconds / total) if total > 0 else corrected), overhead
