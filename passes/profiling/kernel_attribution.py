"""Trace each kernel that ONNX Runtime ran back to the nodes of the model whose work it does.

Two graphs that ONNX Runtime saves are read. After all fusions but those of memory layout, every kernel computes a
value of the model from other values of it, so the nodes between them are one kernel, a *unit*
(docs/decisions/0003-fusion.md). After all optimisations, which is what runs, most values of convolutional networks are
renamed; a kernel there tells where it belongs by the value or node that it was named after.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx

from onnxplace.graph import Bools, Floats, Ints
from onnxplace.model import Model

# What ONNX Runtime appends to a name to make it unique, and to that of the value that a kernel for blocked layouts
# computes; and what it inserts to change a layout.
_TOKEN, _BLOCKED = re.compile(r"_token_\d+$"), re.compile(r"_nchwc$")
_LAYOUT = ("ReorderInput", "ReorderOutput", "Transpose")
# More than the profiler adds to the time of a kernel (2.5 us measured); what exceeds it is something else.
MAX_OVERHEAD_SECONDS = 5e-6
# A kernel keeps this share of its time at least when overhead is taken off.
MIN_SHARE = 0.1


@dataclass(frozen=True)
class Attributed:
    """Kernels by node of the model."""

    kernel: Ints
    """Per kernel that ran, the unit it belongs to, -1 for none."""
    unit: Ints
    """Dense id per node: nodes of one unit."""
    ran: Bools
    """Per node: False if ONNX Runtime folded it away."""

    def per_node(self, amounts: Floats) -> Floats:
        """Return an amount per kernel as an amount per node: the nodes of a unit share in equal parts."""
        known = self.kernel >= 0
        count = int(self.unit.max(initial=-1)) + 1
        units = np.bincount(self.kernel[known], amounts[known], count)
        sharing = np.bincount(self.unit, minlength=count)
        shares: Floats = (units / np.maximum(sharing, 1))[self.unit]
        return shares


def attribute(model: Model, fused: onnx.ModelProto, ran: onnx.ModelProto) -> Attributed:
    """Find the unit of each node and of each kernel of `ran`; `fused` is the graph before the layout was changed."""
    producer = {name: i for i, node in enumerate(model.nodes) for name in node.output if name}
    owner = _owners(model, producer, fused)
    cluster = _clusters(fused, producer.keys())
    key = [cluster[k] if k >= 0 else -1 - n for n, k in enumerate(owner)]
    kernels, clear = _kernel_clusters(fused, cluster, ran)
    merged = _merged(fused, cluster, ran, kernels) if clear else {}
    units, unit = np.unique([merged.get(k, k) for k in key], return_inverse=True)
    number = {int(k): index for index, k in enumerate(units)}
    kernel = np.array([-1 if k is None else number.get(merged.get(k, k), -1) for k in kernels], dtype=np.int32)
    return Attributed(kernel, unit.astype(np.int32), np.array([k >= 0 for k in owner], dtype=bool))


def _owners(model: Model, producer: Mapping[str, int], fused: onnx.ModelProto) -> list[int]:
    """Return, per node of the model, the index of the kernel that does its work; -1 if none does."""
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


def _clusters(fused: onnx.ModelProto, names: Iterable[str]) -> list[int]:
    """Return a cluster per kernel: those that make only values unknown to the model belong to one that reads them.

    Such are inserted reshapes and casts.
    """
    known, reader = set(names), _readers(fused.graph.node)
    kernels = fused.graph.node
    cluster = list(range(len(kernels)))
    for index in range(len(kernels) - 1, -1, -1):
        if not known.intersection(kernels[index].output):
            following = [reader[name] for name in kernels[index].output if name in reader]
            cluster[index] = cluster[following[0]] if following else index
    return cluster


def _readers(kernels: Sequence[onnx.NodeProto]) -> dict[str, int]:
    """Return the first kernel that reads each value."""
    reader: dict[str, int] = {}
    for index, kernel in enumerate(kernels):
        for name in kernel.input:
            reader.setdefault(name, index)
    return reader


def _kernel_clusters(
    fused: onnx.ModelProto, cluster: Sequence[int], ran: onnx.ModelProto
) -> tuple[list[int | None], bool]:
    """Return the cluster of each kernel that ran, and whether all that compute something tell theirs.

    That is the cluster of the value that a kernel makes, of the kernel or value it is named after, else of the
    kernel that reads what it makes.
    """
    named = {kernel.name: cluster[index] for index, kernel in enumerate(fused.graph.node) if kernel.name}
    made = {name: cluster[index] for index, kernel in enumerate(fused.graph.node) for name in kernel.output if name}
    kernels, reader = ran.graph.node, _readers(ran.graph.node)
    found: list[int | None] = [None] * len(kernels)
    clear = True
    for index in range(len(kernels) - 1, -1, -1):
        kernel = kernels[index]
        plain = _TOKEN.sub("", kernel.name)
        told = [made.get(name) for name in kernel.output]
        told += [named.get(kernel.name), named.get(plain), made.get(_BLOCKED.sub("", plain))]
        found[index] = next((place for place in told if place is not None), None)
        if found[index] is None:
            clear = clear and kernel.op_type in _LAYOUT
            found[index] = next((found[reader[name]] for name in kernel.output if name in reader), None)
    return found, clear


def _merged(
    fused: onnx.ModelProto, cluster: Sequence[int], ran: onnx.ModelProto, kernels: Sequence[int | None]
) -> dict[int, int]:
    """Return the clusters that no kernel of its own computes, with the one that computes them too.

    That is one whose value they read, and whose kernel reads all else that they read: a convolution that adds what
    it is given. So joined units are convex, since ONNX Runtime's own graph has no cycle.
    """
    timed = {found for found in kernels if found is not None}
    reads = _sources(ran.graph.node, kernels)
    wants = _sources(fused.graph.node, cluster)
    merged: dict[int, int] = {}
    for index in sorted(set(cluster) - timed):
        sources = sorted({merged.get(k, k) for k in wants.get(index, ())})
        for source in reversed(sources):
            if source in timed and set(sources) - {source} <= {merged.get(k, k) for k in reads.get(source, ())}:
                merged[index] = source
                break
    return merged


def _sources(kernels: Sequence[onnx.NodeProto], cluster: Sequence[int | None]) -> dict[int, set[int]]:
    """Return, per cluster, the other clusters whose values it reads."""
    maker = {name: cluster[index] for index, kernel in enumerate(kernels) for name in kernel.output if name}
    found: dict[int, set[int]] = {}
    for index, kernel in enumerate(kernels):
        mine = cluster[index]
        if mine is not None:
            made = {maker[name] for name in kernel.input if name in maker}
            found.setdefault(mine, set()).update(other for other in made if other is not None and other != mine)
    return found


def without_overhead(seconds: Floats, whole_seconds: float) -> tuple[Floats, float]:
    """Return kernel times that add up to a run without the profiler, and what that had added to each of them.

    The profiler adds about the same to every kernel; whatever else is missing or too much is spread in proportion.
    """
    excess = float(seconds.sum()) - whole_seconds
    added = 0.0
    if excess > 0:
        low, high = 0.0, MAX_OVERHEAD_SECONDS
        for _ in range(50):
            added = (low + high) / 2
            much = float(np.minimum(added, (1 - MIN_SHARE) * seconds).sum()) > excess
            low, high = (low, added) if much else (added, high)
    left = seconds - np.minimum(added, (1 - MIN_SHARE) * seconds)
    total = float(left.sum())
    return (left * (whole_seconds / total) if total > 0 else left), added
