"""Estimates of machines next to published figures: python benchmarks/machines.py [--only resnet50].

Each row is a figure that MLPerf or a vendor has published for a device of the catalogue, with its address, and what
`onnxplace plan --machine` estimates for a network of the same operators and sizes: as it does, and by peak rates alone,
without the coefficients of measured products. Networks are generated: their weights are holes of a file or random
numbers, so that nothing is downloaded, and large ones take no space. Nothing runs on a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from unittest.mock import patch

import numpy as np
import onnx
from _tables import report_progress
from onnx import TensorProto, helper

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

from _builder import GraphBuilder
from decoder import decoder
from light_models import light_model
from onnxplace.driver.plan import plan_model
from onnxplace.model.loading import load
from onnxplace.model.lowering import bind, infer_static_shapes
from onnxplace.passes.profiling.roofline import device_peaks, estimate_seconds
from onnxplace.target.machines import parse_machine
from transformer import transformer

MLPERF_3_1 = "https://github.com/mlcommons/inference_results_v3.1/tree/eaf622a25c00f2b4b1d2c4f5b4f430570429d24a/closed/NVIDIA/results"
MLPERF_2_1 = "https://github.com/mlcommons/inference_results_v2.1/tree/c43f76f2447cc4b41a37952c86c108749f8d12f3/closed/NVIDIA/results"
EXAMPLES = "https://github.com/NVIDIA/DeepLearningExamples/blob"
RESNET = f"{EXAMPLES}/291f0d02e815b148fa5c2b81bf07aa3552142895/PyTorch/Classification/ConvNets/resnet50v1.5/README.md"
BERT = f"{EXAMPLES}/002bcd8c45a0ae4bdf2f01918ab22e0752ffa3e6/TensorFlow/LanguageModeling/BERT/README.md"
LLM = "https://github.com/NVIDIA/TensorRT-LLM/blob/138f96d45f90b9667426f7c47297d8c06bafac73/docs/source/performance.md"


@dataclass(frozen=True)
class Published:
    """A published figure, and the plan that estimates the same."""

    model: str
    machine: str
    seconds: float
    """For `requests` requests, or one batch of them."""
    source: str
    shape: Mapping[str, int] = field(default_factory=dict)
    requests: int = 1
    devices: int = 1
    """Devices that work on one request."""
    software: str = "TensorRT"

    @staticmethod
    def of_rate(
        model: str, machine: str, rate: float, source: str, batch: int, software: str, seq: int = 0
    ) -> Published:
        """Return a figure that is published as requests per second, at a batch size."""
        shape = {"batch": batch, **({"seq": seq} if seq else {})}
        return Published(model, machine, batch / rate, source, shape, batch, software=software)


# Networks of MLPerf are served in batches of 256 and more; larger ones change an estimate by less than 1 %.
PUBLISHED = (
    Published.of_rate(
        "resnet50 int8",
        "H100-SXM",
        88526,
        f"{MLPERF_3_1}/DGX-H100_H100-SXM-80GBx1_TRT/resnet50/Offline",
        256,
        "TensorRT",
    ),
    Published.of_rate(
        "resnet50 int8", "A100-80-PCIe", 39814.4, f"{MLPERF_2_1}/A100-PCIe-80GBx1_TRT/resnet50/Offline", 256, "TensorRT"
    ),
    Published.of_rate("resnet50 int8", "L4", 12881.7, f"{MLPERF_3_1}/L4x1_TRT/resnet50/Offline", 256, "TensorRT"),
    Published(
        "resnet50 int8",
        "A100-80-PCIe",
        471368e-9,
        f"{MLPERF_2_1}/A100-PCIe-80GBx1_TRT/resnet50/SingleStream",
        {"batch": 1},
    ),
    *(
        Published.of_rate(f"resnet50 {kind}", "T4", rate, RESNET, 128, "PyTorch")
        for kind, rate in (("float32", 426), ("float16", 1190))
    ),
    *(
        Published.of_rate(
            f"bert-large {kind}",
            machine,
            rate,
            BERT,
            8,
            "TensorFlow",
            seq=384,
        )
        for kind, machine, rate in (
            ("float32", "A100-40", 182.46),  # published as TF32, which products of float32 are on an A100
            ("float16", "A100-40", 182.13),
            ("float32", "T4", 9.75),
            ("float16", "T4", 38.29),
        )
    ),
    *(
        Published(
            f"{model} float16",
            machine,
            seconds,
            LLM,
            {"batch": 1, "seq": seq, "past": 0},
            devices=devices,
            software="TensorRT-LLM",
        )
        for model, machine, devices, seq, seconds in (
            ("gpt-j-6b", "A100-80", 1, 128, 12e-3),
            ("gpt-j-6b", "A100-80", 1, 2048, 129e-3),
            ("llama-7b", "A100-80", 1, 128, 16e-3),
            ("llama-7b", "A100-80", 1, 2048, 133e-3),
            ("llama-70b", "4xA100-80-NVLink", 4, 128, 47e-3),
            ("llama-70b", "4xA100-80-NVLink", 4, 2048, 377e-3),
        )
    ),
)


# ------------------------------------------------------------------------------------------------------------ networks


def make_resnet(folder: Path, kind: str) -> onnx.ModelProto:
    """Return ResNet-50 with a symbolic batch, of float32, float16 or int8."""
    model = light_model("resnet50")
    for node in model.graph.node:
        if node.op_type == "Sum":  # of two values: the operator that quantisation knows
            node.op_type = "Add"
    shape = next(item for item in model.graph.initializer if item.data_type == TensorProto.INT64)
    rows = onnx.numpy_helper.to_array(shape).copy()
    rows[0] = -1
    shape.CopyFrom(onnx.numpy_helper.from_array(rows, shape.name))
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del model.graph.value_info[:]
    return _quantise(model, folder) if kind == "int8" else model


def _quantise(model: onnx.ModelProto, folder: Path) -> onnx.ModelProto:
    """Return a model whose convolutions are of int8, by ONNX Runtime's tools and one random image."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class OneImage(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            image = np.random.default_rng(0).random((1, 3, 224, 224), dtype=np.float32)
            self.feeds = iter([{model.graph.input[0].name: image}])

        def get_next(self) -> dict[str, np.ndarray] | None:
            return next(self.feeds, None)

    float_path, fused_path, path = (str(folder / f"{name}.onnx") for name in ("float", "fused", "int8"))
    onnx.save(onnx.version_converter.convert_version(model, 13), float_path)
    quant_pre_process(float_path, fused_path, skip_symbolic_shape=True)
    quantize_static(fused_path, path, OneImage(), quant_format=QuantFormat.QDQ)
    return onnx.load(path)


# BERT-large has 24 blocks of width 1024. GPT-J 6B has 28 of width 4096. LLaMA 7B and 70B have gated perceptrons; their
# blocks count as many weights as these (7B), or as many as 85 of these (70B).
TRANSFORMERS: Mapping[str, Callable[[], onnx.ModelProto]] = {
    "bert-large": lambda: transformer(layers=24, hidden=1024, heads=16, vocab=30522, positions=512),
    "gpt-j-6b": lambda: decoder(layers=28, hidden=4096, heads=16, vocab=50400, positions=2048),
    "llama-7b": lambda: decoder(layers=32, hidden=4096, heads=32, vocab=32000, positions=2048),
    "llama-70b": lambda: decoder(layers=85, hidden=8192, heads=64, vocab=32000, positions=2048),
}
HOLES = "weights.bin"


@contextlib.contextmanager
def declared_weights() -> Iterator[None]:
    """Let the builder of the examples declare weights in a file instead of drawing them."""

    def declare(builder: GraphBuilder, name: str, shape: Sequence[int], *_: float, **__: float) -> str:
        tensor = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
        tensor.external_data.add(key="location", value=HOLES)
        tensor.external_data.add(key="length", value=str(4 * math.prod(shape)))
        builder._initializers[name] = tensor
        return name

    with patch.object(GraphBuilder, "random", declare):
        yield


def halve(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model with float16 in place of float32."""
    half = TensorProto.FLOAT16
    for tensor in model.graph.initializer:
        if tensor.data_type == TensorProto.FLOAT and tensor.data_location == TensorProto.EXTERNAL:
            tensor.data_type = half
        elif tensor.data_type == TensorProto.FLOAT:
            array = onnx.numpy_helper.to_array(tensor).astype(np.float16)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))
    for value in (*model.graph.input, *model.graph.output):
        if value.type.tensor_type.elem_type == TensorProto.FLOAT:
            value.type.tensor_type.elem_type = half
    for node in model.graph.node:
        if node.op_type == "Cast" and helper.get_node_attr_value(node, "to") == TensorProto.FLOAT:
            node.attribute[0].i = half
    return model


def place_weights(model: onnx.ModelProto, folder: Path) -> None:
    """Give declared weights their places in a file of holes, which takes no space on the disk."""
    end = 0
    for tensor in model.graph.initializer:
        if tensor.data_location == TensorProto.EXTERNAL:
            size = math.prod(tensor.dims) * helper.tensor_dtype_to_np_dtype(tensor.data_type).itemsize
            del tensor.external_data[:]
            for key, value in (("location", HOLES), ("offset", str(end)), ("length", str(size))):
                tensor.external_data.add(key=key, value=value)
            end += size
    with (folder / HOLES).open("wb") as stream:
        stream.truncate(end)


def write_network(name: str, folder: Path) -> Path:
    """Write a network such as `resnet50 int8`; return its path."""
    family, kind = name.split()
    with declared_weights():
        model = make_resnet(folder, kind) if family == "resnet50" else TRANSFORMERS[family]()
    if kind == "float16":
        model = halve(model)
    place_weights(model, folder)
    path = folder / "model.onnx"
    path.write_bytes(model.SerializeToString())
    return path


# ----------------------------------------------------------------------------------------------------------- the table


def estimate(path: Path, row: Published, *, by_peaks: bool = False) -> float:
    """Return the estimated seconds of what a row has: the fastest strategy on its devices."""
    target = parse_machine(row.machine).to_target()
    # What was published is computed in TF32 where the GPU has it; onnxplace's default is float32.
    kinds = ["tf32" if "tf32" in device.type_operations_per_second else "" for device in target.devices]
    devices = [replace(device, computes_in=kind) for device, kind in zip(target.devices, kinds)]
    devices = [replace(device, products={}) for device in devices] if by_peaks else devices
    plan = plan_model(path, target=replace(target, devices=tuple(devices)), shape=row.shape, estimate=True)
    possible = [item for item in plan.strategies if item.step_seconds is not None and item.devices == row.devices]
    return min(item.step_seconds or math.inf for item in possible)


def estimate_parts(path: Path, row: Published) -> list[str]:
    """Return the estimated milliseconds of a row's parts on one device, as cells.

    They are products with weights, by coefficients and by peak rates; other products; other operators; and of these,
    what is the launch of a kernel.
    """
    model = bind(load(path), row.shape, {})
    shapes = infer_static_shapes(model)
    device = parse_machine(row.machine).to_target().devices[0]
    peaks = device_peaks(device)
    seconds = estimate_seconds(model, shapes, device.cost_class, peaks)
    by_peaks = estimate_seconds(model, shapes, device.cost_class, replace(peaks, products={}))
    is_product = np.array([node.op_type in ("MatMul", "Gemm") for node in model.nodes])
    has_weights = is_product & np.array([not model.initializers.keys().isdisjoint(node.input) for node in model.nodes])
    parts = (
        seconds[has_weights].sum(),
        by_peaks[has_weights].sum(),
        seconds[is_product & ~has_weights].sum(),
        seconds[~is_product].sum(),
        peaks.kernel_seconds * np.count_nonzero(~is_product),
    )
    return [f"{item * 1e3:.1f} ms" for item in parts]


def print_parts(rows: Sequence[Published]) -> None:
    """Print what estimates of networks on one measured device consist of."""
    header = (
        "network",
        "sizes",
        "published",
        "products with weights",
        "by peak rates",
        "other products",
        "other operators",
        "of these, launches",
    )
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    for row in rows:
        if row.devices == 1 and "float16" in row.model and parse_machine(row.machine).device.products:
            with tempfile.TemporaryDirectory() as folder:
                cells = estimate_parts(write_network(row.model, Path(folder)), row)
            sizes = ", ".join(f"{name} {size}" for name, size in row.shape.items() if size)
            print(f"| {' | '.join((row.model, sizes, f'{row.seconds * 1e3:.1f} ms', *cells))} |", flush=True)


def main() -> None:
    """Print a table as Markdown."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--only", default="", help="Rows whose model begins so.")
    parser.add_argument("--parts", action="store_true", help="What estimates on one device consist of.")
    options = parser.parse_args()
    rows = [row for row in PUBLISHED if row.model.startswith(options.only)]
    if options.parts:
        print_parts(rows)
    else:
        print_estimates(rows)


def print_estimates(rows: Sequence[Published]) -> None:
    """Print published figures next to estimates, and how far off these are."""
    header = (
        "network",
        "machine",
        "sizes",
        "published",
        "software",
        "estimate",
        "published time / estimate",
        "by peak rates",
        "published time / that",
    )
    print(f"| {' | '.join(header)} |\n|{'---|' * len(header)}")
    ratios: tuple[list[float], list[float]] = [], []
    sources = dict[str, int]()
    for name in dict.fromkeys(row.model for row in rows):
        with tempfile.TemporaryDirectory() as folder:
            report_progress(name)
            path = write_network(name, Path(folder))
            for row in (item for item in rows if item.model == name):
                is_measured = any(device.products for device in parse_machine(row.machine).to_target().devices)
                seconds = estimate(path, row)
                peak_seconds = estimate(path, row, by_peaks=True) if is_measured else seconds
                for column, item in zip(ratios, (seconds, peak_seconds)):
                    column.append(row.seconds / item)
                print(_format_row(row, (seconds, peak_seconds), sources), flush=True)
    print("\n".join(["", *(f"[{number}]: {address}" for address, number in sources.items())]))
    for column, name in zip(ratios, ("estimate", "that by peak rates")):
        spread = f"{min(column):.2f} to {max(column):.2f}, median {statistics.median(column):.2f}"
        factor = math.exp(statistics.fmean(abs(math.log(ratio)) for ratio in column))
        print(f"\n{len(column)} figures; published time / {name}: {spread}; typical factor {factor:.2f}")


def _format_row(row: Published, seconds: Sequence[float], sources: dict[str, int]) -> str:
    sizes = ", ".join(f"{name} {size}" for name, size in row.shape.items() if size)
    number = sources.setdefault(row.source, len(sources) + 1)
    cells = [f"[{_format(row, row.seconds)}][{number}]", row.software]
    for item in seconds:
        cells += [_format(row, item), f"{row.seconds / item:.2f}"]
    return f"| {row.model} | {row.machine} | {sizes} | {' | '.join(cells)} |"


def _format(row: Published, seconds: float) -> str:
    return f"{row.requests / seconds:,.0f}/s" if row.requests > 1 else f"{seconds * 1e3:.3g} ms"


if __name__ == "__main__":
    main()
