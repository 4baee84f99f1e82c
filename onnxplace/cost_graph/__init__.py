"""Cost graphs: placement problems without ONNX, read, written and generated."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.cost_graph.cost_graphs import (
        CostGraph as CostGraph,
        from_networkx as from_networkx,
        parse_cost_graph as parse_cost_graph,
        read_cost_graph as read_cost_graph,
    )
    from onnxplace.cost_graph.generators import GENERATORS as GENERATORS

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "cost_graphs": "CostGraph from_networkx parse_cost_graph read_cost_graph",
        "generators": "GENERATORS",
    },
)
