"""Check that values arrive bit for bit on other devices and on the host."""

from __future__ import annotations

from typing import Any

import numpy as np

from onnxplace.doctor.context import (
    CheckContext,
    CheckFailedError,
    Finding,
    compile_placed,
    parse_model,
    require,
    require_same,
)
from onnxplace.doctor.operators import OPTIONAL_TYPES
from onnxplace.errors import ExecutionError, ModelError, format_names
from onnxplace.feeds import Array

TYPES = (
    *("float", "float16", "bfloat16", "double", "bool", "string"),
    *("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"),
)
# Elements; most types also with a tensor of 1 MiB.
ELEMENTS = (0, 1, 2, 7, 1000, 4099)
MEDIUM_BYTES = 1 << 20
# For one type only: how bytes are copied does not depend on the type.
LARGE_BYTES = (4 << 20, 32 << 20)
OUTPUTS = ("arrived", "returned", "resent")
_NUMPY_TYPES = {"float": "float32", "double": "float64", "string": "object"}


def check_copies(context: CheckContext) -> Finding:
    """Send values of each type to and fro between the devices, and compare what arrives at each with what was sent."""
    from onnxplace.devices import find_kind

    all_hosts = all(find_kind(device.partition(":")[0]).is_host for device in context.ids)
    refused, wrong, values = [], [], 0
    for kind in TYPES if all_hosts else [kind for kind in TYPES if kind != "string"]:
        try:
            values += _check_type(context, kind)
        except CheckFailedError as problem:
            wrong.append(f"{kind}: {problem}")
        except (ExecutionError, ModelError) as problem:
            if all_hosts or kind not in OPTIONAL_TYPES:
                wrong.append(f"{kind}: {problem.message}")
            refused.append(kind)
    require(not wrong, "; ".join(wrong))
    detail = f"{values} values of {len(TYPES) - len(refused) - (not all_hosts)} types, all exact"
    if refused:
        detail += f"; refused: {format_names(refused, quoted=False)}"
    return Finding(detail, {"values": values, "refused": refused})


def _check_type(context: CheckContext, kind: str) -> int:
    """Return how many values of a type were compared."""
    from onnxplace.api import InferenceSession

    first, last = context.ids[0], context.ids[-1]
    count = 0
    for shape in ("", "[n]", "[n, 2]"):  # scalars, vectors and matrices
        # Each value crosses to the other device, and the host reads all three that have crossed.
        nodes = "sent = Identity(x) arrived = Identity(sent) returned = Identity(arrived) resent = Identity(returned)"
        outputs = ", ".join(f"{kind}{shape} {name}" for name in OUTPUTS)
        model = parse_model(f"copies ({kind}{shape} x) => ({outputs}) {{ {nodes} }}")
        folder = context.folder / f"copies-{kind}-{len(shape)}"
        sizes: dict[str, Any] = {"n": 4} if shape else {}
        places = {"sent|returned": first, "arrived|resent": last}
        bundle = compile_placed(model, folder, context.make_target(), places, **sizes)
        with InferenceSession(bundle) as session:
            for value in _list_values(kind, shape):
                for name, result in zip(OUTPUTS, session.run(None, {"x": value})):
                    require_same(result, value, f"{value.size} elements, {name} ({first}, {last})")
                    count += 1
    return count


def _list_values(kind: str, shape: str) -> list[Array]:
    """Return random values of a type: every bit pattern may occur, except in truth values."""
    if not shape:
        return [_make_value(kind, 1, seed).reshape(()) for seed in range(3)]
    width = 1 if kind == "string" else _find_type(kind).itemsize
    sizes = list(ELEMENTS)
    if kind != "string" and shape == "[n]":
        sizes += [size // width for size in (MEDIUM_BYTES, *(LARGE_BYTES if kind == "float" else ()))]
    if shape == "[n]":
        return [_make_value(kind, size, size) for size in sizes]
    return [_make_value(kind, 2 * size, size).reshape(size, 2) for size in sizes]


def _make_value(kind: str, size: int, seed: int) -> Array:
    random = np.random.default_rng(seed)
    if kind == "string":
        return np.array([f"text {number}" * (number % 3) for number in random.integers(0, 99, size)], object)
    if kind == "bool":
        return random.integers(0, 2, size).astype(np.bool_)
    width = _find_type(kind).itemsize
    value: Array = np.frombuffer(random.bytes(size * width), _find_type(kind)).copy()
    if kind in ("float", "float16", "bfloat16", "double"):
        # Devices may change the bits of NaN, and which number stands for it.
        with np.errstate(invalid="ignore"):
            value[~np.isfinite(value)] = 1
    return value


def _find_type(kind: str) -> Any:
    """Return numpy's type of an ONNX type."""
    if kind == "bfloat16":
        import ml_dtypes

        return np.dtype(ml_dtypes.bfloat16)
    return np.dtype(_NUMPY_TYPES.get(kind, kind))
