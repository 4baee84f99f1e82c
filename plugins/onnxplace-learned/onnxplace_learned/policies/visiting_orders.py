"""The order in which a sequential policy visits the nodes of a graph.

Most orders are those of Wang, Payberah, Hagos and Vlassov (arXiv 2201.09676), with networkx, as in their study.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Literal

import networkx
import numpy as np

from onnxplace.graph import Ints
from onnxplace.problem import PlacementProblem
from onnxplace.simulation import heads_and_tails

Order = Literal[
    "alpha",
    "topological",
    "lexicographic",
    "reversed",
    "dfs-preorder",
    "dfs-postorder",
    "bfs",
    "random",
    "by-criticality",
]

Start = Literal["several", "m-etf", "first-device", "auto"]
"""What episodes start from.

- `m-etf`: the better of the placement of m-ETF and one device.
- `first-device`: one device.
- `several`: each of these in turn, then the best placement that was visited.
- `auto`: the placement of a short search, as the placer of this name does.
"""

Reward = Literal["simulated", "measured"]
"""How the placements of a training are rewarded: by simulated steps, or by those of bundles that are run."""


def visit_nodes(problem: PlacementProblem, order: Order, seed: int = 0) -> Ints:
    """Return all nodes of a problem in the order of visiting.

    - `alpha`: by name; `topological`; `lexicographic`: topological, by name where several are possible; `reversed`.
    - `dfs-preorder`, `dfs-postorder`: depth first, from each node that is not visited yet.
    - `bfs`: breadth first, from each node without predecessors, by name.
    - `random`: by `seed`.
    - `by-criticality`: those on the longest paths first.
    """
    return np.array(ORDERS[order](problem, seed), dtype=np.int32)


def _digraph(problem: PlacementProblem) -> networkx.DiGraph[int]:
    """Return the edges of a graph, its nodes in topological order."""
    graph, result = problem.graph, networkx.DiGraph()
    result.add_nodes_from(graph.order.tolist())
    edges = graph.predecessors
    result.add_edges_from(zip(edges.items.tolist(), edges.rows.tolist()))
    return result


def _sort_by_name(problem: PlacementProblem, seed: int) -> list[int]:
    return sorted(range(len(problem.graph)), key=problem.graph.names.__getitem__)


def _sort_lexicographically(problem: PlacementProblem, seed: int) -> list[int]:
    digraph, names = _digraph(problem), problem.graph.names
    return list(networkx.lexicographical_topological_sort(digraph, key=lambda node: names[node]))


def _search_breadth_first(problem: PlacementProblem, seed: int) -> list[int]:
    """Append the tree of each source; the first visit counts."""
    digraph, names = _digraph(problem), problem.graph.names
    sources = sorted((node for node, degree in digraph.in_degree() if degree == 0), key=lambda node: names[node])
    visited: dict[int, None] = {}
    for source in sources:
        if source not in visited:
            visited[source] = None
        visited.update((node, None) for _, node in networkx.bfs_edges(digraph, source) if node not in visited)
    return list(visited)


def _sort_by_criticality(problem: PlacementProblem, seed: int) -> list[int]:
    """Sort by the longest path through each node, longest first; ties in topological order."""
    reach = heads_and_tails(problem.graph, problem.seconds, problem.target)
    length = reach.head + reach.least + reach.tail
    return list(np.lexsort((problem.graph.positions, -length)).tolist())


ORDERS: Mapping[Order, Callable[[PlacementProblem, int], list[int]]] = MappingProxyType(
    {
        "alpha": _sort_by_name,
        "topological": lambda problem, seed: problem.graph.order.tolist(),
        "lexicographic": _sort_lexicographically,
        "reversed": lambda problem, seed: problem.graph.order[::-1].tolist(),
        "dfs-preorder": lambda problem, seed: list(networkx.dfs_preorder_nodes(_digraph(problem))),
        "dfs-postorder": lambda problem, seed: list(networkx.dfs_postorder_nodes(_digraph(problem))),
        "bfs": _search_breadth_first,
        "random": lambda problem, seed: np.random.default_rng(seed).permutation(len(problem.graph)).tolist(),
        "by-criticality": _sort_by_criticality,
    }
)
"""Order -> function of a problem and a seed."""
