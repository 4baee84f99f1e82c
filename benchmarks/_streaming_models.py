"""Models for streaming.py: a decoder with a cache of keys and values, and the UNet of a diffusion model.

Attentions, rotations and RMS normalisations are one node each, as exporters write them today; a group normalisation is
five, as they have written it since opset 6, because ONNX infers no shapes for GroupNormalization. Weights are external
data, random numbers or holes of a file.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from _large_graphs import Builder
from onnx import TensorProto, ValueInfoProto, helper, numpy_helper

# Of random numbers; a prime, so that no row of a weight equals another one.
PATTERN_NUMBERS = 4_194_301
PAGE_BYTES = 4096
# Theta of the rotations and the largest number of tokens; neither changes what a step takes.
THETA, POSITIONS = 500_000.0, 8192


@dataclass(frozen=True)
class Decoder:
    """The sizes of a decoder with gated perceptrons, whose heads share keys and values in groups."""

    layers: int
    width: int
    inner: int
    heads: int
    kv_heads: int
    vocab: int

    @property
    def head(self) -> int:
        """Return the width of a head."""
        return self.width // self.heads

    def feeds(self, batch: int, tokens: int, past: int) -> dict[str, np.ndarray]:
        """Return inputs of a step of `tokens` after `past` ones, float32."""
        random = np.random.default_rng(0)
        ids = random.integers(0, self.vocab, (batch, tokens))
        positions = np.broadcast_to(np.arange(past, past + tokens), (batch, tokens)).copy()
        shape = (batch, self.kv_heads, past, self.head)
        caches = {name: random.standard_normal(shape, np.float32) for name in self.caches}
        return {"input_ids": ids, "position_ids": positions, **caches}

    @property
    def caches(self) -> tuple[str, ...]:
        """Return the names of the inputs with keys and values."""
        return tuple(f"past_key_values.{layer}.{part}" for layer in range(self.layers) for part in ("key", "value"))


@dataclass(frozen=True)
class UNet:
    """The sizes of a UNet with transformers at some of its levels."""

    latent: int = 128
    channels: tuple[int, ...] = (320, 640, 1280)
    depths: tuple[int, ...] = (0, 2, 10)
    """Blocks of each transformer, per level."""
    cross: int = 2048
    """Width of the text's embeddings."""
    head: int = 64
    added: int = 2816
    """Width of the embeddings of picture sizes and of the whole text."""
    groups: int = 32


LLAMA_3_8B = Decoder(layers=32, width=4096, inner=14336, heads=32, kv_heads=8, vocab=128_256)
# A Llama-3.2-1B with more layers and a smaller vocabulary: 6.1 GB of float32.
SIX_GIGABYTES = Decoder(layers=23, width=2048, inner=8192, heads=32, kv_heads=8, vocab=32_000)
SMALL_DECODER = Decoder(layers=6, width=256, inner=2048, heads=4, kv_heads=2, vocab=100)
SDXL = UNet()
SMALL_UNET = UNet(latent=16, channels=(32, 64, 128), depths=(0, 1, 2), cross=48, head=16, added=40, groups=8)
# As published: by Meta (8.03 billion) and in the paper on SDXL (2.6 billion), there without its added embeddings.
PUBLISHED_PARAMETERS = {"llama-3-8b": 8_030_261_248, "sdxl": 2_567_463_684}


class Weights:
    """Weights as external data in one file; vectors are in the model.

    Matrices are [in, out], and convolutions [out, in, height, width]. Their random numbers keep the variance of what
    they are applied to. With `holes`, the file has the right size, takes no space, and its numbers are zeros.
    """

    def __init__(self, path: Path, dtype: type, *, holes: bool = False) -> None:
        self.path, self.dtype, self.holes = path, np.dtype(dtype), holes
        self.parameters = 0
        self._end, self._count = 0, 0
        size = 1 if holes else PATTERN_NUMBERS
        self._pattern = np.random.default_rng(0).standard_normal(size, np.float32)
        path.write_bytes(b"")

    def __call__(self, name: str, shape: Sequence[int]) -> TensorProto:
        """Append a weight and return the tensor that refers to it."""
        size, self._count = math.prod(shape), self._count + 1
        self.parameters += size
        if size == max(shape):  # a vector
            return numpy_helper.from_array(np.full(shape, name.endswith("scale"), self.dtype), name)
        kind = helper.np_dtype_to_tensor_dtype(self.dtype)
        tensor = TensorProto(name=name, data_type=kind, dims=shape, data_location=TensorProto.EXTERNAL)
        start, length = -(-self._end // PAGE_BYTES) * PAGE_BYTES, size * self.dtype.itemsize
        for key, value in {"location": self.path.name, "offset": start, "length": length}.items():
            tensor.external_data.add(key=key, value=str(value))
        self._end = start + length
        with self.path.open("r+b") as stream:
            stream.truncate(self._end)
            stream.seek(start)
            if not self.holes:
                self._write(stream, size, fan_in=math.prod(shape[1:]) if len(shape) > 2 else shape[0])
        return tensor

    def _write(self, stream: Any, size: int, fan_in: int) -> None:
        piece = (np.roll(self._pattern, 7919 * self._count) / math.sqrt(fan_in)).astype(self.dtype)
        for left in range(size, 0, -len(piece)):
            stream.write(piece[:left].data)


def write_model(sizes: Decoder | UNet, path: Path, dtype: type, *, holes: bool = False) -> int:
    """Write a model, and its weights as `PATH.data`; return the number of its parameters."""
    weights = Weights(path.with_name(f"{path.name}.data"), dtype, holes=holes)
    network = Network(weights, dtype)
    parts = network.add_decoder(sizes) if isinstance(sizes, Decoder) else network.add_unet(sizes)
    graph = helper.make_graph(network.nodes, path.stem, *parts, list(network.weights.values()))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11), path)
    return weights.parameters


Values = list[ValueInfoProto]
# The scale and the bias of a normalisation that is scaled later.
_UNITS = (("scale", 1.0), ("bias", 0.0))


class Network(Builder):
    """Nodes and weights of both models."""

    def __init__(self, weights: Weights, dtype: type) -> None:
        super().__init__(weights)
        self.dtype = np.dtype(dtype)

    def value(self, name: str, *shape: int | str, dtype: type | None = None) -> ValueInfoProto:
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype or self.dtype))
        return helper.make_tensor_value_info(name, kind, shape)

    def linear(self, value: str, name: str, rows: int, columns: int, *, bias: bool = True) -> str:
        product = self.add("MatMul", value, self.weight(name, rows, columns))
        return self.add("Add", product, self.weight(f"{name}.bias", columns)) if bias else product

    def silu(self, value: str) -> str:
        return self.add("Mul", value, self.add("Sigmoid", value))

    # ------------------------------------------------------------------------------------------------------ decoder

    def add_decoder(self, sizes: Decoder) -> tuple[Values, Values]:
        """Add a decoder; return its inputs and outputs."""
        angles = np.outer(np.arange(POSITIONS), THETA ** -(np.arange(0, sizes.head, 2) / sizes.head))
        for name, table in (("cos", np.cos(angles)), ("sin", np.sin(angles))):
            self.constant(name, table, self.dtype.type)
        value = self.add("Gather", self.weight("embedding", sizes.vocab, sizes.width), "input_ids")
        for layer in range(sizes.layers):
            self.prefix = f"layer{layer}/"
            value = self._add_layer(value, sizes, layer)
        self.prefix = ""
        value = self.add("RMSNormalization", value, self.weight("norm.scale", sizes.width), axis=-1)
        product = [value, self.weight("head", sizes.width, sizes.vocab)]
        self.nodes.append(helper.make_node("MatMul", product, ["logits"], name="logits"))
        axes, rest = ("batch", "sequence"), (sizes.kv_heads, sizes.head)
        tokens = [self.value(name, *axes, dtype=np.int64) for name in ("input_ids", "position_ids")]
        past = [self.value(name, "batch", rest[0], "past", rest[1]) for name in sizes.caches]
        present = [self.value(_present(name), "batch", rest[0], "total", rest[1]) for name in sizes.caches]
        return [*tokens, *past], [self.value("logits", *axes, sizes.vocab), *present]

    def _add_layer(self, value: str, sizes: Decoder, layer: int) -> str:
        norm = self.add("RMSNormalization", value, self.weight("norm1.scale", sizes.width), axis=-1)
        heads = {"q": sizes.heads, "k": sizes.kv_heads, "v": sizes.kv_heads}
        q, k, v = (
            self.linear(norm, part, sizes.width, count * sizes.head, bias=False) for part, count in heads.items()
        )
        q, k = (
            self.add("RotaryEmbedding", part, "cos", "sin", "position_ids", num_heads=count)
            for part, count in ((q, sizes.heads), (k, sizes.kv_heads))
        )
        caches = sizes.caches[2 * layer : 2 * layer + 2]
        mixed, name = f"{self.prefix}mixed", f"{self.prefix}attention"
        self.nodes.append(
            helper.make_node(
                "Attention", [q, k, v, "", *caches], [mixed, *map(_present, caches)], name=name,
                is_causal=1, q_num_heads=sizes.heads, kv_num_heads=sizes.kv_heads,
            )
        )  # fmt: skip
        value = self.add("Add", value, self.linear(mixed, "out", sizes.width, sizes.width, bias=False))
        norm = self.add("RMSNormalization", value, self.weight("norm2.scale", sizes.width), axis=-1)
        gate, up = (self.linear(norm, part, sizes.width, sizes.inner, bias=False) for part in ("gate", "up"))
        inner = self.add("Mul", self.silu(gate), up)
        return self.add("Add", value, self.linear(inner, "down", sizes.inner, sizes.width, bias=False))

    # --------------------------------------------------------------------------------------------------------- UNet

    def add_unet(self, sizes: UNet) -> tuple[Values, Values]:
        """Add a UNet; return its inputs and outputs.

        The embeddings of time and sizes are inputs.
        """
        self.sizes, channels, self.side = sizes, sizes.channels, sizes.latent
        width = self.time_width = 4 * channels[0]
        times = []
        for name, count in (("time", channels[0]), ("added", sizes.added)):
            first = self.silu(self.linear(name, f"{name}.1", count, width))
            times.append(self.linear(first, f"{name}.2", width, width))
        self.time = self.silu(self.add("Add", *times))
        value = self._convolve("latents", "in", 4, channels[0])
        skips = [(value, channels[0])]
        width = channels[0]
        for level, count in enumerate(channels):
            for part in range(2):
                self.prefix = f"down{level}.{part}/"
                value = self._add_part(value, width, count, level)
                width = count
                skips.append((value, width))
            if level < len(channels) - 1:
                value = self._convolve(value, "shrink", width, width, strides=[2, 2])
                self.side //= 2
                skips.append((value, width))
        for part, depth in enumerate((sizes.depths[-1], 0)):
            self.prefix = f"middle{part}/"
            value = self._add_residual(value, width, width)
            value = self._add_transformer(value, width, depth) if depth else value
        for level in reversed(range(len(channels))):
            for part in range(3):
                self.prefix = f"up{level}.{part}/"
                skip, count = skips.pop()
                value = self._add_part(
                    self.add("Concat", value, skip, axis=1), width + count, channels[level], level
                )  # fmt: skip
                width = channels[level]
            if level:
                larger = self.add("Resize", value, "", self.constant("twice", [1, 1, 2, 2]), mode="nearest")
                value = self._convolve(larger, "grow", width, width)
                self.side *= 2
        self.prefix = ""
        value = self._convolve(self.silu(self._normalise(value, "norm", width)), "out", width, 4)
        self.nodes.append(helper.make_node("Identity", [value], ["noise"], name="noise"))
        picture = ("batch", 4, sizes.latent, sizes.latent)
        inputs = [
            self.value("latents", *picture),
            self.value("time", "batch", channels[0]),
            self.value("added", "batch", sizes.added),
            self.value("text", "batch", 77, sizes.cross),
        ]
        return inputs, [self.value("noise", *picture)]

    def _add_part(self, value: str, width: int, count: int, level: int) -> str:
        value = self._add_residual(value, width, count)
        depth = self.sizes.depths[level]
        return self._add_transformer(value, count, depth) if depth else value

    def _add_residual(self, value: str, width: int, count: int) -> str:
        inner = self._convolve(self.silu(self._normalise(value, "norm1", width)), "conv1", width, count)
        time = self.linear(self.time, "time", self.time_width, count)
        time = self.add("Unsqueeze", time, self.constant("picture axes", [2, 3], np.int64))
        inner = self.silu(self._normalise(self.add("Add", inner, time), "norm2", count))
        inner = self._convolve(inner, "conv2", count, count)
        return self.add("Add", inner, value if width == count else self._convolve(value, "skip", width, count, side=1))

    def _add_transformer(self, value: str, width: int, depth: int) -> str:
        side, prefix = self.side, self.prefix
        rows = self.add("Transpose", self._normalise(value, "norm", width), perm=[0, 2, 3, 1])
        rows = self.add("Reshape", rows, self.constant(f"rows{width}", [0, -1, width], np.int64))
        rows = self.linear(rows, "before", width, width)
        for block in range(depth):
            self.prefix = f"{prefix}block{block}/"
            for part, text in (("self", ""), ("cross", "text")):
                norm = self._normalise_rows(rows, part, width)
                rows = self.add("Add", rows, self._attend(norm, text or norm, part, width))
            wide = self.linear(self._normalise_rows(rows, "inner", width), "wide", width, 8 * width)
            halves = [f"{self.prefix}halves:{half}" for half in range(2)]
            self.nodes.append(
                helper.make_node("Split", [wide], halves, name=f"{self.prefix}halves", axis=-1, num_outputs=2)
            )
            gated = self.add("Mul", halves[0], self.add("Gelu", halves[1]))
            rows = self.add("Add", rows, self.linear(gated, "narrow", 4 * width, width))
        self.prefix = prefix
        rows = self.linear(rows, "after", width, width)
        shape = self.constant(f"picture{width}.{side}", [0, side, side, width], np.int64)
        return self.add("Add", value, self.add("Transpose", self.add("Reshape", rows, shape), perm=[0, 3, 1, 2]))

    def _attend(self, rows: str, source: str, part: str, width: int) -> str:
        read = self.sizes.cross if source == "text" else width
        heads = width // self.sizes.head
        q = self.linear(rows, f"{part}.q", width, width, bias=False)
        k, v = (self.linear(source, f"{part}.{name}", read, width, bias=False) for name in "kv")
        return self.linear(
            self.add("Attention", q, k, v, q_num_heads=heads, kv_num_heads=heads), f"{part}.out", width, width
        )  # fmt: skip

    def _convolve(self, value: str, name: str, width: int, count: int, side: int = 3, **attributes: Any) -> str:
        weights = self.weight(f"{name}.conv", count, width, side, side), self.weight(f"{name}.conv.bias", count)
        return self.add("Conv", value, *weights, pads=[side // 2] * 4, kernel_shape=[side, side], **attributes)

    def _normalise(self, value: str, name: str, width: int) -> str:
        groups, side = self.sizes.groups, self.side
        grouped = self.add("Reshape", value, self.constant("groups", [0, groups, -1], np.int64))
        ones, zeros = (self.constant(f"group {text}", [number] * groups, self.dtype.type) for text, number in _UNITS)
        normal = self.add("InstanceNormalization", grouped, ones, zeros, epsilon=1e-5)
        picture = self.constant(f"channels{width}.{side}", [0, width, side, side], np.int64)
        scaled = self.add("Mul", self.add("Reshape", normal, picture), self.weight(f"{name}.scale", width, 1, 1))
        return self.add("Add", scaled, self.weight(f"{name}.bias", width, 1, 1))

    def _normalise_rows(self, value: str, name: str, width: int) -> str:
        parts = self.weight(f"{name}.scale", width), self.weight(f"{name}.bias", width)
        return self.add("LayerNormalization", value, *parts, axis=-1)


def _present(name: str) -> str:
    return name.replace("past_key_values", "present")
