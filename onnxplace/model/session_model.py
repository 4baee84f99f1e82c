"""Models in the form in which ONNX Runtime opens them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from onnxplace.model.model import MAX_INLINE_BYTES, Model
from onnxplace.model.weights import WeightFile


def store_for_session(
    model: Model, folder: Path, more: Sequence[onnx.ValueInfoProto] = ()
) -> tuple[bytes | Path, dict[str, str]]:
    """Return a model as ONNX Runtime opens it.

    Args:
        model: The model.
        folder: An empty folder, which takes the model and its weights if these exceed `MAX_INLINE_BYTES`.
        more: Values that are to be outputs too.

    Returns:
        Serialised model or path of a file, and entries for the session's configuration.
    """
    if model.inline_bytes <= MAX_INLINE_BYTES:
        return model.whole_proto(more=more).SerializeToString(), model.session_entries
    with WeightFile(folder / "weights.bin", "weights.bin") as weights:
        (folder / "whole.onnx").write_bytes(model.whole_proto(weights, more).SerializeToString())
    return folder / "whole.onnx", {}
