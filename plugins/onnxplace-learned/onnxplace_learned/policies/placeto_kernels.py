"""Compiled loops of Placeto: its policy network, and episodes that visit every group once and simulate each placement.

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

from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs
from onnxplace.passes.placement.search.decode_kernels import Scratch, Wiring, decode
from onnxplace.utils.jit import compiled_part, in_place
from onnxplace_learned.policies.batch_kernels import (
    BatchGraph,
    BatchScratch,
    MemoryScratch,
    peak_bytes_of_one,
    simulate_one,
)

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
    """Width of the embeddings of one direction."""
    rounds: int
    devices: int
    """The most devices that the policy knows."""
    stay: float
    """Added to the score of the device where the current node is."""


class GraphTensors(NamedTuple):
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


# Seconds of a step, and bytes above the limits as a multiple of them, that count alike; and the most that they count.
EXCESS_PENALTY, MAX_COST = 2.0, 10.0


class Visits(NamedTuple):
    """Groups in the order in which an episode visits them."""

    group: Ints
    """Per step."""
    speaker: Ints
    """Per step: the node of the group that the policy looks at."""
    member_starts: Longs
    members: Ints
    """The nodes of each group."""
    allowed: Bools
    """[group, device]."""


class Rules(NamedTuple):
    """How placements are scored."""

    scale_seconds: float
    """A step of this length has cost 1."""
    limit_bytes: Longs
    has_memory: bool
    """Whether memory may be exceeded, so that peaks count."""


class Simulators(NamedTuple):
    """A graph, with arrays for the simulator of the search, which chooses the order, and for that of memory."""

    wiring: Wiring
    search: Scratch
    bias: Floats
    """Zero per node: devices run the ready node with the longest path to the end first."""
    graph: BatchGraph
    scratch: BatchScratch
    memory: MemoryScratch
    order: Ints
    start: Floats
    finish: Floats
    peaks: Longs
    """Per device."""


class Trajectory(NamedTuple):
    """What happened in one episode, for each of its steps."""

    device: NDArray[np.int16]
    """[step, node]: the placement before the step."""
    start: Singles
    """[step, node]: simulated starts before the step, seconds."""
    action: Ints
    cost: Floats
    """[step + 1]: of the placement before each step, and of the last one."""
    fits: Bools
    """[step + 1]."""
    entropy: Floats


class CompletionWork(NamedTuple):
    """Arrays of `score_completions`."""

    agreement: Floats
    """Per completion: the weight of the nodes that are where it has them."""
    tried: Ints
    """Completions that are tried at a step."""
    visited: NDArray[np.uint8]
    device: Ints


@compiled_part
def _score_placement(rules, device, simulators, number):
    """Simulate a placement; return its cost, and whether it fits."""
    search, peaks = simulators.search, simulators.peaks
    seconds, _ = decode(simulators.wiring, device, simulators.bias, 1.0, np.inf, search)
    cost, fits = seconds / rules.scale_seconds, True
    if rules.has_memory:
        for node in range(len(device)):
            simulators.order[search.sequence[node]] = node
        start, finish = simulators.start, simulators.finish
        sent, end = simulate_one(simulators.graph, device, simulators.order, simulators.scratch, start, finish)
        peak_bytes_of_one(
            simulators.graph, device, simulators.order, sent, end, number, simulators.scratch, simulators.memory,
            start, finish, peaks,
        )  # fmt: skip
        for d in range(len(peaks)):
            if peaks[d] > rules.limit_bytes[d]:
                fits = False
                cost += EXCESS_PENALTY * (peaks[d] - rules.limit_bytes[d]) / max(rules.limit_bytes[d], 1)
    return min(cost, MAX_COST), fits


@compiled_part
def _choose_device(scores, allowed, devices, draw):
    """Return a device by its softmax score, the best one if `draw` is negative; and the entropy."""
    highest, best = -np.inf, -1
    for d in range(devices):
        if allowed[d] and scores[d] > highest:
            highest, best = scores[d], d
    total = 0.0
    for d in range(devices):
        if allowed[d]:
            total += np.exp(scores[d] - highest)
    entropy, passed, chosen = 0.0, 0.0, -1
    for d in range(devices):
        if not allowed[d]:
            continue
        share = np.exp(scores[d] - highest) / total
        if share > 0.0:
            entropy -= share * np.log(share)
        passed += share
        if chosen < 0 and draw < passed:
            chosen = d
    if chosen < 0 or draw < 0.0:
        chosen = best
    return chosen, entropy


@in_place
def run_episode(
    network, wires, visits, rules, draws, device, simulators, policy, visited, trajectory
):  # fmt: skip
    """Improve `device` in place, visiting each group once, and record the episode.

    `draws` has a number below 1 for each step; a negative one takes the best device.
    """
    count, devices = len(device), len(simulators.peaks)
    steps = len(visits.group)
    for node in range(count):
        visited[node] = 0
    cost, fits = _score_placement(rules, device, simulators, 0)
    for step in range(steps):
        group, current = visits.group[step], visits.speaker[step]
        trajectory.cost[step], trajectory.fits[step] = cost, fits
        for node in range(count):
            trajectory.device[step, node] = device[node]
            trajectory.start[step, node] = simulators.search.start[node]
        fill_features(network, wires, device, trajectory.start[step], visited, current, policy.features)
        score_devices(network, wires, current, count, policy)
        chosen, trajectory.entropy[step] = _choose_device(policy.scores, visits.allowed[group], devices, draws[step])
        trajectory.action[step] = chosen
        changes = False
        for k in range(visits.member_starts[group], visits.member_starts[group + 1]):
            node = visits.members[k]
            changes = changes or device[node] != chosen
            device[node] = chosen
            visited[node] = 1
        if changes:
            cost, fits = _score_placement(rules, device, simulators, step + 1)
    trajectory.cost[steps], trajectory.fits[steps] = cost, fits


@in_place
def fill_step_features(network, wires, visits, trajectory, steps, visited, features):
    """Fill the features [item, feature, node] of some steps of an episode, in increasing order."""
    for node in range(len(visited)):
        visited[node] = 0
    done = 0
    for item in range(len(steps)):
        step = steps[item]
        while done < step:
            group = visits.group[done]
            for k in range(visits.member_starts[group], visits.member_starts[group + 1]):
                visited[visits.members[k]] = 1
            done += 1
        fill_features(
            network, wires, trajectory.device[step], trajectory.start[step], visited, visits.speaker[step],
            features[item],
        )  # fmt: skip


@in_place
def score_completions(visits, rules, trajectory, steps, completions, weight, simulators, work, costs):
    """Fill `costs` [item, device] of some steps of an episode, in increasing order: the least if others finish it.

    The groups that were visited before a step stay where they are, the others go where a completion [completion, node]
    has them. At each step, those `len(work.tried)` completions are tried that agree best with the groups that were
    visited, by the `weight` of their nodes.
    """
    count, devices = len(work.device), len(simulators.peaks)
    work.agreement[:] = 0.0
    work.visited[:] = 0
    done, number = 0, 0
    for item in range(len(steps)):
        step = steps[item]
        # Follow the episode up to this step.
        while done < step:
            group, chosen = visits.group[done], trajectory.action[done]
            for k in range(visits.member_starts[group], visits.member_starts[group + 1]):
                node = visits.members[k]
                work.visited[node] = 1
                for c in range(len(completions)):
                    if completions[c, node] == chosen:
                        work.agreement[c] += weight[node]
            done += 1
        _pick_highest(work.agreement, work.tried)
        group = visits.group[step]
        for d in range(devices):
            costs[item, d] = np.inf
        # The last one tried leaves the other groups where they are.
        for t in range(len(work.tried) + 1):
            for node in range(count):
                keeps = work.visited[node] or t == len(work.tried)
                work.device[node] = trajectory.device[step, node] if keeps else completions[work.tried[t], node]
            for d in range(devices):
                if visits.allowed[group, d]:
                    for k in range(visits.member_starts[group], visits.member_starts[group + 1]):
                        work.device[visits.members[k]] = d
                    cost, _ = _score_placement(rules, work.device, simulators, number)
                    number += 1
                    costs[item, d] = min(costs[item, d], cost)


@compiled_part
def _pick_highest(amounts, picked):
    """Fill `picked` with the indices of the highest amounts; the first of equal ones."""
    for t in range(len(picked)):
        best = -1
        for k in range(len(amounts)):
            is_new = True
            for earlier in range(t):
                is_new = is_new and picked[earlier] != k
            if is_new and (best < 0 or amounts[k] > amounts[best]):
                best = k
        picked[t] = best


@in_place
def fill_relations(order, sources, source_starts, relation):
    """Fill `relation` [node, node]: ancestors and descendants of each node; O(N E).

    `source_starts` and `sources` are the predecessors of each node.
    """
    count = len(order)
    for node in range(count):
        for other in range(count):
            relation[node, other] = 3
    for position in range(count):
        node = order[position]
        for k in range(source_starts[node], source_starts[node + 1]):
            source = sources[k]
            relation[node, source] = 1
            for other in range(count):
                if relation[source, other] == 1:
                    relation[node, other] = 1
    for node in range(count):
        relation[node, node] = 0
        for other in range(count):
            if relation[node, other] == 1:
                relation[other, node] = 2
