"""Placeto's policy network as arrays: its layers, how it starts, and its evaluation on one placement."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import numpy as np

from onnxplace.graph.op_graph import Ints, Longs
from onnxplace_learned.policies.environment import Order, Reward, Start
from onnxplace_learned.policies.placeto_kernels import FIXED_FEATURES, LAYERS, Network, Singles

# Embeddings of one direction, and rounds of messages, as Placeto's published settings have them.
WIDTH, ROUNDS = 8, 8
# Rounds of policies that learn from completions: an update takes 0.6 of the time.
COMPLETION_ROUNDS = 4
# Scale of the first weights of nets that read sums, which are larger than their summands; and of the last layer, so
# that all devices are about equally likely at first.
SUM_SCALE, LAST_SCALE = 0.2, 0.05
# With two devices, an untrained policy moves one node in eight.
STAY_SCORE = 2.0
# Names of the nets and their numbers of layers, in the order of the parameters.
NETS = (
    ("encode", 2),
    ("forward.send", 2),
    ("forward.receive", 2),
    ("backward.send", 2),
    ("backward.receive", 2),
    *((f"{kind}.{part}", 2) for kind in ("ancestors", "descendants", "parallel") for part in ("send", "receive")),
    ("choose", 3),
)


LearnFrom = Literal["completions", "rewards"]
"""What a policy learns from.

- `completions`: what its choices cost if good placements, which a search found, complete them.
- `rewards`: REINFORCE with the changes of the cost, as in the paper.
"""


@dataclass(frozen=True)
class Shape:
    """The sizes of a policy network."""

    devices: int
    """The most devices that it knows."""
    width: int = WIDTH
    rounds: int = ROUNDS

    @property
    def sizes(self) -> list[tuple[int, int]]:
        """Return inputs and outputs of each layer."""
        width = self.width
        features = 2 * self.devices + FIXED_FEATURES
        messages = [(width, width)] * 8
        pools = [(2 * width, 2 * width)] * 12
        choose = [(8 * width, 16 * width), (16 * width, 8 * width), (8 * width, self.devices)]
        return [(features, width), (width, width), *messages, *pools, *choose]

    @property
    def layers(self) -> Longs:
        """Return position, inputs and outputs of each layer: [layer, 3]."""
        counts = [(inputs + 1) * outputs for inputs, outputs in self.sizes]
        starts = np.concatenate([[0], np.cumsum(counts)])[:LAYERS]
        return np.column_stack([starts, np.array(self.sizes)]).astype(np.int64)

    @property
    def parameters(self) -> int:
        """Return the number of parameters."""
        return sum((inputs + 1) * outputs for inputs, outputs in self.sizes)

    @property
    def layer_names(self) -> list[str]:
        """Return a name for each layer."""
        return [f"{net}.{index}" for net, count in NETS for index in range(count)]

    def network(self, theta: Singles, stay: float = 0.0) -> Network:
        """Return a network with these parameters, and what the score of the present device is raised by."""
        return Network(theta, self.layers, self.width, self.rounds, self.devices, stay)

    def draw_parameters(self, seed: int) -> Singles:
        """Return random parameters: weights as He et al. (2015), biases zero."""
        rng, names = np.random.default_rng(seed), self.layer_names
        parts = []
        for (inputs, outputs), name in zip(self.sizes, names):
            scale = SUM_SCALE if name.endswith("receive.0") else LAST_SCALE if name == names[-1] else 1.0
            weights = scale * np.sqrt(2 / inputs) * rng.standard_normal((inputs, outputs))
            parts += [weights.ravel(), np.zeros(outputs)]
        return np.concatenate(parts).astype(np.float32)


@dataclass(frozen=True)
class Policy:
    """A trained policy: what it is made of, and what it knows."""

    shape: Shape
    theta: Singles
    order: Order = "topological"
    """Order in which it visits nodes."""
    start: Start = "m-etf"
    """What its episodes start from."""
    family: str = ""
    """The graphs that it was trained on."""
    graphs: int = 0
    """How many they were."""
    updates: int = 0
    """Number of updates of its training."""
    seed: int = 0
    learned_from: LearnFrom = "rewards"
    reward: Reward = "simulated"
    """Kind of rewards in its training."""
    max_nodes: int = 0
    """Graphs with more nodes were coarsened in its training; 0 if none were."""
    kept: Mapping[str, Ints] = field(default_factory=dict, repr=False, compare=False)
    """The placements that a training with measured rewards kept: the device of each node, by `hash_names`."""

    @property
    def network(self) -> Network:
        return self.shape.network(self.theta, self.stay)

    @property
    def stay(self) -> float:
        """Return what the score of the device where a node is already is raised by.

        An untrained policy then leaves a good placement mostly as it is, and the effect of each move can be told.
        """
        return 0.0 if self.start == "first-device" else STAY_SCORE

    def with_parameters(self, theta: Singles, updates: int) -> Policy:
        """Return this policy after further training."""
        return replace(self, theta=theta, updates=updates)


def hash_names(names: Sequence[str]) -> str:
    """Return a hash of the names of a graph's nodes, in their order."""
    return hashlib.sha256("\n".join(names).encode()).hexdigest()[:16]


def split_parameters(shape: Shape, theta: Singles) -> dict[str, Singles]:
    """Return weights [input, output] and biases by name."""
    tensors: dict[str, Singles] = {}
    for name, (start, inputs, outputs) in zip(shape.layer_names, shape.layers.tolist()):
        middle = start + inputs * outputs
        tensors[f"{name}.weight"] = theta[start:middle].reshape(inputs, outputs)
        tensors[f"{name}.bias"] = theta[middle : middle + outputs]
    return tensors


def join_parameters(tensors: Sequence[Singles]) -> Singles:
    """Return tensors in the order of `split_parameters` as one row."""
    return np.concatenate([tensor.ravel() for tensor in tensors]).astype(np.float32)
