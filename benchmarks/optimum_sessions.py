"""Bundles under Hugging Face optimum's ORTModel classes: python benchmarks/optimum_sessions.py.

It needs optimum-onnx in the environment (extra `[optimum]`). Each model is made of a
configuration with random weights, exported by optimum, compiled for two CPU devices, and run by the ORTModel class with
a session of ONNX Runtime and with one of onnxplace. A row of the table has the largest difference of the outputs;
models that generate have to generate the same tokens. Arguments are the names of single classes.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import optimum.onnxruntime as ort_models
import torch
import transformers
from optimum.exporters.onnx import onnx_export_from_model

import onnxplace

BATCH, TOKENS, VOCABULARY = 2, 12, 100
# Sizes of symbolic dimensions for the estimates; others are 8.
SIZES = {"batch_size": BATCH, "num_channels": 3, "height": 32, "width": 32}
PIPELINE = "optimize,profile{estimate=true},coplace{join=never},m-etf,split,emit"  # quick: nothing is measured
TOLERANCE = 1e-4
TEXT = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
BERT = {**TEXT, "intermediate_size": 64, "max_position_embeddings": 64}
VIT = {**TEXT, "intermediate_size": 64, "image_size": 32, "patch_size": 8}
WAVE = {
    **BERT,
    "conv_dim": (16, 16),
    "conv_stride": (5, 4),
    "conv_kernel": (10, 3),
    "num_conv_pos_embedding_groups": 4,
    "num_feat_extract_layers": 2,
    "xvector_output_dim": 16,
    "tdnn_dim": (16, 16),
    "tdnn_kernel": (3, 1),
    "tdnn_dilation": (1, 1),
}
LLAMA = {**BERT, "num_key_value_heads": 1}
GPT = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64, "eos_token_id": None}
T5: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
T5 |= {"decoder_start_token_id": 0, "eos_token_id": None}
WHISPER: dict[str, Any] = {"vocab_size": VOCABULARY, "d_model": 32, "num_mel_bins": 8, "max_target_positions": 32}
WHISPER |= {f"{part}_layers": 1 for part in ("encoder", "decoder")}
WHISPER |= {f"{part}_attention_heads": 2 for part in ("encoder", "decoder")}
WHISPER |= {f"{part}_ffn_dim": 64 for part in ("encoder", "decoder")}
WHISPER |= {"decoder_start_token_id": 1, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WHISPER |= {"suppress_tokens": None, "begin_suppress_tokens": None}
Feeds = dict[str, torch.Tensor]


def draw_text() -> Feeds:
    """Return tokens and their mask."""
    tokens = torch.randint(3, VOCABULARY, (BATCH, TOKENS))
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}


def draw_typed_text() -> Feeds:
    """Return tokens, their mask, and their types: the class for custom tasks adds none."""
    text = draw_text()
    return {**text, "token_type_ids": torch.zeros_like(text["input_ids"])}


def draw_choices() -> Feeds:
    """Return tokens of three choices each."""
    return {name: value[:, None].repeat(1, 3, 1) for name, value in draw_text().items()}


def draw_pixels() -> Feeds:
    """Return pictures."""
    return {"pixel_values": torch.randn(BATCH, 3, 32, 32)}


def draw_pixels_and_text() -> Feeds:
    """Return pictures, and texts that may describe them."""
    return {**draw_text(), **draw_pixels()}


def draw_sound() -> Feeds:
    """Return waves."""
    return {"input_values": torch.randn(BATCH, 800)}


def draw_spectrum() -> Feeds:
    """Return spectra of sounds, as Whisper takes them."""
    return {"input_features": torch.randn(BATCH, 8, 3000)}


@dataclass(frozen=True)
class Case:
    """A class of optimum, and a model for it."""

    name: str
    """Of the class in `optimum.onnxruntime`."""
    model: str
    """Of the class in `transformers`."""
    config: str
    options: Mapping[str, Any]
    task: str
    draw: Callable[[], Feeds]
    generates: bool = False


CASES = [
    Case("ORTModelForFeatureExtraction", "BertModel", "BertConfig", BERT, "feature-extraction", draw_text),
    Case("ORTModelForMaskedLM", "BertForMaskedLM", "BertConfig", BERT, "fill-mask", draw_text),
    Case(
        "ORTModelForSequenceClassification",
        *("BertForSequenceClassification", "BertConfig", BERT, "text-classification", draw_text),
    ),
    Case(
        "ORTModelForTokenClassification",
        *("BertForTokenClassification", "BertConfig", BERT, "token-classification", draw_text),
    ),
    Case(
        "ORTModelForQuestionAnswering",
        *("BertForQuestionAnswering", "BertConfig", BERT, "question-answering", draw_text),
    ),
    Case("ORTModelForMultipleChoice", "BertForMultipleChoice", "BertConfig", BERT, "multiple-choice", draw_choices),
    Case("ORTModelForCustomTasks", "BertModel", "BertConfig", BERT, "feature-extraction", draw_typed_text),
    Case(
        "ORTModelForImageClassification",
        *("ViTForImageClassification", "ViTConfig", VIT, "image-classification", draw_pixels),
    ),
    Case(
        "ORTModelForSemanticSegmentation",
        "SegformerForSemanticSegmentation",
        "SegformerConfig",
        {"hidden_sizes": [8] * 4, "depths": [1] * 4, "num_attention_heads": [1] * 4, "decoder_hidden_size": 16},
        "semantic-segmentation",
        draw_pixels,
    ),
    Case(
        "ORTModelForZeroShotImageClassification",
        "CLIPModel",
        "CLIPConfig",
        {"text_config": {**BERT, "eos_token_id": 2}, "vision_config": VIT, "projection_dim": 16},
        "zero-shot-image-classification",
        draw_pixels_and_text,
    ),
    Case(
        "ORTModelForImageToImage",
        "Swin2SRForImageSuperResolution",
        "Swin2SRConfig",
        {"image_size": 16, "embed_dim": 16, "depths": [2], "num_heads": [2], "window_size": 4, "upscale": 2},
        "image-to-image",
        draw_pixels,
    ),
    Case(
        "ORTModelForAudioClassification",
        *("Wav2Vec2ForSequenceClassification", "Wav2Vec2Config", WAVE, "audio-classification", draw_sound),
    ),
    Case(
        "ORTModelForAudioFrameClassification",
        *("Wav2Vec2ForAudioFrameClassification", "Wav2Vec2Config", WAVE, "audio-frame-classification", draw_sound),
    ),
    Case("ORTModelForAudioXVector", "Wav2Vec2ForXVector", "Wav2Vec2Config", WAVE, "audio-xvector", draw_sound),
    Case("ORTModelForCTC", "Wav2Vec2ForCTC", "Wav2Vec2Config", WAVE, "automatic-speech-recognition", draw_sound),
    Case("ORTModelForCausalLM", "GPT2LMHeadModel", "GPT2Config", GPT, "text-generation-with-past", draw_text, True),
    Case("ORTModelForCausalLM", "LlamaForCausalLM", "LlamaConfig", LLAMA, "text-generation-with-past", draw_text, True),
    Case(
        "ORTModelForSeq2SeqLM",
        *("T5ForConditionalGeneration", "T5Config", T5, "text2text-generation-with-past", draw_text, True),
    ),
    Case(
        "ORTModelForSpeechSeq2Seq",
        "WhisperForConditionalGeneration",
        "WhisperConfig",
        WHISPER,
        "automatic-speech-recognition-with-past",
        draw_spectrum,
        True,
    ),
]


def compile_model(path: Path) -> onnxplace.Bundle:
    """Compile an exported model for two devices."""
    model = onnx.load(path, load_external_data=False)
    dimensions = (item.dim_param for value in model.graph.input for item in value.type.tensor_type.shape.dim)
    names = {name for dimension in dimensions for name in dimension.split() if name.isidentifier()}
    shape = {name: SIZES.get(name, 8) for name in names}
    return onnxplace.compile(
        path, path.with_suffix(".bundle"), devices="cpu:0,cpu:1", shape=shape, pipeline=PIPELINE, force=True
    )


def name_sessions(folder: Path) -> dict[str, Path]:
    """Return the exported files by the argument of the ORTModel class that takes their session."""
    if not (folder / "encoder_model.onnx").exists():
        return {"session": folder / "model.onnx"}
    encoder = {"encoder_session": folder / "encoder_model.onnx"}
    merged = folder / "decoder_model_merged.onnx"
    if merged.exists():  # one decoder for the first token and for others, with a branch for each
        return {**encoder, "decoder_session": merged}
    further = {"decoder_session": "decoder_model", "decoder_with_past_session": "decoder_with_past_model"}
    return {**encoder, **{key: folder / f"{name}.onnx" for key, name in further.items()}}


def read_outputs(result: Any) -> list[np.ndarray[Any, Any]]:
    """Return all tensors of a result, in their order."""
    if isinstance(result, torch.Tensor):
        return [result.numpy()]
    if isinstance(result, np.ndarray):
        return [result]
    items = result.values() if isinstance(result, Mapping) else result
    return [array for item in items if item is not None for array in read_outputs(item)]


def find_difference(expected: Sequence[Any], actual: Sequence[Any]) -> float:
    """Return the largest difference of outputs; raises ValueError if they do not even have the same shapes."""
    pairs = list(zip(expected, actual, strict=True))
    if any(one.shape != other.shape or one.dtype != other.dtype for one, other in pairs):
        raise ValueError("outputs of other shapes or types")
    return max(float(np.abs(one.astype("f8") - other.astype("f8")).max(initial=0)) for one, other in pairs)


def check_case(case: Case, folder: Path) -> str:
    """Return a row of the table; exits if outputs differ."""
    torch.manual_seed(0)
    config = getattr(transformers, case.config)(**case.options)
    model = getattr(transformers, case.model)(config).eval()
    onnx_export_from_model(model, folder, task=case.task, do_validation=False)
    paths = name_sessions(folder)
    bundles = {key: compile_model(path) for key, path in paths.items()}
    kind, feeds = getattr(ort_models, case.name), case.draw()
    extra = {"generation_config": transformers.GenerationConfig.from_model_config(config)} if case.generates else {}
    results = []
    for open_session, sources in (
        (onnxruntime.InferenceSession, paths),
        (onnxplace.InferenceSession, {key: bundle.path for key, bundle in bundles.items()}),
    ):
        sessions = {key: open_session(path, providers=["CPUExecutionProvider"]) for key, path in sources.items()}
        placed = kind(config=config, **sessions, **extra)
        if case.generates:
            tokens = placed.generate(**feeds, max_new_tokens=8, do_sample=False)
            results.append([tokens.numpy()])
            continue
        results.append(read_outputs(placed(**feeds)))
        if open_session is onnxplace.InferenceSession:
            check_saved(placed, folder / "saved")
    difference = find_difference(*results)
    if difference > (0 if case.generates else TOLERANCE):
        raise SystemExit(f"{case.name}, {case.model}: outputs differ by {difference}")
    segments = sum(len(bundle.manifest.segments) for bundle in bundles.values())
    text = f"{results[0][0].size} tokens equal" if case.generates else f"{difference:.1e}"
    return f"| `{case.name}` | {case.model} | {len(bundles)} | {segments} | {text} |"


def check_saved(model: Any, folder: Path) -> None:
    """Let the model be saved, and ONNX Runtime open what was saved: the whole model, with its weights."""
    model.save_pretrained(folder)
    (path,) = folder.glob("*.onnx")
    onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])


def main() -> None:
    """Print the table, and the versions that it is for."""
    transformers.logging.set_verbosity_error()
    chosen = sys.argv[1:] or [case.name for case in CASES]
    names = ("optimum-onnx", "optimum", "transformers", "torch", "onnxruntime")
    print(", ".join(f"{name} {metadata.version(name)}" for name in names))
    print("\n| class | model | bundles | segments | largest difference |\n" + "|---" * 5 + "|")
    for case in CASES:
        if case.name in chosen:
            with tempfile.TemporaryDirectory() as folder:
                print(check_case(case, Path(folder)), flush=True)


if __name__ == "__main__":
    main()
