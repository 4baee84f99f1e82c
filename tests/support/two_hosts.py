"""Bundles of two hosts, both of which are this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from onnx import ModelProto

from onnxplace.bundle.bundle import Bundle
from onnxplace.driver.compile import compile_model
from onnxplace.target.target import Device, Link, Target

# Two names of this machine.
HOSTS = ("localhost", "127.0.0.1")
TWO_HOSTS = ("localhost/cpu:0", "127.0.0.1/cpu:0")


def make_target(*device_ids: str) -> Target:
    """Return a target with links in both directions between all hosts that its devices name."""
    devices = tuple(Device(name, 1 << 30) for name in device_ids)
    hosts = dict.fromkeys(device.host for device in devices if device.host)
    pairs = [(one, other) for one in hosts for other in hosts if one != other]
    return Target(devices, tuple(Link(one, other, 1e-4, 1e9) for one, other in pairs))


def compile_alternating(model: ModelProto, folder: Path, *device_ids: str, **options: Any) -> Bundle:
    """Compile a model whose nodes change the device one after another; nodes get the names of their outputs."""
    for node in model.graph.node:
        node.name = node.output[0]
    placed = {node.name: device_ids[index % len(device_ids)] for index, node in enumerate(model.graph.node)}
    (folder / "map.json").write_text(json.dumps(placed))
    pipeline = f'profile{{estimate=true}},coplace{{join=never,device_map="{folder / "map.json"}"}},m-topo,split,emit'
    path = folder / f"{model.graph.name}.bundle"
    return compile_model(model, path, target=make_target(*device_ids), pipeline=pipeline, **options).bundle
