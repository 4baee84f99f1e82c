"""Cost graphs: placement problems without ONNX, read, written and generated."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.cost_graph.cost_graphs import (
        CostGraph as CostGraph,
        cost_graph as cost_graph,
        from_networkx as from_networkx,
        read_cost_graph as read_cost_graph,
    )
    from onnxplace.cost_graph.generators import GENERATORS as GENERATORS

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "cost_graphs": "CostGraph cost_graph from_networkx read_cost_graph",
        "generators": "GENERATORS",
    },
)
