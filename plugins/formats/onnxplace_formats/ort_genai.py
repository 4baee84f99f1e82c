"""Export a bundle of a decoder for ONNX Runtime GenAI: its stages, and a genai_config.json with their pipeline.

Of a bundle with several plans, the pipeline has the stages of two: one plan for prompts, one for single tokens. What
GenAI accepts is what its src/config.cpp reads, which refuses unknown fields, and its src/*/session_options.cpp.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from onnxplace.bundle.manifest import Manifest
from onnxplace.errors import Diagnostic, InputError, UsageError, format_count, format_names, format_value
from onnxplace.export.exporting import note_routes, require_one_host
from onnxplace.export.segment_models import BundleModels, SegmentModel
from onnxplace.target.device_kinds import list_provider_options
from onnxplace.target.kind_table import find_kind
from onnxplace.target.plugin_providers import has_library, load_provider
from onnxplace.target.target import Device
from onnxplace.utils.files import format_path, read_json
from onnxplace_formats.segment_files import write_segment_files

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


@dataclass(frozen=True)
class GenaiProvider:
    """How GenAI knows an execution provider, and how it chooses among its devices."""

    name: str
    index_option: str = ""
    """The option that has the index of the device."""
    filters_devices: bool = False
    """Whether `device_filtering_options` choose, among the devices that the provider's library lists."""


# By the first part of the names of kinds. GenAI's TensorRT RTX sets profiles of the whole model's inputs in each stage.
PROVIDERS = {
    "cuda": GenaiProvider("cuda", index_option="device_id"),
    "directml": GenaiProvider("DML", index_option="device_index"),
    "openvino": GenaiProvider("OpenVINO"),  # by OpenVINO's own name of the device
    "qnn": GenaiProvider("QNN", filters_devices=True),
    "vitisai": GenaiProvider("VitisAI", filters_devices=True),
    "webgpu": GenaiProvider("WebGPU", filters_devices=True),
}
# GenAI reads it as a number.
UNREADABLE_OPTIONS = ("arena_extend_strategy",)


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
    phases = list_phases(models, whole["model"]["decoder"])
    for phase in phases:
        require_decoder(phase.models.manifest, whole["model"]["decoder"], format_path(config))
    require_open_sizes(phases, whole)
    cache = require_one_cache(phases)
    rows = [(phase, phase.prefix + segment.record.id, segment) for phase in phases for segment in phase.models.segments]
    write_segment_files(folder, [(f"{name}.onnx", phase.models, segment) for phase, name, segment in rows])
    stages = {name: describe_stage(segment, f"{name}.onnx", phase) for phase, name, segment in rows}
    configured = replace_decoder(whole, stages, describe_providers(cache) if cache else [])
    (folder / CONFIG_FILE).write_text(json.dumps(configured, indent=4) + "\n", encoding="utf-8")
    notes = (*_note_other_plans(models.manifest, phases), *_note_copied_caches(phases), *_note_open_sizes(phases))
    return (*note_routes(models.manifest, "ort-genai"), *notes)


@dataclass(frozen=True)
class Phase:
    """A plan of the bundle, and the calls in which GenAI runs its stages."""

    models: BundleModels
    plan: int
    runs_prompts: bool = True
    """Whether it runs calls with several tokens."""
    runs_tokens: bool = True
    """Whether it runs calls with one token."""

    @property
    def prefix(self) -> str:
        """Return what the names of its stages begin with, which tells them from those of another plan."""
        return "" if self.runs_prompts and self.runs_tokens else "prompt-" if self.runs_prompts else "token-"


def list_phases(models: BundleModels, decoder: Mapping[str, Any]) -> list[Phase]:
    """Return the plan for prompts and the one for tokens, which may be one plan for both."""
    prompt, token = choose_phase_plans(models.manifest, {**INPUT_NAMES, **decoder.get("inputs", {})}["input_ids"])
    plans = models.bundle.plans
    if prompt == token:
        return [Phase(BundleModels(plans[token]), token)]
    return [
        Phase(BundleModels(plans[prompt]), prompt, runs_tokens=False),
        Phase(BundleModels(plans[token]), token, runs_prompts=False),
    ]


def choose_phase_plans(manifest: Manifest, tokens: str) -> tuple[int, int]:
    """Return the plan for prompts and the one for single tokens, by index.

    Each has the least weighted step at the sizes of its calls, or at all sizes where the bundle was compiled for none
    of these. The last axis of the input `tokens` counts the new tokens.
    """
    shapes = {item.name: item.shape for item in manifest.inputs}
    symbol = (shapes.get(tokens) or (None,))[-1]
    sizes = [record for record in manifest.sizes if record.weight > 0]

    def find_fastest(*, is_prompt: bool) -> int:
        own = [item for item in sizes if (item.dimensions.get(str(symbol), 1) > 1) == is_prompt] or sizes
        steps = [
            sum(item.weight * (math.inf if item.seconds[plan] is None else item.seconds[plan] or 0) for item in own)
            for plan in range(len(manifest.plans) + 1)
        ]
        return steps.index(min(steps))

    return find_fastest(is_prompt=True), find_fastest(is_prompt=False)


def _note_other_plans(manifest: Manifest, phases: Sequence[Phase]) -> tuple[Diagnostic, ...]:
    """Return the note that plans are left out which run neither prompts nor tokens, if there are any."""
    names = ("the main plan", *manifest.plans)
    if not (others := [name for plan, name in enumerate(names) if plan not in {phase.plan for phase in phases}]):
        return ()
    message = f"GenAI tells prompts from tokens only: {format_count(len(others), 'plan')} for other sizes left out"
    return (Diagnostic("I001", message, where=", ".join(others), hint="each plan is a bundle: export it by its path"),)


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


def require_open_sizes(phases: Sequence[Phase], config: Mapping[str, Any]) -> None:
    """Raise InputError for a plan of fixed sizes: GenAI's prompts have any length, and its cache grows.

    A cache that GenAI allocates once, `past_present_share_buffer`, does not grow.
    """
    names = {**INPUT_NAMES, **config["model"]["decoder"].get("inputs", {})}
    search = config.get("search")
    grows = not (isinstance(search, dict) and search.get("past_present_share_buffer"))
    expanded = expand_names(names, config["model"]["decoder"]["num_hidden_layers"])
    pasts = {name for key, name in expanded.items() if key.startswith("past_") and " " in key}
    for phase in phases:
        shapes = {item.name: item.shape or () for item in phase.models.manifest.inputs}
        lengths = [size for size in shapes.get(names["input_ids"], ())[-1:] if isinstance(size, int)]
        fixed = [names["input_ids"] for length in lengths if phase.runs_prompts or length > 1]
        if grows:
            fixed += [name for name in sorted(pasts & shapes.keys()) if _is_fixed(shapes[name])]
        if fixed:
            message = f"the input {fixed[0]!r} has the fixed sizes {list(shapes[fixed[0]])}, and GenAI feeds others"
            raise InputError("I018", message, where="--to ort-genai", hint="compile without --fixed-sizes")


def _is_fixed(shape: Sequence[int | str | None]) -> bool:
    return bool(shape) and all(isinstance(size, int) for size in shape)


def require_one_cache(phases: Sequence[Phase]) -> Device | None:
    """Return the device where GenAI keeps the cache: a GPU by CUDA, or None for the host's memory.

    GenAI keeps inputs, outputs and the cache in one place, and passes all other values through the host. The cache is
    where single tokens are computed. Stages on other devices get and return it only if it is in the host's memory.

    Raises InputError unless all stages of tokens with inputs or outputs of the model share the place of the cache, and
    the stages of prompts reach it.
    """
    *prompts, tokens = [_list_outer_devices(phase.models) for phase in phases]
    places = {device.id if device.kind == "cuda" else None: device for device in tokens}
    if len(places) > 1:
        names = format_names(device.id for device in tokens)
        message = f"GenAI keeps the cache on one GPU, or in the host's memory; these stages use {names}"
        hint = "compile so that all layers with a cache are on one device, or export --to triton"
        raise InputError("I018", message, where="--to ort-genai", hint=hint)
    cache = next((device for place, device in places.items() if place is not None), None)
    far = [device.id for device in prompts[0] if cache is not None and device.id != cache.id] if prompts else []
    if cache and far:
        message = (
            f"GenAI keeps the cache on {cache.id}, where tokens run, and these stages of prompts use "
            f"{format_names(far)}"
        )
        hint = "compile so that tokens run on the CPU, or export one plan: each is a bundle in the bundle's folder"
        raise InputError("I018", message, where="--to ort-genai", hint=hint)
    _require_known_providers(phases)
    return cache


def _note_copied_caches(phases: Sequence[Phase]) -> tuple[Diagnostic, ...]:
    """Return the note that tokens run on devices to which GenAI brings the cache in each call, if there are any."""
    used = [device for device in _list_outer_devices(phases[-1].models) if device.kind != "cuda"]
    if not (names := [device.id for device in used if not find_kind(device.kind).has_cores]):
        return ()
    message = (
        "GenAI keeps the cache in the host's memory: each token copies it to a device with its own memory, and back"
    )
    hint = "on cuda devices the cache stays where tokens run"
    return (Diagnostic("I001", message, where=format_names(names, quoted=False), hint=hint),)


def _note_open_sizes(phases: Sequence[Phase]) -> tuple[Diagnostic, ...]:
    """Return the note that providers of fixed sizes leave nodes to the CPU, if there are stages on such devices."""
    used = {segment.record.device: phase for phase in phases for segment in phase.models.segments}
    fixed = [name for name, phase in used.items() if find_kind(phase.models.devices[name].kind).needs_static_shapes]
    if not fixed:
        return ()
    message = "its provider takes nodes of fixed sizes only: in GenAI, whose sizes change, the CPU computes the others"
    return (Diagnostic("I001", message, where=format_names(fixed, quoted=False), hint="compile for another device"),)


def _list_outer_devices(models: BundleModels) -> list[Device]:
    """Return the devices of the stages with inputs or outputs of the model."""
    manifest = models.manifest
    outside = {item.name for item in manifest.inputs} | {item.value for item in manifest.outputs}
    used = dict.fromkeys(
        segment.record.device
        for segment in models.segments
        if outside.intersection((*segment.record.inputs, *segment.record.outputs))
    )
    return [models.devices[name] for name in used]


def _require_known_providers(phases: Sequence[Phase]) -> None:
    """Raise InputError for devices whose provider GenAI does not know, and for several of one that it opens once."""
    devices = {name: device for phase in phases for name, device in phase.models.devices.items()}
    used = [devices[name] for name in dict.fromkeys(s.record.device for phase in phases for s in phase.models.segments)]
    for device in used:
        if device.kind != "cpu" and _find_family(device) not in PROVIDERS:
            message = f"the export knows no name by which GenAI has the provider of {device.id}"
            hint = f"compile for devices of cpu, {', '.join(PROVIDERS)}, or export --to stages"
            raise InputError("I018", message, where="--to ort-genai", hint=hint)
    adapters = [device.id for device in used if _find_family(device) == "directml"]
    if len(adapters) > 1:
        message = f"GenAI opens one adapter by DirectML, and stages use {format_names(adapters)}"
        raise InputError("I018", message, where="--to ort-genai", hint="compile for one of them")


def _find_family(device: Device) -> str:
    return device.kind.partition("/")[0]


def describe_providers(device: Device) -> list[dict[str, dict[str, Any]]]:
    """Return the provider of a device with its options, under GenAI's names; none for the CPU.

    The options are those with which onnxplace runs the device. Raises InputError for a device that GenAI cannot tell
    from another one.

    >>> describe_providers(Device("cuda:1", 1 << 30))
    [{'cuda': {'device_id': '1', 'use_tf32': '0'}}]
    >>> describe_providers(Device("vitisai/npu:0", 1 << 30))
    [{'VitisAI': {'device_filtering_options': {'hardware_device_type': 'NPU'}}}]
    """
    if device.kind == "cpu":
        return []
    family, address = PROVIDERS[_find_family(device)], device.address
    ((_, own),) = find_kind(device.kind).list_providers(address)[-1:]
    options: dict[str, Any] = {**own, **list_provider_options(device.options)}
    options = {name: value for name, value in options.items() if name not in (*UNREADABLE_OPTIONS, "device_id")}
    if family.index_option:
        options = {family.index_option: str(address.index), **options}
    if _find_family(device) == "openvino":
        options = {"device_type": _name_openvino_device(device), **options}
    if family.filters_devices and "/" in device.kind:
        options["device_filtering_options"] = _describe_hardware(device)
    return [{family.name: options}]


def _list_present(device: Device) -> Sequence[Any]:
    """Return what the provider's library lists here of a device's type, as OrtEpDevice; nothing without the device."""
    family, _, kind = device.kind.partition("/")
    present = load_provider(family).devices.get(kind, ()) if has_library(family) else ()
    return present if device.address.index < len(present) else ()


def _name_openvino_device(device: Device) -> str:
    """Return OpenVINO's name of a device: as it is called here, or else by type and index, such as `GPU.1`."""
    index, kind = device.address.index, device.kind.partition("/")[2]
    usual = kind.removeprefix("i").upper() + (f".{index}" if index else "")
    if kind == "cpu":
        return "CPU"
    present = _list_present(device)
    return str(dict(present[index].ep_metadata).get("ov_device", usual)) if present else usual


def _describe_hardware(device: Device) -> dict[str, str | int]:
    """Return what GenAI filters a provider's devices by: their type, and among several here their PCI numbers.

    Raises InputError for a further device that is not here, or that has the numbers of one before it.
    """
    index, present = device.address.index, [item.device for item in _list_present(device)]
    if not present and index == 0:
        return {"hardware_device_type": device.kind.partition("/")[2].removeprefix("i").upper()}
    numbers = [(item.device_id, item.vendor_id) for item in present]
    if not present or numbers[index] in numbers[:index]:
        message = f"GenAI finds {device.id} by its PCI number alone, which "
        message += "another device here has, too" if present else "is unknown where its provider does not list it"
        hint = "export on the machine that has it, or compile for the first device of its type"
        raise InputError("I018", message, where="--to ort-genai", hint=hint)
    number, vendor = numbers[index]
    several = {"hardware_device_id": number, "hardware_vendor_id": vendor} if len(set(numbers)) > 1 else {}
    return {"hardware_device_type": present[index].type.name, **several}


def describe_stage(segment: SegmentModel, file: str, phase: Phase) -> dict[str, Any]:
    """Return the entry of a stage in the pipeline."""
    device = phase.models.devices[segment.record.device]
    options: dict[str, Any] = {"provider_options": describe_providers(device)}
    if device.has_cores:
        options["intra_op_num_threads"] = device.cores
    return {
        "filename": file,
        "inputs": list(segment.record.inputs),
        "outputs": list(segment.record.outputs),
        "run_on_prompt": phase.runs_prompts,
        "run_on_token_gen": phase.runs_tokens,
        "session_options": options,
    }


def replace_decoder(
    config: Mapping[str, Any], stages: Mapping[str, Any], providers: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the configuration with a pipeline in place of the decoder's own file.

    The providers of the decoder itself say where GenAI keeps the cache.
    """
    replaced = copy.deepcopy(dict(config))
    replaced["model"]["type"] = PIPELINE_TYPE
    decoder = replaced["model"]["decoder"]
    decoder.pop("filename", None)
    decoder["session_options"] = {**decoder.get("session_options", {}), "provider_options": list(providers)}
    decoder["pipeline"] = [{name: stage} for name, stage in stages.items()]
    return replaced
