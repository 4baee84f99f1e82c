"""Graphs to learn from, as placement problems: drawn from a family, or read from a folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from onnxplace.cost_graph import ARCHITECTURES, GraphSet, draw_graphs, graph_fingerprint, read_cost_graph
from onnxplace.driver import replace_devices
from onnxplace.errors import InputError
from onnxplace.facts import Profile
from onnxplace.machine import local_target
from onnxplace.model import bind, load
from onnxplace.pipeline import Pipeline
from onnxplace.problem import PlacementProblem, placement_problem
from onnxplace.state import State
from onnxplace.utils import format_path

# What may be in a folder of graphs. Other files are ignored.
COST_GRAPH_SUFFIXES = (".json", ".json.gz", ".graphml", ".graphml.gz", ".gexf", ".gexf.gz")
MODEL_SUFFIX = ".onnx"
# Costs of models are estimated, and nodes that ONNX Runtime runs as one kernel stay together.
MODEL_PIPELINE = "optimize,profile{estimate=true},coplace{join=never},fuse"
GRAPH_PIPELINE = "coplace{join=never}"


@dataclass(frozen=True)
class LearningGraph:
    """A graph to learn from."""

    name: str
    fingerprint: str
    problem: PlacementProblem


def draw_problems(graphs: GraphSet, devices: int) -> list[LearningGraph]:
    """Return the graphs of a set on so many devices.

    Raises UsageError if the family does not have so many graphs.
    """
    problems = []
    for graph in draw_graphs(graphs):
        state, _ = Pipeline.parse(GRAPH_PIPELINE).run(replace_devices(graph, devices, None).state())
        problems.append(_make_learning_graph(graph.name, state))
    return problems


def draw_mixture(families: Sequence[str], count: int, nodes: int, devices: int) -> list[LearningGraph]:
    """Return graphs of several families on 2 devices up to so many, each on one number of devices.

    For each family and number of devices, `count` graphs have half of the nodes, as many have all of them, and as many
    have a backward pass, where the family has one.

    Raises UsageError if a family is unknown, or does not have so many graphs.
    """
    problems = []
    for family in families:
        for number in range(min(2, devices), devices + 1):
            sizes = [(nodes // 2, False), (nodes, False)] + [(nodes, True)] * (family in ARCHITECTURES)
            for size, backward in sizes:
                # Other numbers of devices get other graphs.
                drawn = GraphSet(family, count, max(1, size), "train", backward, 10_000 * number + 1_000 * backward)
                problems += draw_problems(drawn, number)
    return problems


def read_problems(folder: Path, devices: int) -> list[LearningGraph]:
    """Return the graphs in a folder on so many devices, by name, each different graph once.

    Cost graphs keep their links. Models get CPU devices and estimated costs.

    Raises:
        InputError: It has no graphs, or one of them cannot be read.
    """
    if not folder.is_dir():
        message, hint = "expected a folder of cost graphs or models", "`onnxplace learn graphs` writes one"
        raise InputError("H011", message, where=format_path(folder), hint=hint)
    states = {}
    for path in sorted(folder.iterdir()):
        if path.name.lower().endswith(COST_GRAPH_SUFFIXES):
            cost_graph = replace_devices(read_cost_graph(path, device_count=devices), devices, None)
            states[path.name], _ = Pipeline.parse(GRAPH_PIPELINE).run(cost_graph.state())
        elif path.name.lower().endswith(MODEL_SUFFIX):
            target = local_target(",".join(f"cpu:{index}" for index in range(devices)))
            model = bind(load(path), {}, {})
            states[path.name], _ = Pipeline.parse(MODEL_PIPELINE).run(State(target).having(model))
    graphs = [_make_learning_graph(name, state) for name, state in states.items()]
    if not graphs:
        known = ", ".join((*COST_GRAPH_SUFFIXES, MODEL_SUFFIX))
        raise InputError("H011", f"it has no graphs: expected files that end in {known}", where=format_path(folder))
    distinct = {graph.fingerprint: graph for graph in reversed(graphs)}  # the first of equal ones stays
    return sorted(distinct.values(), key=lambda graph: graph.name)


def _make_learning_graph(name: str, state: State) -> LearningGraph:
    return LearningGraph(name, graph_fingerprint(state[Profile].graph), placement_problem(state))
