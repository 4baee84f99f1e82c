"""Move connected regions of a placed graph between devices, at random, keeping what helps: simulated annealing.

A region grows around a node that the step waits for, over readers, over producers or both, and goes where it would
wait less. Most proposals are dropped unsimulated, since a path through the new placement is already too long.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onnxplace.graph import Csr, Floats, Ints, Longs
from onnxplace.passes.placement.search.decode_kernels import AHEAD, FROM_THERE, decode
from onnxplace.problem import PlacementProblem
from onnxplace.utils import compiled_part, in_place


class Atoms(NamedTuple):
    """What moves as a whole: the groups of a problem, and how values tie them together."""

    of: Ints
    """The atom of each node."""
    member_starts: Longs
    members: Ints
    next_starts: Longs
    nexts: Ints
    """Neighbours of each atom, those that read from it first."""
    reader_count: Longs
    """How many of the neighbours read from it."""
    pinned: Ints


class Walk(NamedTuple):
    """Where a search is; arrays are of node length unless said otherwise."""

    device: Ints
    bias: Floats
    """Added to the urgency of each node."""
    chain: Ints
    """The nodes that decide the makespan, each blaming the next, the last to finish first."""
    chain_kind: Ints
    stamp: Longs
    """Per atom: the number of the proposal that last saw it."""
    region: Ints
    """Per atom: those that the proposal moves."""
    before: Ints
    """Per atom: where those of the region were."""
    times: Floats
    """[energy, makespan, best makespan, makespan proposed, transfers proposed], seconds."""
    counts: Longs
    """[chain length, proposals, taken, size of the region, node whose bias changed or -1]."""
    saved_bias: Floats
    """[bias before the proposal]."""
    rng: Longs


ENERGY, MAKESPAN, BEST, NEW, TRAFFIC = range(5)
CHAIN, TRIED, TAKEN, REGION, BIASED = range(5)
# How often a proposal starts from a node on the critical chain; the others start anywhere.
CRITICAL = 0.75
# How often a region may not leave the device it starts on.
LOYAL = 0.85
# What part of the time that transfers take counts as if it were time of the step: least traffic among equals.
TRAFFIC_WEIGHT = 0.01


def atoms(asked: PlacementProblem) -> Atoms:
    """Return what moves as a whole in a problem."""
    graph, group, count = asked.graph, asked.group.astype(np.int32), len(asked.pinned)
    members = Csr.grouped(group, np.arange(len(graph), dtype=np.int32), count)
    before = graph.predecessors
    source, reader = group[before.items], group[before.rows]
    apart = source != reader
    after = Csr.grouped(source[apart], reader[apart], count)
    both = Csr.grouped(np.concatenate([after.rows, reader[apart]]), np.concatenate([after.items, source[apart]]), count)
    return Atoms(
        group,
        members.starts,
        members.items,
        both.starts,
        both.items,
        np.diff(after.starts),
        asked.pinned.astype(np.int32),
    )


def walk(device: Ints, bias: Floats, count: int, seed: int) -> Walk:
    """Return the beginning of a search from a placement, with `count` atoms."""

    def ints(length: int) -> Ints:
        return np.zeros(length, dtype=np.int32)

    nodes = len(device)
    state = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    return Walk(
        device.astype(np.int32), bias.copy(), ints(nodes), ints(nodes), np.zeros(count, dtype=np.int64), ints(count),
        ints(count), np.full(5, np.inf), np.array([0, 0, 0, 0, -1]), np.zeros(1), (state | np.uint64(1)).view(np.int64),
    )  # fmt: skip


@compiled_part
def _uniform(rng):
    """Draw from [0, 1): xorshift64 (Marsaglia 2003)."""
    x = np.uint64(rng[0])
    x ^= x << np.uint64(13)
    x ^= x >> np.uint64(7)
    x ^= x << np.uint64(17)
    rng[0] = np.int64(x)
    return np.float64(x >> np.uint64(11)) * (1.0 / 9007199254740992.0)


@compiled_part
def _below(rng, count):
    return min(np.int64(_uniform(rng) * count), count - 1)


@compiled_part
def _home(device, members, starts, atom):  # only what it needs: numba compiles the passing of each array of a tuple
    return device[members[starts[atom]]]


@compiled_part
def _grow(a, k, seed, largest):
    """Collect a region around an atom; returns its size and a device that it borders on, or -1."""
    origin = _home(k.device, a.members, a.member_starts, seed)
    wanted = np.int64(np.exp(_uniform(k.rng) * np.log(largest)))
    direction = _below(k.rng, 3)
    loyal = _uniform(k.rng) < LOYAL
    mark = k.counts[TRIED]
    k.stamp[seed] = mark
    k.before[0] = seed  # the frontier, until the region is known
    waiting, size, border = 1, 0, -1
    while waiting > 0 and size < wanted:
        pick = _below(k.rng, waiting)
        atom = k.before[pick]
        waiting -= 1
        k.before[pick] = k.before[waiting]
        if a.pinned[atom] >= 0:
            continue
        k.region[size] = atom
        size += 1
        first, end = a.next_starts[atom], a.next_starts[atom + 1]
        if direction == 1:
            end = first + a.reader_count[atom]
        elif direction == 2:
            first += a.reader_count[atom]
        for n in range(first, end):
            other = a.nexts[n]
            if k.stamp[other] != mark:
                k.stamp[other] = mark
                there = _home(k.device, a.members, a.member_starts, other)
                if there != origin:
                    border = there
                if there == origin or not loyal:
                    k.before[waiting] = other
                    waiting += 1
    return size, border


@in_place
def propose(devices, a, k):
    """Alter the walk's placement, or the urgency of a node; `undo` takes it back."""
    k.counts[TRIED] += 1
    k.counts[REGION] = 0
    k.counts[BIASED] = -1
    seed, target = np.int64(-1), -1
    if k.counts[CHAIN] > 0 and _uniform(k.rng) < CRITICAL:
        c = _below(k.rng, k.counts[CHAIN])
        seed = np.int64(k.chain[c])
        if k.chain_kind[c] == FROM_THERE:
            other = k.chain[c + 1]
            target = k.device[other]
            if _uniform(k.rng) < 0.5:
                seed, target = np.int64(other), k.device[seed]
        elif k.chain_kind[c] == AHEAD:
            if _uniform(k.rng) < 0.3:
                k.counts[BIASED] = seed
                k.saved_bias[0] = k.bias[seed]
                k.bias[seed] += (2 * _uniform(k.rng) - 0.7) * 0.1 * k.times[MAKESPAN]
                if _uniform(k.rng) < 0.2:
                    k.bias[seed] = 0.0
                return
            if _uniform(k.rng) < 0.5:
                seed = np.int64(k.chain[c + 1])
    else:
        seed = _below(k.rng, len(k.device))
    origin = k.device[seed]
    size, border = _grow(a, k, a.of[seed], max(2.0, len(a.pinned) / 3.0))
    if target < 0:
        if border >= 0 and _uniform(k.rng) < 0.6:
            target = border
        else:
            target = _below(k.rng, devices - 1)
            if target >= origin:
                target += 1
    for r in range(size):
        atom = k.region[r]
        k.before[r] = _home(k.device, a.members, a.member_starts, atom)
        for m in range(a.member_starts[atom], a.member_starts[atom + 1]):
            k.device[a.members[m]] = target
    k.counts[REGION] = size


@in_place
def undo(a, k):
    """Take the last proposal back."""
    if k.counts[BIASED] >= 0:
        k.bias[k.counts[BIASED]] = k.saved_bias[0]
    for r in range(k.counts[REGION]):
        atom = k.region[r]
        for m in range(a.member_starts[atom], a.member_starts[atom + 1]):
            k.device[a.members[m]] = k.before[r]


@in_place
def take(s, k):
    """Go on from the last proposal, which `s` holds the simulation of; returns whether it is the best so far."""
    k.counts[TAKEN] += 1
    k.times[MAKESPAN] = k.times[NEW]
    k.times[ENERGY] = k.times[NEW] + k.times[TRAFFIC]
    last = 0
    for node in range(len(k.device)):
        if s.finish[node] > s.finish[last]:
            last = node
    size, node = 0, last
    while node >= 0:
        k.chain[size] = node
        k.chain_kind[size] = s.blame_kind[node]
        size += 1
        node = s.blame[node]
    k.counts[CHAIN] = size
    if k.times[NEW] < k.times[BEST]:
        k.times[BEST] = k.times[NEW]
        return True
    return False


@in_place
def anneal(w, s, a, k, lean, proposals, hot, progress, step, ask, best_device, best_bias):
    """Try so many proposals, taking those that pass at the temperature of the moment; the best goes to `best_*`.

    The temperature, in seconds, is `hot * (1 - progress)^2`, and each proposal makes `step` progress. With `ask`,
    returns early, True, at each one that would be taken, for the caller to `take` or to `undo` it.
    """
    weight = TRAFFIC_WEIGHT / len(w.latency)
    end = k.counts[TRIED] + proposals
    while k.counts[TRIED] < end:
        propose(len(w.latency), a, k)
        progress += step
        if k.counts[REGION] == 0 and k.counts[BIASED] < 0:
            continue
        temperature = hot * max(0.0, 1.0 - progress) ** 2
        limit = k.times[ENERGY] - temperature * np.log(max(_uniform(k.rng), 1e-300))
        k.times[NEW], traffic = decode(w, k.device, k.bias, lean, limit, s)
        k.times[TRAFFIC] = weight * traffic
        if k.times[NEW] + k.times[TRAFFIC] > limit:
            undo(a, k)
        elif ask:
            return True
        elif take(s, k):
            for node in range(len(best_bias)):  # numba takes seconds to compile a copy from slice to slice
                best_device[node], best_bias[node] = k.device[node], k.bias[node]
    return False
