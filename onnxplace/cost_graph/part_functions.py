"""What the part in `plugins/formats` adds to cost graphs, found by entry points when it is used."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from onnxplace.cost_graph.data import CostGraph, TimedPlacement
from onnxplace.plugins import load_plugin
from onnxplace.state import State
from onnxplace.target.target import Target

if TYPE_CHECKING:
    import networkx

GENERATORS: Mapping[str, Callable[[int, int], CostGraph]] = load_plugin("graph_functions", "GENERATORS")[0]
"""Family of cost graphs -> function of a number of nodes and a seed."""


def from_networkx(graph: networkx.DiGraph[Any], target: Target | None = None) -> CostGraph:
    """Return the cost graph of a networkx digraph: on `target`, or on the devices that its attributes name.

    Nodes have `seconds`, and optionally `weights_bytes`, `workspace_bytes`, `output_bytes`, `group`, `backward`; edges
    have `bytes`, and optionally `tensor` (edges from one node with one tensor carry the same value). The order of nodes
    breaks ties. A digraph from `to_networkx` becomes the same cost graph again.

    Raises:
        InputError: The graph is undirected, has a cycle or no devices, or an attribute is invalid.

    >>> import networkx
    >>> digraph = networkx.DiGraph(devices=[{"id": "a", "memory_bytes": 100}, {"id": "b", "memory_bytes": 100}])
    >>> digraph.add_node("x", seconds=0.5, weights_bytes=8)
    >>> graph = from_networkx(digraph)
    >>> graph.ids, graph.device_ids
    (('x',), ('a', 'b'))
    """
    convert, _ = load_plugin("graph_functions", "from_networkx")
    return convert(graph, target)  # type: ignore[no-any-return]


def to_networkx(graph: CostGraph | State, placed: TimedPlacement | None = None) -> networkx.MultiDiGraph[Any]:
    """Return a cost graph, or the profile of a model, as a networkx digraph; with its placement, where there is one.

    A node of a cost graph keeps its id, a node of a model has its name. Edges are parallel where several values go from
    one node to another. The docs list the attributes of nodes, edges and the graph. `from_networkx` turns the
    digraph of a cost graph back into the same cost graph.

    Args:
        graph: a cost graph, or a state with a Profile (and a Placement and a Schedule, if it is placed).
        placed: what `onnxplace.driver.place_cost_graph` returned for this cost graph.

    Raises:
        InputError: `placed` belongs to another graph.

    >>> from onnxplace.cost_graph import parse_cost_graph
    >>> nodes = [{"id": "a", "compute_time_us": 2e6}, {"id": "b", "compute_time_us": 0}]
    >>> edges = [{"src": "a", "dst": "b", "bytes": 64}]
    >>> digraph = to_networkx(parse_cost_graph({"nodes": nodes, "edges": edges, "devices": [{"id": 0}]}))
    >>> digraph.nodes["a"]["seconds"], digraph["a"]["b"][0]["bytes"]
    (2.0, 64)
    """
    convert, _ = load_plugin("graph_functions", "to_networkx")
    return convert(graph, placed)
