"""Architectures of the transformers library, small and with random weights, and their export to ONNX.

Only `export` needs torch and transformers: `pip install -e '.[cpu,dev,zoo]'`. Nothing is downloaded.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from onnxplace.feeds.feeds import Array

Exporter = Literal["dynamo", "torchscript"]
EXPORTERS: tuple[Exporter, ...] = ("dynamo", "torchscript")

VOCABULARY = 128
Axes = tuple[int | str, ...]


@dataclass(frozen=True)
class Input:
    """An input of a model: its axes and content; names are symbolic axes."""

    axes: Axes
    content: Literal["ids", "mask", "reals"] = "reals"

    def draw(self, sizes: Mapping[str, int], random: np.random.Generator) -> Array:
        """Return random content; a mask hides the last third of the last row."""
        shape = tuple(sizes[axis] if isinstance(axis, str) else axis for axis in self.axes)
        if self.content == "ids":
            return random.integers(3, VOCABULARY, shape)
        if self.content == "mask":
            mask = np.ones(shape, np.int64)
            mask[-1, math.ceil(2 * shape[1] / 3) :] = 0
            return mask
        return random.standard_normal(shape).astype(np.float32)


@dataclass(frozen=True)
class Architecture:
    """A model of the zoo."""

    build: Callable[[], Any]
    """Builds the torch module."""
    inputs: Mapping[str, Input]
    outputs: tuple[str, ...]
    sizes: tuple[Mapping[str, int], ...]
    """Sizes of symbolic axes: the first for export and compilation, the others for more runs."""
    states: tuple[str, ...] = ()
    """Outputs that are inputs of the next call, as `--state` takes them."""
    layers: int = 0
    """Number of layers with cached keys and values; 0 without a cache."""
    exporters: tuple[Exporter, ...] = EXPORTERS
    """The exporters that support it."""

    def feeds(self, number: int, step: int = 0) -> dict[str, Array]:
        """Return inputs for `sizes[number]`; in a later `step` the cache has grown by what was new in each before."""
        sizes = dict(self.sizes[number])
        for grown in ("past", "past + seq"):
            sizes[grown] = sizes.get(grown, 0) + step * sizes.get("seq", 0)
        random = np.random.default_rng((number, step))
        return {name: item.draw(sizes, random) for name, item in self.inputs.items()}


# --- the architectures --------------------------------------------------------------------------------------------

IDS, MASK = Input(("batch", "seq"), "ids"), Input(("batch", "seq"), "mask")
TEXT = {"input_ids": IDS, "attention_mask": MASK}
TEXT_SIZES = ({"batch": 2, "seq": 12}, {"batch": 3, "seq": 7}, {"batch": 1, "seq": 20})
IMAGE = {"pixel_values": Input(("batch", 3, 64, 64))}
IMAGE_SIZES = ({"batch": 2}, {"batch": 1}, {"batch": 5})
WIDTH, HEADS = 64, 4


def _new(model: str, config: str, **options: Any) -> Callable[[], Any]:
    """Return a function that builds a transformers model from a configuration."""

    def build() -> Any:
        import transformers

        return getattr(transformers, model)(_make_config(transformers, config, options))

    return build


def _make_config(transformers: Any, name: str, options: Mapping[str, Any]) -> Any:
    """Return a configuration; a pair (name, options) is a nested one."""
    values = {
        key: _make_config(transformers, *value) if isinstance(value, tuple) else value for key, value in options.items()
    }
    return getattr(transformers, name)(**values)


def _list_cache_inputs(layers: int, heads: int) -> dict[str, Input]:
    kinds = ("key", "value")
    axes = ("batch", heads, "past", WIDTH // HEADS)
    return {f"past_key_values.{i}.{kind}": Input(axes) for i in range(layers) for kind in kinds}


def _build_branching(build: Callable[[], Any]) -> Any:
    """Build a mixture of experts with an If for each expert.

    An expert without tokens is not computed.
    """
    import torch
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

    def forward(self: Any, hidden: Any, index: Any, weights: Any) -> Any:
        def run_expert(tokens: Any, up: Any, down: Any) -> Any:
            return self._apply_gate(tokens @ up.T) @ down.T

        def skip_expert(tokens: Any, up: Any, down: Any) -> Any:
            return torch.zeros_like(tokens)

        mixed = torch.zeros_like(hidden)
        for expert in range(self.num_experts):
            selected = index == expert
            operands = (hidden, self.gate_up_proj[expert], self.down_proj[expert])
            mixed = mixed + (weights * selected).sum(-1, keepdim=True) * torch.cond(
                selected.any(), run_expert, skip_expert, operands
            )
        return mixed

    ALL_EXPERTS_FUNCTIONS.register("branching", forward)
    model = build()
    model.set_experts_implementation("branching")
    return model


def _build_greedy(model: Any, count: int = 4) -> Any:
    """Build a module that appends the likeliest token `count` times: a Loop."""
    import torch

    class Greedy(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, input_ids: Any, **_: Any) -> dict[str, Any]:
            length = input_ids.shape[1]

            def is_unfinished(step: Any, tokens: Any) -> Any:
                return step < count

            def append_token(step: Any, tokens: Any) -> tuple[Any, Any]:
                last = length - 1 + step
                logits = self.model(input_ids=tokens, use_cache=False).logits
                likeliest = logits.index_select(1, last.reshape(1))[:, 0].argmax(-1)
                position = torch.arange(tokens.shape[1]) == last + 1
                return step + 1, torch.where(position[None], likeliest[:, None], tokens)

            room = torch.nn.functional.pad(input_ids, (0, count))
            loop = torch._higher_order_ops.while_loop
            return {"tokens": loop(is_unfinished, append_token, (torch.tensor(0), room))[1]}

    return Greedy()


_PAST_MASK = Input(("batch", "past + seq"), "mask")
_CACHED_SIZES = (
    {"batch": 2, "seq": 2, "past": 6, "past + seq": 8},
    {"batch": 1, "seq": 1, "past": 4, "past + seq": 5},
    {"batch": 3, "seq": 5, "past": 1, "past + seq": 6},
)
_ENCODER = {"hidden_size": WIDTH, "num_hidden_layers": 3, "num_attention_heads": HEADS, "intermediate_size": 2 * WIDTH}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": WIDTH, "n_layer": 3, "n_head": HEADS, "n_positions": 64,
         "bos_token_id": 1, "eos_token_id": 2}  # fmt: skip
_LLAMA = {**_ENCODER, "vocab_size": VOCABULARY, "num_key_value_heads": 2, "max_position_embeddings": 64}
_SPEECH = {"d_model": WIDTH, "num_mel_bins": 16, "max_source_positions": 32, "max_target_positions": 32,
           "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS, "decoder_attention_heads": HEADS,
           "encoder_ffn_dim": 2 * WIDTH, "decoder_ffn_dim": 2 * WIDTH, "vocab_size": VOCABULARY,
           "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1,
           "suppress_tokens": None, "begin_suppress_tokens": None}  # fmt: skip
_RESNET = {"embedding_size": 16, "hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1], "layer_type": "basic",
           "out_features": ["stage4"]}  # fmt: skip
_TARGET_SEQ = Input(("batch", "target"), "ids")
_TARGET_SIZES = tuple({**sizes, "target": target} for sizes, target in zip(TEXT_SIZES, (5, 1, 9)))

ZOO: Mapping[str, Architecture] = {
    "bert": Architecture(
        _new("BertModel", "BertConfig", vocab_size=VOCABULARY, **_ENCODER),
        TEXT, ("last_hidden_state", "pooler_output"), TEXT_SIZES,
    ),
    "gpt2": Architecture(_new("GPT2LMHeadModel", "GPT2Config", **_GPT2), TEXT, ("logits",), TEXT_SIZES),
    "gpt2-cache": Architecture(
        _new("GPT2LMHeadModel", "GPT2Config", **_GPT2),
        {"input_ids": IDS, "attention_mask": _PAST_MASK, **_list_cache_inputs(3, HEADS)}, ("logits",), _CACHED_SIZES,
        states=("present.*=past_key_values.*",), layers=3,
    ),
    "gpt2-loop": Architecture(
        lambda: _build_greedy(_new("GPT2LMHeadModel", "GPT2Config", **_GPT2)()), {"input_ids": IDS},
        ("tokens",), TEXT_SIZES,
        exporters=("dynamo",),
    ),
    "llama": Architecture(_new("LlamaForCausalLM", "LlamaConfig", **_LLAMA), TEXT, ("logits",), TEXT_SIZES),
    "llama-cache": Architecture(
        _new("LlamaForCausalLM", "LlamaConfig", **_LLAMA),
        {"input_ids": IDS, "attention_mask": _PAST_MASK, **_list_cache_inputs(3, 2)}, ("logits",), _CACHED_SIZES,
        states=("present.*=past_key_values.*",), layers=3,
    ),
    "t5": Architecture(
        _new("T5ForConditionalGeneration", "T5Config", vocab_size=VOCABULARY, d_model=WIDTH, d_kv=16, num_heads=HEADS,
            d_ff=2 * WIDTH, num_layers=2, decoder_start_token_id=0),
        {**TEXT, "decoder_input_ids": _TARGET_SEQ}, ("logits", "encoder_last_hidden_state"), _TARGET_SIZES,
    ),
    "vit": Architecture(
        _new("ViTForImageClassification", "ViTConfig", image_size=64, patch_size=16, **_ENCODER),
        IMAGE, ("logits",), IMAGE_SIZES,
    ),
    "clip": Architecture(
        _new("CLIPModel", "CLIPConfig", projection_dim=32,
            text_config={**_ENCODER, "vocab_size": VOCABULARY, "max_position_embeddings": 32, "eos_token_id": 2},
            vision_config={**_ENCODER, "image_size": 64, "patch_size": 16}),
        {"input_ids": Input(("texts", "seq"), "ids"), "pixel_values": Input(("images", 3, 64, 64)),
         "attention_mask": Input(("texts", "seq"), "mask")},
        ("logits_per_image", "text_embeds", "image_embeds"),
        ({"texts": 3, "seq": 8, "images": 2}, {"texts": 1, "seq": 11, "images": 1},
         {"texts": 4, "seq": 5, "images": 3}),
    ),
    "whisper": Architecture(
        _new("WhisperForConditionalGeneration", "WhisperConfig", **_SPEECH),
        {"input_features": Input(("batch", 16, 64)), "decoder_input_ids": _TARGET_SEQ,
         "decoder_attention_mask": Input(("batch", "target"), "mask")},
        ("logits", "encoder_last_hidden_state"),
        ({"batch": 2, "target": 5}, {"batch": 1, "target": 1}, {"batch": 3, "target": 9}),
    ),
    "mixtral": Architecture(
        _new("MixtralForCausalLM", "MixtralConfig", num_local_experts=4, num_experts_per_tok=2, **_LLAMA,
            experts_implementation="batched_mm"),
        TEXT, ("logits",), TEXT_SIZES,
    ),
    "mixtral-if": Architecture(
        lambda: _build_branching(_new("MixtralForCausalLM", "MixtralConfig", num_local_experts=8, num_experts_per_tok=1,
                               **_LLAMA)),
        TEXT, ("logits",), TEXT_SIZES, exporters=("dynamo",),
    ),
    "detr": Architecture(
        _new("DetrForObjectDetection", "DetrConfig", d_model=WIDTH, encoder_layers=2, decoder_layers=2,
            encoder_attention_heads=HEADS, decoder_attention_heads=HEADS, encoder_ffn_dim=128, decoder_ffn_dim=128,
            num_queries=10, backbone_config=("ResNetConfig", _RESNET)),
        {**IMAGE, "pixel_mask": Input(("batch", 64, 64), "mask")}, ("logits", "pred_boxes"), IMAGE_SIZES,
    ),
    "segformer": Architecture(
        _new("SegformerForSemanticSegmentation", "SegformerConfig", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1],
            num_attention_heads=[1, 2, 3, 4], decoder_hidden_size=WIDTH, num_labels=7),
        {"pixel_values": Input(("batch", 3, "height", "width"))}, ("logits",),
        ({"batch": 2, "height": 64, "width": 64}, {"batch": 1, "height": 64, "width": 96},
         {"batch": 3, "height": 96, "width": 32}),
    ),
    "mobilenet": Architecture(
        _new("MobileNetV2ForImageClassification", "MobileNetV2Config", depth_multiplier=0.35, image_size=64),
        IMAGE, ("logits",), IMAGE_SIZES,
    ),
}  # fmt: skip


# --- export -------------------------------------------------------------------------------------------------------


def export(architecture: Architecture, exporter: Exporter, path: Path, seed: int = 0) -> None:
    """Build the model with random weights and write it; whatever torch raises is passed on."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import torch

    torch.manual_seed(seed)
    module = _wrap(architecture.build().eval(), architecture)
    names = list(architecture.inputs)
    arguments = tuple(torch.from_numpy(array) for array in architecture.feeds(0).values())
    axes = {name: _list_symbols(item.axes) for name, item in architecture.inputs.items()}
    dynamic = {"dynamic_shapes": (tuple(axes.values()),)} if exporter == "dynamo" else {"dynamic_axes": axes}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the exporters warn of their own deprecations and of traced constants
        torch.onnx.export(
            module, arguments, str(path), input_names=names, output_names=_list_outputs(architecture),
            dynamo=exporter == "dynamo", external_data=False, verbose=False, **dynamic,
        )  # fmt: skip


def _list_symbols(axes: Axes) -> dict[int, str]:
    return {number: axis for number, axis in enumerate(axes) if isinstance(axis, str)}


def _list_outputs(architecture: Architecture) -> list[str]:
    cache = [f"present.{layer}.{kind}" for layer in range(architecture.layers) for kind in ("key", "value")]
    return [*architecture.outputs, *cache]


def _wrap(model: Any, architecture: Architecture) -> Any:
    """Return a module with positional inputs and outputs, cached tensors last."""
    import torch
    from transformers import DynamicCache

    names, layers = list(architecture.inputs), architecture.layers
    plain = names[: len(names) - 2 * layers]

    class Positional(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, *values: Any) -> tuple[Any, ...]:
            options = dict(zip(plain, values))
            past: Sequence[Any] = values[len(plain) :]
            if layers:
                options["past_key_values"] = DynamicCache(list(zip(past[::2], past[1::2])))
                options["use_cache"] = True
            elif hasattr(getattr(self.model, "config", None), "use_cache"):
                options["use_cache"] = False
            result = self.model(**options, return_dict=True)
            outputs = [result[name] for name in architecture.outputs]
            for layer in result.past_key_values.layers if layers else ():
                outputs += [layer.keys, layer.values]
            return tuple(outputs)

    return Positional()
