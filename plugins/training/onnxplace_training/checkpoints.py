"""Checkpoints: the states of a training step with the number of its last step, as a safetensors file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from onnxplace.bundle.manifest import Manifest, TrainingRecord
from onnxplace.errors import InputError, format_names
from onnxplace.feeds.feeds import Array, numpy_type
from onnxplace.utils.files import format_path
from onnxplace_training.array_files import map_arrays, write_arrays

FORMAT = "onnxplace checkpoint"
VERSION = 1
# Steps and seeds are inputs of type int64.
MAX_NUMBER = 1 << 63
_DAMAGED_HINT = "it was cut off or altered: use another checkpoint"
_OTHER_HINT = "use a checkpoint of this model, or compile the model that it was saved from"


@dataclass(frozen=True)
class StateSpec:
    """A state of a training step, as checkpoints hold it."""

    input: str
    """Input of the model."""
    dtype: str
    """ONNX Runtime's name."""
    shape: tuple[int | str | None, ...] | None


@dataclass(frozen=True)
class Checkpoint:
    """What a checkpoint holds."""

    states: Mapping[str, Array]
    """Arrays by the names of users: parameters, moments (`layers.0.weight.exp_avg`) and buffers."""
    step: int
    """Number of the last step; 0 before the first one."""
    seed: int
    """Seed of random numbers in the step."""
    notes: Mapping[str, str] = field(default_factory=dict)
    """Texts of the program that saved it."""


def list_state_specs(manifest: Manifest) -> dict[str, StateSpec]:
    """Return the states of a training step by the names of users; those without a role under their input's name."""
    declared = {item.name: (item.dtype, item.shape) for item in manifest.inputs}
    for split in manifest.sharding.states if manifest.sharding else ():
        dtype, shape = declared[split.inputs[0]]
        if split.axis >= 0 and shape is not None:
            shape = (*shape[: split.axis], sum(split.sizes), *shape[split.axis + 1 :])
        declared[split.input] = dtype, shape
        for part in split.inputs:
            declared.pop(part, None)
    states = {item.input for item in manifest.states} & declared.keys()
    states |= {item.input for item in (manifest.sharding.states if manifest.sharding else ())}
    names = name_states(manifest.training) if manifest.training else {}
    return {names.get(name, name): StateSpec(name, *declared[name]) for name in declared if name in states}


def name_states(training: TrainingRecord) -> dict[str, str]:
    """Return the name for users of each state of a training step, by its input."""
    names = {item.input: item.name for item in (*training.parameters, *training.buffers)}
    for parameter in training.parameters:
        names |= {moment.input: f"{parameter.name}.{moment.name}" for moment in parameter.moments}
    return names


def write_checkpoint(path: Path, checkpoint: Checkpoint, model: str) -> None:
    """Write a checkpoint atomically; raises UsageError or ExecutionError, and keeps an older one then."""
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "step": str(checkpoint.step),
        "seed": str(checkpoint.seed),
        "model": model,
        "notes": json.dumps(dict(checkpoint.notes)),
    }
    write_arrays(path, checkpoint.states, metadata)


def read_checkpoint(path: Path, specs: Mapping[str, StateSpec]) -> Checkpoint:
    """Map a checkpoint into memory.

    Raises InputError for one of another model, and for a file that is damaged, too new, or no checkpoint.
    """
    where = format_path(path)
    file = map_arrays(path, "L041", _DAMAGED_HINT)
    metadata = file.metadata
    if metadata.get("format") != FORMAT:
        message = "a safetensors file, but not a checkpoint of onnxplace: its metadata does not say so"
        hint = "trainer.save writes checkpoints; for weights: trainer.load_state_dict(arrays, strict=False)"
        raise InputError("L041", message, where=where, hint=hint)
    try:
        if (version := int(metadata["version"])) > VERSION:
            message = f"expected version {VERSION} of checkpoints or older, got {version}"
            raise InputError("L041", message, where=where, hint="update onnxplace")
        step, seed = int(metadata["step"]), int(metadata["seed"])
        notes = json.loads(metadata.get("notes", "{}"))
        # Without a hash, the name of the hash was altered.
        if not (0 <= step < MAX_NUMBER and 0 <= seed < MAX_NUMBER and isinstance(notes, dict) and file.has_hash):
            raise ValueError
    except (KeyError, ValueError, RecursionError):
        raise InputError("L041", "its metadata is malformed", where=where, hint=_DAMAGED_HINT) from None
    check_states(file.arrays, specs, where)
    return Checkpoint(file.arrays, step, seed, {str(key): str(value) for key, value in notes.items()})


def check_states(arrays: Mapping[str, Array], specs: Mapping[str, StateSpec], where: str, strict: bool = True) -> None:
    """Raise InputError L041 unless arrays are the states of a training step, naming the first that differs.

    Without `strict`, states may be missing.
    """
    for difference in _list_differences(arrays, specs, strict):
        raise InputError("L041", f"it is of another model: {difference}", where=where, hint=_OTHER_HINT)


def _list_differences(arrays: Mapping[str, Array], specs: Mapping[str, StateSpec], strict: bool) -> Iterator[str]:
    for name, spec in specs.items():
        if name not in arrays:
            if strict:
                yield f"it has no {name!r}, which this model has"
            continue
        array, dtype = arrays[name], numpy_type(spec.dtype)
        if not _fits(array.shape, spec.shape):
            yield f"{name!r} has the shape {list(array.shape)}, expected {list(spec.shape or ())}"
        if dtype is not None and array.dtype != dtype:
            yield f"{name!r} has the type {array.dtype}, expected {dtype}"
    if unknown := [name for name in arrays if name not in specs]:
        yield f"it has {format_names(unknown)}, which this model does not have"


def _fits(shape: tuple[int, ...], declared: tuple[int | str | None, ...] | None) -> bool:
    return declared is None or (
        len(shape) == len(declared) and all(a == b for a, b in zip(shape, declared) if isinstance(b, int))
    )
