"""Graphs to learn from, as placement problems: drawn from a family, or read from a folder; and variants of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

import numpy as np

from onnxplace.cost_graph.cost_graphs import read_cost_graph
from onnxplace.cost_graph.data import CostGraph
from onnxplace.driver.place import apply_target, replace_devices
from onnxplace.errors import InputError
from onnxplace.facts import Profile
from onnxplace.machine.hardware import local_target
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import PlacementProblem, placement_problem
from onnxplace.state import State
from onnxplace.target.target import Target
from onnxplace.utils.files import format_path
from onnxplace_learned.graphs.architectures import ARCHITECTURES
from onnxplace_learned.graphs.graph_sets import GraphSet, draw_graphs, graph_fingerprint

# What may be in a folder of graphs. Other files are ignored.
COST_GRAPH_SUFFIXES = (".json", ".json.gz", ".graphml", ".graphml.gz")
MODEL_SUFFIX = ".onnx"
# Nodes that ONNX Runtime runs as one kernel stay together. Named devices have the costs that `compile` would use, and a
# number of devices has estimated ones.
MODEL_PIPELINE = "optimize,profile,coplace{join=never},fuse"
ESTIMATED_PIPELINE = "optimize,profile{estimate=true},coplace{join=never},fuse"
GRAPH_PIPELINE = "coplace{join=never}"


@dataclass(frozen=True)
class LearningGraph:
    """A graph to learn from."""

    name: str
    fingerprint: str
    problem: PlacementProblem
    state: State | None = None
    """For a model, the facts from which its bundles are made."""


def draw_problems(graphs: GraphSet, devices: int, target: Target | None = None) -> list[LearningGraph]:
    """Return the graphs of a set on so many devices, or on those of a target.

    Raises UsageError if the family does not have so many graphs.
    """
    return [_read_cost_graph_problem(graph.name, graph, devices, target) for graph in draw_graphs(graphs)]


def draw_mixture(
    families: Sequence[str], count: int, nodes: int, devices: int, target: Target | None = None
) -> list[LearningGraph]:
    """Return graphs of several families on 2 devices up to so many, each on one number of devices.

    For each family and number of devices, `count` graphs have half of the nodes, as many have all of them, and as many
    have a backward pass, where the family has one. With a target, these are its first devices.

    Raises UsageError if a family is unknown, or does not have so many graphs.
    """
    problems = []
    for family in families:
        for number in range(min(2, devices), devices + 1):
            sizes = [(nodes // 2, False), (nodes, False)] + [(nodes, True)] * (family in ARCHITECTURES)
            for size, backward in sizes:
                # Other numbers of devices get other graphs.
                drawn = GraphSet(family, count, max(1, size), "train", backward, 10_000 * number + 1_000 * backward)
                problems += draw_problems(drawn, number, target and _take_first_devices(target, number))
    return problems


def read_problems(
    source: Path, devices: int, target: Target | None = None, shape: Mapping[str, int] = MappingProxyType({})
) -> list[LearningGraph]:
    """Return the graphs in a folder or file on so many devices, by name, each different graph once.

    Without a target, cost graphs keep their links, and models get CPU devices and estimated costs. With one, cost
    graphs get its devices and their relative speeds, and models the costs that `compile` would use. `shape`
    has the sizes of symbolic dimensions of models.

    Raises:
        InputError: There are no graphs, or one of them cannot be read.
    """
    if not source.exists():
        message, hint = (
            "expected a folder of cost graphs or models, or one of them",
            "`onnxplace learn graphs` writes one",
        )
        raise InputError("H011", message, where=format_path(source), hint=hint)
    graphs = []
    for path in sorted(source.iterdir()) if source.is_dir() else [source]:
        if path.name.lower().endswith(COST_GRAPH_SUFFIXES):
            cost_graph = read_cost_graph(path, device_count=devices)
            graphs.append(_read_cost_graph_problem(path.name, cost_graph, devices, target))
        elif path.name.lower().endswith(MODEL_SUFFIX):
            graphs.append(_read_model_problem(path, devices, target, shape))
    if not graphs:
        known = ", ".join((*COST_GRAPH_SUFFIXES, MODEL_SUFFIX))
        raise InputError("H011", f"there are no graphs: expected files that end in {known}", where=format_path(source))
    distinct = {graph.fingerprint: graph for graph in reversed(graphs)}  # the first of equal ones stays
    return sorted(distinct.values(), key=lambda graph: graph.name)


def _read_cost_graph_problem(name: str, graph: CostGraph, devices: int, target: Target | None) -> LearningGraph:
    graph = replace_devices(graph, devices, None) if target is None else apply_target(graph, target)
    state, _ = Pipeline.parse(GRAPH_PIPELINE).run(graph.state())
    return LearningGraph(name, graph_fingerprint(state[Profile].graph), placement_problem(state))


def _read_model_problem(path: Path, devices: int, target: Target | None, shape: Mapping[str, int]) -> LearningGraph:
    chosen = target or local_target(",".join(f"cpu:{index}" for index in range(devices)))
    pipeline = Pipeline.parse(MODEL_PIPELINE if target else ESTIMATED_PIPELINE)
    state, _ = pipeline.run(State(chosen).with_facts(bind(load(path), shape, {})))
    return LearningGraph(path.name, graph_fingerprint(state[Profile].graph), placement_problem(state), state)


def _take_first_devices(target: Target, count: int) -> Target:
    """Return a target without its other devices, and what belongs to them."""
    devices = target.devices[:count]
    ids = {device.id for device in devices}
    links = tuple(link for link in target.with_all_links().links if {link.source, link.destination} <= ids)
    return replace(target, devices=devices, links=links, shared=())


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
