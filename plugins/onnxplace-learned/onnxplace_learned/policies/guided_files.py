"""Policies of `guided` on disk."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from onnxplace.errors import InputError
from onnxplace.utils import format_path
from onnxplace_learned.policies.guided_policy import GuidedPolicy, GuidedShape, Tensors
from onnxplace_learned.policy_files import MAX_SIZES, PolicyFile, write_policy_file

KIND = "guided"
# Adam's moments of each parameter in a checkpoint, as torch names them.
MOMENTS = ("exp_avg", "exp_avg_sq")
# The metadata of a checkpoint: all of it besides moments, as JSON.
CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class GuidedCheckpoint:
    """What the training of a policy is resumed from, next to the policy itself."""

    updates: int
    """Updates of the optimiser; 0 if it has no moments yet."""
    random_state: Mapping[str, Any]
    """State of numpy's generator PCG64."""
    recent: Sequence[tuple[float, float]]
    """Losses and shares of right decisions since the last point."""
    moments: Tensors
    """The moments of each parameter."""


def default_policy_path() -> Path:
    """Return the file of the policy that comes with the package."""
    return Path(str(files("onnxplace_learned.policies"))) / "guided.safetensors"


def write_guided_policy(path: Path, policy: GuidedPolicy, checkpoint: GuidedCheckpoint | None = None) -> None:
    """Write a policy; with a checkpoint, also what its training can be resumed from.

    Raises UsageError or ExecutionError if the file cannot be written.
    """
    tensors, more = dict(policy.tensors), {}
    if checkpoint:
        tensors |= checkpoint.moments
        state = {name: getattr(checkpoint, name) for name in ("updates", "random_state", "recent")}
        more = {CHECKPOINT: json.dumps(state)}
    write_policy_file(path, KIND, (policy.shape, policy), tensors, more)


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
    policy, checkpoint = _read_file(path)
    if checkpoint is None:
        hint = "omit --resume to start anew"
        raise InputError("H012", "expected a checkpoint, found a policy alone", where=format_path(path), hint=hint)
    return policy, checkpoint


def _read_file(path: Path) -> tuple[GuidedPolicy, GuidedCheckpoint | None]:
    """Return the policy in a file, and its checkpoint if there is one."""
    file = PolicyFile(path, KIND)
    shape = GuidedShape(**file.read_fields(GuidedShape, MAX_SIZES))
    updates, recent = 0, list[tuple[float, float]]()
    random_state: Any = None
    if CHECKPOINT in file.metadata:
        try:
            state = json.loads(file.metadata[CHECKPOINT])
            updates, random_state = int(state["updates"]), state["random_state"]
            recent = [(float(loss), float(right)) for loss, right in state["recent"]]
            np.random.PCG64().state = random_state
        except (KeyError, ValueError, TypeError) as problem:
            raise file.damage(f"its checkpoint cannot be read ({problem})") from None
    moments = {f"{moment}.{name}": size for moment in MOMENTS for name, size in shape.tensors.items() if updates}
    tensors = file.read_tensors({**shape.tensors, **moments})
    policy = GuidedPolicy(shape, {name: tensors[name] for name in shape.tensors}, **file.read_fields(GuidedPolicy))
    if CHECKPOINT not in file.metadata:
        return policy, None
    return policy, GuidedCheckpoint(updates, random_state, recent, {name: tensors[name] for name in moments})
