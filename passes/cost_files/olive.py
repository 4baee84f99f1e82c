"""Olive's cost model of a PyTorch model: figures of each module.

By its sources, `olive generate-cost-model` writes modules without children, by their path in the PyTorch model. It
writes the bytes of their parameters in their future precision, and operations for one position of one request (batch 1,
sequence 1), zero where Olive does not know them. Files by hand may hold modules that contain others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from onnxplace.graph import Floats, Ints
from onnxplace.model import Model, iterate_subgraphs, list_enclosing_modules, list_module_paths, tensor_size
from onnxplace.passes.profiling import PeakRates, count_moved_bytes, count_operations, typical_peaks
from onnxplace.target import Device

Shapes = Mapping[str, Sequence[int]]


@dataclass(frozen=True)
class Figures:
    """The figures of a module in the file."""

    operations: float
    """For one position of one request; 0 if unknown."""
    bytes: float
    """Of its parameters."""


@dataclass(frozen=True)
class ModuleWork:
    """The work of nodes, by the figures of their modules."""

    modules: tuple[str, ...]
    """The modules that have nodes."""
    nodes: Ints
    operations: Floats
    """Per node in `nodes`."""
    moved_bytes: Floats
    """Per node in `nodes`: activations by the model, parameters by the file."""

    def seconds(self, device: Device, peaks: PeakRates | None) -> Floats:
        """Return the time of `nodes` on a device, by a roofline.

        `peaks` are of one core; None for typical ones.
        """
        best = peaks or typical_peaks(device.kind)
        rate = best.operations_per_second * (device.cores if device.kind == "cpu" else 1)
        return np.maximum(self.operations / rate, self.moved_bytes / best.bytes_per_second) + best.kernel_seconds


def module_work(rows: Mapping[str, Figures], model: Model, shapes: Shapes, sizes: Mapping[str, int]) -> ModuleWork:
    """Return the work of nodes, each in its innermost module; linear.

    Nodes with subgraphs are left out, since their iterations decide their cost.
    """
    members: dict[str, list[int]] = {}
    for index, node in enumerate(model.nodes):
        module = next((name for name in list_module_paths(node) if name in rows), None)
        if module is not None and not any(True for _ in iterate_subgraphs(node)):
            members.setdefault(module, []).append(index)
    figures = _own_figures(rows, members)
    known_shapes = {**shapes, **{name: tuple(tensor.dims) for name, tensor in model.initializers.items()}}
    work = np.zeros(len(model.nodes))
    moved = np.zeros(len(model.nodes))
    for module, nodes in members.items():
        protos = [model.nodes[index] for index in nodes]
        work[nodes] = _distribute_operations(figures[module].operations, protos, known_shapes)
        moved[nodes] = _distribute_bytes(figures[module].bytes, nodes, model, sizes, work[nodes])
    indices = np.array(sorted(index for nodes in members.values() for index in nodes), dtype=np.int32)
    return ModuleWork(modules=tuple(members), nodes=indices, operations=work[indices], moved_bytes=moved[indices])


def _own_figures(rows: Mapping[str, Figures], members: Mapping[str, object]) -> dict[str, Figures]:
    """Return figures of modules with nodes, without inner modules."""
    inner_operations, inner_bytes = dict.fromkeys(members, 0.0), dict.fromkeys(members, 0.0)
    for module in members:
        outer = next((name for name in list_enclosing_modules(module) if name in members and name != module), None)
        if outer is not None:
            inner_operations[outer] += rows[module].operations
            inner_bytes[outer] += rows[module].bytes
    return {
        module: Figures(
            operations=max(rows[module].operations - inner_operations[module], 0.0),
            bytes=max(rows[module].bytes - inner_bytes[module], 0.0),
        )
        for module in members
    }


def _distribute_operations(file_operations: float, nodes: Sequence[NodeProto], shapes: Shapes) -> Floats:
    """Distribute a module's operations in proportion to the model's counts."""
    counts = np.array([count_operations(node, shapes) for node in nodes])
    if file_operations == 0:
        return counts
    total = file_operations * _count_positions(nodes[int(counts.argmax())], shapes)
    return counts * (total / counts.sum()) if counts.any() else np.full(len(nodes), total / len(nodes))


def _count_positions(node: NodeProto, shapes: Shapes) -> int:
    """Return the positions of all requests of a module.

    The output of its largest node tells.
    """
    shape = shapes.get(node.output[0], ())
    return math.prod(shape[:1] if "Conv" in node.op_type else shape[:-1])


def _distribute_bytes(
    file_bytes: float, nodes: Sequence[int], model: Model, sizes: Mapping[str, int], work: Floats
) -> Floats:
    """Return bytes moved per node, with weights scaled to the file.

    Where its nodes read no weights, the bytes go to those that compute.
    """
    weights = {
        name: tensor_size(model.initializers[name])
        for index in nodes
        for name in model.reads[index]
        if name in model.initializers
    }
    weight_bytes = sum(weights.values())
    scaled = {name: round(size * file_bytes / weight_bytes) for name, size in weights.items()} if weight_bytes else {}
    names = {name for index in nodes for name in (*model.reads[index], *model.nodes[index].output)}
    known = {name: scaled.get(name, sizes.get(name, 0)) for name in names}
    moved = np.array(
        [count_moved_bytes(model.nodes[index], model.reads[index], known) for index in nodes], dtype=np.float64
    )
    if weight_bytes == 0:
        moved += file_bytes * (work / work.sum() if work.any() else np.full(len(nodes), 1 / len(nodes)))
    return moved
