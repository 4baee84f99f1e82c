"""Policies of placeto on graphs that they have not seen, next to policies that were trained on these.

python benchmarks/learned_unseen.py --family encoder_decoder      does a policy place unseen graphs as well as its own?

For each seed, a policy is trained on 80 % of the graphs of a family, and places the others. Next to it are policies
that are trained on one of these graphs itself: in the same way, and with rewards (`placeto{episodes=N}`), as published.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
from learned import bootstrap_interval, geometric_mean, print_rows

from onnxplace_learned.graphs.graph_sets import GraphSet
from onnxplace_learned.policies.environment import Environment
from onnxplace_learned.policies.placeto_learning import Settings
from onnxplace_learned.policies.placeto_network import COMPLETION_ROUNDS, Policy, Shape
from onnxplace_learned.policies.placing import place_with_policy
from onnxplace_learned.policies.teacher import search_lesson
from onnxplace_learned.policy_training.learning_graphs import LearningGraph, draw_problems
from onnxplace_learned.policy_training.placeto_training import PlacetoOptions, PlacetoTraining
from onnxplace_learned.policy_training.training_loop import learn_policy

# Share of the graphs that is not trained on.
UNSEEN_SHARE = 0.2
# Seeds of graphs of one seed of the measurement.
FIRST_SEEDS = 1_000
# Of the search that is shown for comparison.
SEARCH_PROPOSALS = 20_000


def train(graphs: list[LearningGraph], updates: int, seed: int) -> Policy:
    """Return a policy that learned from completions."""
    options = PlacetoOptions(
        devices=len(graphs[0].problem.target.devices),
        updates=updates,
        start="several",
        settings=Settings.for_completions(seed),
    )
    with tempfile.TemporaryDirectory() as folder:
        policy: Policy = learn_policy(PlacetoTraining, graphs, options, Path(folder) / "policy.safetensors").policy
    return policy


def place(graph: LearningGraph, policy: Policy, episodes: int = 0, seed: int = 0) -> float:
    """Return the cost of the best placement that fits; 1 is all work on one device."""
    result = place_with_policy(
        graph.problem, policy, policy.order, episodes=episodes, seed=seed, max_nodes=len(graph.problem.graph)
    )
    environment = Environment(graph.problem)
    candidates = [environment.evaluate(item.device) for item in result.visited]
    return min(item.seconds for item in candidates if item) / environment.rules.scale_seconds


def measure_seed(options: argparse.Namespace, seed: int) -> Iterator[Mapping[str, float]]:
    """Yield the cost of each way to place each unseen graph of one seed."""
    drawn = draw_problems(
        GraphSet(options.family, options.count, options.nodes, first_seed=FIRST_SEEDS * seed), options.devices
    )
    unseen = drawn[: max(1, round(UNSEEN_SHARE * len(drawn)))]
    policy = train(drawn[len(unseen) :], options.updates, seed)
    for graph in unseen:
        environment = Environment(graph.problem)
        search, scale = search_lesson(graph.problem, SEARCH_PROPOSALS, seed), environment.rules.scale_seconds
        list_scheduled = environment.evaluate(environment.start)
        assert search
        assert list_scheduled
        shape = Shape(options.devices, rounds=COMPLETION_ROUNDS)
        untrained = Policy(shape, shape.draw_parameters(seed), seed=seed)
        yield {
            "m-etf or one device": list_scheduled.seconds / scale,
            "trained on the others": place(graph, policy),
            "trained on the graph": place(graph, train([graph], options.own_updates, seed)),
            "rewards on the graph": place(graph, untrained, options.episodes, seed),
            "search": search.seconds / scale,
        }


def main() -> None:
    """Train, and print a table of costs and their ratios to those of the policies that learned on the graph itself."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", required=True)
    parser.add_argument("--count", type=int, default=15)
    parser.add_argument("--nodes", type=int, default=100)
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=800, help="of the policy of the family")
    parser.add_argument("--own-updates", type=int, default=400, help="of each policy of one graph")
    parser.add_argument("--episodes", type=int, default=400, help="with rewards")
    options = parser.parse_args()
    start, costs = time.process_time(), dict[str, list[float]]()
    for seed in range(options.seeds):
        for row in measure_seed(options, seed):
            for name, cost in row.items():
                costs.setdefault(name, []).append(cost)
        print(f"seed {seed}: {time.process_time() - start:.0f} s of processor time so far", file=sys.stderr, flush=True)
    print_rows(summarise(costs))


def summarise(costs: Mapping[str, list[float]]) -> Iterator[dict[str, Any]]:
    """Yield a row per way to place."""
    own = np.array(costs["trained on the graph"])
    for name, numbers in costs.items():
        ratios = np.array(numbers) / own
        low, high = bootstrap_interval(ratios)
        yield {
            "placement": name,
            "graphs": len(numbers),
            "to one device": round(geometric_mean(numbers), 4),
            "to trained on the graph": round(geometric_mean(list(ratios)), 4),
            "95 %": f"{low:.3f} to {high:.3f}",
        }


if __name__ == "__main__":
    main()
