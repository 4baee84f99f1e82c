"""Variants of placement problems: other links, and devices of unlike speed."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from onnxplace.problem import PlacementProblem

# How much slower than the first device another one may be, and how much faster or slower links may become.
MAX_SLOWDOWN, MAX_LINK_FACTOR = 3.0, 4.0


def vary_problem(problem: PlacementProblem, seed: int) -> PlacementProblem:
    """Return a problem with other links and speeds of devices, drawn from a seed; of three seeds, one changes nothing.

    >>> from onnxplace.testing import random_state
    >>> from onnxplace.problem import placement_problem
    >>> problem = placement_problem(random_state(0, nodes=5, devices=2))
    >>> vary_problem(problem, 3) is problem
    True
    """
    rng, kind = np.random.default_rng([seed, 2]), seed % 3
    if kind == 0:
        return problem
    target, seconds = problem.target, problem.seconds
    factor = float(np.exp(rng.uniform(-np.log(MAX_LINK_FACTOR), np.log(MAX_LINK_FACTOR))))
    links = tuple(replace(link, bytes_per_second=link.bytes_per_second * factor) for link in target.links)
    devices = target.devices
    if kind == 2:
        slowdown = np.exp(rng.uniform(0.0, np.log(MAX_SLOWDOWN), len(devices)))
        slowdown[0] = 1.0
        seconds = np.ascontiguousarray(seconds * slowdown[:, None])
        # Costs are equal within a class, so each device gets a class of its own.
        devices = tuple(replace(device, model=f"variant {index}") for index, device in enumerate(devices))
    return replace(problem, target=replace(target, devices=devices, links=links), seconds=seconds)
