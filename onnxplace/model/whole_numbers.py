"""Find nodes with numbers of a type that a device changes, other than sizes and indices that are within its range."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from onnxplace.model.model import Model

# Types that stand for others -> the magnitude below which they hold all whole numbers.
_LIMITS = {"float64": 1 << 53, "int32": 1 << 31, "float32": 1 << 24, "float16": 1 << 11}
_NARROW = {"BOOL": 2, "UINT8": 1 << 8, "INT8": 1 << 8, "UINT16": 1 << 16, "INT16": 1 << 16, "INT32": 1 << 31}
# Operators -> those of their inputs that are indices or sizes: the operator fails with others than its data allow.
_INDICES = {
    **dict.fromkeys(("Gather", "GatherElements", "GatherND", "Reshape", "Expand", "Tile", "Slice"), slice(1, None)),
    **dict.fromkeys(("ScatterElements", "ScatterND", "Pad"), slice(1, 2)),
    **dict.fromkeys(("ConstantOfShape", "Loop"), slice(0, 1)),
}
# The same of their outputs.
_MADE_INDICES = {**dict.fromkeys(("Shape", "Size", "ArgMax", "ArgMin", "NonZero"), slice(1)), "TopK": slice(1, 2)}
# Their results are about as large as their inputs, and the other way round; or smaller.
_MOVING = {"Reshape", "Flatten", "Squeeze", "Unsqueeze", "Transpose", "Concat", "Split", "Identity", "Where"}
_KEEPING = {
    "Gather",
    "GatherElements",
    "GatherND",
    "Expand",
    "Tile",
    "Slice",
    "Add",
    "Sub",
    "Neg",
    "Abs",
    "Cast",
} | _MOVING
_LIMITING = {"Mod", "Min", "Max", "Clip", "Range", "ReduceMax", "ReduceMin"} | _KEEPING


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
    types = {name: tensor.data_type for name, tensor in model.initializers.items()}
    types |= {name: kind.tensor_type.elem_type for name, kind in model.types.items()}
    is_whole = helper.tensor_dtype_to_np_dtype(number).kind in "iu"
    kept = _find_bounded(model, types, _LIMITS.get(found, 0), known) if is_whole else set[str]()
    names = [{*reads, *node.output} - kept for node, reads in zip(model.nodes, model.reads)]
    return np.array([any(types.get(name) == number for name in items) for items in names], dtype=bool)


def _find_bounded(model: Model, types: Mapping[str, int], limit: int, known: Mapping[str, TensorProto]) -> set[str]:
    """Return the names of values whose magnitude is below a limit, as far as the model tells."""
    narrow = {TensorProto.DataType.Value(name) for name, least in _NARROW.items() if least <= limit}
    bounded = {"", *(name for name, kind in types.items() if kind in narrow)}
    arrays = {name: numpy_helper.to_array(tensor) for name, tensor in known.items()}
    bounded |= {
        x for x, array in arrays.items() if array.dtype.kind in "biuf" and (abs(array.astype(float)) < limit).all()
    }
    for node in model.nodes:
        bounded.update(node.input[_INDICES.get(node.op_type, slice(0))])
        bounded.update(node.output[_MADE_INDICES.get(node.op_type, slice(0))])
    before = 0
    while before < len(bounded):
        before = len(bounded)
        for node in model.nodes:
            bounded.update(node.output if node.op_type in _LIMITING and bounded.issuperset(node.input) else ())
        for node in reversed(model.nodes):
            bounded.update(node.input if node.op_type in _KEEPING and bounded.issuperset(node.output) else ())
    return bounded
