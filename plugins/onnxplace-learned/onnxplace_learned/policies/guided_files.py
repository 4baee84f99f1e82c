"""Policies of `guided` on disk, as safetensors."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplace.errors import InputError
from onnxplace.utils import format_path, write_arrays
from onnxplace_learned.policies.guided_policy import GuidedPolicy, GuidedShape
from onnxplace_learned.policies.policy_tensors import (
    FORMAT,
    MAX_WIDTH,
    damaged_policy_error,
    newer_policy_error,
    open_policy,
    require_tensors,
)

KIND, VERSION = "guided", 1
# Adam's moments of each parameter in a checkpoint, as torch names them.
MOMENTS = ("exp_avg", "exp_avg_sq")
# Far more rounds than any useful policy has.
MAX_ROUNDS = 16


@dataclass(frozen=True)
class GuidedCheckpoint:
    """What the training of a policy is resumed from, next to the policy itself."""

    updates: int
    """Of the optimiser; 0 if it has no moments yet."""
    random_state: Mapping[str, Any]
    """Of numpy's generator PCG64."""
    arrays: Mapping[str, NDArray[Any]]
    """The moments of each parameter, and `recent`: losses and shares of right decisions since the last point."""


def default_policy_path() -> Path:
    """Return the file of the policy that comes with the package."""
    return Path(str(files("onnxplace_learned.policies"))) / "guided.safetensors"


def write_guided_policy(path: Path, policy: GuidedPolicy, checkpoint: GuidedCheckpoint | None = None) -> None:
    """Write a policy; with a checkpoint, also what its training can be resumed from.

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
    tensors: dict[str, NDArray[Any]] = dict(policy.tensors)
    if checkpoint:
        metadata |= {"updates": checkpoint.updates, "random_state": json.dumps(checkpoint.random_state)}
        tensors |= checkpoint.arrays
    write_arrays(path, tensors, {key: str(value) for key, value in metadata.items()})


def read_guided_policy(path: Path) -> GuidedPolicy:
    """Return the policy in a file.

    Raises:
        InputError: The file cannot be read, is damaged, is not a policy of `guided`, or is of a newer version.
    """
    return _read_file(path)[0]


def read_guided_checkpoint(path: Path) -> tuple[GuidedPolicy, GuidedCheckpoint]:
    """Return the policy in a checkpoint, and what its training is resumed from.

    Raises:
        InputError: As `read_guided_policy`; or the file is a policy without a checkpoint.
    """
    policy, arrays, metadata = _read_file(path)
    if "random_state" not in metadata:
        hint = "omit --resume to start anew"
        raise InputError("H012", "expected a checkpoint, found a policy alone", where=format_path(path), hint=hint)
    try:
        state, updates = json.loads(metadata["random_state"]), int(metadata["updates"])
        np.random.PCG64().state = state
    except (KeyError, ValueError, TypeError) as problem:
        raise damaged_policy_error(path, KIND, f"its random state cannot be read ({problem})") from None
    named = [f"{moment}.{name}" for name in policy.tensors for moment in MOMENTS] if updates else []
    if missing := [name for name in (*named, "recent") if name not in arrays]:
        raise damaged_policy_error(path, KIND, f"tensor {missing[0]!r} is missing")
    if arrays["recent"].ndim != 2 or arrays["recent"].shape[1] != 2:
        raise damaged_policy_error(
            path, KIND, f"tensor 'recent' is of shape {arrays['recent'].shape}, expected (any, 2)"
        )
    return policy, GuidedCheckpoint(updates, state, {name: np.array(arrays[name]) for name in (*named, "recent")})


def _read_file(path: Path) -> tuple[GuidedPolicy, Mapping[str, NDArray[Any]], Mapping[str, str]]:
    """Return the policy in a file, and all arrays and metadata of the file, both checked."""
    file = open_policy(path, KIND)
    tensors, policy = file.arrays, _read_description(file.metadata, path)
    expected = policy.shape.tensors
    is_checkpoint = "random_state" in file.metadata
    moments = {f"{moment}.{name}": expected[name] for moment in MOMENTS for name in expected if is_checkpoint}
    checked = {name: array for name, array in tensors.items() if name != "recent" or not is_checkpoint}
    present = {name: moments[name] for name in moments.keys() & tensors.keys()}
    require_tensors(checked, {**expected, **present}, path, KIND)
    # Copies, so that nothing refers to the file any more.
    policy = policy.with_tensors({name: np.array(tensors[name]) for name in expected}, policy.steps)
    return policy, tensors, file.metadata


def _read_description(metadata: Mapping[str, str], path: Path) -> GuidedPolicy:
    """Return a policy without parameters; raises InputError for one that this version does not know."""
    try:
        if metadata["kind"] != KIND or int(metadata["version"]) > VERSION:
            raise newer_policy_error(path, KIND, VERSION, metadata)
        sizes = {"width": MAX_WIDTH, "message_width": MAX_WIDTH, "hidden": MAX_WIDTH, "rounds": MAX_ROUNDS}
        numbers = {key: int(metadata[key]) for key in (*sizes, "graphs", "devices", "steps", "seed")}
        if any(not 1 <= numbers[key] <= limit for key, limit in sizes.items()) or min(numbers.values()) < 0:
            raise ValueError(f"its sizes are {numbers}")
        families = str(metadata["families"])
    except (KeyError, ValueError, TypeError) as problem:
        raise damaged_policy_error(path, KIND, f"its metadata cannot be read ({problem})") from None
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
