"""Order the nodes of a graph topologically."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Mapping, Sequence

from onnx import NodeProto

from onnxplace.errors import MAX_LISTED, ModelError
from onnxplace.model.nested_graphs import iterate_reads


def index_producers(nodes: Sequence[NodeProto], initializers: Collection[str], where: str) -> dict[str, int]:
    """Return the index of each value's producer.

    Raises ModelError for a value with two producers.
    """
    producers: dict[str, int] = {}
    for index, node in enumerate(nodes):
        for name in filter(None, node.output):
            if name in producers or name in initializers:
                place = f"{where}, node {node.name or node.op_type!r}"
                hint = "the model is damaged; export it again"
                raise ModelError("M013", f"value {name!r} has two producers, expected one", where=place, hint=hint)
            producers[name] = index
    return producers


def sort_topologically(
    nodes: Sequence[NodeProto], producers: Mapping[str, int], known: Collection[str], where: str
) -> list[NodeProto]:
    """Return the nodes in topological order.

    Ties keep the order of the file.

    Args:
        nodes: Nodes with unique names, in any order.
        producers: Value -> index of the node that produces it.
        known: Inputs and initializers, which need no producer.
        where: Place for error messages.

    Raises:
        ModelError: A value has no producer, or the graph has a cycle.
    """
    readers: list[list[int]] = [[] for _ in nodes]
    missing_counts = [0] * len(nodes)
    for index, node in enumerate(nodes):
        for name in set(iterate_reads(node)):
            if name in producers:
                readers[producers[name]].append(index)
                missing_counts[index] += 1
            elif name not in known:
                place, hint = f"{where}, node {node.name!r}", "the model is incomplete; export it again"
                raise ModelError("M014", f"it reads {name!r}, which has no producer", where=place, hint=hint)
    ready = [index for index, count in enumerate(missing_counts) if count == 0]
    order: list[int] = []
    while ready:
        index = heapq.heappop(ready)
        order.append(index)
        for reader in readers[index]:
            missing_counts[reader] -= 1
            if missing_counts[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < len(nodes):
        cycle = _describe_cycle(nodes, producers, missing_counts)
        raise ModelError("M015", f"the graph has a cycle: {cycle}", where=where)
    return [nodes[index] for index in order]


def _describe_cycle(nodes: Sequence[NodeProto], producers: Mapping[str, int], missing_counts: Sequence[int]) -> str:
    """Describe one cycle among the nodes that never became ready."""

    def find_blocking_producer(index: int) -> int:
        indices = (producers[name] for name in iterate_reads(nodes[index]) if name in producers)
        return next(producer for producer in indices if missing_counts[producer] > 0)

    index = next(i for i, count in enumerate(missing_counts) if count > 0)
    positions: dict[int, int] = {}
    while index not in positions:
        positions[index] = len(positions)
        index = find_blocking_producer(index)
    visited = list(positions)
    names = [nodes[i].name for i in (*reversed(visited[positions[index] :]), visited[-1])]
    if len(names) > MAX_LISTED + 1:
        names[MAX_LISTED:-1] = [f"... ({len(names) - 1 - MAX_LISTED} more)"]
    return " -> ".join(names)
