"""Models for benchmarks/sharding.py: exports of torch with random weights, and large transformers without any.

`export` needs torch and transformers: `pip install -e '.[cpu,dev,zoo]'`. Nothing is downloaded.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper

IDS = 30000


def _language_model(kind: str) -> Callable[[Any, Any], tuple[Any, tuple[Any, ...]]]:
    """Return a builder of a text model and its input, 128 tokens."""

    def build(torch: Any, transformers: Any) -> tuple[Any, tuple[Any, ...]]:
        ids = torch.randint(0, IDS, (1, 128))
        if kind == "bert":
            model = transformers.BertModel(transformers.BertConfig(attn_implementation="eager"))
            return _Wrapped(torch, model, lambda m, x: m(input_ids=x, return_dict=False)[0]), (ids,)
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(attn_implementation="eager"))
        return _Wrapped(torch, model, lambda m, x: m(x, return_dict=False, use_cache=False)[0]), (ids,)

    return build


def _image_model(kind: str, batch: int) -> Callable[[Any, Any], tuple[Any, tuple[Any, ...]]]:
    def build(torch: Any, transformers: Any) -> tuple[Any, tuple[Any, ...]]:
        if kind == "vit":
            model = transformers.ViTModel(transformers.ViTConfig(attn_implementation="eager"))
        else:
            model = transformers.ResNetForImageClassification(transformers.ResNetConfig())
        images = torch.randn(batch, 3, 224, 224)
        return _Wrapped(torch, model, lambda m, x: m(x, return_dict=False)[0]), (images,)

    return build


def _recurrent_model(torch: Any, _: Any) -> tuple[Any, tuple[Any, ...]]:
    layers = torch.nn.LSTM(512, 512, 4)
    return _Wrapped(torch, layers, lambda m, x: m(x)[0]), (torch.randn(40, 4, 512),)


def _Wrapped(torch: Any, model: Any, call: Callable[[Any, Any], Any]) -> Any:  # noqa: N802 - it returns a module
    """Return a module with one input and one output."""

    class Wrapped(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, value: Any) -> Any:
            return call(self.model, value)

    return Wrapped()


EXPORTED: Mapping[str, Callable[[Any, Any], tuple[Any, tuple[Any, ...]]]] = {
    "bert-base": _language_model("bert"),
    "gpt2": _language_model("gpt2"),
    "vit-base": _image_model("vit", 1),
    "resnet50": _image_model("resnet", 1),
    "resnet50-batch4": _image_model("resnet", 4),
    "lstm": _recurrent_model,
}


def export(name: str, folder: Path) -> Path:
    """Write a model as ONNX file, unless it is there; return its path."""
    path = folder / f"{name}.onnx"
    if path.is_file():
        return path
    import torch
    import transformers

    torch.manual_seed(0)
    module, arguments = EXPORTED[name](torch, transformers)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        torch.onnx.export(module.eval(), arguments, str(path), input_names=["x"], output_names=["y"], dynamo=True)
    return path


@dataclass(frozen=True)
class Transformer:
    """A large language model, of which only the sizes matter."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    is_gated: bool
    """With a gate in the feed-forward network, as in LLaMA; otherwise with GELU, as in BERT."""


TRANSFORMERS = {
    "bert-large": Transformer(24, 1024, 4096, 16, 16, False),
    "llama-7b": Transformer(32, 4096, 11008, 32, 32, True),
    "llama-70b": Transformer(80, 8192, 28672, 64, 8, True),
}


class _Builder:
    def __init__(self, path: Path) -> None:
        self.path, self.nodes, self.weights, self.offset = path, list[Any](), list[TensorProto](), 0

    def node(self, op: str, inputs: list[str], result: str | list[str], **attributes: Any) -> str:
        outputs = [result] if isinstance(result, str) else result
        self.nodes.append(helper.make_node(op, inputs, outputs, name=outputs[0], **attributes))
        return outputs[0]

    def weight(self, name: str, *dims: int) -> str:
        """Return a half-precision weight, whose bytes are a hole in a sparse file."""
        size = 2 * math.prod(dims)
        tensor = TensorProto(name=name, data_type=TensorProto.FLOAT16, dims=dims, data_location=TensorProto.EXTERNAL)
        entries = {"location": f"{self.path.name}.data", "offset": str(self.offset), "length": str(size)}
        for key, value in entries.items():
            tensor.external_data.add(key=key, value=value)
        self.weights.append(tensor)
        self.offset += -(-size // 4096) * 4096
        return name

    def ints(self, name: str, values: list[int]) -> str:
        self.weights.append(helper.make_tensor(name, TensorProto.INT64, [len(values)], values))
        return name


def write_transformer(name: str, path: Path, batch: int, tokens: int, past: int) -> dict[str, str]:
    """Write a transformer with weights in a sparse file; return its carried states, output by input.

    Caches have a symbolic size, `past`.
    """
    sizes, build = TRANSFORMERS[name], _Builder(path)
    head = sizes.width // sizes.heads
    build.ints("heads", [0, 0, -1, head])
    build.ints("flat", [0, 0, -1])
    value, states = "x", dict[str, str]()
    for layer in range(sizes.layers):
        value = _attention(build, sizes, f"layer{layer}", value, past, states)
        value = _feed_forward(build, sizes, f"layer{layer}", value)
    build.node("Identity", [value], "y")
    half, shape = TensorProto.FLOAT16, [batch, tokens, sizes.width]
    inputs = [helper.make_tensor_value_info("x", half, shape)]
    outputs = [helper.make_tensor_value_info("y", half, shape)]
    for source, output in states.items():
        cache: list[int | str | None] = [batch, sizes.kv_heads, "past", head]
        inputs.append(helper.make_tensor_value_info(source, half, cache))
        outputs.append(helper.make_tensor_value_info(output, half, [*cache[:2], "present", head]))
    graph = helper.make_graph(build.nodes, name, inputs, outputs, build.weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11), path)
    with open(f"{path}.data", "wb") as stream:
        stream.truncate(build.offset)
    return states


def _attention(build: _Builder, sizes: Transformer, layer: str, value: str, past: int, states: dict[str, str]) -> str:
    head, kv_width = sizes.width // sizes.heads, sizes.kv_heads * (sizes.width // sizes.heads)
    norm = build.node("RMSNormalization", [value, build.weight(f"{layer}.norm1", sizes.width)], f"{layer}.n1", axis=-1)
    parts = []
    for part, width in (("q", sizes.width), ("k", kv_width), ("v", kv_width)):
        product = build.node("MatMul", [norm, build.weight(f"{layer}.w{part}", sizes.width, width)], f"{layer}.{part}")
        split = build.node("Reshape", [product, "heads"], f"{layer}.{part}4")
        parts.append(build.node("Transpose", [split], f"{layer}.{part}t", perm=[0, 2, 1, 3]))
    inputs, outputs = [*parts], [f"{layer}.mix"]
    if past:
        for part in ("key", "value"):
            states[f"{layer}.past.{part}"] = f"{layer}.present.{part}"
        inputs += ["", f"{layer}.past.key", f"{layer}.past.value"]
        outputs += [f"{layer}.present.key", f"{layer}.present.value"]
    mix = build.node("Attention", inputs, outputs, is_causal=1)
    joined = build.node("Transpose", [mix], f"{layer}.mt", perm=[0, 2, 1, 3])
    flat = build.node("Reshape", [joined, "flat"], f"{layer}.mf")
    out = build.node("MatMul", [flat, build.weight(f"{layer}.wo", head * sizes.heads, sizes.width)], f"{layer}.o")
    return build.node("Add", [value, out], f"{layer}.r1")


def _feed_forward(build: _Builder, sizes: Transformer, layer: str, value: str) -> str:
    width, inner = sizes.width, sizes.inner
    norm = build.node("RMSNormalization", [value, build.weight(f"{layer}.norm2", width)], f"{layer}.n2", axis=-1)
    up = build.node("MatMul", [norm, build.weight(f"{layer}.up", width, inner)], f"{layer}.u")
    if sizes.is_gated:
        gate = build.node("MatMul", [norm, build.weight(f"{layer}.gate", width, inner)], f"{layer}.g")
        active = build.node("Sigmoid", [gate], f"{layer}.s")
        scaled = build.node("Mul", [gate, active], f"{layer}.sg")
        up = build.node("Mul", [up, scaled], f"{layer}.h")
    else:
        up = build.node("Gelu", [up], f"{layer}.h")
    down = build.node("MatMul", [up, build.weight(f"{layer}.down", inner, width)], f"{layer}.d")
    return build.node("Add", [value, down], f"{layer}.r2")
