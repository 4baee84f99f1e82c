from onnxplace.cost_graph.cost_graphs import (
    assemble_cost_graph as assemble_cost_graph,
    describe_item as describe_item,
    is_real as is_real,
    note_missing_costs as note_missing_costs,
    parse_cost_graph as parse_cost_graph,
    read_cost_graph as read_cost_graph,
    require_graph_format as require_graph_format,
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
