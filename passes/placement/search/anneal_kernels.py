"""Simulated annealing of a placement: move connected regions of the graph between devices at random.

A region grows around a node that delays the step: over readers, over producers or both. It moves to a device where it
would wait less. Most proposals are dropped unsimulated, since a path through the new placement is already too long.

The state has one placement, which proposals change in place, and what `undo` needs to take the last one back. The
others are scored by a whole simulation: a single move can shift the start of every later node. The critical chain of
the last accepted placement says which nodes to move.
"""

# Compiled loops get their types from numba.
# mypy: allow-untyped-defs, allow-incomplete-defs, disable-error-code="assignment, misc"

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from onnxplace.graph.op_graph import Bools, Csr, Floats, Ints, Longs
from onnxplace.passes.placement.search.decode_kernels import AHEAD, FROM_THERE, decode
from onnxplace.problem import PlacementProblem
from onnxplace.utils.jit import compiled_part, in_place, linear_in_place
from onnxplace.utils.random_kernels import random_uniform


class Atoms(NamedTuple):
    """The groups of a problem, which move as a whole, and their neighbours."""

    atom_of: Ints
    """The atom of each node."""
    member_starts: Longs
    members: Ints
    neighbour_starts: Longs
    neighbours: Ints
    """Neighbours of each atom, its readers first."""
    reader_count: Longs
    """How many of the neighbours are readers."""
    pinned: Ints
    refused: Bools
    """[device, atom]: whether the device does not take the atom."""


class AnnealState(NamedTuple):
    """The state of one annealing search; arrays have one entry per node unless noted."""

    device: Ints
    bias: Floats
    """Added to the urgency of each node."""
    chain: Ints
    """The critical chain: nodes that decide the makespan, each delayed by the next, the last to finish first."""
    chain_kind: Ints
    stamp: Longs
    """Per atom: the number of the proposal that last saw it."""
    region: Ints
    """Atoms that the proposal moves."""
    old_device: Ints
    """Per atom of the region, its device before the proposal; the frontier while the region grows."""
    times: Floats
    """Seconds, indexed by `ENERGY`, `MAKESPAN`, `BEST_MAKESPAN`, `NEW_MAKESPAN` and `NEW_TRAFFIC`."""
    counts: Longs
    """Indexed by `CHAIN_LENGTH`, `PROPOSALS`, `ACCEPTED`, `REGION_SIZE`, and `BIASED_NODE` (-1 for none)."""
    saved_bias: Floats
    """One entry: the bias before the proposal."""
    rng: Longs


ENERGY, MAKESPAN, BEST_MAKESPAN, NEW_MAKESPAN, NEW_TRAFFIC = range(5)
CHAIN_LENGTH, PROPOSALS, ACCEPTED, REGION_SIZE, BIASED_NODE = range(5)
# Share of proposals that start from a node on the critical chain; the others start anywhere.
CRITICAL_SHARE = 0.75
# Share of regions that stay within the device where they start.
LOYAL_SHARE = 0.85
# The chance of the second of two nodes, of which nothing says that moving it is better than moving the first.
EVEN_CHANCE = 0.5
# Share of the proposals for a node that waited for its device which run it earlier: that costs no transfers, but only
# helps if other nodes can wait. The rest move one of the two nodes.
BIAS_SHARE = 0.3
# A bias changes by a part of the step from -7 % to +13 %: more often up than down, since the node came too late.
BIAS_RANGE, BIAS_DOWN = 0.1, 0.7
# Share of these proposals that return to the plain bottom level instead, so that biases do not add up for ever.
BIAS_RESET_SHARE = 0.2
# Share of regions that go to a device that they border on, which saves a transfer; the others may go to any.
BORDER_SHARE = 0.6
# Regions hold at most the atoms divided by this: to move more than half is to move the others the other way. The limit
# is at least 2, as sizes are drawn by its logarithm.
MAX_REGION_DIVISOR, MIN_REGION_LIMIT = 3.0, 2.0
# Share of the transfer time that counts as time of the step: of equal steps, the one with least traffic wins.
TRAFFIC_WEIGHT = 0.01


def build_atoms(problem: PlacementProblem) -> Atoms:
    """Return the atoms of a problem: its groups."""
    graph, group, count = problem.graph, problem.group.astype(np.int32), len(problem.pinned)
    members = Csr.grouped(group, np.arange(len(graph), dtype=np.int32), count)
    predecessors = graph.predecessors
    source, reader = group[predecessors.items], group[predecessors.rows]
    crossing = source != reader
    readers = Csr.grouped(source[crossing], reader[crossing], count)
    neighbours = Csr.grouped(
        np.concatenate([readers.rows, reader[crossing]]), np.concatenate([readers.items, source[crossing]]), count
    )
    return Atoms(
        atom_of=group,
        member_starts=members.starts,
        members=members.items,
        neighbour_starts=neighbours.starts,
        neighbours=neighbours.items,
        reader_count=np.diff(readers.starts),
        pinned=problem.pinned.astype(np.int32),
        refused=problem.refused_groups,
    )


def start_state(device: Ints, bias: Floats, count: int, seed: int) -> AnnealState:
    """Return the state of a search that begins from a placement, with `count` atoms."""
    nodes = len(device)
    first = np.random.SeedSequence(seed).generate_state(1, np.uint64)
    return AnnealState(
        device=device.astype(np.int32),
        bias=bias.copy(),
        chain=np.zeros(nodes, dtype=np.int32),
        chain_kind=np.zeros(nodes, dtype=np.int32),
        stamp=np.zeros(count, dtype=np.int64),
        region=np.zeros(count, dtype=np.int32),
        old_device=np.zeros(count, dtype=np.int32),
        times=np.full(5, np.inf),
        counts=np.array([0, 0, 0, 0, -1]),
        saved_bias=np.zeros(1),
        rng=(first | np.uint64(1)).view(np.int64),  # the generator needs a seed other than zero
    )


@compiled_part
def _random_below(rng, count):
    """Draw an integer uniformly from 0 to `count` - 1."""
    return min(np.int64(random_uniform(rng) * count), count - 1)


@compiled_part
def _device_of_atom(device, members, member_starts, atom):
    """Return the device of an atom: that of its first node."""
    # It takes only the arrays that it needs: numba compiles the passing of each array of a tuple.
    return device[members[member_starts[atom]]]


@compiled_part
def _grow_region(atoms, state, seed, largest):
    """Collect a region around an atom; return its size and a device that it borders on, or -1."""
    # Draw what kind of region: sizes are log-uniform, so that most are small and some hold a third of the graph.
    origin = _device_of_atom(state.device, atoms.members, atoms.member_starts, seed)
    max_size = np.int64(np.exp(random_uniform(state.rng) * np.log(largest)))
    direction = _random_below(state.rng, np.int64(3))
    loyal = random_uniform(state.rng) < LOYAL_SHARE
    # Marks are numbers of proposals, so that nothing has to be cleared between them.
    mark = state.counts[PROPOSALS]
    state.stamp[seed] = mark
    state.old_device[0] = seed  # the frontier shares this array with the old devices
    # Grow by random atoms of the frontier, until the region is large enough or surrounded.
    frontier_size, size, border = 1, 0, -1
    while frontier_size > 0 and size < max_size:
        pick = _random_below(state.rng, frontier_size)
        atom = state.old_device[pick]
        frontier_size -= 1
        state.old_device[pick] = state.old_device[frontier_size]
        if atoms.pinned[atom] >= 0:
            continue
        state.region[size] = atom
        size += 1
        # One direction follows readers only, another producers only, the third both.
        first, end = atoms.neighbour_starts[atom], atoms.neighbour_starts[atom + 1]
        if direction == 1:
            end = first + atoms.reader_count[atom]
        elif direction == 2:
            first += atoms.reader_count[atom]
        for n in range(first, end):
            neighbour = atoms.neighbours[n]
            if state.stamp[neighbour] != mark:
                state.stamp[neighbour] = mark
                neighbour_device = _device_of_atom(state.device, atoms.members, atoms.member_starts, neighbour)
                if neighbour_device != origin:
                    border = neighbour_device
                if neighbour_device == origin or not loyal:
                    state.old_device[frontier_size] = neighbour
                    frontier_size += 1
    return size, border


@in_place
def propose(devices, atoms, state):
    """Change the placement, or the urgency of a node, at random; `undo` reverts it."""
    state.counts[PROPOSALS] += 1
    state.counts[REGION_SIZE] = 0
    state.counts[BIASED_NODE] = -1
    # Choose where the region starts. On the critical chain, what delayed the node says which move may help.
    seed, target = np.int64(-1), -1
    if state.counts[CHAIN_LENGTH] > 0 and random_uniform(state.rng) < CRITICAL_SHARE:
        link = _random_below(state.rng, state.counts[CHAIN_LENGTH])
        seed = np.int64(state.chain[link])
        if state.chain_kind[link] == FROM_THERE:
            # It waited for a transfer: bring producer and reader together, on either device.
            other = state.chain[link + 1]
            target = state.device[other]
            if random_uniform(state.rng) < EVEN_CHANCE:
                seed, target = np.int64(other), state.device[seed]
        elif state.chain_kind[link] == AHEAD:
            # It waited for its device: run it earlier, or move one of the two nodes away.
            if random_uniform(state.rng) < BIAS_SHARE:
                state.counts[BIASED_NODE] = seed
                state.saved_bias[0] = state.bias[seed]
                state.bias[seed] += (2 * random_uniform(state.rng) - BIAS_DOWN) * BIAS_RANGE * state.times[MAKESPAN]
                if random_uniform(state.rng) < BIAS_RESET_SHARE:
                    state.bias[seed] = 0.0
                return
            if random_uniform(state.rng) < EVEN_CHANCE:
                seed = np.int64(state.chain[link + 1])
    else:
        seed = _random_below(state.rng, len(state.device))
    origin = state.device[seed]
    largest = max(MIN_REGION_LIMIT, len(atoms.pinned) / MAX_REGION_DIVISOR)
    size, border = _grow_region(atoms, state, atoms.atom_of[seed], largest)
    # Choose the device: a neighbour's, which saves a transfer, or any other one.
    if target < 0:
        if border >= 0 and random_uniform(state.rng) < BORDER_SHARE:
            target = border
        else:
            target = _random_below(state.rng, devices - 1)
            if target >= origin:
                target += 1
    # Move the region, but for what the device refuses, and remember where each atom was for `undo`.
    moved = 0
    for r in range(size):
        atom = state.region[r]
        if atoms.refused[target, atom]:
            continue
        state.region[moved] = atom
        state.old_device[moved] = _device_of_atom(state.device, atoms.members, atoms.member_starts, atom)
        for m in range(atoms.member_starts[atom], atoms.member_starts[atom + 1]):
            state.device[atoms.members[m]] = target
        moved += 1
    state.counts[REGION_SIZE] = moved


@linear_in_place
def undo(atoms, state):
    """Revert the last proposal."""
    if state.counts[BIASED_NODE] >= 0:
        state.bias[state.counts[BIASED_NODE]] = state.saved_bias[0]
    for r in range(state.counts[REGION_SIZE]):
        atom = state.region[r]
        for m in range(atoms.member_starts[atom], atoms.member_starts[atom + 1]):
            state.device[atoms.members[m]] = state.old_device[r]


@linear_in_place
def accept(scratch, state):
    """Accept the last proposal, whose simulation `scratch` holds; return whether it is the best so far."""
    state.counts[ACCEPTED] += 1
    state.times[MAKESPAN] = state.times[NEW_MAKESPAN]
    state.times[ENERGY] = state.times[NEW_MAKESPAN] + state.times[NEW_TRAFFIC]
    # Trace the critical chain back from the node that finishes last.
    last = 0
    for node in range(len(state.device)):
        if scratch.finish[node] > scratch.finish[last]:
            last = node
    # Each node names what delayed it, up to one that nothing delayed.
    size, node = 0, last
    while node >= 0:
        state.chain[size] = node
        state.chain_kind[size] = scratch.blame_kind[node]
        size += 1
        node = scratch.blame[node]
    state.counts[CHAIN_LENGTH] = size
    if state.times[NEW_MAKESPAN] < state.times[BEST_MAKESPAN]:
        state.times[BEST_MAKESPAN] = state.times[NEW_MAKESPAN]
        return True
    return False


@in_place
def anneal(
    wiring,
    scratch,
    atoms,
    state,
    level_weight,
    proposals,
    start_temperature,
    progress,
    step,
    ask_before,
    best_device,
    best_bias,
):
    """Try some proposals and accept those that pass at the current temperature; the best goes to `best_*`.

    The temperature, in seconds, is `start_temperature * (1 - progress)^2`; each proposal adds `step` to the progress.
    With `ask_before`, it returns True early at each proposal that passes, for the caller to `accept` or to `undo`.
    """
    # The mean over devices, since transfers between different pairs of them overlap.
    weight = TRAFFIC_WEIGHT / len(wiring.latency)
    end = state.counts[PROPOSALS] + proposals
    while state.counts[PROPOSALS] < end:
        propose(len(wiring.latency), atoms, state)
        progress += step
        if state.counts[REGION_SIZE] == 0 and state.counts[BIASED_NODE] < 0:
            continue
        # The acceptable energy is drawn first (Metropolis): the simulation stops as soon as it exceeds that.
        # Quadratic cooling: the second half of the proposals runs below a quarter of the first temperature.
        temperature = start_temperature * max(0.0, 1.0 - progress) ** 2
        limit = state.times[ENERGY] - temperature * np.log(max(random_uniform(state.rng), 1e-300))
        state.times[NEW_MAKESPAN], traffic = decode(wiring, state.device, state.bias, level_weight, limit, scratch)
        state.times[NEW_TRAFFIC] = weight * traffic
        if state.times[NEW_MAKESPAN] + state.times[NEW_TRAFFIC] > limit:
            undo(atoms, state)
        elif ask_before:
            return True
        elif accept(scratch, state):
            for node in range(len(best_bias)):  # numba takes seconds to compile a copy of slices
                best_device[node], best_bias[node] = state.device[node], state.bias[node]
    return False
