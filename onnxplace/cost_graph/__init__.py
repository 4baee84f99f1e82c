"""Cost graphs: placement problems without ONNX, read, written and generated."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.cost_graph.architectures import ARCHITECTURES as ARCHITECTURES
    from onnxplace.cost_graph.cost_graphs import (
        from_networkx as from_networkx,
        parse_cost_graph as parse_cost_graph,
        read_cost_graph as read_cost_graph,
        write_cost_graph as write_cost_graph,
    )
    from onnxplace.cost_graph.data import CostGraph as CostGraph
    from onnxplace.cost_graph.generators import GENERATORS as GENERATORS, tf_like as tf_like
    from onnxplace.cost_graph.graph_files import require_graph_format as require_graph_format
    from onnxplace.cost_graph.graph_sets import (
        FAMILIES as FAMILIES,
        GraphSet as GraphSet,
        choose_side as choose_side,
        draw_graphs as draw_graphs,
        graph_fingerprint as graph_fingerprint,
    )
    from onnxplace.cost_graph.networkx_graphs import to_networkx as to_networkx

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "architectures": "ARCHITECTURES",
        "cost_graphs": "from_networkx parse_cost_graph read_cost_graph write_cost_graph",
        "data": "CostGraph",
        "generators": "GENERATORS tf_like",
        "graph_files": "require_graph_format",
        "graph_sets": "FAMILIES GraphSet choose_side draw_graphs graph_fingerprint",
        "networkx_graphs": "to_networkx",
    },
)
