"""Policies on disk, as safetensors: tensors by name, and the fields of the policy as metadata.

All kinds of policies have one reader. A policy is a record of sizes (its shape), a record of what it was trained on,
and tensors. The texts and whole numbers among the fields of both records are the metadata of the file. A file may come
from anywhere, so nothing in it is believed: each field is checked by its annotation, sizes also by limits, and each
tensor by its shape, type and numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from onnxplace.errors import InputError, format_value
from onnxplace.utils.files import format_path
from onnxplace_training import map_arrays, write_arrays

# In the metadata of every policy.
FORMAT, VERSION = "onnxplace.policy", 1
# Limits of the sizes that a file may ask for, far above any useful policy.
MAX_SIZES = {"devices": 256, "groups": 4096, "hidden": 256, "message_width": 256, "rounds": 64, "width": 256}


class PolicyFile:
    """The file of a policy of one kind; raises InputError where it is not one (H003)."""

    def __init__(self, path: Path, kind: str) -> None:
        self.path, self.kind = path, kind
        retrain = f"train it again with `onnxplace learn {kind}`"
        self._hint = f"copy it again, or {retrain}"
        file = map_arrays(path, "H003", self._hint)
        self.metadata, self.arrays = file.metadata, file.arrays
        where = format_path(path)
        if self.metadata.get("format") != FORMAT:
            message = "expected a policy of onnxplace, found safetensors of another program"
            raise InputError("H003", message, where=where, hint=self._hint)
        try:
            found, version = self.metadata["kind"], int(self.metadata["version"])
        except (KeyError, ValueError) as problem:
            raise self.damage(f"its metadata cannot be read ({problem})") from None
        if found != kind or version > VERSION:
            shown = f"{format_value(found)} of version {format_value(self.metadata['version'])}"
            message = f"expected a policy {kind!r} of version {VERSION} or earlier, found {shown}"
            raise InputError("H003", message, where=where, hint=f"update onnxplace, or {retrain}")

    def damage(self, reason: str) -> InputError:
        """Return the error for a damaged file."""
        message = f"the policy is damaged: {reason}"
        return InputError("H003", message, where=format_path(self.path), hint=self._hint)

    def read_fields(self, record: type[Any], max_sizes: Mapping[str, int] | None = None) -> dict[str, Any]:
        """Return the texts, choices and whole numbers among the fields of a dataclass.

        Numbers are at least 0, and sizes from 1 to their maximum.
        """
        values: dict[str, Any] = {}
        try:
            for name, hint in get_type_hints(record).items():
                if hint is int:
                    values[name] = int(self.metadata[name])
                elif hint is str or get_origin(hint) is Literal:
                    values[name] = self.metadata[name]
                if get_origin(hint) is Literal and values[name] not in get_args(hint):
                    raise ValueError(f"its {name} is {format_value(values[name])}")
            numbers = {name: value for name, value in values.items() if isinstance(value, int)}
            sizes = max_sizes or {}
            if any(not (name in sizes) <= value <= sizes.get(name, value) for name, value in numbers.items()):
                raise ValueError(f"its sizes are {numbers}")
        except (KeyError, ValueError) as problem:
            raise self.damage(f"its metadata cannot be read ({problem})") from None
        return values

    def read_tensors(self, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NDArray[np.float32]]:
        """Return copies of the tensors, which must be exactly these: float32, with finite numbers."""
        for name, shape in shapes.items():
            tensor = self.arrays.get(name)
            if tensor is None or tensor.shape != shape:
                shown = "missing" if tensor is None else f"of shape {tensor.shape}"
                raise self.damage(f"tensor {name!r} is {shown}, expected {shape}")
            if tensor.dtype != np.float32:
                raise self.damage(f"tensor {name!r} is of type {tensor.dtype}, expected float32")
            if not np.isfinite(tensor).all():
                raise self.damage(f"tensor {name!r} has numbers that are not finite")
        if unknown := sorted(self.arrays.keys() - shapes.keys()):
            raise self.damage(f"tensor {unknown[0]!r} does not belong to a policy")
        return {name: np.array(self.arrays[name]) for name in shapes}


def write_policy_file(
    path: Path,
    kind: str,
    records: Sequence[Any],
    tensors: Mapping[str, NDArray[np.float32]],
    more: Mapping[str, str] | None = None,
) -> None:
    """Write the fields of records that `PolicyFile` reads, tensors, and more metadata.

    Raises UsageError or ExecutionError if the file cannot be written.
    """
    named = [(item.name, getattr(record, item.name)) for record in records for item in fields(record)]
    described = {name: str(value) for name, value in named if isinstance(value, (int, str))}
    write_arrays(path, tensors, {**described, "format": FORMAT, "kind": kind, "version": str(VERSION), **(more or {})})
