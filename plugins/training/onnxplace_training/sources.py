"""What `onnxplace.compile` takes as a model with this part: programs of `torch.export`, and modules of PyTorch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onnxplace.errors import UsageError
from onnxplace.utils.files import open_input


def convert_torch(
    model: Any, path: Path, example_inputs: Sequence[Any] | Mapping[str, Any] | None
) -> Mapping[str, int] | None:
    """Write what is torch's as an ONNX file at `path`, and return the sizes of its example inputs; None for others.

    Raises:
        UsageError: Example inputs are missing, or given for a program; or the extra `[torch]` is not installed.
        ModelError: torch cannot read or convert it.
    """
    is_path = isinstance(model, (str, Path))
    if is_path and Path(model).suffix.lower() != ".pt2":
        return None
    if not is_path and not any(kind.__module__.startswith("torch.") for kind in type(model).__mro__):
        return None
    where = str(model) if is_path else ""
    if where:
        open_input(model, "M001").close()
    try:
        from onnxplace_training import convert_to_onnx
    except UsageError as problem:
        message = f"{problem.message}, which reads programs of torch.export"
        raise UsageError(problem.code, message, where=where, hint=problem.hint) from None
    return convert_to_onnx(model, path, example_inputs or ())
