"""Learned placers measured: python benchmarks/learned.py simulator|quality.

python benchmarks/learned.py simulator                                  placements per second, in batches
python benchmarks/learned.py quality --family transformer               unseen graphs: guided, others (POLICY: placeto)
python benchmarks/learned.py starts                                     the same search with and without guided's policy
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np

from onnxplace.driver.place import place_cost_graph, replace_devices
from onnxplace.passes.placement.search.placement_search import (
    Budget,
    Candidate,
    SearchSpace,
    evaluate_candidate,
    explore,
    finest_level,
)
from onnxplace.passes.placement.search.portfolio import PlacerPlan, published_plans
from onnxplace.pipeline.pipeline import Pipeline
from onnxplace.problem import placement_problem
from onnxplace_learned.graphs.architectures import ARCHITECTURES
from onnxplace_learned.graphs.graph_sets import GraphSet, draw_graphs
from onnxplace_learned.policies.batch_simulator import BatchSimulator
from onnxplace_learned.policies.guided_policy import default_policy_path, plan_with_policy, read_guided_policy

Row = Mapping[str, Any]
# Of each family.
PLACEMENTS = 20_000
RESAMPLES = 2_000


def measure_simulator(threads: int, nodes: int) -> Iterator[Row]:
    """Yield a row per family and number of devices: random placements of one graph, per second and per CPU second."""
    for family, make in ARCHITECTURES.items():
        for devices in (2, 4):
            problem = placement_problem(replace_devices(make(nodes, 0), devices, None).state())
            simulator = BatchSimulator(problem.graph, problem.seconds, problem.target)
            random = np.random.default_rng(0).integers(0, devices, (PLACEMENTS, len(problem.graph)), dtype=np.int32)
            row: dict[str, Any] = {"family": family, "nodes": len(problem.graph), "devices": devices}
            for memory in (False, True):
                simulator.simulate(random[:1], memory=memory)
                wall, cpu = time.perf_counter(), time.process_time()
                simulator.simulate(random, memory=memory, threads=threads)
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
                kind = "with peaks" if memory else "times"
                row[f"{kind}/s"], row[f"{kind}/CPU s"] = round(PLACEMENTS / wall), round(PLACEMENTS / cpu)
            yield row


def compare_placers(graphs: GraphSet, devices: int, placers: Mapping[str, str]) -> Iterator[Row]:
    """Yield a row per placer: steps of unseen graphs relative to one device, and the time to place them."""
    drawn = [replace_devices(graph, devices, None) for graph in draw_graphs(graphs)]
    single = [place_cost_graph(graph, "single").makespan_seconds for graph in drawn]
    steps: dict[str, list[float]] = {}
    seconds: dict[str, list[float]] = {}
    cpu: dict[str, float] = {}
    for label, placer in placers.items():
        place_cost_graph(drawn[0], placer)  # compile loops
        cpu_start = time.process_time()
        results = [place_cost_graph(graph, placer, groups="given") for graph in drawn]
        cpu_seconds = time.process_time() - cpu_start
        steps[label] = [result.makespan_seconds / alone for result, alone in zip(results, single)]
        cpu[label] = cpu_seconds / len(drawn)
        seconds[label] = [result.seconds for result in results]
    for label in placers:
        low, high = bootstrap_interval(np.array(steps[label]) / np.array(steps["m-etf"]))
        yield {
            "placer": label,
            "to one device": round(geometric_mean(steps[label]), 4),
            "to m-etf": round(geometric_mean(steps[label]) / geometric_mean(steps["m-etf"]), 4),
            "95 %": f"{low:.3f} to {high:.3f}",
            "ms to place, median": round(1e3 * float(np.median(seconds[label])), 1),
            "CPU ms, mean": round(1e3 * cpu[label], 1),
            "longest": round(1e3 * max(seconds[label]), 1),
        }


def score_plans(space: SearchSpace, plans: Sequence[PlacerPlan]) -> list[Candidate]:
    """Return the plans that fit, the shortest step first."""
    candidates = [evaluate_candidate(space, plan.name, plan.device, plan.order) for plan in plans]
    return sorted((item for item in candidates if item), key=lambda item: item.seconds)


def search_seconds(space: SearchSpace, starts: Sequence[Candidate], proposals: int) -> float:
    """Return the step that a search finds from list schedules and further starts."""
    return explore([finest_level(space.problem)], starts, Budget(0, proposals), 0, 0.0).best.seconds


def compare_starts(family: str, devices: int, nodes: int, count: int, proposals: int) -> Row:
    """Return steps relative to one device: of the policy alone, and of equal searches with and without its starts."""
    policy, ratios = read_guided_policy(default_policy_path()), dict[str, list[float]]()
    for graph in draw_graphs(GraphSet(family, count, nodes, "test")):
        state, _ = Pipeline.parse("coplace{join=never}").run(replace_devices(graph, devices, None).state())
        problem = placement_problem(state)
        space = SearchSpace(problem)
        published = published_plans(problem)
        sampled = score_plans(space, plan_with_policy(problem, policy, 12, 0, "policy"))
        best = plan_with_policy(problem, policy, 1, 0, "policy")
        alone = score_plans(space, published[:1])[0].seconds
        for label, seconds in {
            "published placers": score_plans(space, published)[0].seconds,
            "policy, best devices": score_plans(space, best)[0].seconds,
            "policy, best of 12": sampled[0].seconds,
            "search alone": search_seconds(space, [], proposals),
            "search from the policy": search_seconds(space, sampled[:3], proposals),
        }.items():
            ratios.setdefault(label, []).append(seconds / alone)
    rounded = {label: round(geometric_mean(numbers), 4) for label, numbers in ratios.items()}
    return {"family": family, "devices": devices, **rounded}


def geometric_mean(numbers: Sequence[float]) -> float:
    """Return the geometric mean of positive numbers."""
    return float(np.exp(np.mean(np.log(numbers))))


def bootstrap_interval(ratios: np.ndarray[Any, Any]) -> tuple[float, float]:
    """Return a 95 % interval of the geometric mean, from resampled graphs."""
    drawn = np.random.default_rng(0).choice(np.log(ratios), (RESAMPLES, len(ratios))).mean(axis=1)
    low, high = np.exp(np.quantile(drawn, [0.025, 0.975]))
    return float(low), float(high)


def print_rows(rows: Iterator[Row]) -> None:
    """Print rows as a Markdown table, each when it is known."""
    for number, row in enumerate(rows):
        if number == 0:
            print(f"| {' | '.join(row)} |\n|{'---|' * len(row)}", flush=True)
        print(f"| {' | '.join(map(str, row.values()))} |", flush=True)


def main() -> None:
    """Run one of the measurements, and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    simulator = commands.add_parser("simulator")
    simulator.add_argument("--threads", type=int, default=1)
    simulator.add_argument("--nodes", type=int, default=200)
    quality = commands.add_parser("quality")
    quality.add_argument("policy", nargs="?", help="of placeto")
    quality.add_argument("--family", required=True)
    quality.add_argument("--count", type=int, default=8)
    quality.add_argument("--nodes", type=int, default=200)
    quality.add_argument("--devices", type=int, default=2)
    quality.add_argument("--backward", action="store_true")
    quality.add_argument("--first-seed", type=int, default=0, help="of the graphs, for others than before")
    quality.add_argument("--only", default="", help="labels of placers, such as 'm-etf;placeto;auto, 2 s'")
    starts = commands.add_parser("starts")
    starts.add_argument("--count", type=int, default=6)
    starts.add_argument("--nodes", type=int, default=200)
    starts.add_argument("--proposals", type=int, default=1_000)
    options = parser.parse_args()
    if options.command == "starts":
        families = (*ARCHITECTURES, "layered")
        print_rows(
            compare_starts(family, devices, options.nodes, options.count, options.proposals)
            for devices in (3, 4, 8)
            for family in families
        )
        return
    if options.command == "simulator":
        print_rows(measure_simulator(options.threads, options.nodes))
        return
    graphs = GraphSet(options.family, options.count, options.nodes, "test", options.backward, options.first_seed)
    placers = {
        "m-etf": "m-etf",
        "m-sct": "m-sct",
        **({"placeto": f"placeto{{policy={options.policy}}}"} if options.policy else {}),
        "guided": "guided",
        "multilevel, 0.05 s": "multilevel{seconds=0.05}",
        "auto, 0.05 s": "auto{seconds=0.05}",
        "guided, 0.5 s": "guided{seconds=0.5}",
        "auto, 0.5 s": "auto{seconds=0.5}",
        "guided, 2 s": "guided{seconds=2}",
        "auto, 2 s": "auto",
    }
    chosen = options.only.split(";") if options.only else list(placers)
    print_rows(compare_placers(graphs, options.devices, {label: placers[label] for label in chosen}))


if __name__ == "__main__":
    main()
