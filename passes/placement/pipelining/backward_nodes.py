"""Which nodes of a training step belong to the backward pass or the update."""

from __future__ import annotations

import numpy as np

from onnxplace.facts import MicroBatches, Profile
from onnxplace.graph import Bools
from onnxplace.state import State
from onnxplace.training_roles import Phase


def find_backward_nodes(state: State) -> Bools:
    """Return, per node of the profile's graph, whether it is not part of the forward pass.

    The profile of a training step knows; a cost graph may mark its backward nodes. In other graphs, all are forward.
    """
    profile = state[Profile]
    if profile.training is not None:
        backward = profile.training.phase != Phase.FORWARD
    elif profile.backward is not None:
        backward = profile.backward.copy()
    else:
        backward = np.zeros(len(profile.graph), dtype=bool)
    return _mark_exchanges(state, backward)


def _mark_exchanges(state: State, backward: Bools) -> Bools:
    """Mark nodes that cut, join or add up parts as the nodes whose values they take."""
    if MicroBatches not in state:
        return backward
    graph, source = state[Profile].graph, state[MicroBatches].source
    for node in graph.order.tolist():
        if source[node] < 0:
            before = graph.predecessors[node]
            backward[node] = bool(len(before)) and bool(backward[before].any())
    return backward
