"""A placer that learns: the hierarchical planner, with ColocRL."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Le

from onnxplace.facts import Placement, Profile, Schedule
from onnxplace.problem import placement_problem
from onnxplace.state import Pass, State
from onnxplace_learned.policies.placing import commit_result
from onnxplace_learned.policies.sequence_placing import SequenceOptions, load_policy, place_with_sequence
from onnxplace_learned.policies.sequence_policy import SequenceShape


@dataclass(frozen=True)
class Hierarchical(Pass):
    """Let a learned policy put nodes into groups, and then give each group a device, one after the other.

    Mirhoseini et al., "A Hierarchical Model for Device Placement", ICLR 2018 (HDP). A grouper, a small network, samples
    a group for each node. A placer reads the groups as a sequence with a bidirectional LSTM; a second LSTM with
    attention emits their devices, each given those before. `groups=given` is ColocRL (Mirhoseini et al., "Device
    Placement Optimization with Reinforcement Learning", ICML 2017): groups come from coarsening the graph, only the
    placer learns. With `groups=each`, every node is a group. Both networks are trained by REINFORCE, with the reward
    minus the square root of the step, and a moving average as baseline. Without `episodes`, the policy is applied as
    it was trained (`onnxplace learn hierarchical`); with them, it is first trained further on this graph. The best
    placement that was sampled and fits is kept; where none fits, one of m-TOPO, m-ETF, m-SCT or a single device.

    Unlike in the papers: steps are simulated, relative to one device; a placement that does not fit counts as 10 times
    one device; features are relative, and neighbours are given by their positions, so that policies carry over to
    other graphs; LSTMs have 64 units; the decoder also reads the encoding of the group that it places; advantages have
    deviation 1; the learning rate falls from 0.01 to 0.001; scores are noisy for 20 updates, not 500; an entropy bonus
    that falls to zero keeps devices open while groups are learned. Needs torch.
    """

    name: ClassVar[str] = "hierarchical"
    requires: ClassVar[tuple[type, ...]] = (Profile,)
    provides: ClassVar[tuple[type, ...]] = (Placement, Schedule)

    policy: str = ""
    """File of the policy; without one, it is trained from nothing on this graph."""
    episodes: Annotated[int, Ge(0)] = 0
    """How many placements to sample on this graph, and to learn from, before it is placed."""
    groups: Literal["trained", "learned", "given", "each"] = "trained"
    """Where groups come from; by default as in training, and learned without a policy."""
    max_groups: Annotated[int, Ge(1), Le(4096)] = 64
    """How many groups a policy without a file may learn or is given."""
    samples: Annotated[int, Ge(0)] = 16
    """How many placements to sample without learning, next to the likeliest one."""
    max_nodes: Annotated[int, Ge(1)] = 1_000
    """Graphs with more nodes are coarsened before they are placed."""
    seed: Annotated[int, Ge(0)] = 0
    """Seed of the samples."""

    def run(self, state: State) -> State:
        variant = "learned" if self.groups == "trained" else self.groups
        shape = SequenceShape("hierarchical", variant, len(state.target.devices), self.max_groups)
        policy = load_policy(self.policy, shape, self.episodes, self.seed, is_any_variant=self.groups == "trained")
        problem = placement_problem(state)
        options = SequenceOptions(self.episodes, self.samples, self.max_nodes, self.seed)
        return commit_result(state, problem, place_with_sequence(problem, policy, options), self.name)
