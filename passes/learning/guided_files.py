"""Policies of `guided` on disk, as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path

import numpy as np

from onnxplace.errors import InputError, format_value
from onnxplace.passes.learning.guided_policy import GuidedPolicy, GuidedShape
from onnxplace.passes.learning.policy_tensors import FORMAT, MAX_WIDTH
from onnxplace.utils import format_path, map_arrays, write_arrays

KIND, VERSION = "guided", 1
# Far more rounds than any useful policy has.
MAX_ROUNDS = 16
_RETRAIN = "train it again with `onnxplace learn guided`"
_DAMAGED_HINT = f"copy it again, or {_RETRAIN}"


def default_policy_path() -> Path:
    """Return the file of the policy that comes with the package."""
    return Path(str(files("onnxplace.passes.learning"))) / "guided.safetensors"


def write_guided_policy(path: Path, policy: GuidedPolicy) -> None:
    """Write a policy.

    Raises UsageError or ExecutionError if the file cannot be written.
    """
    shape = policy.shape
    metadata = {
        "format": FORMAT,
        "kind": KIND,
        "version": VERSION,
        "width": shape.width,
        "message_width": shape.message_width,
        "hidden": shape.hidden,
        "rounds": shape.rounds,
        "families": policy.families,
        "graphs": policy.graphs,
        "devices": policy.devices,
        "steps": policy.steps,
        "seed": policy.seed,
    }
    write_arrays(path, policy.tensors, {key: str(value) for key, value in metadata.items()})


def read_guided_policy(path: Path) -> GuidedPolicy:
    """Return the policy in a file.

    Raises:
        InputError: The file cannot be read, is damaged, is not a policy of `guided`, or is of a newer version.
    """
    file = map_arrays(path, "H003", _DAMAGED_HINT, foreign_code="H004")
    if file.metadata.get("format") != FORMAT:
        message = "expected a policy of onnxplace, found safetensors of another program"
        raise InputError("H004", message, where=format_path(path), hint=_DAMAGED_HINT)
    tensors, policy = file.arrays, _read_description(file.metadata, path)
    expected = policy.shape.tensors
    for name, shape in expected.items():
        if name not in tensors or tensors[name].shape != shape:
            shown = f"of shape {tensors[name].shape}" if name in tensors else "missing"
            raise _damaged(path, f"tensor {name!r} is {shown}, expected {shape}")
        if tensors[name].dtype != np.float32:
            raise _damaged(path, f"tensor {name!r} is of type {tensors[name].dtype}, expected float32")
        if not np.isfinite(tensors[name]).all():
            raise _damaged(path, f"tensor {name!r} has numbers that are not finite")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise _damaged(path, f"tensor {unknown[0]!r} does not belong to a policy")
    # Copies, so that nothing refers to the file any more.
    return policy.with_tensors({name: np.array(tensors[name]) for name in expected}, policy.steps)


def _read_description(metadata: Mapping[str, str], path: Path) -> GuidedPolicy:
    """Return a policy without parameters; raises InputError for one that this version does not know."""
    try:
        if metadata["kind"] != KIND or int(metadata["version"]) > VERSION:
            raise _newer(path, metadata)
        sizes = {"width": MAX_WIDTH, "message_width": MAX_WIDTH, "hidden": MAX_WIDTH, "rounds": MAX_ROUNDS}
        numbers = {key: int(metadata[key]) for key in (*sizes, "graphs", "devices", "steps", "seed")}
        if any(not 1 <= numbers[key] <= limit for key, limit in sizes.items()) or min(numbers.values()) < 0:
            raise ValueError(f"its sizes are {numbers}")
        families = str(metadata["families"])
    except (KeyError, ValueError, TypeError) as problem:
        raise _damaged(path, f"its metadata cannot be read ({problem})") from None
    shape = GuidedShape(**{key: numbers[key] for key in sizes})
    return GuidedPolicy(
        shape=shape,
        tensors={},
        families=families,
        graphs=numbers["graphs"],
        devices=numbers["devices"],
        steps=numbers["steps"],
        seed=numbers["seed"],
    )


def _damaged(path: Path, reason: str) -> InputError:
    return InputError("H003", f"the policy is damaged: {reason}", where=format_path(path), hint=_DAMAGED_HINT)


def _newer(path: Path, metadata: Mapping[str, str]) -> InputError:
    shown = f"{format_value(metadata['kind'])} of version {format_value(metadata['version'])}"
    message = f"expected a policy {KIND!r} of version {VERSION} or earlier, found {shown}"
    return InputError("H005", message, where=format_path(path), hint=f"update onnxplace, or {_RETRAIN}")
