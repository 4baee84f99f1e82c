"""Export a bundle as a model repository of Triton Inference Server.

An ensemble has a model of the ONNX Runtime backend for each segment. Otherwise one model of the Python backend runs
the whole bundle with onnxplace. Configurations are protobuf's text format of `ModelConfig`.
"""

from __future__ import annotations

import json
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxplace.bundle.bundle import MANIFEST_FILE
from onnxplace.bundle.bundle_routes import list_routes
from onnxplace.bundle.manifest import InputRecord, Manifest, OutputRecord, SegmentRecord
from onnxplace.errors import Diagnostic, InputError, UsageError, format_names, suggest_nearest
from onnxplace.export.exporting import note_plans, require_one_host
from onnxplace.export.segment_models import BundleModels
from onnxplace.target.target import Device
from onnxplace.utils.names import claim_name
from onnxplace.utils.progress import progress_part, report_progress
from onnxplace_formats.plain_stages import is_numpy_type
from onnxplace_formats.segment_files import list_producers, write_segment_files

CONFIG_FILE, MODEL_FILE, SCRIPT_FILE = "config.pbtxt", "model.onnx", "model.py"
BUNDLE_FOLDER = "model.bundle"
VERSION_FOLDER = "1"
# The names of segments are added to it, and file systems have names of 255 bytes.
MAX_NAME = 200
# The field of Triton's configuration has 32 bits.
MAX_BATCH = 2**31 - 1
LAYOUTS = ("auto", "ensemble", "python")
# Sequences, each with its own states, that a model keeps at a time; the one without requests for longest goes first.
MAX_SEQUENCES = 64
# Triton ends a sequence without requests for this long.
MAX_IDLE_MICROSECONDS = 60_000_000


def write_triton(
    models: BundleModels, folder: Path, *, layout: str = "auto", name: str = "", max_batch: int = 0
) -> tuple[Diagnostic, ...]:
    """Write a model repository: the folder that `tritonserver --model-repository` takes.

    Args:
        models: The bundle.
        folder: Where the repository goes.
        layout: `ensemble` (a model for each segment), `python` (one model that runs the bundle), or `auto`.
        name: The model that clients call; by default it has the name of the bundle.
        max_batch: The most rows of requests that one model joins; 0 joins none.

    Raises:
        UsageError: The name or the layout is wrong.
        InputError: Triton cannot express the inputs or outputs, or the layout cannot express the bundle.
    """
    manifest = models.manifest
    require_one_host(manifest, "triton")
    name = choose_name(name or models.bundle.path.resolve().name.removesuffix(".bundle"))
    layout = choose_layout(manifest, layout, max_batch)
    require_tensors(manifest, needs_numpy=layout == "python")
    if layout == "python":
        write_python_model(models, folder / name, max_batch)
        return note_custom_operators(manifest)
    write_ensemble(models, folder, name)
    return (*note_custom_operators(manifest), *note_defaults(manifest), *note_plans(manifest, "triton"))


def choose_name(text: str) -> str:
    """Return the name of the model that clients call: letters, digits, `_`, `-` and `.`.

    >>> choose_name("resnet 50 (v2)")
    'resnet_50_v2'
    """
    name = re.sub(r"[^\w.-]+", "_", text, flags=re.ASCII).strip("_.-")
    if not name:
        hint = "use letters, digits, '_', '-' and '.'"
        raise UsageError("U005", f"{text!r} cannot be the name of a model", where="--name", hint=hint)
    if len(name) > MAX_NAME:
        message = f"expected a name of at most {MAX_NAME} characters, got {len(name)}: each model is a folder"
        raise UsageError("U005", message, where="--name", hint="choose a shorter --name")
    return name


def choose_layout(manifest: Manifest, layout: str, max_batch: int) -> str:
    """Return "ensemble" or "python"; raises UsageError or InputError where the wish cannot be met."""
    if layout not in LAYOUTS:
        hint = suggest_nearest(layout, LAYOUTS)
        raise UsageError("U005", f"there is no layout {layout!r}", where="--layout", hint=hint)
    if max_batch:
        require_batches(manifest, layout, max_batch)
        return "python"
    obstacle = find_obstacle(manifest)
    if layout == "ensemble" and obstacle:
        hint = "use --layout python"
        raise InputError("I015", f"an ensemble cannot express this bundle: {obstacle}", where="--layout", hint=hint)
    if layout != "auto":
        return layout
    has_defaults = any(item.optional for item in manifest.inputs)
    return "python" if obstacle or has_defaults or returns_to_device(manifest) else "ensemble"


def require_batches(manifest: Manifest, layout: str, max_batch: int) -> None:
    """Raise an error unless Triton can join requests along the first axis of all inputs and outputs."""
    if not 2 <= max_batch <= MAX_BATCH:
        message = f"expected at least 2 rows, and at most {MAX_BATCH}, got {max_batch}"
        raise UsageError("U005", message, where="--max-batch", hint="omit it: each request runs by itself")
    if layout == "ensemble":
        hint = "omit --layout, or use --layout python"
        raise UsageError("U005", "only the layout python joins requests", where="--max-batch", hint=hint)
    record = manifest.batching
    reason = "this bundle was not examined for it" if record is None else record.reason
    if record is not None and record.dimension:
        axes = {
            **{item.name: record.inputs.get(item.name) for item in manifest.inputs},
            **{item.name: record.outputs.get(item.name) for item in manifest.outputs},
        }
        reason = ", ".join(repr(name) for name, axis in axes.items() if axis != 0)
        reason = f"the first axis of {reason} is not {record.dimension!r}" if reason else ""
    if reason:
        hint = "omit it: each request runs by itself"
        raise InputError("I015", f"requests cannot be joined: {reason}", where="--max-batch", hint=hint)


def require_tensors(manifest: Manifest, *, needs_numpy: bool) -> None:
    """Raise InputError for inputs and outputs that Triton, or numpy, does not have."""
    items: tuple[InputRecord | OutputRecord, ...] = (*manifest.inputs, *list_outputs(manifest))
    for item in items:
        reason = ""
        if find_data_type(item.dtype) is None:
            reason = f"has the type {item.dtype}, which Triton lacks"
        elif needs_numpy and not is_numpy_type(item.dtype):
            reason = f"has the type {item.dtype}, which numpy lacks"
        elif item.shape is None:
            reason = "has no known rank"
        if reason:
            hint = "export --to stages, or change the model"
            raise InputError("I015", f"{item.name!r} {reason}", where="--to triton", hint=hint)
    if not manifest.inputs:
        message = "this bundle has no inputs, expected at least one: Triton needs it"
        raise InputError("I015", message, where="--to triton", hint="export --to stages")


def list_outputs(manifest: Manifest) -> tuple[OutputRecord, ...]:
    """Return the outputs with the sizes of their segments' files: those that the model declares may be wrong."""
    shapes = {item.name: (manifest.values[item.value].shape, item.shape) for item in manifest.outputs}
    known = {
        name: (None,) * len(declared) if shape is None and declared is not None else shape
        for name, (shape, declared) in shapes.items()
    }
    return tuple(item.model_copy(update={"shape": known[item.name]}) for item in manifest.outputs)


def find_obstacle(manifest: Manifest) -> str:
    """Return why an ensemble cannot express a bundle; empty if it can."""
    if manifest.states:
        return "it carries states between calls"
    if any(segment.keeps_order for segment in manifest.segments):
        return "it is a training step, whose segments keep the order of their nodes"
    if other := _list_foreign_kinds(manifest):
        return f"Triton's ONNX Runtime backend does not have {format_names(other)} devices"
    if obstacle := _find_output_obstacle(manifest):
        return obstacle
    obstacles = (_find_segment_obstacle(manifest, segment) for segment in manifest.segments)
    return next(filter(None, obstacles), "")


def _find_output_obstacle(manifest: Manifest) -> str:
    """Return why an ensemble cannot return the outputs; empty if it can."""
    returned = [output.value for output in manifest.outputs]
    if len(set(returned)) < len(returned):
        return "two outputs return the same value"
    if direct := [name for name in returned if manifest.values[name].producer is None]:
        return f"it returns the input {direct[0]!r}"
    return ""


def _list_foreign_kinds(manifest: Manifest) -> list[str]:
    """Return the kinds of used devices that the backend does not have."""
    kinds = {device.id: device.kind for device in manifest.target.target().devices}
    used = dict.fromkeys(kinds[segment.device] for segment in manifest.segments)
    return [kind for kind in used if kind not in ("cpu", "cuda")]


def _find_segment_obstacle(manifest: Manifest, segment: SegmentRecord) -> str:
    """Return why a segment cannot be a model of an ensemble; empty if it can."""
    if {item.name for item in manifest.inputs if item.optional}.issuperset(segment.inputs):
        return f"segment {segment.id} reads no input"
    for name in (*segment.inputs, *segment.outputs):
        value = manifest.values[name]
        if find_data_type(value.dtype) is None:
            return f"Triton cannot pass the value {name!r} of type {value.dtype}"
        if value.shape is None:
            return f"Triton cannot pass the value {name!r}, whose rank is unknown"
    return ""


def returns_to_device(manifest: Manifest) -> bool:
    """Return whether work goes back to a device that it had left: then an ensemble pays for each change."""
    device_of = {segment.id: segment.device for segment in manifest.segments}
    readers: dict[str, set[str]] = {device: set() for device in device_of.values()}
    for segment in manifest.segments:
        for producer in list_producers(manifest, segment):
            if device_of[producer] != segment.device:
                readers[device_of[producer]].add(segment.device)
    while free := [device for device in readers if not any(device in others for others in readers.values())]:
        for device in free:
            del readers[device]
    return bool(readers)


def note_custom_operators(manifest: Manifest) -> tuple[Diagnostic, ...]:
    """Return the note that the server needs a library, if the model has operators of one."""
    if not manifest.custom_operators:
        return ()
    message = f"the server needs the library of the operators {format_names(manifest.custom_operators)}"
    hint = "in config.pbtxt: model_operations of each segment, or the parameter custom_op_libraries of the Python model"
    return (Diagnostic("I001", message, where="--to triton", hint=hint),)


def note_defaults(manifest: Manifest) -> tuple[Diagnostic, ...]:
    """Return the note that an ensemble has no optional inputs, if there are any."""
    optional = [item.name for item in manifest.inputs if item.optional]
    if not optional:
        return ()
    message = f"the ensemble leaves out the inputs {format_names(optional)}, which keep their defaults"
    return (Diagnostic("I001", message, where="--to triton", hint="to feed them, export --layout python"),)


# ------------------------------------------------------------------------------------------------------------- ensemble


def write_ensemble(models: BundleModels, folder: Path, name: str) -> None:
    """Write a model for each segment, and the ensemble that connects them."""
    manifest = models.manifest
    tensors, optional = name_tensors(manifest), {item.name for item in manifest.inputs if item.optional}
    steps, routes = [], list_routes(manifest)
    for index, segment in enumerate(models.segments):
        record = segment.record
        step = f"{name}_{record.id.replace('-', '_')}"
        inputs = [value for value in record.inputs if value not in optional]
        version = folder / step / VERSION_FOLDER
        version.mkdir(parents=True)
        with progress_part(index, len(models.segments)):
            write_segment_files(version, [(MODEL_FILE, models, segment)])
        devices = dict.fromkeys(models.devices[route.devices[record.device]] for route in routes)
        write_config(folder / step, describe_segment(manifest, record, step, inputs, list(devices)))
        maps = {
            "input_map": [{"key": value, "value": tensors[value]} for value in inputs],
            "output_map": [{"key": value, "value": tensors[value]} for value in record.outputs],
        }
        steps.append({"model_name": step, "model_version": -1, **maps})
    config = {
        "name": name,
        "platform": "ensemble",
        "max_batch_size": 0,
        "input": [describe_tensor(i.name, i.dtype, i.shape) for i in manifest.inputs if not i.optional],
        "output": [describe_tensor(output.name, output.dtype, output.shape) for output in list_outputs(manifest)],
        "ensemble_scheduling": {"step": steps},
    }
    write_config(folder / name, config)
    (folder / name / VERSION_FOLDER).mkdir()
    (folder / name / VERSION_FOLDER / ".keep").write_text("")  # Triton needs the folder, which git would not keep empty


def name_tensors(manifest: Manifest) -> dict[str, str]:
    """Return the name of each value in the ensemble: returned ones have the names of the outputs."""
    names = {output.value: output.name for output in manifest.outputs}
    taken = {*names.values(), *(item.name for item in manifest.inputs)}
    for name, record in manifest.values.items():
        if record.producer is None:
            names[name] = name
        elif name not in names:
            names[name] = claim_name(name, taken)
    return names


def describe_segment(
    manifest: Manifest, segment: SegmentRecord, name: str, inputs: Iterable[str], devices: Sequence[Device]
) -> dict[str, Any]:
    """Return the configuration of a segment: an instance on its device, the first, and on those of further routes."""

    def describe(value: str) -> dict[str, Any]:
        return describe_tensor(value, manifest.values[value].dtype, manifest.values[value].shape)

    config: dict[str, Any] = {
        "name": name,
        "backend": "onnxruntime",
        "default_model_filename": MODEL_FILE,
        "max_batch_size": 0,
        "input": [describe(value) for value in inputs],
        "output": [describe(value) for value in segment.outputs],
        "instance_group": list_instance_groups(devices),
    }
    if devices[0].kind == "cpu":
        config["parameters"] = list_parameters({"intra_op_thread_count": str(devices[0].cores)})
    return config


# ------------------------------------------------------------------------------------------------------- Python backend


def write_python_model(models: BundleModels, folder: Path, max_batch: int) -> None:
    """Write one model of the Python backend, with a copy of the bundle that it runs."""
    manifest = models.manifest
    states = {state.output for state in manifest.states}
    carried = {state.input for state in manifest.states}
    is_batched = max_batch > 0
    config: dict[str, Any] = {
        "name": folder.name,
        "backend": "python",
        "max_batch_size": max_batch,
        "input": [
            describe_tensor(i.name, i.dtype, i.shape, optional=i.optional or i.name in carried, is_batched=is_batched)
            for i in manifest.inputs
        ],
        "output": [
            describe_tensor(output.name, output.dtype, output.shape, is_batched=is_batched)
            for output in list_outputs(manifest)
            if output.name not in states
        ],
        "instance_group": [{"kind": Name("KIND_MODEL"), "count": 1}],
        "parameters": list_parameters({"custom_op_libraries": "", "max_sequences": str(MAX_SEQUENCES)}),
    }
    if is_batched:
        config["dynamic_batching"] = {}
    if states:
        config["sequence_batching"] = {
            "max_sequence_idle_microseconds": MAX_IDLE_MICROSECONDS,
            "oldest": {"max_candidate_sequences": MAX_SEQUENCES},
        }
    version = folder / VERSION_FOLDER
    version.mkdir(parents=True)
    write_config(folder, config)
    shutil.copyfile(Path(__file__).with_name("triton_model.txt"), version / SCRIPT_FILE)
    copy_bundle(models, version)


def copy_bundle(models: BundleModels, folder: Path) -> None:
    """Copy a bundle, and the weights files that it links to, with their times."""
    bundle = models.bundle
    copies = {f"{BUNDLE_FOLDER}/{file}": bundle.file(file) for file in (MANIFEST_FILE, *bundle.list_files(True))}
    copies |= {file: bundle.linked_file(file) for file in models.manifest.linked}
    for index, (destination, source) in enumerate(copies.items()):
        report_progress(index, len(copies))
        (folder / destination).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(source, folder / destination)


def write_config(folder: Path, config: Mapping[str, Any]) -> None:
    """Write the configuration of a model into its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(format_config(config), encoding="utf-8")


# ------------------------------------------------------------------------------------------------------- configurations


# ONNX Runtime's name of an element type -> Triton's.
DATA_TYPES = {"float": "FP32", "double": "FP64", "float16": "FP16", "bfloat16": "BF16"} | {
    name: name.upper()
    for name in ("bool", "string", *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)))
}

Shape = Sequence[int | str | None] | None


class Name(str):
    """A name of an enumeration, which has no quotes."""


def format_config(fields: Mapping[str, Any]) -> str:
    """Return a message in protobuf's text format: maps are messages, and lists repeat their field.

    >>> print(format_config({"name": "m", "input": [{"name": "x", "data_type": Name("TYPE_FP32"), "dims": [-1, 4]}]}))
    name: "m"
    input {
      name: "x"
      data_type: TYPE_FP32
      dims: -1
      dims: 4
    }
    <BLANKLINE>
    """
    return "".join(f"{line}\n" for line in _format_lines(fields))


def _format_lines(fields: Mapping[str, Any]) -> Iterator[str]:
    for key, content in fields.items():
        for item in content if isinstance(content, list) else [content]:
            if isinstance(item, Mapping):
                yield f"{key} {{"
                yield from (f"  {line}" for line in _format_lines(item))
                yield "}"
            elif isinstance(item, str) and not isinstance(item, Name):
                yield f"{key}: {json.dumps(item, ensure_ascii=False)}"
            else:
                yield f"{key}: {str(item).lower() if isinstance(item, bool) else item}"


def find_data_type(dtype: str) -> Name | None:
    """Return Triton's name of a type, None for types that it lacks.

    >>> find_data_type("tensor(float)"), find_data_type("seq(tensor(float))")
    ('TYPE_FP32', None)
    """
    element = dtype.removeprefix("tensor(").removesuffix(")")
    return Name(f"TYPE_{DATA_TYPES[element]}") if dtype.startswith("tensor(") and element in DATA_TYPES else None


def describe_tensor(
    name: str, dtype: str, shape: Shape, *, optional: bool = False, is_batched: bool = False
) -> dict[str, Any]:
    """Return the entry of an input or output.

    A batched one leaves out its first dimension; if there is no other, it has the shape [1] for each request and row. A
    scalar has the shape [1], too: Triton has no scalars.
    """
    assert shape is not None, "checked before"
    sizes = [size if isinstance(size, int) and size > 0 else -1 for size in shape][is_batched:]
    entry: dict[str, Any] = {"name": name, "data_type": find_data_type(dtype), "dims": sizes or [1]}
    if not sizes and is_batched:
        entry["reshape"] = {}
    if optional:
        entry["optional"] = True
    return entry


def list_instance_groups(devices: Sequence[Device]) -> list[dict[str, Any]]:
    """Return one instance of a model for each device."""
    gpus = Counter(device.address.index for device in devices if device.kind == "cuda")
    groups: list[dict[str, Any]] = [
        {"kind": Name("KIND_GPU"), "count": count, "gpus": [gpu]} for gpu, count in gpus.items()
    ]
    if others := sum(device.kind != "cuda" for device in devices):
        groups.append({"kind": Name("KIND_CPU"), "count": others})
    return groups


def list_parameters(parameters: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return entries of the field `parameters`."""
    return [{"key": key, "value": {"string_value": text}} for key, text in parameters.items()]
