"""Models for NPUs, which take inputs of fixed sizes only."""

import json
import tempfile
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto, TensorProto, helper, numpy_helper

from tests.conftest import branches

NPU = "qnn/npu:0"


def fixed_branches(batch: int = 4) -> ModelProto:
    """Return the model of two branches for a batch of this size."""
    model = branches()
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_value = batch
    return model


def quantised_mobilenet() -> ModelProto:
    """Return a small MobileNet: blocks of depthwise and pointwise convolutions with Clip, quantised by ONNX Runtime."""
    random = np.random.default_rng(0)
    nodes, weights, value, channels = [], [], "image", 8

    def add(op: str, name: str, inputs: list[str], **attributes: object) -> str:
        nodes.append(helper.make_node(op, inputs, [name], name, **attributes))
        return name

    def convolve(name: str, value: str, shape: tuple[int, ...], **attributes: object) -> str:
        weights.append(numpy_helper.from_array(random.standard_normal(shape).astype(np.float32) / 4, f"{name}_w"))
        return add("Clip", f"{name}_clip", [add("Conv", name, [value, f"{name}_w"], **attributes), "least", "most"])

    weights += [numpy_helper.from_array(np.float32(bound), name) for name, bound in (("least", 0), ("most", 6))]
    value = convolve("stem", value, (channels, 3, 3, 3), pads=[1, 1, 1, 1], strides=[2, 2])
    for block in range(3):
        depthwise = convolve(f"depth{block}", value, (channels, 1, 3, 3), pads=[1, 1, 1, 1], group=channels)
        pointwise = convolve(f"point{block}", depthwise, (channels, channels, 1, 1))
        value = add("Add", f"residual{block}", [value, pointwise])
    value = add("GlobalAveragePool", "pool", [value])
    weights.append(numpy_helper.from_array(random.standard_normal((channels, 10)).astype(np.float32), "head_w"))
    add("MatMul", "logits", [add("Flatten", "flat", [value]), "head_w"])
    image = helper.make_tensor_value_info("image", TensorProto.FLOAT, [2, 3, 32, 32])
    logits = helper.make_tensor_value_info("logits", TensorProto.FLOAT, [2, 10])
    graph = helper.make_graph(nodes, "mobilenet", [image], [logits], weights)
    return quantise(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9))


def quantise(model: ModelProto) -> ModelProto:
    """Return a model of images with QuantizeLinear and DequantizeLinear around its operators."""
    from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_static

    class Images(CalibrationDataReader):
        def __init__(self) -> None:
            self.images = iter(np.random.default_rng(1).random((3, 2, 3, 32, 32), dtype=np.float32))

        def get_next(self) -> dict[str, np.ndarray] | None:
            image = next(self.images, None)
            return None if image is None else {"image": image}

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "quantised.onnx"
        options = {"quant_format": QuantFormat.QDQ, "activation_type": QuantType.QUInt8, "weight_type": QuantType.QInt8}
        quantize_static(model, path, Images(), **options)
        return onnx.load(path)


def scale_costs(path: Path, factor: float = 5.0) -> None:
    """Rewrite a cost file as if on large models: the CPU takes a thousand times longer, the NPU a part of that."""
    costs = json.loads(path.read_text())
    for entry in costs["nodes"].values():
        cpu = next(name for name in entry["seconds"] if name.startswith("cpu/"))
        entry["seconds"][cpu] *= 1000
        for name in entry["seconds"].keys() - {cpu}:
            if entry["seconds"][name] != "refused":
                entry["seconds"][name] = entry["seconds"][cpu] / factor
    path.write_text(json.dumps({**costs, "whole_seconds": {}, "measured": {}}))
