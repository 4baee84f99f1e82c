"""The nodes of a model as a tree of layers, by the parts of their names.

Whichever layers are folded, values never run in a circle between boxes, so a picture of the graph needs no edge that
runs backwards: the nodes of a layer follow each other in one order of all nodes, in which none reads a later one.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass, field, fields
from itertools import groupby, pairwise
from typing import Any

from onnxplace.graph.op_graph import order_items
from onnxplace.reports.page_records import LayerTree
from onnxplace.utils.groups import group_pairs
from onnxplace.utils.quantities import list_first

Edges = Collection[tuple[int, int]]
"""Each from an item to one that reads it; none twice."""

# More children than this without a common name are shown in parts.
MAX_CHILDREN = 100
# Names deeper than this are cut; the rest is one label.
MAX_DEPTH = 24
# Operators that the title of a segment names.
MAX_NAMED_OPERATORS = 2
_NUMBER = re.compile(r"\d+")
# What the names of the parts of a split operator end with.
NODE_PART = re.compile(r"/(shard|copy)\d+$")
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
        return f"({','.join(sorted(child.describe_shape() for child in self.children))})"


def build_layer_tree(nodes: Sequence[LayerNode], edges: Edges = ()) -> LayerTree:
    """Return the tree of nodes.

    Names are split at `/` and `.`, except before a digit. Layers with one child are joined with it. Equal siblings
    whose names differ in a number, such as `block_0` and `block_1`, get a common parent. A layer that values leave and
    come back to is divided there: `norm`, then `norm (part 2)`.

    Args:
        nodes: The nodes.
        edges: From each node to those that read it, by their positions; none twice.

    >>> build_layer_tree([LayerNode("a/x", "Add", 0, 1.0), LayerNode("a/y", "Mul", 1, 1.0)]).label
    ('a', 'x', 'y')
    """
    ends = [[0, *_find_ends(node.name)[:MAX_DEPTH], len(node.name)] for node in nodes]

    def label(item: int, depth: int, end: int) -> str:
        text = nodes[item].name[ends[item][depth] : ends[item][end]]
        return text.strip("/.") or text

    def build(items: Sequence[int], links: Edges, depth: int) -> list[_Layer]:
        keys = [label(item, depth, depth + 1) if len(ends[item]) > depth + 2 else item for item in items]
        runs, layers, seen = divide_forward(items, keys, links), list[_Layer](), Counter[str]()
        home = {item: index for index, run in enumerate(runs) for item in run}
        inner = group_pairs((home[link[0]], link) for link in links if home[link[0]] == home[link[1]])
        for index, run in enumerate(runs):
            end, least = depth + 1, min(len(ends[item]) for item in run) - 2
            if len(run) == 1:
                layers.append(_Layer(label(run[0], depth, -1), node=nodes[run[0]]))
                continue
            while end < least and len({label(item, end, end + 1) for item in run}) == 1:
                end += 1
            name = label(run[0], depth, end)
            seen[name] += 1
            suffix = f" (part {seen[name]})" if seen[name] > 1 else ""
            layers.append(_Layer(name + suffix, build(run, inner.get(index, ()), end)))
        return _divide(_group_repeats(layers, {(home[a], home[b]) for a, b in links if home[a] != home[b]}))

    # All nodes, even if hostile ones read each other in a circle.
    return _flatten(build([*dict.fromkeys([*sort_forward(len(nodes), edges), *range(len(nodes))])], edges, 0))


def _find_ends(name: str) -> list[int]:
    """Return where the parts of a name end, except for the last part."""
    return [match.start() for match in _BOUNDARY.finditer(name)]


def name_layer(name: str) -> str:
    """Return the layer of a node as a reader would name it: the parts of its name up to the first with a number.

    Empty where the name has no parts.

    >>> [*map(name_layer, ("/model/layers.3/mlp/Mul", "model.layers.3.mlp/node_mul_4", "encoder/norm"))]
    ['model/layers.3', 'model.layers.3', 'encoder']
    """
    name = NODE_PART.sub("", name)
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
    named = [f"{op} ×{count[op]}" if count[op] > 1 else op for op in ranked]
    return where + ", ".join(list_first(named, MAX_NAMED_OPERATORS))


def _group_repeats(layers: Sequence[_Layer], edges: Edges) -> list[_Layer]:
    """Return layers with a parent for equal ones whose names differ in a number only."""
    keys = list[Hashable]()
    for index, layer in enumerate(layers):
        shape = layer.describe_shape()
        # The parts of one split operator, which has a number in its name, are no layer of the model.
        is_layer = layer.node is None and _NUMBER.search(layer.label) and len({*re.findall(r"\w+", shape)}) > 1
        keys.append((_NUMBER.sub("#", layer.label), shape) if is_layer else index)
    grouped = []
    for run in divide_forward(range(len(layers)), keys, edges):
        group = [layers[index] for index in run]
        name = f"{group[0].label} … {group[-1].label}: {len(group)} equal layers"
        grouped.append(_Layer(name, group) if len(group) > 1 else group[0])
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
    rows: list[tuple[Any, ...]] = []
    pending = [(layer, -1) for layer in reversed(roots)]
    while pending:
        layer, parent = pending.pop()
        pending += [(child, len(rows)) for child in reversed(layer.children)]
        node = layer.node or LayerNode("", "", -1, 0.0)
        place = node.index, node.segment
        rows.append((layer.label, parent, node.op, node.device, node.seconds, *place, node.shape, node.source))
    columns: list[tuple[Any, ...]] = [*zip(*rows)] or [()] * len(fields(LayerTree))
    return LayerTree(*columns)


# ------------------------------------------------------------------------------ orders in which no edge runs backwards


def sort_forward(count: int, edges: Edges) -> list[int]:
    """Return items 0 to `count` - 1, each after all that it reads, without those on a circle or after one.

    >>> sort_forward(4, [(3, 1), (1, 2)]), sort_forward(4, [(0, 1), (1, 2), (2, 1), (2, 3)])
    ([0, 3, 1, 2], [0])
    """
    readers: list[list[int]] = [[] for _ in range(count)]
    missing = [0] * count
    for source, reader in edges:
        readers[source].append(reader)
        missing[reader] += 1
    return order_items(readers, missing)


def divide_forward(items: Sequence[int], keys: Sequence[Hashable], edges: Edges) -> list[list[int]]:
    """Return runs of items with one key, in an order in which no edge runs backwards.

    A key has one run, or several where values leave it and come back.

    Args:
        items: Each after all that it reads.
        keys: Of each item.
        edges: Between these items.

    >>> divide_forward([0, 1, 2, 3], "abab", [(0, 2)]), divide_forward([0, 1, 2, 3], "abab", [(0, 1), (1, 2)])
    ([[0, 2], [1, 3]], [[0], [1], [2], [3]])
    """
    number = {key: index for index, key in enumerate(dict.fromkeys(keys))}
    home = {item: number[key] for item, key in zip(items, keys)}
    between = {(home[source], home[reader]) for source, reader in edges if home[source] != home[reader]}
    # Before all circles of keys, and after all of them, each key is whole; in between, the order of the items stands.
    before = dict.fromkeys(sort_forward(len(number), between))
    back = sort_forward(len(number), {(reader, source) for source, reader in between})
    after = [key for key in reversed(back) if key not in before]
    members = group_pairs((home[item], item) for item in items)
    whole = {*before, *after}
    divided = groupby((item for item in items if home[item] not in whole), lambda item: home[item])
    return [*(members[key] for key in before), *([*run] for _, run in divided), *(members[key] for key in after)]
