"""What convolutions by rows and split loops gain: python benchmarks/split_features.py [MODEL ...].

Each model is planned twice by estimated costs, with the feature and without it, for 2 and 4 devices: GPUs like the H200
as in `benchmarks/sharding.py --simulate`, and CPUs. Markdown on stdout: simulated speed-ups over one device.
docs/sharding.md holds the latest table.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import onnx
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).parent))
from _sharding_models import _Builder
from _tables import report_progress
from sharding import make_target, print_markdown, speed_up

from onnxplace.model.loading import load
from onnxplace.model.lowering import bind
from onnxplace.target.target import Device, Link, Target

SPACE = "onnxplace.passes.sharding.space"
# What lists the strategies of each feature.
FEATURES = {
    "rows": f"{SPACE}.node_strategies.list_windows",
    "loops": f"{SPACE}.strategy_space.list_subgraph_strategies",
}
STEPS = 100


class Network(_Builder):
    """Layers of a model in half precision, whose weights are a hole in a sparse file."""

    def add(self, op: str, *inputs: str, **attributes: Any) -> str:
        return self.node(op, [*inputs], f"{op}_{len(self.nodes)}", **attributes)

    def convolve(self, value: str, inner: int, outer: int, kernel: int = 3, stride: int = 1) -> str:
        weight = self.weight(f"w{len(self.nodes)}", outer, inner, kernel, kernel)
        return self.add("Conv", value, weight, pads=[kernel // 2] * 4, strides=[stride] * 2, kernel_shape=[kernel] * 2)

    def activate(self, value: str) -> str:
        return self.add("Relu", value)

    def save(self, inputs: dict[str, tuple[int, ...]], output: str) -> None:
        infos = [helper.make_tensor_value_info(name, TensorProto.FLOAT16, shape) for name, shape in inputs.items()]
        results = [helper.make_tensor_value_info(output, TensorProto.FLOAT16, None)]
        graph = helper.make_graph(self.nodes, "graph", infos, results, self.weights)
        opset = [helper.make_opsetid("", 17)]
        onnx.save(helper.make_model(graph, opset_imports=opset, ir_version=8), str(self.path))
        with self.path.with_name(f"{self.path.name}.data").open("wb") as file:
            file.truncate(max(self.offset, 1))


def write_resnet(path: Path, pixels: int) -> None:
    """Write ResNet-50 for one image."""
    net, channels = Network(path), 64
    value = net.activate(net.convolve("x", 3, 64, 7, 2))
    value = net.add("MaxPool", value, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
    for stage, blocks in enumerate((3, 4, 6, 3)):
        width = 64 << stage
        for block in range(blocks):
            stride = 2 if stage and not block else 1
            inner = net.activate(net.convolve(value, channels, width, 1))
            inner = net.activate(net.convolve(inner, width, width, 3, stride))
            inner = net.convolve(inner, width, 4 * width, 1)
            short = value if block else net.convolve(value, channels, 4 * width, 1, stride)
            value, channels = net.activate(net.add("Add", inner, short)), 4 * width
    value = net.add("Flatten", net.add("GlobalAveragePool", value))
    net.save({"x": (1, 3, pixels, pixels)}, net.add("MatMul", value, net.weight("classes", channels, 1000)))


def write_unet(path: Path, pixels: int) -> None:
    """Write a U-Net for one image."""
    net, value, skips, channels = Network(path), "x", list[str](), 3
    for level in range(5):
        width = 64 << level
        if level:
            value = net.add("MaxPool", value, kernel_shape=[2, 2], strides=[2, 2])
        value = net.activate(net.convolve(net.activate(net.convolve(value, channels, width)), width, width))
        channels = width
        skips.append(value)
    for level in reversed(range(4)):
        width = 64 << level
        weight = net.weight(f"up{level}", 2 * width, width, 2, 2)
        value = net.add("ConvTranspose", value, weight, strides=[2, 2], kernel_shape=[2, 2])
        value = net.add("Concat", skips[level], value, axis=1)
        value = net.activate(net.convolve(net.activate(net.convolve(value, 2 * width, width)), width, width))
    net.save({"x": (1, 3, pixels, pixels)}, net.convolve(value, 64, 2, 1))


def write_super_resolution(path: Path, pixels: int) -> None:
    """Write EDSR: residual blocks of 256 channels, and twice the pixels."""
    net = Network(path)
    value = first = net.convolve("x", 3, 256)
    for _ in range(32):
        value = net.add("Add", value, net.convolve(net.activate(net.convolve(value, 256, 256)), 256, 256))
    value = net.add("Add", net.convolve(value, 256, 256), first)
    value = net.add("DepthToSpace", net.convolve(value, 256, 1024), blocksize=2)
    net.save({"x": (1, 3, pixels, pixels)}, net.convolve(value, 256, 3))


def write_scan(path: Path, batch: int) -> None:
    """Write a layer of LSTM cells of 1024 units with normalised gates: no operator but Scan has such cells."""
    net, width = Network(path), 1024
    cell = Network(path)
    names = {name: net.weight(name, *shape) for name, shape in (("wh", (width, 4 * width)), ("wx", (width, 4 * width)))}
    scale = net.weight("scale", 4 * width)
    products = [cell.add("MatMul", value, names[name]) for value, name in (("h", "wh"), ("xt", "wx"))]
    gates = cell.add("LayerNormalization", cell.add("Add", *products), scale)
    parts = [f"gate{index}" for index in range(4)]
    cell.node("Split", [gates, net.ints("sizes", [width] * 4)], parts, axis=1)
    opened = [cell.add("Sigmoid", part) for part in parts[:3]]
    fresh = cell.add("Mul", opened[0], cell.add("Tanh", parts[3]))
    kept = cell.add("Add", cell.add("Mul", opened[1], "c"), fresh)
    hidden = cell.add("Mul", opened[2], cell.add("Tanh", kept))
    infos = {
        name: helper.make_tensor_value_info(name, TensorProto.FLOAT16, (batch, width))
        for name in ("h", "c", "xt", hidden, kept, "result")
    }
    cell.node("Identity", [hidden], "result")
    *inputs, last_hidden, last_kept, result = infos.values()
    body = helper.make_graph(cell.nodes, "cell", inputs, [last_hidden, last_kept, result])
    net.node("Scan", ["h0", "c0", "x"], ["h1", "c1", "results"], body=body, num_scan_inputs=1)
    states = dict.fromkeys(("h0", "c0"), (batch, width))
    net.save({"x": (STEPS, batch, width), **states}, net.add("MatMul", "results", net.weight("classes", width, 1000)))


MODELS: dict[str, tuple[str, Callable[[Path, int], None], int]] = {
    "resnet50, 224 pixels": ("rows", write_resnet, 224),
    "resnet50, 1024 pixels": ("rows", write_resnet, 1024),
    "resnet50, 2048 pixels": ("rows", write_resnet, 2048),
    "unet, 1024 pixels": ("rows", write_unet, 1024),
    "edsr, 256 pixels": ("rows", write_super_resolution, 256),
    "scan of lstm cells, batch 16": ("loops", write_scan, 16),
    "scan of lstm cells, batch 64": ("loops", write_scan, 64),
}


def list_targets() -> Iterator[tuple[str, list[Target]]]:
    """Yield machines of 2 and of 4 devices, by name."""
    for link in ("nvlink", "pcie"):
        for kind, collective in (("waits", False), ("one message", True)):
            yield f"GPUs, {link}, {kind}", [make_target(count, link, collective) for count in (2, 4)]
    yield "CPUs", [make_cpus(count) for count in (2, 4)]


def make_cpus(count: int) -> Target:
    """Return a target of CPU devices of one core each."""
    devices = tuple(Device(f"cpu:{index}", memory_bytes=1 << 42) for index in range(count))
    return Target(devices, tuple(Link(a.id, b.id, 20e-6, 10e9) for a in devices for b in devices if a is not b))


def measure(name: str, folder: Path) -> Iterator[list[str]]:
    """Yield a row per machine: speed-ups with the feature, and without it."""
    feature, write, size = MODELS[name]
    path = folder / "model.onnx"
    write(path, size)
    model = bind(load(path), {}, {})
    for machine, targets in list_targets():
        report_progress(f"{name}, {machine}")
        cells = []
        for target in targets:
            gains = [max(speed_up(model, target)[1], 1.0)]
            with patch(FEATURES[feature], lambda *_: iter(())):
                gains.append(max(speed_up(model, target)[1], 1.0))
            cells.append(", ".join(f"{gain:.2f}" for gain in gains))
        yield [name, machine, *cells]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", help=f"default: all of {'; '.join(MODELS)}")
    names = parser.parse_args().models or list(MODELS)
    with tempfile.TemporaryDirectory() as folder:
        header = ["model", "devices", "2: with, without", "4: with, without"]
        print_markdown(header, (row for name in names for row in measure(name, Path(folder))))


if __name__ == "__main__":
    main()
