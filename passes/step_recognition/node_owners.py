"""Which nodes belong together in a training step: those of one parameter, and backward nodes with a forward node."""

from __future__ import annotations

import numpy as np

from onnxplace.graph import Bools, Ints, OpGraph
from onnxplace.passes.step_recognition.role_kernels import NONE, fill_owners, label_derived
from onnxplace.training_roles import TrainingRoles

# Smaller values, such as the norm of a parameter, cost nothing to send: their readers need not be with the parameter.
MAX_NUMBER_BYTES = 8


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


def list_parameter_members(graph: OpGraph, roles: TrainingRoles) -> tuple[Ints, Ints]:
    """Return nodes, and for each of them the first node of the same parameter.

    Nodes of a parameter read it, or what follows from it alone, such as its transpose; or they read no parameter, and
    compute its gradient, its moments or its new values. What several parameters share belongs to none.
    """
    index = {name: value for value, name in enumerate(graph.value_names)}
    values = [index.get(item.input, -1) for item in roles.step.parameters]
    label = np.full(len(graph.value_names), NONE, dtype=np.int32)
    known = np.flatnonzero(np.array(values, dtype=np.int64) >= 0)
    label[np.array(values, dtype=np.int64)[known]] = known
    derived = label_derived(
        graph.order, graph.producer, graph.inputs.starts, graph.inputs.items, label,
        graph.value_bytes > MAX_NUMBER_BYTES,
    )  # fmt: skip
    produced = np.flatnonzero((graph.producer >= 0) & (graph.value_bytes > MAX_NUMBER_BYTES))
    label[produced] = derived[graph.producer[produced]]
    reads = label[graph.inputs.items] >= 0
    read = _find_single(graph.inputs.rows[reads], label[graph.inputs.items[reads]], len(graph))
    member = np.where(read >= 0, read, roles.parameter)
    members = np.flatnonzero(member >= 0).astype(np.int32)
    number = member[members]
    first = np.full(int(number.max(initial=NONE)) + 1, NONE, dtype=np.int32)
    first[number[::-1]] = members[::-1]
    return members, first[number]


def _find_single(nodes: Ints, numbers: Ints, count: int) -> Ints:
    """Return, per node, its only number, -1 for none or several."""
    lowest, highest = np.full(count, np.iinfo(np.int32).max, dtype=np.int32), np.full(count, NONE, dtype=np.int32)
    np.minimum.at(lowest, nodes, numbers)
    np.maximum.at(highest, nodes, numbers)
    return np.where(lowest == highest, lowest, NONE).astype(np.int32)
