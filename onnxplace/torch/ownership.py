"""Finds the nodes that compute the gradient of one parameter and of no other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from onnxplace.torch.builder import GraphBuilder
from onnxplace.torch.origins import BACKWARD


def mark_owners(builder: GraphBuilder, gradients: Mapping[str, str]) -> None:
    """Set the parameter of backward nodes whose results only reach the gradient of one parameter.

    Args:
        builder: the graph of the step, complete.
        gradients: the value that is the gradient of each parameter.
    """
    names = list(gradients)
    # Bits of the parameters whose gradients depend on a value.
    reached: dict[str, int] = {}
    for index, name in enumerate(names):
        reached[gradients[name]] = reached.get(gradients[name], 0) | 1 << index
    for node in reversed(builder.nodes):
        origin = builder.origins[node.name]
        if origin.phase != BACKWARD:
            continue
        owners = 0
        for output in node.output:
            owners |= reached.get(output, 0)
        for value in filter(None, node.input):
            reached[value] = reached.get(value, 0) | owners
        if owners.bit_count() == 1:
            builder.origins[node.name] = replace(origin, parameter=names[owners.bit_length() - 1])
