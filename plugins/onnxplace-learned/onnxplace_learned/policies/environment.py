"""A placement problem as an environment of Placeto: its graph for the policy, its order of visits, its costs.

Most orders are those of Wang, Payberah, Hagos and Vlassov (arXiv 2201.09676), with networkx, as in their study.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Literal

import networkx
import numpy as np

from onnxplace.errors import InfeasibleError
from onnxplace.graph.op_graph import Bools, Csr, Floats, Ints, Longs
from onnxplace.passes.placement.list_scheduling.list_planner import find_best_plan
from onnxplace.passes.placement.search.decode_kernels import new_scratch
from onnxplace.passes.placement.search.placement_search import Candidate, SearchSpace, evaluate_candidate
from onnxplace.passes.placement.search.portfolio import published_plans
from onnxplace.problem import PlacementProblem
from onnxplace.simulation.lower_bounds import heads_and_tails
from onnxplace.simulation.simulator import device_weights
from onnxplace_learned.policies.batch_simulator import BatchSimulator, new_batch_scratch, new_memory_scratch
from onnxplace_learned.policies.placeto_kernels import (
    FIXED_FEATURES,
    GraphTensors,
    Network,
    Rules,
    Simulators,
    Singles,
    Trajectory,
    Visits,
    fill_relations,
    fill_step_features,
    new_policy_scratch,
    run_episode,
)
from onnxplace_learned.policies.teacher import search_lesson

Order = Literal[
    "alpha",
    "topological",
    "lexicographic",
    "reversed",
    "dfs-preorder",
    "dfs-postorder",
    "bfs",
    "random",
    "by-criticality",
]

Start = Literal["several", "m-etf", "first-device", "auto"]
"""What episodes start from.

- `m-etf`: the better of the placement of m-ETF and one device.
- `first-device`: one device.
- `several`: each of these in turn, then the best placement that was visited.
- `auto`: the placement of a short search, as the placer of this name does.
"""

Reward = Literal["simulated", "measured"]
"""How the placements of a training are rewarded: by simulated steps, or by those of bundles that are run."""


def visit_nodes(problem: PlacementProblem, order: Order, seed: int = 0) -> Ints:
    """Return all nodes of a problem in the order of visiting.

    - `alpha`: by name; `topological`; `lexicographic`: topological, by name where several are possible; `reversed`.
    - `dfs-preorder`, `dfs-postorder`: depth first, from each node that is not visited yet.
    - `bfs`: breadth first, from each node without predecessors, by name.
    - `random`: by `seed`.
    - `by-criticality`: those on the longest paths first.
    """
    return np.array(ORDERS[order](problem, seed), dtype=np.int32)


def _digraph(problem: PlacementProblem) -> networkx.DiGraph[int]:
    """Return the edges of a graph, its nodes in topological order."""
    graph, result = problem.graph, networkx.DiGraph()
    result.add_nodes_from(graph.order.tolist())
    edges = graph.predecessors
    result.add_edges_from(zip(edges.items.tolist(), edges.rows.tolist()))
    return result


def _sort_by_name(problem: PlacementProblem, seed: int) -> list[int]:
    return sorted(range(len(problem.graph)), key=problem.graph.names.__getitem__)


def _sort_lexicographically(problem: PlacementProblem, seed: int) -> list[int]:
    digraph, names = _digraph(problem), problem.graph.names
    return list(networkx.lexicographical_topological_sort(digraph, key=lambda node: names[node]))


def _search_breadth_first(problem: PlacementProblem, seed: int) -> list[int]:
    """Append the tree of each source; the first visit counts."""
    digraph, names = _digraph(problem), problem.graph.names
    sources = sorted((node for node, degree in digraph.in_degree() if degree == 0), key=lambda node: names[node])
    visited: dict[int, None] = {}
    for source in sources:
        if source not in visited:
            visited[source] = None
        visited.update((node, None) for _, node in networkx.bfs_edges(digraph, source) if node not in visited)
    return list(visited)


def _sort_by_criticality(problem: PlacementProblem, seed: int) -> list[int]:
    """Sort by the longest path through each node, longest first; ties in topological order."""
    reach = heads_and_tails(problem.graph, problem.seconds, problem.target)
    length = reach.head + reach.least + reach.tail
    return list(np.lexsort((problem.graph.positions, -length)).tolist())


ORDERS: Mapping[Order, Callable[[PlacementProblem, int], list[int]]] = MappingProxyType(
    {
        "alpha": _sort_by_name,
        "topological": lambda problem, seed: problem.graph.order.tolist(),
        "lexicographic": _sort_lexicographically,
        "reversed": lambda problem, seed: problem.graph.order[::-1].tolist(),
        "dfs-preorder": lambda problem, seed: list(networkx.dfs_preorder_nodes(_digraph(problem))),
        "dfs-postorder": lambda problem, seed: list(networkx.dfs_postorder_nodes(_digraph(problem))),
        "bfs": _search_breadth_first,
        "random": lambda problem, seed: np.random.default_rng(seed).permutation(len(problem.graph)).tolist(),
        "by-criticality": _sort_by_criticality,
    }
)
"""Order -> function of a problem and a seed."""


# Moves of the search whose placement episodes may start from.
START_PROPOSALS = 2_000


@dataclass(frozen=True)
class Episode:
    """The steps of one episode and the placements that it visited."""

    trajectory: Trajectory
    final: Ints
    """The placement after the last step."""

    def returns(self, discount: float = 1.0) -> Floats:
        """Return, per step, the sum of later rewards: of the falls of the cost, the k-th discounted k times."""
        falls = self.trajectory.cost[:-1] - self.trajectory.cost[1:]
        total, totals = 0.0, np.zeros(len(falls))
        for step in range(len(falls) - 1, -1, -1):
            total = falls[step] + discount * total
            totals[step] = total
        return totals

    def best(self) -> tuple[float, Ints] | None:
        """Return cost and devices of the best visited placement that fits; None if none does."""
        costs = np.where(self.trajectory.fits, self.trajectory.cost, np.inf)
        step = int(costs.argmin())
        if not np.isfinite(costs[step]):
            return None
        is_last = step == len(self.trajectory.device)
        return float(costs[step]), self.final if is_last else self.trajectory.device[step].astype(np.int32)


@dataclass(frozen=True)
class Environment:
    """A problem in which episodes of a policy run."""

    problem: PlacementProblem
    visiting_order: Order = "topological"
    seed: int = 0
    """Seed of a random order."""
    start_from: Start = "m-etf"

    @cached_property
    def space(self) -> SearchSpace:
        return SearchSpace(self.problem)

    @cached_property
    def simulator(self) -> BatchSimulator:
        return BatchSimulator(self.problem.graph, self.problem.seconds, self.problem.target)

    @cached_property
    def wires(self) -> GraphTensors:
        """Return what the policy reads of the graph."""
        problem, graph = self.problem, self.problem.graph
        edges = graph.predecessors
        relation = np.zeros((len(graph), len(graph)), dtype=np.uint8)
        fill_relations(graph.order, edges.items, edges.starts, relation)
        mean = float(problem.seconds.mean()) if problem.seconds.size else 0.0
        return GraphTensors(
            costs=_squash(problem.seconds, mean),
            transfer=_squash(self.transfer_seconds, mean),
            sources=edges.items,
            readers=edges.rows,
            relation=relation,
        )

    @cached_property
    def transfer_seconds(self) -> Floats:
        """Return, per node, the time to send its outputs once, on the mean of all links."""
        graph = self.problem.graph
        latency, per_byte = self.problem.target.link_arrays()
        remote = ~np.eye(len(latency), dtype=bool)
        if not remote.any():
            return np.zeros(len(graph))
        read = np.flatnonzero((graph.producer >= 0) & (np.diff(graph.readers.starts) > 0))
        seconds = latency[remote].mean() + graph.value_bytes[read] * per_byte[remote].mean()
        return np.bincount(graph.producer[read], seconds, len(graph)).astype(np.float64)

    @cached_property
    def visits(self) -> Visits:
        """Return the groups without a pin in the order of their first nodes."""
        group, nodes = self.problem.group, visit_nodes(self.problem, self.visiting_order, self.seed)
        visited, first = np.unique(group[nodes], return_index=True)
        is_free = self.problem.pinned[visited] < 0
        steps = np.argsort(first[is_free], kind="stable")
        members = Csr.grouped(group, np.arange(len(group), dtype=np.int32), len(self.problem.pinned))
        return Visits(
            group=visited[is_free][steps].astype(np.int32),
            speaker=nodes[first[is_free][steps]].astype(np.int32),
            member_starts=members.starts,
            members=members.items,
            allowed=self._allowed_devices(),
        )

    def _allowed_devices(self) -> Bools:
        """Return, per group and device, whether its weights have room there; everything if none has."""
        needed = device_weights(self.problem.graph, self.problem.group, len(self.problem.pinned))
        has_room = needed[:, None] <= self.problem.limit_bytes[None, :]
        has_room[~has_room.any(axis=1)] = True
        return has_room

    @cached_property
    def rules(self) -> Rules:
        """Return how placements are scored: cost 1 is all work on the fastest device."""
        scale = float(self.problem.seconds.sum(axis=1).min(initial=np.inf))
        scale = scale if 0 < scale < np.inf else 1.0
        return Rules(scale, np.asarray(self.problem.limit_bytes, dtype=np.int64), self.space.memory_binds)

    @cached_property
    def start(self) -> Ints:
        """Return the placement that episodes start from.

        That is one device, or m-ETF's if it is requested and better, or that of a search; if none of these fits, a
        published one that does.
        """
        if self.start_from == "auto" and (lesson := search_lesson(self.problem, START_PROPOSALS, 0)):
            return lesson.device
        alone = self.place_on_one_device(0)
        starts = [alone, *([self.planned[0]] if self.planned else [])]
        candidates = [self.evaluate(device) for device in starts]
        if not any(candidates):
            candidates = [self.evaluate(plan.device) for plan in published_plans(self.problem)]
        fitting = [candidate for candidate in candidates if candidate]
        return min(fitting, key=lambda candidate: candidate.seconds).device if fitting else alone

    @cached_property
    def planned(self) -> tuple[Ints, Ints] | None:
        """Return devices and order of nodes of m-ETF; None if it finds none, or if episodes start from one device."""
        return None if self.start_from == "first-device" else plan_m_etf(self.problem)

    @cached_property
    def starts(self) -> list[Ints]:
        """Return the placements that episodes start from: `start`, and if several are requested, the others."""
        starts = [self.start]
        if self.start_from == "several":
            starts += [self.place_on_one_device(0), *([self.planned[0]] if self.planned else [])]
        return list({device.tobytes(): device for device in starts}.values())

    def evaluate(self, device: Ints) -> Candidate | None:
        """Return a placement with the better of two orders; None if it does not fit."""
        return evaluate_candidate(self.space, "", device, self.problem.graph.order)

    def place_on_one_device(self, device: int) -> Ints:
        """Return the placement with everything without a pin on one device."""
        pinned = self.problem.pinned
        return np.where(pinned >= 0, pinned, device)[self.problem.group].astype(np.int32)

    def run(self, network: Network, draws: Floats | None = None, start: Ints | None = None) -> Episode:
        """Run an episode from a placement; without `draws` from 0 to 1, always choose the likeliest device."""
        steps, nodes = len(self.visits.group), len(self.problem.graph)
        trajectory = Trajectory(
            device=np.zeros((steps, nodes), dtype=np.int16),
            start=np.zeros((steps, nodes), dtype=np.float32),
            action=np.zeros(steps, dtype=np.int32),
            cost=np.zeros(steps + 1),
            fits=np.zeros(steps + 1, dtype=bool),
            entropy=np.zeros(steps),
        )
        device = (self.start if start is None else start).copy()
        run_episode(
            network,
            self.wires,
            self.visits,
            self.rules,
            np.full(steps, -1.0) if draws is None else draws,
            device,
            self.new_simulators(),
            new_policy_scratch(network, nodes),
            np.zeros(nodes, dtype=np.uint8),
            trajectory,
        )
        return Episode(trajectory, device)

    def run_best(self, network: Network) -> list[Episode]:
        """Run an episode of likeliest devices from each start; with several starts, one more from the best placement.

        The first episode starts from `start`.
        """
        episodes = [self.run(network, start=start) for start in self.starts]
        visited = [best for episode in episodes if (best := episode.best())]
        if self.start_from == "several" and visited:
            episodes.append(self.run(network, start=min(visited, key=lambda item: item[0])[1]))
        return episodes

    def new_simulators(self) -> Simulators:
        graph, devices = self.problem.graph, len(self.problem.target.devices)
        nodes = len(graph)
        return Simulators(
            wiring=self.space.wiring,
            search=new_scratch(self.space.wiring),
            bias=np.zeros(nodes),
            graph=self.simulator.arrays,
            scratch=new_batch_scratch(graph, self.problem.target),
            memory=new_memory_scratch(graph, devices),
            order=np.zeros(nodes, dtype=np.int32),
            start=np.zeros(nodes),
            finish=np.zeros(nodes),
            peaks=np.zeros(devices, dtype=np.int64),
        )

    def step_features(self, network: Network, episode: Episode, steps: Longs) -> Singles:
        """Return the features of some steps of an episode, which increase: [step, feature, node]."""
        nodes = len(self.problem.graph)
        features = np.zeros((len(steps), 2 * network.devices + FIXED_FEATURES, nodes), dtype=np.float32)
        visited = np.zeros(nodes, dtype=np.uint8)
        fill_step_features(network, self.wires, self.visits, episode.trajectory, steps, visited, features)
        return features


def plan_m_etf(problem: PlacementProblem) -> tuple[Ints, Ints] | None:
    """Return the placement of m-ETF and its order of nodes; None if it finds none."""
    try:
        device, start = find_best_plan(problem, np.full(len(problem.graph), -1, dtype=np.int32))
    except InfeasibleError:
        return None
    return device.astype(np.int32), np.lexsort((problem.graph.positions, start)).astype(np.int32)


def _squash(seconds: Floats, mean: float) -> Singles:
    """Map seconds to numbers from 0 to 1; those of the mean become a half."""
    return np.ascontiguousarray(seconds / (seconds + mean) if mean > 0 else np.zeros_like(seconds), dtype=np.float32)
