"""Models in the form in which ONNX Runtime opens them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx

from onnxplace.model.model import INLINE_LIMIT_BYTES, Model
from onnxplace.model.weights import WeightFile


def store_for_session(
    model: Model, folder: Path, more: Sequence[onnx.ValueInfoProto] = ()
) -> tuple[bytes | Path, dict[str, str]]:
    """Return what a session opens, and the options it needs; `more` values are outputs too.

    Weights beyond 1 GiB go through a file in `folder`.
    """
    if model.inline_bytes <= INLINE_LIMIT_BYTES:
        return model.whole_proto(more=more).SerializeToString(), model.session_entries
    with WeightFile(folder / "weights.bin", "weights.bin") as weights:
        (folder / "whole.onnx").write_bytes(model.whole_proto(weights, more).SerializeToString())
    return folder / "whole.onnx", {}
