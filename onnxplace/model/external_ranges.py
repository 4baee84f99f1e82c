"""The ranges of weights files that a model refers to."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto

from onnxplace.model.nested_graphs import iterate_tensors


def list_external_ranges(path: Path) -> list[tuple[str, int, int]]:
    """Return (location, offset, length) of all external data of a model file, in the order of the bytes.

    Locations are relative to the folder of the file. Nothing is read but the model itself.
    """
    graph = onnx.load(path, load_external_data=False).graph
    tensors = [*graph.initializer, *(tensor for node in graph.node for tensor in iterate_tensors(node))]
    ranges = set()
    for tensor in tensors:
        if tensor.data_location == TensorProto.EXTERNAL:
            entries = {entry.key: entry.value for entry in tensor.external_data}
            ranges.add((entries["location"], int(entries.get("offset") or 0), int(entries["length"])))
    return sorted(ranges)
