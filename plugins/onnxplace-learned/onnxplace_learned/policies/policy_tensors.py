"""What all files of policies have in common: their format, and checks of their tensors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from onnxplace.errors import InputError, format_value
from onnxplace.utils import ArrayFile, format_path, map_arrays

# In the metadata of every policy.
FORMAT = "onnxplace.policy"
# Limits of what a file may ask for, far above any useful policy.
MAX_WIDTH, MAX_ROUNDS, MAX_DEVICES = 256, 64, 256


def open_policy(path: Path, kind: str) -> ArrayFile:
    """Return the contents of the file of a policy.

    Raises InputError if it cannot be read, or is not a policy (H003, H004).
    """
    hint = _damaged_hint(kind)
    file = map_arrays(path, "H003", hint, foreign_code="H004")
    if file.metadata.get("format") != FORMAT:
        message = "expected a policy of onnxplace, found safetensors of another program"
        raise InputError("H004", message, where=format_path(path), hint=hint)
    return file


def require_tensors(
    tensors: Mapping[str, NDArray[Any]],
    expected: Mapping[str, tuple[int, ...]],
    path: Path,
    kind: str,
) -> None:
    """Raise InputError unless a file has exactly the expected tensors: float32, with finite numbers."""
    for name, shape in expected.items():
        if name not in tensors or tensors[name].shape != shape:
            shown = f"of shape {tensors[name].shape}" if name in tensors else "missing"
            raise damaged_policy_error(path, kind, f"tensor {name!r} is {shown}, expected {shape}")
        if tensors[name].dtype != np.float32:
            raise damaged_policy_error(
                path, kind, f"tensor {name!r} is of type {tensors[name].dtype}, expected float32"
            )
        if not np.isfinite(tensors[name]).all():
            raise damaged_policy_error(path, kind, f"tensor {name!r} has numbers that are not finite")
    if unknown := sorted(tensors.keys() - expected.keys()):
        raise damaged_policy_error(path, kind, f"tensor {unknown[0]!r} does not belong to a policy")


def damaged_policy_error(path: Path, kind: str, reason: str) -> InputError:
    """Return the error for a file that is damaged."""
    message = f"the policy is damaged: {reason}"
    return InputError("H003", message, where=format_path(path), hint=_damaged_hint(kind))


def newer_policy_error(path: Path, kind: str, version: int, metadata: Mapping[str, str]) -> InputError:
    """Return the error for a policy of another kind or of a newer version."""
    shown = f"{format_value(metadata['kind'])} of version {format_value(metadata['version'])}"
    message = f"expected a policy {kind!r} of version {version} or earlier, found {shown}"
    hint = f"update onnxplace, or {_retrain(kind)}"
    return InputError("H005", message, where=format_path(path), hint=hint)


def _retrain(kind: str) -> str:
    return f"train it again with `onnxplace learn {kind}`"


def _damaged_hint(kind: str) -> str:
    return f"copy it again, or {_retrain(kind)}"
