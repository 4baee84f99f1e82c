"""Cost graphs: placement problems without ONNX, read, written and generated."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.cost_graph.cost_graphs import (
        parse_cost_graph as parse_cost_graph,
        read_cost_graph as read_cost_graph,
        write_cost_graph as write_cost_graph,
    )
    from onnxplace.cost_graph.data import (
        CostGraph as CostGraph,
        GraphFormat as GraphFormat,
        TimedPlacement as TimedPlacement,
    )
    from onnxplace.cost_graph.part_functions import (
        GENERATORS as GENERATORS,
        from_networkx as from_networkx,
        to_networkx as to_networkx,
    )
else:
    __getattr__, __dir__, __all__ = attach(__name__, __file__)
