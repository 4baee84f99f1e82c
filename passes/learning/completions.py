"""What each choice of an episode is worth if good placements complete it: the lessons of Placeto's policy."""

from __future__ import annotations

from itertools import islice, permutations

import numpy as np

from onnxplace.graph import Floats, Ints, Longs
from onnxplace.passes.learning.environment import Environment, Episode
from onnxplace.passes.learning.episode_kernels import CompletionWork, score_completions
from onnxplace.problem import PlacementProblem

# Permutations of alike devices that a placement is completed with, and how many are tried at a step.
MAX_PERMUTATIONS, MAX_TRIED = 24, 4


def permute_placement(problem: PlacementProblem, device: Ints) -> Ints:
    """Return a placement and those that differ from it only by an exchange of alike devices: [placement, node].

    Pinned nodes stay. At most `MAX_PERMUTATIONS` are returned, each once.
    """
    latency, per_byte = problem.target.link_arrays()
    limit, seconds = np.asarray(problem.limit_bytes), problem.seconds
    pinned = problem.pinned[problem.group]
    placements: dict[bytes, Ints] = {}
    for order in islice(permutations(range(len(limit))), 100 * MAX_PERMUTATIONS):
        to = np.array(order, dtype=np.int32)
        is_alike = (
            (limit[to] == limit).all()
            and np.allclose(seconds[to], seconds)
            and np.allclose(latency[np.ix_(to, to)], latency)
            and np.allclose(per_byte[np.ix_(to, to)], per_byte)
        )
        if is_alike:
            placement = np.where(pinned >= 0, pinned, to[device]).astype(np.int32)
            placements.setdefault(placement.tobytes(), placement)
        if len(placements) == MAX_PERMUTATIONS:
            break
    return np.stack(list(placements.values()))


def complete_steps(environment: Environment, episode: Episode, steps: Longs, completions: Ints) -> Floats:
    """Return the cost of each device at some steps of an episode, which increase: [step, device]."""
    problem = environment.problem
    count, devices = len(problem.graph), len(problem.target.devices)
    work = CompletionWork(
        agreement=np.zeros(len(completions)),
        tried=np.zeros(min(len(completions), MAX_TRIED), dtype=np.int32),
        visited=np.zeros(count, dtype=np.uint8),
        device=np.zeros(count, dtype=np.int32),
    )
    costs = np.zeros((len(steps), devices))
    score_completions(
        environment.visits,
        environment.rules,
        episode.trajectory,
        steps,
        completions,
        problem.seconds.mean(axis=0),
        environment.new_simulators(),
        work,
        costs,
    )
    return costs
