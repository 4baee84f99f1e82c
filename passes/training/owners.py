"""The forward node of backward nodes that nothing but their neighbours tells it of."""

from __future__ import annotations

from onnxplace.graph import Bools, Ints, OpGraph
from onnxplace.passes.training.role_kernels import fill_owners


def spread_owners(graph: OpGraph, is_backward: Bools, owner: Ints) -> Ints:
    """Return the forward node of each backward node, where some have one: others have that of the nearest.

    Distance is the number of values between backward nodes, in either direction. Of those at one distance, found
    breadth first from the first in topological order, the first one counts. Linear in the edges.

    Args:
        graph: The graph.
        is_backward: Per node.
        owner: The forward node per node, -1 for none.
    """
    result: Ints = fill_owners(
        graph.order, is_backward, owner.copy(), graph.producer, graph.outputs.starts, graph.outputs.items,
        graph.inputs.starts, graph.inputs.items, graph.readers.starts, graph.readers.items,
    )  # fmt: skip
    return result
