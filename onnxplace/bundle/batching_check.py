"""Check how a manifest says that requests can be joined."""

from __future__ import annotations

from pathlib import Path

from onnxplace.bundle.manifest import Manifest
from onnxplace.errors import BundleError


def check_batching(manifest: Manifest, file: Path) -> None:
    """Raise BundleError unless the axes of a batch are symbolic axes of inputs, and axes of outputs."""
    record = manifest.batching
    if record is None or not record.dimension:
        return
    inputs = {item.name: item.shape for item in manifest.inputs}
    outputs = {item.name for item in manifest.outputs}  # whose declared shapes may be wrong
    problem = "it has no inputs or no outputs" if not record.inputs or not record.outputs else ""
    for name, axis in record.inputs.items():
        shape = inputs.get(name)
        if shape is None or axis >= len(shape) or isinstance(shape[axis], int):
            problem = problem or f"input {name!r} has no symbolic axis {axis}"
    for name in record.outputs:
        if name not in outputs:
            problem = problem or f"there is no output {name!r}"
    if problem:
        message = f"its batching does not fit its inputs and outputs: {problem}"
        raise BundleError("N002", message, where=str(file), hint="the bundle is damaged; compile the model again")
