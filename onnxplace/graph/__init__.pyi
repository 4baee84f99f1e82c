from onnxplace.graph.graph_kernels import (
    cluster_edges as cluster_edges,
    group_items as group_items,
    heap_pop as heap_pop,
    heap_push as heap_push,
    is_acyclic as is_acyclic,
)
from onnxplace.graph.lifetimes import sum_alive as sum_alive
from onnxplace.graph.op_graph import (
    Bools as Bools,
    Csr as Csr,
    Floats as Floats,
    Ints as Ints,
    Longs as Longs,
    OpGraph as OpGraph,
    find_root as find_root,
    order_items as order_items,
    sum_by as sum_by,
)
