"""Find nodes with numbers of a type that a device changes, other than sizes and indices that are within its range."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxplace.model.model import Model

# Sizes and indices are below this.
MAX_INDEX = 1 << 31
# Types that stand for others -> the magnitude below which they hold all whole numbers.
_LIMITS = {"float64": 1 << 53, "int32": MAX_INDEX, "float32": 1 << 24}
# Those of indices, for which numbers count as small if they are cast to one of these.
_WHOLE = (TensorProto.INT64, TensorProto.INT32)
# Types of few bits -> the magnitude below which their numbers are.
_NARROW = {"BOOL": 2, "UINT8": 1 << 8, "INT8": 1 << 8, "UINT16": 1 << 16, "INT16": 1 << 16, "INT32": MAX_INDEX}
# Operators -> those of their inputs that are indices or sizes: the operator fails with others than its data allow.
_INDICES = dict.fromkeys(("Gather", "GatherElements", "GatherND", "Reshape", "Expand", "Tile", "Slice"), slice(1, None))
_INDICES |= dict.fromkeys(("ScatterElements", "ScatterND", "Pad"), slice(1, 2))
# The same of their outputs.
_MADE_INDICES = {**dict.fromkeys(("Shape", "Size", "ArgMax", "ArgMin", "NonZero"), slice(1)), "TopK": slice(1, 2)}
# Results of these have all elements of their inputs, or about as large ones.
_KEEPING = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Concat", "Split", "Identity", "Expand", "Tile"}
_KEEPING |= {"Add", "Sub", "Neg", "Abs", "Cast"}
# Results of these have some of them.
_LIMITING = {*_INDICES, "Where", "Mod", "Min", "Max", "Clip", "Range", "ReduceMax", "ReduceMin"} | _KEEPING


def find_changed_nodes(model: Model, name: str, found: str, known: Mapping[str, TensorProto]) -> NDArray[np.bool_]:
    """Return, per node, whether it reads or computes numbers that a device may not keep.

    It keeps whole numbers below its limit: constants, sizes and indices, such as tokens, of which a Gather takes rows,
    also where they are computed from each other.

    Args:
        model: The model.
        name: The type of the numbers in ONNX's text form, such as `int64`.
        found: The type that the device has instead, such as `int32`.
        known: Small values that are constants, or follow from the sizes of the model.
    """
    number = TensorProto.DataType.Value(name.upper())
    types = model.element_types
    is_whole = helper.tensor_dtype_to_np_dtype(number).kind in "iu"
    kept = _find_bounded(model, types, _LIMITS.get(found, 0), known) if is_whole else set[str]()
    changed = {name for name, kind in types.items() if kind == number} - kept
    rows = zip(model.nodes, model.reads)
    return np.array([not changed.isdisjoint((*reads, *node.output)) for node, reads in rows], dtype=bool)


def _find_bounded(model: Model, types: Mapping[str, int], limit: int, known: Mapping[str, TensorProto]) -> set[str]:
    """Return the names of values whose magnitude is below a limit, as far as the model tells."""
    narrow = {TensorProto.DataType.Value(name) for name, least in _NARROW.items() if least <= limit}
    tensors = model.constants | dict(known)
    bounded = {"", *(name for name, kind in types.items() if kind in narrow)}
    bounded |= {name for name, tensor in tensors.items() if _is_below(tensor, limit)}
    used = set[str]()
    for node in model.nodes if limit >= MAX_INDEX else ():
        used.update(node.input[_INDICES.get(node.op_type, slice(0))])
        bounded.update(node.output[_MADE_INDICES.get(node.op_type, slice(0))])
    before = -1
    while before < len(bounded | used):
        before = len(bounded | used)
        for node in model.nodes:
            if node.op_type in _LIMITING and (bounded | used).issuperset(node.input):
                bounded.update(node.output)
        for node in reversed(model.nodes):
            # Two large numbers may have a small difference, and a large one may be cast to a small one.
            is_open = node.op_type in ("Add", "Sub") and (bounded | used).isdisjoint(node.input)
            if node.op_type in _KEEPING and used.issuperset(node.output) and not is_open:
                used.update(name for name in node.input if types.get(name) in _WHOLE)
    return bounded | used


def _is_below(tensor: TensorProto, limit: int) -> bool:
    is_read = tensor.data_type in _WHOLE and tensor.data_location != TensorProto.EXTERNAL
    return is_read and bool((abs(numpy_helper.to_array(tensor).astype(float)) < limit).all())
