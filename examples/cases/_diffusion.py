"""A generated diffusion pipeline: text encoder, denoiser and decoder of pictures, apart and as one program.

       prompt --> [text encoder] --text, pooled--.--------------.
                                                 v              v
       noise ---------------------> latents --> [denoiser] --> [denoiser] --> ... --> [decoder] --> picture
                                                 the same weights in each step

The graphs have the form of Stable Diffusion's, and random weights, or weights that are holes of a file. All files refer
to one file of weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from _streaming_models import Network, UNet, Weights
from numpy.typing import NDArray
from onnx import ModelProto, NodeProto, TensorProto, ValueInfoProto, helper, numpy_helper

TOKENS = 77
OPSET, IR_VERSION = 23, 11
PARTS = ("text", "denoise", "decode")
"""The three models: what their nodes are named after in the program, and their files."""


@dataclass(frozen=True)
class Diffusion:
    """The sizes of a diffusion pipeline for one picture of 8 x `unet.latent` pixels each way."""

    unet: UNet
    text_layers: int
    channels: tuple[int, int, int, int]
    """Of the decoder, from the latents to the picture."""
    vocab: int
    steps: int


@dataclass(frozen=True)
class Pipeline:
    """The files of a pipeline."""

    sizes: Diffusion
    program: Path
    """All of it: inputs `prompt` int64 [batch, 77] and `noise` [batch, 4, latent, latent]; output `picture`."""
    parts: Mapping[str, Path]
    """Each of the three models."""

    def feeds(self) -> dict[str, NDArray[Any]]:
        """Return a random prompt and noise, for one picture in float32."""
        random, side = np.random.default_rng(0), self.sizes.unet.latent
        prompt = random.integers(0, self.sizes.vocab, (1, TOKENS))
        return {"prompt": prompt, "noise": random.standard_normal((1, 4, side, side), np.float32)}

    def run(self, sessions: Mapping[str, Any], feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Run the three models by hand, as a library of diffusion models does, with ONNX Runtime's sessions."""
        text, pooled = sessions["text"].run(["text", "pooled"], {"prompt": feeds["prompt"]})
        latents = feeds["noise"]
        for time, share in schedule(self.sizes):
            given = {"latents": latents, "time": time, "added": pooled, "text": text}
            latents = latents - np.float32(share) * sessions["denoise"].run(["noise"], given)[0]
        return {"picture": sessions["decode"].run(["picture"], {"latents": latents})[0]}


def schedule(sizes: Diffusion) -> list[tuple[NDArray[np.float32], float]]:
    """Return for each step the embedding of its time, [1, channels], and the share of the noise that it takes away."""
    half = sizes.unet.channels[0] // 2
    frequencies = np.exp(-np.log(10_000.0) * np.arange(half) / half)
    times = np.linspace(999, 1, sizes.steps)
    embedded = [np.concatenate([np.cos(t * frequencies), np.sin(t * frequencies)]) for t in times]
    return [(item[None].astype(np.float32), 1 / sizes.steps) for item in embedded]


def write_pipeline(sizes: Diffusion, folder: Path, dtype: type = np.float32, *, holes: bool = False) -> Pipeline:
    """Write the program and its three models to a folder."""
    weights = Weights(folder / "weights.bin", dtype, holes=holes)
    models = {name: _build_part(name, sizes, weights, dtype) for name in PARTS}
    paths = {name: folder / f"{name}.onnx" for name in PARTS}
    for name, path in paths.items():
        onnx.save(models[name], path)
    program = folder / "program.onnx"
    onnx.save(_join(models, sizes, dtype), program)
    return Pipeline(sizes, program, paths)


class _Pictures(Network):
    """Nodes and weights of the text encoder and of the decoder of pictures."""

    def add_text_encoder(self, sizes: Diffusion) -> tuple[list[ValueInfoProto], list[ValueInfoProto]]:
        """Add a text encoder; return its inputs and outputs."""
        self.sizes, width = sizes.unet, sizes.unet.cross
        value = self.add("Gather", self.weight("embedding", sizes.vocab, width), "prompt")
        value = self.add("Add", value, self.weight("positions", TOKENS, width))
        for layer in range(sizes.text_layers):
            self.prefix = f"layer{layer}/"
            norm = self._normalise_rows(value, "norm1", width)
            value = self.add("Add", value, self._attend(norm, norm, "self", width))
            wide = self.linear(self._normalise_rows(value, "norm2", width), "wide", width, 4 * width)
            value = self.add("Add", value, self.linear(self.add("Gelu", wide), "narrow", 4 * width, width))
        self.prefix = ""
        value = self._normalise_rows(value, "norm", width)
        last = self.add("Gather", value, self.constant("last", TOKENS - 1, np.int64), axis=1)  # type: ignore[arg-type]
        self._name_output(value, "text")
        self._name_output(self.linear(last, "pool", width, sizes.unet.added), "pooled")
        outputs = [self.value("text", "batch", TOKENS, width), self.value("pooled", "batch", sizes.unet.added)]
        return [self.value("prompt", "batch", TOKENS, dtype=np.int64)], outputs

    def add_decoder_of_pictures(self, sizes: Diffusion) -> tuple[list[ValueInfoProto], list[ValueInfoProto]]:
        """Add what makes a picture of latents; return its inputs and outputs."""
        self.sizes, self.side = sizes.unet, sizes.unet.latent
        width = sizes.channels[0]
        value = self._convolve("latents", "in", 4, width)
        for level, count in enumerate(sizes.channels):
            for part in range(2):
                self.prefix = f"level{level}.{part}/"
                value, width = self._add_plain_residual(value, width, count), count
            if level < len(sizes.channels) - 1:
                larger = self.add("Resize", value, "", self.constant("twice", [1, 1, 2, 2]), mode="nearest")
                value = self._convolve(larger, "grow", width, width)
                self.side *= 2
        self.prefix = ""
        self._name_output(self._convolve(self.silu(self._normalise(value, "norm", width)), "out", width, 3), "picture")
        latents = self.value("latents", "batch", 4, sizes.unet.latent, sizes.unet.latent)
        return [latents], [self.value("picture", "batch", 3, self.side, self.side)]

    def _add_plain_residual(self, value: str, width: int, count: int) -> str:
        inner = self._convolve(self.silu(self._normalise(value, "norm1", width)), "conv1", width, count)
        inner = self._convolve(self.silu(self._normalise(inner, "norm2", count)), "conv2", count, count)
        return self.add("Add", inner, value if width == count else self._convolve(value, "skip", width, count, side=1))

    def _name_output(self, value: str, name: str) -> None:
        self.nodes.append(helper.make_node("Identity", [value], [name], name=name))


def _build_part(name: str, sizes: Diffusion, weights: Weights, dtype: type) -> ModelProto:
    network = _Pictures(weights, dtype)
    if name == "denoise":
        inputs, outputs = network.add_unet(sizes.unet)
    else:
        add = network.add_text_encoder if name == "text" else network.add_decoder_of_pictures
        inputs, outputs = add(sizes)
    graph = helper.make_graph(network.nodes, name, inputs, outputs, list(network.weights.values()))
    return _make_model(graph)


def _join(models: Mapping[str, ModelProto], sizes: Diffusion, dtype: type) -> ModelProto:
    """Return one program: each step of the denoiser has its own nodes, and all of them read the same weights."""
    text, denoiser, decoder = (models[name].graph for name in PARTS)
    nodes = _rename(text, "text/", {"prompt": "prompt"})
    own: list[TensorProto] = []
    latents = "noise"
    for step, (time, share) in enumerate(schedule(sizes)):
        prefix = f"denoise{step}/"
        own.append(numpy_helper.from_array(time.astype(dtype), f"{prefix}time"))
        own.append(numpy_helper.from_array(np.array(share, dtype), f"{prefix}share"))
        given = {"latents": latents, "time": f"{prefix}time", "added": "text/pooled", "text": "text/text"}
        nodes += _rename(denoiser, prefix, given, weights="denoise/")
        before, taken, latents = latents, f"{prefix}taken", f"{prefix}latents"
        nodes.append(helper.make_node("Mul", [f"{prefix}noise", f"{prefix}share"], [taken], name=taken))
        nodes.append(helper.make_node("Sub", [before, taken], [latents], name=latents))
    nodes += _rename(decoder, "decode/", {"latents": latents, "picture": "picture"})
    weights = [_copy(tensor, f"{name}/") for name in PARTS for tensor in models[name].graph.initializer]
    noise = next(item for item in decoder.input if item.name == "latents")
    inputs = [text.input[0], helper.make_tensor_value_info("noise", *_type_of(noise))]
    return _make_model(helper.make_graph(nodes, "diffusion", inputs, list(decoder.output), [*weights, *own]))


def _rename(graph: onnx.GraphProto, prefix: str, given: Mapping[str, str], weights: str = "") -> list[NodeProto]:
    """Return copies of a graph's nodes; names get a prefix, those of weights maybe another one, and `given` others."""
    names = {"": "", **{item.name: (weights or prefix) + item.name for item in graph.initializer}, **given}
    nodes = []
    for node in graph.node:
        copy = NodeProto()
        copy.CopyFrom(node)
        copy.name = prefix + node.name
        copy.input[:] = [names.get(name, prefix + name) for name in node.input]
        copy.output[:] = [names.get(name, prefix + name) for name in node.output]
        nodes.append(copy)
    return nodes


def _copy(tensor: TensorProto, prefix: str) -> TensorProto:
    copy = TensorProto()
    copy.CopyFrom(tensor)
    copy.name = prefix + tensor.name
    return copy


def _type_of(value: ValueInfoProto) -> tuple[int, list[int | str]]:
    kind = value.type.tensor_type
    return kind.elem_type, [item.dim_param or item.dim_value for item in kind.shape.dim]


def _make_model(graph: onnx.GraphProto) -> ModelProto:
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=IR_VERSION)
