"""Compiled loops of Placeto's policy: features of a placement, message passing, pooling, and scores of devices.

Arrays of the network are [feature, node], so that inner loops run over nodes. `theta` has all parameters in one row;
a row of `layers` says where those of a layer are: first, inputs, outputs. A layer has its weights [input, output], then
its biases.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph import Ints, Longs
from onnxplace.utils import compiled_part

Singles = NDArray[np.float32]

# Rows of `layers`: each net has one hidden layer, the last one two.
ENCODE, FORWARD, BACKWARD, ANCESTORS, CHOOSE = 0, 2, 6, 10, 22
LAYERS = 25
# How a node relates to the one that is being placed.
OWN, ANCESTOR, DESCENDANT, PARALLEL = range(4)
# Features of a node besides two per device: transfer, visited, current, start.
FIXED_FEATURES = 4


class Network(NamedTuple):
    """The parameters of a policy."""

    theta: Singles
    layers: Longs
    """[layer, 3]: position of the parameters, inputs, outputs."""
    width: int
    """Of the embeddings of one direction."""
    rounds: int
    devices: int
    """The most devices that the policy knows."""
    stay: float
    """Added to the score of the device where the current node is."""


class Wires(NamedTuple):
    """What the policy reads of a graph."""

    costs: Singles
    """[device, node]: seconds, squashed to 0 ... 1."""
    transfer: Singles
    """Per node: the mean transfer of its outputs, squashed alike."""
    sources: Ints
    """Edges, each once."""
    readers: Ints
    relation: NDArray[np.uint8]
    """[node, node]: what the second is to the first."""


class PolicyScratch(NamedTuple):
    """Arrays of one evaluation of the network."""

    features: Singles
    first: Singles
    """The embedding before any message."""
    current: Singles
    hidden: Singles
    message: Singles
    both: Singles
    """The embeddings of both directions."""
    related: Singles
    """Those of the nodes of one relation."""
    row: Singles
    """The inputs of the last net: of one node."""
    wide: Singles
    narrow: Singles
    scores: Singles


def new_policy_scratch(network: Network, nodes: int) -> PolicyScratch:
    """Return arrays for graphs with so many nodes."""
    width = network.width

    def rows(count: int) -> Singles:
        return np.zeros((count, max(nodes, 1)), dtype=np.float32)

    def row(count: int) -> Singles:
        return np.zeros(count, dtype=np.float32)

    return PolicyScratch(
        features=rows(2 * network.devices + FIXED_FEATURES),
        first=rows(width),
        current=rows(width),
        hidden=rows(2 * width),
        message=rows(2 * width),
        both=rows(2 * width),
        related=rows(2 * width),
        row=row(8 * width),
        wide=row(16 * width),
        narrow=row(8 * width),
        scores=row(network.devices),
    )


@compiled_part
def fill_features(network, wires, device, start, visited, current, features):
    """Fill the features [feature, node] of a placement while `current` is being placed."""
    count, known = len(device), network.devices
    devices = len(wires.costs)
    for d in range(known):
        for node in range(count):
            features[d, node] = wires.costs[d, node] if d < devices else np.float32(0.0)
            features[known + FIXED_FEATURES + d, node] = np.float32(1.0 if device[node] == d else 0.0)
    longest = 0.0
    for node in range(count):
        longest = max(longest, abs(start[node] - start[current]))
    scale = 1.0 / longest if longest > 0.0 else 0.0
    for node in range(count):
        features[known, node] = wires.transfer[node]
        features[known + 1, node] = np.float32(visited[node])
        features[known + 2, node] = np.float32(1.0 if node == current else 0.0)
        features[known + 3, node] = np.float32((start[node] - start[current]) * scale)


@compiled_part
def _dense(network, layer, source, destination, count, has_relu):
    """Apply a layer to all nodes: [inputs, node] -> [outputs, node]."""
    first, inputs, outputs = network.layers[layer, 0], network.layers[layer, 1], network.layers[layer, 2]
    for o in range(outputs):
        bias = network.theta[first + inputs * outputs + o]
        for node in range(count):
            destination[o, node] = bias
        # Four inputs at a time, since loading and storing takes longer than computing.
        for i in range(0, inputs - 3, 4):
            w0, w1 = network.theta[first + i * outputs + o], network.theta[first + (i + 1) * outputs + o]
            w2, w3 = network.theta[first + (i + 2) * outputs + o], network.theta[first + (i + 3) * outputs + o]
            for node in range(count):
                low = w0 * source[i, node] + w1 * source[i + 1, node]
                destination[o, node] += low + w2 * source[i + 2, node] + w3 * source[i + 3, node]
        for i in range(inputs - inputs % 4, inputs):
            weight = network.theta[first + i * outputs + o]
            for node in range(count):
                destination[o, node] += weight * source[i, node]
        if has_relu:
            for node in range(count):
                destination[o, node] = max(destination[o, node], np.float32(0.0))


@compiled_part
def _dense_row(network, layer, source, destination, has_relu):
    """Apply a layer to one node: [inputs] -> [outputs]."""
    first, inputs, outputs = network.layers[layer, 0], network.layers[layer, 1], network.layers[layer, 2]
    for o in range(outputs):
        destination[o] = network.theta[first + inputs * outputs + o]
    for i in range(inputs):
        amount = source[i]
        for o in range(outputs):
            destination[o] += amount * network.theta[first + i * outputs + o]
    if has_relu:
        for o in range(outputs):
            destination[o] = max(destination[o], np.float32(0.0))


@compiled_part
def _pass_messages(network, first_layer, sources, readers, scratch, offset, count):
    """Let nodes hear from their sources, round by round; write embeddings to `both` from row `offset`."""
    width = network.width
    for feature in range(width):
        for node in range(count):
            scratch.current[feature, node] = scratch.first[feature, node]
    for _ in range(network.rounds):
        _dense(network, first_layer, scratch.current, scratch.hidden, count, True)
        _dense(network, first_layer + 1, scratch.hidden, scratch.message, count, True)
        for feature in range(width):
            for node in range(count):
                scratch.current[feature, node] = np.float32(0.0)
            for edge in range(len(sources)):
                scratch.current[feature, readers[edge]] += scratch.message[feature, sources[edge]]
        _dense(network, first_layer + 2, scratch.current, scratch.hidden, count, True)
        _dense(network, first_layer + 3, scratch.hidden, scratch.message, count, True)
        for feature in range(width):
            for node in range(count):
                scratch.current[feature, node] = scratch.first[feature, node] + scratch.message[feature, node]
    for feature in range(width):
        for node in range(count):
            scratch.both[offset + feature, node] = scratch.current[feature, node]


@compiled_part
def score_devices(network, wires, current, count, scratch):
    """Fill `scores` for the node `current` from the features in `scratch`."""
    width = network.width
    _dense(network, ENCODE, scratch.features, scratch.hidden, count, True)
    _dense(network, ENCODE + 1, scratch.hidden, scratch.first, count, True)
    _pass_messages(network, FORWARD, wires.sources, wires.readers, scratch, 0, count)
    _pass_messages(network, BACKWARD, wires.readers, wires.sources, scratch, width, count)
    for feature in range(2 * width):
        scratch.row[feature] = scratch.both[feature, current]
    # Sum over ancestors, descendants and parallel nodes, each with nets of its own.
    for kind in range(3):
        layer = ANCESTORS + 4 * kind
        related = 0
        for node in range(count):
            if wires.relation[current, node] == ANCESTOR + kind:
                for feature in range(2 * width):
                    scratch.related[feature, related] = scratch.both[feature, node]
                related += 1
        _dense(network, layer, scratch.related, scratch.hidden, related, True)
        _dense(network, layer + 1, scratch.hidden, scratch.message, related, True)
        for feature in range(2 * width):
            total = np.float32(0.0)
            for item in range(related):
                total += scratch.message[feature, item]
            # Divided by the size of the graph, or the scores of large graphs would be extreme before any training.
            scratch.narrow[feature] = total / np.float32(count)
        _dense_row(network, layer + 2, scratch.narrow, scratch.wide, True)
        _dense_row(network, layer + 3, scratch.wide, scratch.narrow, True)
        for feature in range(2 * width):
            scratch.row[2 * width * (kind + 1) + feature] = scratch.narrow[feature]
    _dense_row(network, CHOOSE, scratch.row, scratch.wide, True)
    _dense_row(network, CHOOSE + 1, scratch.wide, scratch.narrow, True)
    _dense_row(network, CHOOSE + 2, scratch.narrow, scratch.scores, False)
    for d in range(network.devices):
        own = scratch.features[network.devices + FIXED_FEATURES + d, current]
        scratch.scores[d] += np.float32(network.stay) * own
