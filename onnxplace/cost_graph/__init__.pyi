from onnxplace.cost_graph.cost_graphs import (
    assemble_cost_graph as assemble_cost_graph,
    from_networkx as from_networkx,
    parse_cost_graph as parse_cost_graph,
    read_cost_graph as read_cost_graph,
    write_cost_graph as write_cost_graph,
)
from onnxplace.cost_graph.data import CostGraph as CostGraph
from onnxplace.cost_graph.generators import GENERATORS as GENERATORS, tf_like as tf_like
from onnxplace.cost_graph.networkx_graphs import (
    require_graph_format as require_graph_format,
    to_networkx as to_networkx,
)
