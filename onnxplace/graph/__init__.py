"""Graphs of nodes and values on plain arrays, without ONNX."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.graph.kernels import (
        cluster_edges as cluster_edges,
        group_items as group_items,
        is_acyclic as is_acyclic,
    )
    from onnxplace.graph.op_graph import (
        Bools as Bools,
        Csr as Csr,
        Floats as Floats,
        Ints as Ints,
        Longs as Longs,
        OpGraph as OpGraph,
        sum_by as sum_by,
    )

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "kernels": "cluster_edges group_items is_acyclic",
        "op_graph": "Bools Csr Floats Ints Longs OpGraph sum_by",
    },
)
