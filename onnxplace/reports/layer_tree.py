"""The nodes of a model as a tree of layers, by the parts of their names."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from typing import Any

from onnxplace.model import normalize_module
from onnxplace.reports.page_records import LayerTree

# More children than this without a common name are shown in parts.
MAX_CHILDREN = 100
# Names deeper than this are cut; the rest is one label.
MAX_DEPTH = 24
# Operators that the title of a segment names.
MAX_NAMED_OPERATORS = 2
_NUMBER = re.compile(r"\d+")
# Between two parts of a name: a slash or dot, but not one before a number, as in layers.0.
_BOUNDARY = re.compile(r"(?<=[^/.])(?:/|\.(?!\d))(?=[/.]*[^/.])")


@dataclass(frozen=True)
class LayerNode:
    """A node of the model, as the tree shows it."""

    name: str
    op: str
    device: int
    seconds: float
    index: int = -1
    """In the order of the model."""
    segment: int = -1
    shape: str = ""
    source: str = ""


@dataclass
class _Layer:
    """A layer with its children; a leaf has a node."""

    label: str
    children: list[_Layer] = field(default_factory=list)
    node: LayerNode | None = None

    def describe_shape(self) -> str:
        """Return a text that is equal for layers of the same operators."""
        if self.node is not None:
            return self.node.op
        return f"({','.join(child.describe_shape() for child in self.children)})"


def build_layer_tree(nodes: Sequence[LayerNode]) -> LayerTree:
    """Return the tree of nodes.

    Names are split at `/` and `.`, except before a digit. Layers with one child are joined with it. Equal siblings
    whose names differ in a number, such as `block_0` and `block_1`, get a common parent.

    >>> build_layer_tree([LayerNode("a/x", "Add", 0, 1.0), LayerNode("a/y", "Mul", 1, 1.0)]).label
    ('a', 'x', 'y')
    """
    roots: list[_Layer] = []
    layers: dict[str, _Layer] = {}
    for node in nodes:
        siblings, ends = roots, [0, *_find_ends(node.name)[:MAX_DEPTH]]
        for begin, end in pairwise(ends):
            path = normalize_module(node.name[:end])
            if path not in layers:
                layers[path] = _Layer(node.name[begin:end])
                siblings.append(layers[path])
            siblings = layers[path].children
        siblings.append(_Layer(node.name[ends[-1] :], node=node))
    return _flatten(_arrange(roots))


def _find_ends(name: str) -> list[int]:
    """Return where the parts of a name end, except for the last part."""
    return [match.start() for match in _BOUNDARY.finditer(name)]


def name_layer(name: str) -> str:
    """Return the layer that people would say a node is in: the parts of its name up to the first with a number.

    Empty where the name has no parts.

    >>> [*map(name_layer, ("/model/layers.3/mlp/Mul", "model.layers.3.mlp/node_mul_4", "encoder/norm"))]
    ['model/layers.3', 'model.layers.3', 'encoder']
    """
    ends = _find_ends(name)
    numbered = (end for begin, end in pairwise([0, *ends]) if _NUMBER.search(name[begin:end]))
    return name[: next(numbered, ends[-1] if ends else 0)].strip("/.")


def name_segment(nodes: Sequence[LayerNode]) -> str:
    """Return the layers of a segment, and its most expensive operators with their numbers."""
    layers = [*filter(None, dict.fromkeys(name_layer(node.name) for node in nodes))]
    where = f"{layers[0]} … {layers[-1]}: " if len(layers) > 2 else f"{', '.join(layers)}: " if layers else ""
    count, seconds = Counter(node.op for node in nodes), defaultdict[str, float](float)
    for node in nodes:
        seconds[node.op] += node.seconds
    ranked = sorted(count, key=lambda op: (-seconds[op], -count[op]))
    named = [f"{op} ×{count[op]}" if count[op] > 1 else op for op in ranked[:MAX_NAMED_OPERATORS]]
    more = [f"{len(ranked) - MAX_NAMED_OPERATORS} more"] if len(ranked) > MAX_NAMED_OPERATORS else []
    return where + ", ".join(named + more)


def _arrange(layers: Sequence[_Layer]) -> list[_Layer]:
    """Return layers with repeats grouped, single children joined, and long lists divided."""
    arranged = []
    for layer in layers:
        while len(layer.children) == 1:
            child = layer.children[0]
            layer = _Layer(f"{layer.label}{child.label}", child.children, child.node)
        layer.label = layer.label.strip("/.") or layer.label
        layer.children = _arrange(layer.children)
        arranged.append(layer)
    return _divide(_group_repeats(arranged))


def _group_repeats(layers: Sequence[_Layer]) -> list[_Layer]:
    """Return layers with a parent for equal ones whose names differ in a number only."""
    groups: dict[tuple[str, str], list[_Layer]] = {}
    for layer in layers:
        if layer.node is None and _NUMBER.search(layer.label):
            groups.setdefault((_NUMBER.sub("#", layer.label), layer.describe_shape()), []).append(layer)
    first = {id(group[0]): group for group in groups.values() if len(group) > 1}
    members = {id(layer) for group in first.values() for layer in group}
    grouped = []
    for layer in layers:
        if id(layer) in first:
            group = first[id(layer)]
            grouped.append(_Layer(f"{group[0].label} … {group[-1].label}: {len(group)} equal layers", list(group)))
        elif id(layer) not in members:
            grouped.append(layer)
    return grouped


def _divide(layers: list[_Layer]) -> list[_Layer]:
    """Return long lists in parts, each named by its first and last layer."""
    while len(layers) > MAX_CHILDREN:
        parts = [layers[begin : begin + MAX_CHILDREN] for begin in range(0, len(layers), MAX_CHILDREN)]
        ends = [(part[0].label.partition(" … ")[0], part[-1].label.rpartition(" … ")[2]) for part in parts]
        layers = [_Layer(f"{first} … {last}", part) for (first, last), part in zip(ends, parts)]
    return layers


def _flatten(roots: Sequence[_Layer]) -> LayerTree:
    """Return a tree as columns, parents before children."""
    rows = []
    for layer, parent in _iterate_rows(roots):
        node = layer.node or LayerNode("", "", -1, 0.0)
        place = node.index, node.segment
        rows.append((layer.label, parent, node.op, node.device, node.seconds, *place, node.shape, node.source))
    columns: list[tuple[Any, ...]] = [*zip(*rows)] or [()] * len(fields(LayerTree))
    return LayerTree(*columns)


def _iterate_rows(roots: Sequence[_Layer]) -> Iterator[tuple[_Layer, int]]:
    """Yield each layer with the position of its parent."""
    position, pending = -1, [(layer, -1) for layer in reversed(roots)]
    while pending:
        layer, parent = pending.pop()
        position += 1
        yield layer, parent
        pending += [(child, position) for child in reversed(layer.children)]
