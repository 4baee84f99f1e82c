"""Export a bundle of a decoder for ONNX Runtime GenAI: its stages, and a genai_config.json with their pipeline."""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from onnxplace.bundle.manifest import Manifest
from onnxplace.errors import Diagnostic, InputError, UsageError, format_names, format_value
from onnxplace.export.exporting import note_routes, require_one_host
from onnxplace.export.segment_models import BundleModels, SegmentModel, write_segment_files
from onnxplace.target.target import Device
from onnxplace.utils.files import format_path, read_json

CONFIG_FILE = "genai_config.json"
# More layers than any decoder has: a name is made for each.
MAX_LAYERS = 10_000
PIPELINE_TYPE = "decoder-pipeline"
# Names that GenAI gives to a decoder's inputs and outputs if the configuration does not name them (its src/config.h).
INPUT_NAMES = {
    "input_ids": "input_ids",
    "attention_mask": "attention_mask",
    "position_ids": "position_ids",
    "past_key_names": "past_key_values.%d.key",
    "past_value_names": "past_key_values.%d.value",
}
OUTPUT_NAMES = {
    "logits": "logits",
    "present_key_names": "present.%d.key",
    "present_value_names": "present.%d.value",
}


def write_genai_model(models: BundleModels, folder: Path, *, config: Path | None = None) -> tuple[Diagnostic, ...]:
    """Write a file for each stage, and the configuration of the whole model with their pipeline.

    Args:
        models: The bundle.
        folder: Where the files go.
        config: The genai_config.json of the whole model, whose other fields are kept.

    Raises:
        UsageError: The configuration is missing.
        InputError: It is not one, or GenAI cannot run this bundle; the message says why.
    """
    require_one_host(models.manifest, "ort-genai")
    if config is None:
        hint = "--config genai_config.json, which onnxruntime-genai's model builder writes next to the whole model"
        raise UsageError("I018", "expected the configuration of the whole model", where="--config", hint=hint)
    whole = read_config(config)
    require_decoder(models.manifest, whole["model"]["decoder"], format_path(config))
    require_one_cache(models)
    names = [f"{segment.record.id}.onnx" for segment in models.segments]
    write_segment_files(models, folder, zip(names, models.segments))
    stages = {
        segment.record.id: describe_stage(segment, name, models.devices[segment.record.device])
        for name, segment in zip(names, models.segments)
    }
    (folder / CONFIG_FILE).write_text(json.dumps(replace_decoder(whole, stages), indent=4) + "\n", encoding="utf-8")
    return note_routes(models.manifest, "ort-genai")


def read_config(path: Path) -> dict[str, Any]:
    """Return a genai_config.json; raises InputError for other files."""
    config = read_json(path, "I018", "a genai_config.json")
    model = config.get("model") if isinstance(config, dict) else None
    if not isinstance(model, dict) or not isinstance(model.get("decoder"), dict):
        hint = "expected an object with model.decoder"
        raise InputError("I018", "not a genai_config.json", where=format_path(path), hint=hint)
    for key in ("inputs", "outputs"):
        if not isinstance(names := model["decoder"].get(key, {}), dict):
            message = f"expected names of tensors in model.decoder.{key}, got {format_value(names)}"
            raise InputError("I018", message, where=format_path(path), hint='write it like {"input_ids": "tokens"}')
    return dict(config)


def _read_layers(decoder: Mapping[str, Any], where: str) -> int:
    """Return the number of layers; raises InputError unless there are some."""
    layers = decoder.get("num_hidden_layers")
    if isinstance(layers, bool) or not isinstance(layers, int) or not 1 <= layers <= MAX_LAYERS:
        message = f"model.decoder.num_hidden_layers is {format_value(layers)}, expected 1 to {MAX_LAYERS}"
        raise InputError("I018", message, where=where, hint="the number of layers with a cache")
    return layers


def require_decoder(manifest: Manifest, decoder: Mapping[str, Any], where: str) -> None:
    """Raise InputError unless GenAI feeds all inputs of the bundle, and finds the outputs that it reads."""
    layers = _read_layers(decoder, where)
    given_inputs = expand_names({**INPUT_NAMES, **decoder.get("inputs", {})}, layers)
    given_outputs = expand_names({**OUTPUT_NAMES, **decoder.get("outputs", {})}, layers)
    inputs = {item.name: item for item in manifest.inputs if not item.optional}
    outputs = {item.name for item in manifest.outputs}
    hint = "name inputs and outputs of the model in model.decoder.inputs and .outputs; patterns have %d for the layer"
    if unknown := [name for name in inputs if name not in given_inputs.values()]:
        message = f"GenAI does not feed the inputs {format_names(unknown)} of this bundle"
        raise InputError("I018", message, where=where, hint=hint)
    needed = _list_read_outputs(given_inputs, given_outputs, inputs)
    if missing := [name for name in needed if name not in outputs]:
        message = f"GenAI reads the outputs {format_names(missing)}, which this bundle does not have"
        raise InputError("I018", message, where=where, hint=hint)
    _require_computed_outputs(manifest)


def _list_read_outputs(fed: Mapping[str, str], returned: Mapping[str, str], inputs: Collection[str]) -> list[str]:
    """Return the outputs that GenAI reads: the logits, and those of the caches among the inputs."""
    caches = {key for key, name in fed.items() if name in inputs}
    return [name for key, name in returned.items() if key == "logits" or key.replace("present", "past") in caches]


def _require_computed_outputs(manifest: Manifest) -> None:
    """Raise InputError if an output is an input."""
    if direct := [item.name for item in manifest.outputs if manifest.values[item.value].producer is None]:
        message = f"the output {direct[0]!r} is an input, expected the result of a stage"
        raise InputError("I018", message, where="--to ort-genai", hint="export --to stages")


def expand_names(names: Mapping[str, Any], layers: int) -> dict[str, str]:
    """Return the names of tensors; those of a cache for each layer.

    >>> expand_names({"logits": "logits", "past_key_names": "past.%d.key"}, 2)
    {'logits': 'logits', 'past_key_names 0': 'past.0.key', 'past_key_names 1': 'past.1.key'}
    """
    expanded: dict[str, str] = {}
    for key, name in names.items():
        if isinstance(name, str) and "%d" in name:
            expanded |= {f"{key} {layer}": name.replace("%d", str(layer)) for layer in range(layers)}
        elif isinstance(name, str):
            expanded[key] = name
    return expanded


def require_one_cache(models: BundleModels) -> None:
    """Raise InputError unless all stages with inputs or outputs of the model can share the device of the cache.

    GenAI keeps inputs, outputs and the cache on one device, and passes all other values through the host.
    """
    manifest, devices = models.manifest, models.devices
    outside = {item.name for item in manifest.inputs} | {item.value for item in manifest.outputs}
    used = dict.fromkeys(
        segment.record.device
        for segment in models.segments
        if outside.intersection((*segment.record.inputs, *segment.record.outputs))
    )
    places = {name if devices[name].kind != "cpu" else "cpu" for name in used}
    other = [name for name in used if devices[name].kind not in ("cpu", "cuda")]
    if len(places) > 1 or other:
        message = f"GenAI keeps the cache on one device, the CPU or a GPU; these stages use {format_names(used)}"
        hint = "compile so that all layers with a cache are on one device, or export --to triton"
        raise InputError("I018", message, where="--to ort-genai", hint=hint)


def describe_stage(segment: SegmentModel, file: str, device: Device) -> dict[str, Any]:
    """Return the entry of a stage in the pipeline."""
    options: dict[str, Any] = {"provider_options": []}
    if device.kind == "cuda":
        options["provider_options"] = [{"cuda": {"device_id": str(device.address.index)}}]
    if device.kind == "cpu":
        options["intra_op_num_threads"] = device.cores
    return {
        "filename": file,
        "inputs": list(segment.record.inputs),
        "outputs": list(segment.record.outputs),
        "run_on_prompt": True,
        "run_on_token_gen": True,
        "session_options": options,
    }


def replace_decoder(config: Mapping[str, Any], stages: Mapping[str, Any]) -> dict[str, Any]:
    """Return the configuration with a pipeline in place of the decoder's own file."""
    replaced = copy.deepcopy(dict(config))
    replaced["model"]["type"] = PIPELINE_TYPE
    decoder = replaced["model"]["decoder"]
    decoder.pop("filename", None)
    decoder["pipeline"] = [{name: stage} for name, stage in stages.items()]
    return replaced
