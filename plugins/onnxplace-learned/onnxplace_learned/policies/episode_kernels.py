"""Compiled episodes of Placeto: visit every group once, choose its device, and simulate the new placement."""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from onnxplace.graph import Bools, Floats, Ints, Longs
from onnxplace.passes.placement.search import Scratch, Wiring, decode
from onnxplace.simulation import BatchGraph, BatchScratch, MemoryScratch, peak_bytes_of_one, simulate_one
from onnxplace.utils import compiled_part, in_place
from onnxplace_learned.policies.policy_kernels import Singles, fill_features, score_devices

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
