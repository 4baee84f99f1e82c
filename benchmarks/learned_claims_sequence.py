"""Claims on the sequence policies, in simulated placements: learned_claims_sequence.py steps|groups|...

python benchmarks/learned_claims_sequence.py steps      placements until placeto and ColocRL are equally good
python benchmarks/learned_claims_sequence.py groups     large graphs: hierarchical, groups learned, given, and single
python benchmarks/learned_claims_sequence.py schedule   go with and without its head for priorities
python benchmarks/learned_claims_sequence.py standing   all of them next to placers that do not learn, with their time

Every run trains from nothing on one graph. Costs are steps relative to one device. Needs torch.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from learned import compare_placers

from onnxplace.driver.place import replace_devices
from onnxplace.graph.op_graph import Floats
from onnxplace.passes.placement.search.placement_search import (
    Budget,
    SearchSpace,
    evaluate_candidate,
    explore,
    finest_level,
)
from onnxplace.passes.placement.search.portfolio import published_plans
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import PlacementProblem, placement_problem
from onnxplace_learned.graphs.graph_sets import GraphSet, draw_graphs
from onnxplace_learned.policies.environment import Environment
from onnxplace_learned.policies.placeto_learning import Learner, Settings, update_policy
from onnxplace_learned.policies.placeto_network import Policy, Shape
from onnxplace_learned.policies.sequence_graph import SequenceGraph
from onnxplace_learned.policies.sequence_learning import SequenceLearner, SequenceSettings, update_sequence_policy
from onnxplace_learned.policies.sequence_networks import SequenceInputs
from onnxplace_learned.policies.sequence_policy import SequencePolicy, SequenceShape
from onnxplace_learned.pytorch import require_torch

RESAMPLES = 2_000
# Proposals of the search that every table shows next to the policies.
PROPOSALS = 5_000


@dataclass(frozen=True)
class Run:
    """One training on one graph."""

    best: Floats
    """The least cost after each simulated placement."""
    cpu_seconds: float

    @property
    def final(self) -> float:
        return float(self.best[-1])

    def placements_until(self, cost: float) -> int:
        """Return how many placements were simulated until the best was at most `cost`."""
        return int(np.argmax(self.best <= cost)) + 1


def draw_problem(family: str, nodes: int, devices: int) -> PlacementProblem:
    """Return a graph of the test side, on so many devices."""
    (graph,) = draw_graphs(GraphSet(family, 1, nodes, "test"))
    state, _ = Pipeline.parse("coplace{join=never}").run(replace_devices(graph, devices, None).state())
    return placement_problem(state)


def train_sequence(graph: SequenceGraph, shape: SequenceShape, placements: int, seed: int) -> Run:
    """Train a sequence policy on a graph for about so many placements."""
    inputs, settings = SequenceInputs(graph, shape), SequenceSettings.of(shape.kind, seed)
    learner = SequenceLearner.of(SequencePolicy(shape, shape.draw_parameters(seed), seed=seed), 1)
    updates = placements // settings.placements
    costs: list[Floats] = []
    start = time.process_time()
    for index in range(updates):
        update = update_sequence_policy(learner, inputs, 0, settings, index / updates)
        learner = update.learner
        costs.append(update.sampled.scores.cost)
    return Run(np.minimum.accumulate(np.concatenate(costs)), time.process_time() - start)


def train_placeto(problem: PlacementProblem, placements: int, seed: int) -> Run:
    """Train Placeto's policy on a problem, from one device, for about so many placements: each step simulates one."""
    environment, settings = Environment(problem, "topological", seed, "first-device"), Settings(seed=seed)
    shape = Shape(len(problem.target.devices))
    learner = Learner.of(Policy(shape, shape.draw_parameters(seed), start="first-device", seed=seed))
    updates = max(1, placements // (settings.episodes * len(environment.visits.group)))
    costs: list[Floats] = []
    start = time.process_time()
    for index in range(updates):
        update = update_policy(learner, environment, settings, index / updates)
        learner = update.learner
        for episode in update.episodes:
            # The first cost of an episode is that of its start.
            steps = slice(1, None) if costs else slice(None)
            costs.append(np.where(episode.trajectory.fits, episode.trajectory.cost, np.inf)[steps])
    return Run(np.minimum.accumulate(np.concatenate(costs)), time.process_time() - start)


def sample_randomly(graph: SequenceGraph, placements: int, seed: int) -> float:
    """Return the cost of the best of so many placements of all groups, drawn uniformly."""
    devices = len(graph.problem.target.devices)
    return float(graph.score(np.random.default_rng(seed).integers(devices, size=(placements, len(graph)))).cost.min())


def reference_costs(problem: PlacementProblem) -> Mapping[str, float]:
    """Return the costs of placers that do not learn, and of a search."""
    space, scale = SearchSpace(problem), Environment(problem).rules.scale_seconds
    plans = {plan.name: plan for plan in published_plans(problem)}
    costs = {}
    for name in ("m-etf", "m-sct"):
        candidate = evaluate_candidate(space, name, plans[name].device, plans[name].order) if name in plans else None
        costs[name] = candidate.seconds / scale if candidate else np.inf
    start = time.process_time()
    costs["search"] = explore([finest_level(problem)], [], Budget(0, PROPOSALS), 0, 0.0).best.seconds / scale
    return {**costs, "CPU s, search": time.process_time() - start}


def compare_steps(families: Sequence[str], nodes: int, placements: int, seeds: int) -> Iterator[Mapping[str, Any]]:
    """Yield a row per family and number of devices: placements until both policies are equally good."""
    ratios: list[float] = []
    for family in families:
        for devices in (2, 4):
            graph = SequenceGraph.of(draw_problem(family, nodes, devices), 10 * nodes, 64)
            shape = SequenceShape("hierarchical", "given", devices)
            pairs = [
                (train_sequence(graph, shape, placements, seed), train_placeto(graph.problem, placements, seed))
                for seed in range(seeds)
            ]
            own = []
            for sequence, placeto in pairs:
                cost = max(sequence.final, placeto.final)
                own.append(sequence.placements_until(cost) / placeto.placements_until(cost))
            ratios += own
            costs = reference_costs(graph.problem)
            yield {
                "family": family,
                "devices": devices,
                "groups": len(graph),
                "ColocRL": mean(run.final for run, _ in pairs),
                "Placeto": mean(run.final for _, run in pairs),
                "random": mean([sample_randomly(graph, placements, seed) for seed in range(seeds)]),
                **{name: round(costs[name], 3) for name in ("m-etf", "m-sct", "search")},
                "placements, ColocRL to Placeto": f"{mean(own)} ({interval(own)})",
                "CPU s": f"{mean(run.cpu_seconds for run, _ in pairs)}, {mean(run.cpu_seconds for _, run in pairs)}",
            }
    yield {"family": "all", "placements, ColocRL to Placeto": f"{mean(ratios)} ({interval(ratios)})"}


def compare_groups(
    families: Sequence[str], nodes: int, devices: int, placements: int, seeds: int
) -> Iterator[Mapping[str, Any]]:
    """Yield a row per family: the best of equally many placements with groups learned, given, and single."""
    ratios: dict[str, list[float]] = {"learned": [], "given": []}
    for family in families:
        problem = draw_problem(family, nodes, devices)
        runs: dict[str, list[Run]] = {}
        for variant in ("learned", "given", "each"):
            shape = SequenceShape("hierarchical", variant, devices)
            graph = SequenceGraph.of(problem, 10 * nodes, shape.max_items)
            runs[variant] = [train_sequence(graph, shape, placements, seed) for seed in range(seeds)]
        costs = reference_costs(problem)
        for variant, numbers in ratios.items():
            numbers += [run.final / single.final for run, single in zip(runs[variant], runs["each"])]
        yield {
            "family": family,
            "nodes": len(problem.graph),
            **{variant: mean(run.final for run in own) for variant, own in runs.items()},
            **{name: round(costs[name], 3) for name in ("m-etf", "m-sct", "search")},
            "CPU s": ", ".join(str(mean(run.cpu_seconds for run in own)) for own in runs.values()),
        }
    shown = {variant: f"{mean(numbers)} ({interval(numbers)})" for variant, numbers in ratios.items()}
    yield {"family": "all, to single", **shown}


def compare_heads(families: Sequence[str], nodes: int, placements: int, seeds: int) -> Iterator[Mapping[str, Any]]:
    """Yield a row per order, family and number of devices: the best of equally many placements with both heads."""
    for order in ("criticality", "topological"):
        ratios: list[float] = []
        for family in families:
            for devices in (2, 4):
                problem = draw_problem(family, nodes, devices)
                graph, runs = SequenceGraph.of(problem, 10 * nodes), {}
                for heads in ("placement", "placement+schedule"):
                    shape = SequenceShape("go", heads, devices, width=32, order=order)
                    runs[heads] = [train_sequence(graph, shape, placements, seed) for seed in range(seeds)]
                own = [both.final / one.final for one, both in zip(*runs.values())]
                ratios += own
                costs = reference_costs(problem)
                yield {
                    "order": order,
                    "family": family,
                    "devices": devices,
                    "placement (GDP)": mean(run.final for run in runs["placement"]),
                    "and schedule (GO)": mean(run.final for run in runs["placement+schedule"]),
                    **{name: round(costs[name], 3) for name in ("m-etf", "m-sct", "search")},
                    "GO to GDP": f"{mean(own)} ({interval(own)})",
                    "CPU s": mean(run.cpu_seconds for item in runs.values() for run in item),
                }
        yield {"order": order, "family": "all", "GO to GDP": f"{mean(ratios)} ({interval(ratios)})"}


def list_placers(placements: int) -> Mapping[str, str]:
    """Return all placers to compare; `go` gets a quarter of the placements, since its updates take longer."""
    return {
        "m-etf": "m-etf",
        "m-sct": "m-sct",
        "hierarchical (HDP)": f"hierarchical{{episodes={placements}}}",
        "hierarchical, given groups (ColocRL)": f"hierarchical{{groups=given,episodes={placements}}}",
        "go, placement (GDP)": f"go{{heads=placement,episodes={placements // 4}}}",
        "go": f"go{{episodes={placements // 4}}}",
        "guided": "guided",
        "auto, 0.5 s": "auto{seconds=0.5}",
        "auto, 2 s": "auto",
    }


def mean(numbers: Iterator[float] | Sequence[float]) -> float:
    """Return the geometric mean, rounded."""
    return round(float(np.exp(np.mean(np.log(list(numbers))))), 3)


def interval(numbers: Sequence[float]) -> str:
    """Return a 95 % interval of the geometric mean, from resampled runs."""
    drawn = np.random.default_rng(0).choice(np.log(numbers), (RESAMPLES, len(numbers))).mean(axis=1)
    low, high = np.exp(np.quantile(drawn, [0.025, 0.975]))
    return f"{low:.3f} to {high:.3f}"


def print_rows(rows: Iterator[Mapping[str, Any]]) -> None:
    """Print rows as a Markdown table, each when it is known; later rows may leave columns out."""
    names: list[str] = []
    for row in rows:
        if not names:
            names = list(row)
            print(f"| {' | '.join(names)} |\n|{'---|' * len(names)}", flush=True)
        print(f"| {' | '.join(str(row.get(name, '')) for name in names)} |", flush=True)


def main() -> None:
    """Run one of the measurements, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("claim", choices=["steps", "groups", "schedule", "standing"])
    parser.add_argument("--family", action="append", help="again for more")
    parser.add_argument("--nodes", type=int, help="of each graph: 200, 1000 for groups, 100 for schedule")
    parser.add_argument("--devices", type=int, default=4, help="for groups and standing")
    parser.add_argument(
        "--placements", type=int, help="of each run: 8000; 960 for groups, 800 for schedule, 1600 for standing"
    )
    parser.add_argument("--seeds", type=int, default=3, help="of each training; graphs for standing")
    options = parser.parse_args()
    require_torch().set_num_threads(1)
    families = options.family or ["encoder_decoder", "transformer", "convolutional_cells"]
    if options.claim == "steps":
        print_rows(compare_steps(families, options.nodes or 200, options.placements or 8_000, options.seeds))
    elif options.claim == "standing":
        for family in families:
            print(f"\n{family}\n")
            graphs = GraphSet(family, options.seeds, options.nodes or 200, "test")
            print_rows(compare_placers(graphs, options.devices, list_placers(options.placements or 1_600)))
    elif options.claim == "groups":
        placements = options.placements or 960
        print_rows(compare_groups(families, options.nodes or 1_000, options.devices, placements, options.seeds))
    else:
        print_rows(compare_heads(families, options.nodes or 100, options.placements or 800, options.seeds))


if __name__ == "__main__":
    main()
