"""Compiled loops of `guided`: means over neighbours, and list schedules whose devices a network chooses.

One small network scores each device on its own, so that the number and the order of devices do not matter. Groups are
decided where their first node is placed.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onnxplace.graph.op_graph import Bools, Floats, Ints, Longs
from onnxplace.passes.placement.search.heft_kernels import arrival_time, settle_group, take_processors
from onnxplace.utils.jit import compiled_part, in_place
from onnxplace_learned.policies.placeto_kernels import Singles

# Features of a device for a group that is being placed.
DEVICE_FEATURES = 10


class Choice(NamedTuple):
    """What the network needs to choose devices, of one problem and one policy."""

    group_hidden: Singles
    """[group, hidden]: the part of the hidden layer that depends on the group alone."""
    messages: Singles
    """[neighbour pair, width]: what a group hears of a neighbour that is placed already."""
    pair_starts: Longs
    """Per group, where its neighbours start."""
    neighbours: Ints
    own_weights: Singles
    """[width, hidden]: of what neighbours on the device say."""
    all_weights: Singles
    """[width, hidden]: of what neighbours on all devices say."""
    feature_weights: Singles
    """[feature, hidden]."""
    output: Singles
    """[hidden]."""


class ListInputs(NamedTuple):
    """A problem as list schedules read it."""

    order: Ints
    """The nodes in the order in which they are placed."""
    group: Ints
    pinned: Ints
    weight_starts: Longs
    """Per group, where its weights start."""
    weights: Ints
    weight_bytes: Longs
    least_seconds: Floats
    """Per node, on its fastest device."""
    group_seconds: Floats
    """Per group, on the fastest device."""
    fair_seconds: Floats
    """One entry: the work of each device if all had the same."""


class ScheduleTrace(NamedTuple):
    """The decisions of a list schedule; groups without a decision keep what was there before."""

    features: Singles
    """[group, device, feature], as they were when the group was placed."""
    allowed: Bools
    """[group, device]: whether the group had room there."""
    rank: Ints
    """Per group: the number of decisions before its own; -1 without one."""
    choice: Ints
    """Per group."""


class ListScratch(NamedTuple):
    """Arrays of one list schedule."""

    work: Floats
    """Per device: seconds of the groups there."""
    begin: Floats
    finish: Floats
    incoming: Floats
    needed: Longs
    heard: Singles
    """[device, width]: the sum of what neighbours on the device say."""
    heard_by_all: Singles
    hidden: Singles
    scores: Singles


@in_place
def mean_neighbours(starts, items, embedding, means):
    """Fill the mean embedding of the neighbours of each node: rows of `means`; zero without any."""
    for node in range(len(starts) - 1):
        first, end = starts[node], starts[node + 1]
        for feature in range(embedding.shape[1]):
            means[node, feature] = np.float32(0.0)
        for k in range(first, end):
            for feature in range(embedding.shape[1]):
                means[node, feature] += embedding[items[k], feature]
        if end > first:
            scale = np.float32(1.0 / (end - first))
            for feature in range(embedding.shape[1]):
                means[node, feature] *= scale


@in_place
def fill_levels(wiring, seconds, transfer, top, bottom):
    """Fill the longest path to the start of each node, and from its start to the end; `transfer` is per value."""
    for position in range(len(wiring.order)):
        node = wiring.order[position]
        top[node] = 0.0
        for k in range(wiring.in_starts[node], wiring.in_starts[node + 1]):
            value = wiring.ins[k]
            producer = wiring.producer[value]
            if producer >= 0:
                top[node] = max(top[node], top[producer] + seconds[producer] + transfer[value])
    for position in range(len(wiring.order) - 1, -1, -1):
        node = wiring.order[position]
        below = 0.0
        for k in range(wiring.out_starts[node], wiring.out_starts[node + 1]):
            value = wiring.outs[k]
            for j in range(wiring.read_starts[value], wiring.read_starts[value + 1]):
                below = max(below, bottom[wiring.readers[j]] + transfer[value])
        bottom[node] = below + seconds[node]


@in_place
def schedule_by_policy(wiring, inputs, choice, draws, forced, plan, scratch, trace):
    """Place each node where its group is; the network chooses the device of a group at its first node.

    A draw per decision, from 0 to 1, samples the choice; a negative one takes the device of the highest score. With
    `forced` devices of groups (-1 for none), those are taken, and the decisions only recorded. Returns the number of
    decisions, or -1 if a group has no room anywhere.
    """
    # Pinned groups take their memory first.
    for g in range(len(inputs.pinned)):
        if inputs.pinned[g] >= 0:
            settle_group(np.int64(inputs.pinned[g]), g, inputs.weight_starts, inputs.weights, inputs.weight_bytes, plan)
    devices = len(plan.devices)
    for d in range(devices):
        scratch.work[d] = 0.0
    decisions = 0
    for position in range(len(inputs.order)):
        node = inputs.order[position]
        g = np.int64(inputs.group[node])
        if plan.home[g] < 0:
            if not _fill_device_features(wiring, inputs, node, g, plan, scratch, trace):
                return -1
            trace.rank[g] = decisions
            best = np.int64(forced[g])
            if best < 0 or not trace.allowed[g, best]:
                _score_devices(choice, g, plan, scratch, trace)
                best = _choose_device(draws[decisions], g, devices, scratch, trace)
            trace.choice[g] = best
            settle_group(best, g, inputs.weight_starts, inputs.weights, inputs.weight_bytes, plan)
            scratch.work[best] += inputs.group_seconds[g]
            decisions += 1
        home = np.int64(plan.home[g])
        # Book the transfers to the device, which other nodes then wait for.
        begin = max(arrival_time(wiring, node, home, plan, np.bool_(True)), plan.devices[home].free)
        plan.device[node] = home
        plan.start[node] = begin
        plan.finish[node] = begin + wiring.seconds[home, node]
        take_processors(wiring, home, plan.finish[node], plan)
    return decisions


@compiled_part
def _fill_device_features(wiring, inputs, node, g, plan, scratch, trace):
    """Fill the features of each device for a group whose first node is `node`; return whether it fits anywhere."""
    devices = len(plan.devices)
    earliest, first_finish, mean_free, mean_work = np.inf, np.inf, 0.0, 0.0
    is_possible = False
    for d in range(devices):
        # Weights that the device does not have yet.
        needed_bytes = 0
        for k in range(inputs.weight_starts[g], inputs.weight_starts[g + 1]):
            if not plan.stored[d, inputs.weights[k]]:
                needed_bytes += inputs.weight_bytes[inputs.weights[k]]
        scratch.needed[d] = needed_bytes
        trace.allowed[g, d] = needed_bytes <= plan.devices[d].free_bytes
        is_possible = is_possible or trace.allowed[g, d]
        arrival = arrival_time(wiring, node, d, plan, np.bool_(False))
        scratch.begin[d] = max(arrival, plan.devices[d].free)
        scratch.finish[d] = scratch.begin[d] + wiring.seconds[d, node]
        # The time of the transfers alone, which other transfers do not delay.
        incoming = 0.0
        for k in range(wiring.in_starts[node], wiring.in_starts[node + 1]):
            value = wiring.ins[k]
            producer = wiring.producer[value]
            if producer >= 0 and plan.device[producer] != d and plan.arrival[value, d] < 0.0:
                source = plan.device[producer]
                incoming += wiring.latency[source, d] + wiring.value_bytes[value] * wiring.per_byte[source, d]
        scratch.incoming[d] = incoming
        earliest = min(earliest, scratch.begin[d])
        first_finish = min(first_finish, scratch.finish[d])
        mean_free += plan.devices[d].free / devices
        mean_work += scratch.work[d] / devices
    own, fair = inputs.least_seconds[node] + 1e-30, inputs.fair_seconds[0]
    for d in range(devices):
        delay = scratch.finish[d] - first_finish
        wait = scratch.begin[d] - plan.devices[d].free
        row = trace.features[g, d]
        row[0] = np.float32(delay / (delay + own))
        row[1] = np.float32(delay / (delay + 0.05 * fair))
        row[2] = np.float32(wait / (wait + 0.05 * fair))
        row[3] = np.float32(_squash((plan.devices[d].free - mean_free) / fair))
        row[4] = np.float32(_squash((scratch.work[d] - mean_work) / fair))
        row[5] = np.float32(1.0 if scratch.work[d] == 0.0 else 0.0)
        row[6] = np.float32(own / (wiring.seconds[d, node] + 1e-30))
        row[7] = (
            np.float32(scratch.needed[d] / (plan.devices[d].free_bytes + 1.0))
            if trace.allowed[g, d]
            else np.float32(1.0)
        )
        row[8] = np.float32(scratch.incoming[d] / (scratch.incoming[d] + own))
        row[9] = np.float32(scratch.incoming[d] / (scratch.incoming[d] + 0.05 * fair))
    return is_possible


@compiled_part
def _squash(amount):
    """Map a number to one from -1 to 1."""
    return amount / (1.0 + abs(amount))


@compiled_part
def _score_devices(choice, g, plan, scratch, trace):
    """Fill the score of each device for group `g`."""
    devices, width, hidden = len(plan.devices), len(choice.own_weights), len(choice.output)
    for w in range(width):
        scratch.heard_by_all[w] = np.float32(0.0)
        for d in range(devices):
            scratch.heard[d, w] = np.float32(0.0)
    # Neighbours that have a device speak for it.
    for k in range(choice.pair_starts[g], choice.pair_starts[g + 1]):
        d = plan.home[choice.neighbours[k]]
        if d >= 0:
            for w in range(width):
                scratch.heard[d, w] += choice.messages[k, w]
                scratch.heard_by_all[w] += choice.messages[k, w]
    for d in range(devices):
        for h in range(hidden):
            scratch.hidden[h] = choice.group_hidden[g, h]
        for w in range(width):
            own, others = scratch.heard[d, w], scratch.heard_by_all[w]
            for h in range(hidden):
                scratch.hidden[h] += own * choice.own_weights[w, h] + others * choice.all_weights[w, h]
        for f in range(DEVICE_FEATURES):
            amount = trace.features[g, d, f]
            for h in range(hidden):
                scratch.hidden[h] += amount * choice.feature_weights[f, h]
        score = np.float32(0.0)
        for h in range(hidden):
            score += max(scratch.hidden[h], np.float32(0.0)) * choice.output[h]
        scratch.scores[d] = score


@compiled_part
def _choose_device(draw, g, devices, scratch, trace):
    """Return the device of the highest score, or sample one from the scores; only devices with room."""
    best = np.int64(-1)
    for d in range(devices):
        if trace.allowed[g, d] and (best < 0 or scratch.scores[d] > scratch.scores[best]):
            best = np.int64(d)
    if draw < 0.0:
        return best
    total, highest = 0.0, scratch.scores[best]
    for d in range(devices):
        if trace.allowed[g, d]:
            total += np.exp(np.float64(scratch.scores[d] - highest))
    rest = draw * total
    for d in range(devices):
        if trace.allowed[g, d]:
            rest -= np.exp(np.float64(scratch.scores[d] - highest))
            if rest < 0.0:
                return np.int64(d)
    return best
