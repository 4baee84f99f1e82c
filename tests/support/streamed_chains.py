"""Chains of products with signed permutations, whose weights stream, and their reference in numpy.

Such products are exact and never grow, and a weight in the place of another one gives other numbers.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper, parser

import onnxplace
from onnxplace.bundle.manifest import StreamRecord
from onnxplace.facts import Placement, Profile, Segments, Streaming
from onnxplace.passes.split import Split
from onnxplace.state import State
from onnxplace.target.target import Device, Target

Arrays = dict[str, NDArray[np.float32]]
ROWS = 2


@dataclass(frozen=True)
class StreamedChain:
    """A chain of products, and a state that adds up their results; an interface like that of `SmallModel`."""

    devices: tuple[str, ...]
    """Of each layer."""
    homes: tuple[str, ...]
    """Of the weight of each layer: `host`, `disk`, or empty for one that stays on its device."""
    pool_bytes: int
    side: int = 32
    states: int = 1
    dtype: str = "float"
    seed: int = 0

    @property
    def outputs(self) -> list[str]:
        return [f"t{index}" for index in range(self.states)] + [f"h{len(self.devices)}"]

    @property
    def weights(self) -> list[NDArray[np.float32]]:
        random = np.random.default_rng(self.seed)
        matrices = [np.eye(self.side, dtype=np.float32)[random.permutation(self.side)] for _ in self.devices]
        return [matrix * random.choice([-1, 1], self.side).astype(np.float32) for matrix in matrices]

    def make_feeds(self, number: int, size: int = ROWS) -> Arrays:
        return {"h0": (np.arange(size * self.side, dtype=np.float32).reshape(size, -1) + number) % 61}

    def make_start(self, number: int, size: int = ROWS) -> Arrays:
        return {
            f"s{index}": np.full((size, self.side), number % 99 - index, np.float32) for index in range(self.states)
        }

    def step(self, feeds: Arrays) -> Arrays:
        last, values = f"h{len(self.devices)}", feeds["h0"]
        for weight in self.weights:
            values = values @ weight
        return {last: values, **{f"t{index}": feeds[f"s{index}"] + values for index in range(self.states)}}

    def compile(self, folder: Path, pipeline: str = "m-etf,split,emit", **options: Any) -> onnxplace.Bundle:
        """Compile the chain for its devices, or others that `options` give."""
        count, kind = len(self.devices), "" if self.dtype == "float" else self.dtype
        states = [f"float[n,{self.side}] s{index}" for index in range(self.states)]
        outputs = [f"float[n,{self.side}] {name}" for name in self.outputs]
        model = parser.parse_model(
            f'<ir_version: 8, opset_import: ["": 19]> chain ({", ".join([f"float[n,{self.side}] h0", *states])}) '
            f"=> ({', '.join(outputs)}) {{}}"
        )
        places = {}
        for layer, weight in enumerate(self.weights):
            name = f"w{layer}"
            tensor = numpy_helper.from_array(weight, name)
            if kind:
                number = TensorProto.DataType.Value(kind.upper())
                tensor = helper.make_tensor(name, number, weight.shape, weight.ravel())
                tensor = numpy_helper.from_array(numpy_helper.to_array(tensor), name)
                model.graph.node.append(helper.make_node("Cast", [name], [f"c{layer}"], name=f"cast{layer}", to=1))
                places[f"cast{layer}"], name = self.devices[layer], f"c{layer}"
            model.graph.initializer.append(tensor)
            product = helper.make_node("MatMul", [f"h{layer}", name], [f"h{layer + 1}"], name=f"layer{layer}")
            model.graph.node.append(product)
            places[f"layer{layer}"] = self.devices[layer]
        for index in range(self.states):
            node = helper.make_node("Add", [f"s{index}", f"h{count}"], [f"t{index}"], name=f"add{index}")
            model.graph.node.append(node)
            places[f"add{index}"] = self.devices[-1]
        device_map = folder / "map.json"
        device_map.write_text(json.dumps(places))
        names = tuple(dict.fromkeys(self.devices))
        target = {} if "devices" in options else {"target": Target(tuple(Device(name, 1 << 30) for name in names))}
        with self.streaming():
            return onnxplace.compile(
                model,
                folder / "chain.bundle",
                shape={"n": ROWS},
                state=[f"t{index}=s{index}" for index in range(self.states)],
                pipeline=f"profile{{estimate=true}},coplace{{join=never,device_map={json.dumps(str(device_map))}}},"
                + pipeline,
                force=True,
                **{**target, **options},
            )

    def streaming(self) -> AbstractContextManager[Any]:
        """Let `split` see weights that stream, whatever a placer would choose."""
        homes = {f"w{layer}": home for layer, home in enumerate(self.homes) if home}
        if not homes:
            return nullcontext()
        split = Split.run

        def run(self_: Split, state: State) -> State:
            graph, placed = state[Profile].graph, state[Placement].device
            size = {name: int(graph.weight_bytes[graph.weight_names.index(name)]) for name in homes}
            readers = [set(graph.weights[node].tolist()) for node in range(len(graph))]
            names = {graph.weight_names.index(name) for name in homes}
            devices = {int(placed[node]) for node, weights in enumerate(readers) if weights & names}
            streams = {
                device: StreamRecord(
                    device=state.target.devices[device].id,
                    pool_bytes=self.pool_bytes,
                    bytes_per_second={"disk": 1e9, "host": 1e10},
                )
                for device in sorted(devices)
            }
            streaming = Streaming(homes, size, streams)
            return split(self_, state.with_facts(streaming))

        return mock.patch.multiple(Split, run=run, provides=(Segments, Streaming))


def draw_chain(draw: Any, names: Sequence[str]) -> StreamedChain:
    """Return a random chain on some of these devices; `draw` is a `random.Random`."""
    layers, side = draw.randint(1, 9), draw.choice([8, 32, 33])
    return StreamedChain(
        devices=tuple(draw.choice(names) for _ in range(layers)),
        homes=tuple(draw.choice(["", "host", "disk", "disk"]) for _ in range(layers)),
        pool_bytes=draw.choice([2, 3, 5, 12]) * 4096,
        side=side,
        states=draw.randint(0, 1),
        seed=draw.randrange(1 << 30),
    )
