"""Small models whose values cross between devices: fixed and random ones, with states, and their reference in numpy.

Sums of small whole numbers are exact, so results are compared for equality.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from onnx import parser

import onnxplace
from onnxplace.target.target import Device, Target

Arrays = dict[str, NDArray[np.float32]]
SIZE = 4


@dataclass(frozen=True)
class Node:
    """An element-wise sum, difference or negation on a device."""

    output: str
    op: str
    inputs: tuple[str, ...]
    device: int


@dataclass(frozen=True)
class SmallModel:
    """A model of such nodes, with the input `x` and the states `s0`, ..., whose next values are `t0`, ..."""

    nodes: tuple[Node, ...]
    states: int

    @property
    def devices(self) -> int:
        """The number of devices."""
        return 1 + max(node.device for node in self.nodes)

    @property
    def outputs(self) -> list[str]:
        """The next states, and all values that no node reads."""
        read = {name for node in self.nodes for name in node.inputs}
        states = [f"t{index}" for index in range(self.states)]
        return [*states, *(node.output for node in self.nodes if node.output not in {*read, *states})]

    def make_feeds(self, number: int, size: int = SIZE) -> Arrays:
        """Return the inputs of a request, without states."""
        return {"x": np.arange(number % 99, number % 99 + size, dtype=np.float32)}

    def make_start(self, number: int, size: int = SIZE) -> Arrays:
        """Return initial states."""
        return {f"s{index}": np.full(size, number % 99 - index, np.float32) for index in range(self.states)}

    def step(self, feeds: Arrays) -> Arrays:
        """Return all outputs of one request, which is fed its states."""
        values = dict(feeds)
        for node in self.nodes:
            arguments = [values[name] for name in node.inputs]
            values[node.output] = {"Add": np.add, "Sub": np.subtract, "Neg": np.negative}[node.op](*arguments)
        return {name: values[name] for name in self.outputs}

    def compile(
        self,
        folder: Path,
        names: Sequence[str] = ("cpu:0", "cpu:1", "cpu:2"),
        processors: Sequence[tuple[str, ...]] = ((),) * 3,
    ) -> onnxplace.Bundle:
        """Compile the model; nodes stay on their devices, which have these names and processors."""
        names = names[: self.devices]
        devices = [
            Device(name, 1 << 30, cores=max(len(own), 1), processors=own) for name, own in zip(names, processors)
        ]
        inputs = ", ".join(f"float[n] {name}" for name in ("x", *self.make_start(0)))
        outputs = ", ".join(f"float[n] {name}" for name in self.outputs)
        lines = "\n".join(f"[{n.output}] {n.output} = {n.op}({', '.join(n.inputs)})" for n in self.nodes)
        model = parser.parse_model(
            f'<ir_version: 8, opset_import: ["": 17]> small ({inputs}) => ({outputs}) {{ {lines} }}'
        )
        device_map = folder / "map.json"
        device_map.write_text(json.dumps({node.output: names[node.device] for node in self.nodes}))
        return onnxplace.compile(
            model,
            folder / "small.bundle",
            target=Target(tuple(devices)),
            shape={"n": SIZE},
            state=[f"t{index}=s{index}" for index in range(self.states)],
            pipeline=f"profile{{estimate=true}},coplace{{join=never,device_map={json.dumps(str(device_map))}}},m-etf,split,emit",
            force=True,
        )


def make_ping_pong(devices: int, states: int = 2) -> SmallModel:
    """Return a model whose values go to and fro between two devices or three."""
    first, second = ("s0", "s1") if states else ("x", "x")
    return SmallModel(
        (
            Node("t0", "Add", (first, "x"), 0),
            Node("t1", "Sub", (second, "t0"), 1),
            Node("mixed", "Add", ("t1", "x"), 0),
            Node("turned", "Neg", ("mixed",), devices - 1),
            Node("y", "Sub", ("turned", "t0"), 0),
        ),
        states,
    )


def make_random_model(seed: int) -> SmallModel:
    """Return a model of some nodes on one to three devices, with up to two states."""
    draw = random.Random(seed)
    devices, states = draw.randint(1, 3), draw.randint(0, 2)
    values, nodes = ["x"], list[Node]()
    for index in range(draw.randint(3, 9)):
        op = draw.choice(["Add", "Sub", "Neg"])
        # Only one node reads a state: it has to be on the device that computes the next one.
        own = f"s{index}" if index < states else draw.choice(values)
        inputs = (own,) if op == "Neg" else (own, draw.choice(values))
        nodes.append(Node(f"t{index}" if index < states else f"v{index}", op, inputs, draw.randrange(devices)))
        values.append(nodes[-1].output)
    missing = set(range(devices)) - {node.device for node in nodes}
    used = {device: position for position, device in enumerate(sorted(set(range(devices)) - missing))}
    return SmallModel(tuple(Node(n.output, n.op, n.inputs, used[n.device]) for n in nodes), states)


@dataclass
class Talker:
    """A session or a conversation, and what it must answer next."""

    user: onnxplace.InferenceSession
    model: SmallModel
    states: Arrays = field(default_factory=dict)
    """The states that are stored; none if they are lost."""

    def prepare(self, number: int, size: int = SIZE) -> tuple[Arrays, Arrays]:
        """Return the feeds of the next request and the outputs that are right; a lost state is fed anew."""
        start = {} if self.states or not self.model.states else self.model.make_start(number, size)
        feeds = {**self.model.make_feeds(number, size), **start}
        return feeds, self.model.step({**self.states, **feeds})

    def keep(self, outputs: Arrays) -> None:
        """Take note of the states after a request."""
        self.states = {f"s{index}": outputs[f"t{index}"] for index in range(self.model.states)}
