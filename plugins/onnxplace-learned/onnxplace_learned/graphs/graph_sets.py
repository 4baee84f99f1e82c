"""Sets of generated graphs for learning: drawn by seed, and divided so that no graph is in two sets."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from onnxplace.cost_graph.data import CostGraph
from onnxplace.cost_graph.part_functions import GENERATORS
from onnxplace.errors import UsageError, suggest_nearest
from onnxplace.graph.op_graph import Csr, OpGraph
from onnxplace_learned.graphs.architectures import ARCHITECTURES

Side = Literal["train", "test"]
# One graph of so many is for tests.
TEST_PERIOD = 5
# Rounds of comparing neighbours. More rounds hardly tell further graphs apart.
FINGERPRINT_ROUNDS = 4
# Seeds in a row without a new graph, after which a family is considered exhausted.
MAX_REPEATED_SEEDS = 1_000

FAMILIES: Mapping[str, str] = MappingProxyType(
    {
        name: (make.__doc__ or "").strip().partition("\n")[0].removeprefix("Return ")
        for name, make in (*ARCHITECTURES.items(), *GENERATORS.items())
    }
)
"""Families to learn from: name -> summary. The first ones are architectures, which can have a backward pass."""


@dataclass(frozen=True)
class GraphSet:
    """A request for graphs of one family."""

    family: str
    count: int
    nodes: int = 200
    side: Side = "train"
    backward: bool = False
    first_seed: int = 0

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            hint = f"{suggest_nearest(self.family, FAMILIES)} (`onnxplace learn families` lists them)"
            raise UsageError("U001", f"unknown family of graphs {self.family!r}", where="--family", hint=hint)
        if self.backward and self.family not in ARCHITECTURES:
            hint = f"choose one of {', '.join(ARCHITECTURES)}"
            raise UsageError("U001", f"family {self.family!r} has no backward pass", where="--family", hint=hint)


def draw_graphs(graphs: GraphSet) -> list[CostGraph]:
    """Return the first graphs of a set, by increasing seeds.

    The fingerprint of a graph alone decides whether it is for training or for tests, about 4 to 1. So two sets on
    different sides share no graph, whatever their sizes and seeds. Graphs within a set differ, too.

    Raises:
        UsageError: The family does not have so many different graphs.

    >>> [graph.name for graph in draw_graphs(GraphSet("chains", 2, nodes=20))]
    ['chains_20_1', 'chains_20_2']
    """
    drawn: dict[str, CostGraph] = {}
    last_new = graphs.first_seed
    for seed, graph in _draw_all(graphs):
        if len(drawn) >= graphs.count or seed > last_new + MAX_REPEATED_SEEDS:
            break
        fingerprint = graph_fingerprint(graph.profile.graph)
        if choose_side(fingerprint) == graphs.side and fingerprint not in drawn:
            drawn[fingerprint], last_new = graph, seed
    if len(drawn) < graphs.count:
        message = f"family {graphs.family!r} has only {len(drawn)} different graphs of about {graphs.nodes} nodes"
        raise UsageError("H011", message, where="--count", hint="ask for fewer graphs, or for larger ones")
    return list(drawn.values())


def _draw_all(graphs: GraphSet) -> Iterator[tuple[int, CostGraph]]:
    """Yield seeds with their graphs."""
    for seed in itertools.count(graphs.first_seed):
        if graphs.family in ARCHITECTURES:
            yield seed, ARCHITECTURES[graphs.family](graphs.nodes, seed, graphs.backward)
        else:
            yield seed, GENERATORS[graphs.family](graphs.nodes, seed)


def choose_side(fingerprint: str) -> Side:
    """Return the side of a graph with this fingerprint."""
    return "test" if int(fingerprint, 16) % TEST_PERIOD == 0 else "train"


def graph_fingerprint(graph: OpGraph) -> str:
    """Return a hash of a graph's operators, edges and sizes, whatever its names and numbers of nodes.

    Labels of nodes are refined by those of their neighbours (Weisfeiler and Leman 1968). Times do not count: graphs
    that differ in nothing else have the same fingerprint. O(E) for each round.
    """
    outputs = [sorted(graph.value_bytes[graph.outputs[node]].tolist()) for node in range(len(graph))]
    weights = [sorted(graph.weight_bytes[graph.weights[node]].tolist()) for node in range(len(graph))]
    labels = [_hash_text(f"{op} {sizes} {own}") for op, sizes, own in zip(graph.ops, outputs, weights)]
    before, after = graph.predecessors, graph.successors
    for _ in range(FINGERPRINT_ROUNDS):
        labels = [
            _hash_text(f"{label} {_neighbour_labels(before, node, labels)} {_neighbour_labels(after, node, labels)}")
            for node, label in enumerate(labels)
        ]
    return _hash_text(f"{len(graph)} {len(before.items)} {sorted(labels)}")


def _neighbour_labels(neighbours: Csr, node: int, labels: list[str]) -> list[str]:
    return sorted(labels[other] for other in neighbours[node].tolist())


def _hash_text(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
