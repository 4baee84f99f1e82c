"""Policies over sequences: the sizes of their networks, their parameters, and what they were trained on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from onnxplace.errors import UsageError
from onnxplace_learned.policies.placeto_kernels import Singles
from onnxplace_learned.policies.sequence_graph import FIXED_FEATURES, NEIGHBOURS, OP_BUCKETS, ListOrder

Kind = Literal["hierarchical", "go"]
Variant = Literal["learned", "given", "each", "placement", "placement+schedule"]
GroupsFrom = Literal["learned", "given", "each"]
"""For `hierarchical`, whether groups are learned (HDP), given by coarsening (ColocRL), or single (no hierarchy)."""
Heads = Literal["placement", "placement+schedule"]
"""For `go`, whether devices are learned (GDP), or also priorities (GO)."""
VARIANTS: Mapping[str, tuple[str, ...]] = {"hierarchical": get_args(GroupsFrom), "go": get_args(Heads)}

# Embeddings of types of operators, as HDP has them; of devices; the grouper's hidden units, as HDP has them.
OP_WIDTH, DEVICE_WIDTH, GROUPER_HIDDEN = 20, 8, 64
# Layers of GraphSAGE and of attention of `go`, and heads of attention.
GRAPH_LAYERS, ATTENTION_LAYERS, ATTENTION_HEADS = 2, 2, 4
# Levels of priority of the head for schedules.
PRIORITIES = 4
# Scale of the weights of last layers, so that all choices are about equally likely at first.
LAST_SCALE = 0.1
Sizes = dict[str, tuple[int, ...]]


@dataclass(frozen=True)
class SequenceShape:
    """The sizes of a network."""

    kind: Kind
    variant: Variant
    devices: int
    """The most devices that it knows."""
    groups: int = 32
    """For `hierarchical`, the most groups of a graph that it learns or is given."""
    width: int = 64
    order: ListOrder = "criticality"

    @property
    def features(self) -> int:
        return 2 * self.devices + FIXED_FEATURES

    @property
    def max_items(self) -> int:
        """Return the most items of a sequence that the variant can have; 0 for no limit of its own."""
        return self.groups if self.variant == "given" else 0

    @property
    def sizes(self) -> Sizes:
        """Return the shape of each tensor. Weights are [input, output]; those of LSTMs as torch has them."""
        return self._sizes_of_hierarchical() if self.kind == "hierarchical" else self._sizes_of_go()

    def _sizes_of_hierarchical(self) -> Sizes:
        width, half, sizes = self.width, self.width // 2, Sizes()
        sizes["operators"] = (OP_BUCKETS, OP_WIDTH)
        if self.variant == "learned":
            sizes |= _linear("grouper.hidden", OP_WIDTH + self.features + 2 * NEIGHBOURS, GROUPER_HIDDEN)
            sizes |= _linear("grouper.choose", GROUPER_HIDDEN, self.groups)
        sizes |= _linear("group", OP_WIDTH + self.features + 1 + self.groups, width)
        for direction in ("forward", "backward"):
            sizes |= _recurrent(f"encoder.{direction}", width, half)
        sizes |= _recurrent("decoder", DEVICE_WIDTH + width, width)
        sizes["device"] = (self.devices + 1, DEVICE_WIDTH)
        sizes["attention"] = (width, width)
        return sizes | _linear("choose", 2 * width, self.devices)

    def _sizes_of_go(self) -> Sizes:
        width, sizes = self.width, Sizes()
        sizes["operators"] = (OP_BUCKETS, OP_WIDTH)
        sizes |= _linear("encode", OP_WIDTH + self.features + self.devices, width)
        for layer in range(GRAPH_LAYERS):
            sizes |= _linear(f"graph{layer}.send", width, 2 * width)
            sizes |= _linear(f"graph{layer}.receive", 3 * width, width)
        for layer in range(ATTENTION_LAYERS):
            for part, (inputs, outputs) in {
                "query": (width, width), "pair": (width, 2 * width), "join": (width, width),
                "widen": (width, 2 * width), "narrow": (2 * width, width),
            }.items():  # fmt: skip
                sizes |= _linear(f"attention{layer}.{part}", inputs, outputs)
                sizes |= _linear(f"attention{layer}.{part}.modulate", width, inputs)
        sizes |= _linear("choose", width, self.devices)
        if self.variant == "placement+schedule":
            sizes |= _linear("priority.hidden", width + self.devices, width)
            sizes |= _linear("priority.choose", width, PRIORITIES)
        return sizes

    @property
    def parameters(self) -> int:
        return sum(int(np.prod(size)) for size in self.sizes.values())

    def draw_parameters(self, seed: int) -> Singles:
        """Return random parameters: weights as Glorot and Bengio (2010), biases zero."""
        rng, parts = np.random.default_rng(seed), []
        for name, size in self.sizes.items():
            if len(size) == 1:
                parts.append(np.zeros(size))
                continue
            scale = LAST_SCALE if name.endswith("choose.weight") else 1.0
            parts.append(scale * np.sqrt(2 / sum(size)) * rng.standard_normal(size).ravel())
        return np.concatenate(parts).astype(np.float32)

    def split(self, theta: Singles) -> dict[str, Singles]:
        """Return the tensors by name; they share the memory of `theta`, which may also be a tensor of torch."""
        tensors, start = {}, 0
        for name, size in self.sizes.items():
            count = int(np.prod(size))
            tensors[name] = theta[start : start + count].reshape(size)
            start += count
        return tensors


@dataclass(frozen=True)
class SequencePolicy:
    """A policy of `hierarchical` or `go`: what it is made of, and what it was trained on."""

    shape: SequenceShape
    theta: Singles
    family: str = ""
    """The graphs that it was trained on."""
    graphs: int = 0
    """How many they were."""
    updates: int = 0
    seed: int = 0

    def with_parameters(self, theta: Singles, updates: int) -> SequencePolicy:
        """Return this policy after further training."""
        return replace(self, theta=theta, updates=updates)


def require_known_devices(policy: SequencePolicy, devices: int, where: str) -> None:
    """Raise UsageError if there are more devices than a policy knows."""
    if devices > policy.shape.devices:
        message = f"the policy knows at most {policy.shape.devices} devices, expected {devices}"
        hint = f"use fewer devices, or `onnxplace learn {policy.shape.kind} --devices {devices}`"
        raise UsageError("H003", message, where=where, hint=hint)


def _linear(name: str, inputs: int, outputs: int) -> Sizes:
    return {f"{name}.weight": (inputs, outputs), f"{name}.bias": (outputs,)}


def _recurrent(name: str, inputs: int, hidden: int) -> Sizes:
    gates = 4 * hidden
    return {
        f"{name}.input": (gates, inputs), f"{name}.hidden": (gates, hidden), f"{name}.bias": (gates,),
    }  # fmt: skip
