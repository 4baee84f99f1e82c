"""The cost model that Olive writes of a PyTorch model: parameters, bytes and operations of each module.

What `olive generate-cost-model` writes, read with its sources: modules without children, by their path in the PyTorch
model; the bytes of their parameters, in the precision that they are to have; operations for one position of one request
(batch 1, sequence 1), zero where Olive does not know. Files by hand may hold modules that contain others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from onnx import NodeProto

from onnxplace.graph import Floats, Ints
from onnxplace.model import Model, subgraphs, tensor_size
from onnxplace.passes.profiling import TYPICAL_PEAKS, PeakRates, bytes_moved, operations
from onnxplace.target import Device

Shapes = Mapping[str, Sequence[int]]

# Where PyTorch's exporter writes down the modules that a node is in, outermost first: ['', 'model', 'model.norm'].
SCOPES = "pkg.torch.onnx.name_scopes"


@dataclass(frozen=True)
class Figures:
    """What the file says of a module."""

    operations: float
    """For one position of one request; 0 if that is unknown."""
    bytes: float
    """Of its parameters."""


@dataclass(frozen=True)
class ModuleWork:
    """How much work nodes are by the figures of the modules that they are in."""

    modules: tuple[str, ...]
    """Those that have nodes."""
    nodes: Ints
    operations: Floats
    """Per node in `nodes`."""
    moved_bytes: Floats
    """Per node in `nodes`: activations by the model, parameters by the file."""

    def seconds(self, device: Device, peaks: PeakRates | None) -> Floats:
        """Return the time of each of `nodes` on a device (a roofline); `peaks` are of one core, assumed if None."""
        best = peaks or TYPICAL_PEAKS[device.kind]
        rate = best.operations_per_second * (device.cores if device.kind == "cpu" else 1)
        return np.maximum(self.operations / rate, self.moved_bytes / best.bytes_per_second) + best.kernel_seconds


def module_work(rows: Mapping[str, Figures], model: Model, shapes: Shapes, sizes: Mapping[str, int]) -> ModuleWork:
    """Return the work of the nodes that are in modules of the file, each in the innermost; linear in nodes and rows.

    A node with bodies is in none: its turns are what it costs.
    """
    members: dict[str, list[int]] = {}
    for index, node in enumerate(model.nodes):
        module = next((name for name in _paths(node) if name in rows), None)
        if module is not None and not any(True for _ in subgraphs(node)):
            members.setdefault(module, []).append(index)
    own = _own(rows, members)
    known = {**shapes, **{name: tuple(tensor.dims) for name, tensor in model.initializers.items()}}
    done = np.zeros(len(model.nodes))
    moved = np.zeros(len(model.nodes))
    for module, nodes in members.items():
        done[nodes] = _operations(own[module].operations, [model.nodes[index] for index in nodes], known)
        moved[nodes] = _moved(own[module].bytes, nodes, model, sizes, done[nodes])
    inside = np.array(sorted(index for nodes in members.values() for index in nodes), dtype=np.int32)
    return ModuleWork(tuple(members), inside, done[inside], moved[inside])


def _paths(node: NodeProto) -> Iterator[str]:
    """Yield the modules that a node may be in, innermost first, by what its exporter wrote down or by its name.

    `/model/layers.0/mlp/MatMul` is in `model.layers.0.mlp`, `model.layers.0`, `model.layers`, `model`, the whole.
    """
    for entry in node.metadata_props:
        if entry.key == SCOPES:
            yield from filter(None, reversed(re.findall(r"'([^']*)'", entry.value)))
    yield from _enclosing(node.name.replace("/", ".").strip("."))


def _enclosing(path: str) -> Iterator[str]:
    """Yield a module, those around it, and the whole."""
    while path:
        yield path
        path = path.rpartition(".")[0]
    yield ""


def _own(rows: Mapping[str, Figures], members: Mapping[str, object]) -> dict[str, Figures]:
    """Return the figures of modules that have nodes, less those of others that are in them and have some too."""
    inner = {module: [0.0, 0.0] for module in members}
    for module in members:
        around = next((name for name in _enclosing(module) if name in members and name != module), None)
        if around is not None:
            inner[around][0] += rows[module].operations
            inner[around][1] += rows[module].bytes
    return {
        module: Figures(max(rows[module].operations - less[0], 0.0), max(rows[module].bytes - less[1], 0.0))
        for module, less in inner.items()
    }


def _operations(told: float, nodes: Sequence[NodeProto], shapes: Shapes) -> Floats:
    """Return the operations of a module's nodes: what the file tells, shared out as the model's own counts are."""
    counts = np.array([operations(node, shapes) for node in nodes])
    if told == 0:
        return counts
    total = told * _positions(nodes[int(counts.argmax())], shapes)
    return counts * (total / counts.sum()) if counts.any() else np.full(len(nodes), total / len(nodes))


def _positions(node: NodeProto, shapes: Shapes) -> int:
    """Return how many positions of how many requests a module works on, by the output of its largest node."""
    shape = shapes.get(node.output[0], ())
    return math.prod(shape[:1] if "Conv" in node.op_type else shape[:-1])


def _moved(told: float, nodes: Sequence[int], model: Model, sizes: Mapping[str, int], done: Floats) -> Floats:
    """Return the bytes that pass at a module's nodes: its weights scaled to what the file tells of all of them.

    Where its nodes read no weights, the bytes go to those that compute.
    """
    weights = {
        name: tensor_size(model.initializers[name])
        for index in nodes
        for name in model.reads[index]
        if name in model.initializers
    }
    total = sum(weights.values())
    scaled = {name: round(size * told / total) for name, size in weights.items()} if total else {}
    names = {name for index in nodes for name in (*model.reads[index], *model.nodes[index].output)}
    known = {name: scaled.get(name, sizes.get(name, 0)) for name in names}
    moved = np.array([bytes_moved(model.nodes[index], model.reads[index], known) for index in nodes], dtype=np.float64)
    if total == 0:
        moved += told * (done / done.sum() if done.any() else np.full(len(nodes), 1 / len(nodes)))
    return moved
