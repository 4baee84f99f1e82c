"""A placer that learns: Placeto."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge

from onnxplace.errors import UsageError
from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.problem import placement_problem
from onnxplace.state import Pass, State
from onnxplace_learned.policies.placeto_learning import read_policy, require_devices
from onnxplace_learned.policies.placeto_network import Policy, Shape
from onnxplace_learned.policies.placing import commit_result, place_with_policy, recall_placement
from onnxplace_learned.pytorch import require_torch


@dataclass(frozen=True)
class Placeto(Pass):
    """Visit the groups of nodes one by one, and let a learned policy move each to a device.

    Addanki et al., "Placeto: Learning Generalizable Device Placement Algorithms for Distributed Machine Learning",
    NeurIPS 2019. The policy embeds the graph by messages, sums over ancestors, descendants and parallel nodes of the
    current one, and chooses its device. Without `episodes`, it is applied as it was trained (`onnxplace learn
    placeto`); with them, it is then trained further on this graph, by REINFORCE in simulated time. The best placement
    that was visited and fits is kept, so that there is one wherever m-TOPO, m-ETF, m-SCT or one device has one.

    A policy with measured rewards has kept a placement of each model that it was trained on: without `episodes`, such a
    model gets that one.

    Unlike in the paper, a policy of `learn placeto` learns from completions (Ross and Bagnell, "Reinforcement and
    Imitation Learning via Interactive No-Regret Learning", arXiv 1406.5979): at visited states, each device is scored
    by the simulated step if a good placement, which a search found, decides the rest. Its episodes start from one
    device, from m-ETF and from the best placement of these, and messages take 4 rounds instead of 8.

    Costs are seconds on each device and divided by their sum with the mean instead of by the maximum; gradients are
    taken from a part of the steps; and the penalty for memory is relative to the limits. With REINFORCE, the baseline
    is the mean of the other episodes of the same update, advantages have deviation 1, and later rewards are discounted.
    """

    name: ClassVar[str] = "placeto"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    policy: str = ""
    """File of the policy; without one, it is trained from nothing on this graph."""
    episodes: Annotated[int, Ge(0)] = 0
    """How many to train on this graph before it is placed."""
    order: Literal[
        "trained", "alpha", "topological", "lexicographic", "reversed", "dfs-preorder", "dfs-postorder", "bfs",
        "random", "by-criticality",
    ] = "trained"  # fmt: skip
    """Order in which nodes are visited; by default as in training."""
    max_nodes: Annotated[int, Ge(1)] = 500
    """Graphs with more nodes are coarsened before they are placed."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the episodes."""

    def run(self, state: State) -> State:
        policy = self._load_policy(len(state.target.devices))
        if self.episodes:
            require_torch()
        problem = placement_problem(state)
        order = policy.order if self.order == "trained" else self.order
        result = place_with_policy(
            problem, policy, order, episodes=self.episodes, seed=self.seed, max_nodes=self.max_nodes
        )
        known = recall_placement(policy, problem, state[Profile].graph.names)
        if known is not None and not self.episodes:
            result = replace(result, visited=[known, *result.visited])
        return commit_result(state, problem, result, self.name)

    def _load_policy(self, devices: int) -> Policy:
        """Return the policy; raises UsageError if there is none, or if it knows fewer devices."""
        if self.policy:
            policy = read_policy(Path(self.policy))
            require_devices(policy, devices, self.policy)
            return policy
        if not self.episodes:
            hint = "placeto{policy=F.safetensors} applies one, placeto{episodes=N} trains one on this graph"
            raise UsageError(
                "U042", "expected a policy or episodes to train one, got neither", where="placeto", hint=hint
            )
        shape = Shape(devices)
        return Policy(shape, shape.draw_parameters(self.seed), seed=self.seed)
