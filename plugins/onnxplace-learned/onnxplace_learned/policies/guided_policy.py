"""The policy of `guided`: a network over a graph, and list schedules in which it chooses devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from onnxplace.graph import Csr, Floats, Ints
from onnxplace.passes.placement.search import empty_plan
from onnxplace_learned.policies.guided_graph import (
    GROUP_FEATURES,
    NODE_FEATURES,
    PAIR_FEATURES,
    GuidedGraph,
    new_list_scratch,
)
from onnxplace_learned.policies.guided_kernels import (
    DEVICE_FEATURES,
    Choice,
    ListScratch,
    Trace,
    mean_neighbours,
    schedule_by_policy,
)
from onnxplace_learned.policies.policy_kernels import Singles

# Sizes of embeddings, of messages of neighbours and of the layer before a score; rounds of the graph network.
WIDTH, MESSAGE_WIDTH, HIDDEN, ROUNDS = 24, 16, 32, 4
Tensors = Mapping[str, Singles]


@dataclass(frozen=True)
class GuidedShape:
    """The sizes of the network."""

    width: int = WIDTH
    message_width: int = MESSAGE_WIDTH
    hidden: int = HIDDEN
    rounds: int = ROUNDS

    @property
    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by name: weights [input, output], biases [output]."""
        width, message = self.width, self.message_width
        shapes: dict[str, tuple[int, ...]] = {"encode.weight": (NODE_FEATURES, width), "encode.bias": (width,)}
        for index in range(self.rounds):
            for part in ("own", "before", "after"):
                shapes[f"round{index}.{part}"] = (width, width)
            shapes[f"round{index}.bias"] = (width,)
        return shapes | {
            "group.embedding": (width, self.hidden),
            "group.features": (GROUP_FEATURES, self.hidden),
            "group.bias": (self.hidden,),
            "message.own": (width, message),
            "message.neighbour": (width, message),
            "message.pair": (PAIR_FEATURES, message),
            "message.bias": (message,),
            "device.own": (message, self.hidden),
            "device.all": (message, self.hidden),
            "device.features": (DEVICE_FEATURES, self.hidden),
            "device.output": (self.hidden,),
        }

    def draw_tensors(self, seed: int) -> dict[str, Singles]:
        """Return random weights as He et al. (2015) draw them, and biases of zero."""
        rng = np.random.default_rng(seed)
        drawn = {}
        for name, shape in self.tensors.items():
            scale = 0.0 if name.endswith("bias") else np.sqrt(1.0 / shape[0])
            drawn[name] = (scale * rng.standard_normal(shape)).astype(np.float32)
        return drawn


@dataclass(frozen=True)
class GuidedPolicy:
    """A trained policy: its network, and what it was trained on."""

    shape: GuidedShape
    tensors: Tensors
    families: str = ""
    """The graphs that it was trained on."""
    graphs: int = 0
    """How many they were."""
    devices: int = 0
    """The most devices that they had; any number can be placed on."""
    steps: int = 0
    """Steps of its training."""
    seed: int = 0

    def with_tensors(self, tensors: Tensors, steps: int) -> GuidedPolicy:
        """Return this policy after further training."""
        return replace(self, tensors=dict(tensors), steps=steps)

    def embed(self, graph: GuidedGraph) -> Singles:
        """Return the embedding of each node after all rounds: [node, width]."""
        tensors, before, after = self.tensors, graph.problem.graph.predecessors, graph.problem.graph.successors
        current = _relu(graph.node_features @ tensors["encode.weight"] + tensors["encode.bias"])
        for index in range(self.shape.rounds):
            heard = (
                current @ tensors[f"round{index}.own"]
                + _mean(before, current) @ tensors[f"round{index}.before"]
                + _mean(after, current) @ tensors[f"round{index}.after"]
                + tensors[f"round{index}.bias"]
            )
            current = current + _relu(heard)
        return current

    def prepare(self, graph: GuidedGraph) -> Choice:
        """Return what choosing devices for a graph needs: it is computed once for all schedules."""
        tensors, pairs, group = self.tensors, graph.pairs, graph.problem.group
        embedding = np.zeros((len(graph.group_sizes), self.shape.width), dtype=np.float32)
        np.add.at(embedding, group, self.embed(graph))
        embedding /= np.maximum(graph.group_sizes, 1)[:, None].astype(np.float32)
        hidden = embedding @ tensors["group.embedding"] + graph.group_features @ tensors["group.features"]
        messages = (
            (embedding @ tensors["message.own"])[pairs.groups]
            + (embedding @ tensors["message.neighbour"])[pairs.neighbours]
            + pairs.features @ tensors["message.pair"]
            + tensors["message.bias"]
        )
        counts = np.diff(pairs.starts)[pairs.groups].astype(np.float32)
        return Choice(
            group_hidden=np.ascontiguousarray(hidden + tensors["group.bias"], dtype=np.float32),
            messages=np.ascontiguousarray(_relu(messages) / counts[:, None], dtype=np.float32),
            pair_starts=pairs.starts,
            neighbours=pairs.neighbours,
            own_weights=tensors["device.own"],
            all_weights=tensors["device.all"],
            feature_weights=tensors["device.features"],
            output=tensors["device.output"],
        )


def run_schedule(
    graph: GuidedGraph, choice: Choice, draws: Floats | None = None, forced: Ints | None = None
) -> tuple[Ints, Trace] | None:
    """Return the devices of a list schedule and its decisions; None where a group has no room anywhere.

    Args:
        graph: What to place.
        choice: Of the policy for this graph.
        draws: Numbers from 0 to 1, one per group, to sample devices; without them, the best are taken.
        forced: Devices of groups to take instead; the decisions are recorded as if the policy had made them.
    """
    groups = len(graph.problem.pinned)
    plan, trace = empty_plan(graph.problem), graph.new_trace()
    decisions = schedule_by_policy(
        graph.space.wiring,
        graph.list_inputs,
        choice,
        np.full(groups, -1.0) if draws is None else draws,
        np.full(groups, -1, dtype=np.int32) if forced is None else forced,
        plan,
        _new_scratch(graph, choice),
        trace,
    )
    return None if decisions < 0 else (plan.device, trace)


def _new_scratch(graph: GuidedGraph, choice: Choice) -> ListScratch:
    return new_list_scratch(len(graph.problem.target.devices), len(choice.own_weights), len(choice.output))


def _relu(numbers: Singles) -> Singles:
    return np.maximum(numbers, np.float32(0.0))


def _mean(neighbours: Csr, embedding: Singles) -> Singles:
    means = np.zeros_like(embedding)
    mean_neighbours(neighbours.starts, neighbours.items, embedding, means)
    return means
