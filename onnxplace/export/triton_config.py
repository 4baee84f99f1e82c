"""Model configurations of Triton Inference Server: config.pbtxt, protobuf's text format of `ModelConfig`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from onnxplace.target import Device

# ONNX Runtime's name of an element type -> Triton's.
DATA_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float": "TYPE_FP32",
    "double": "TYPE_FP64",
    "string": "TYPE_STRING",
    "bfloat16": "TYPE_BF16",
}

Shape = Sequence[int | str | None] | None


class Name(str):
    """A name of an enumeration, which has no quotes."""


def format_config(fields: Mapping[str, Any]) -> str:
    """Return a message in protobuf's text format: maps are messages, and lists repeat their field.

    >>> print(format_config({"name": "m", "input": [{"name": "x", "data_type": Name("TYPE_FP32"), "dims": [-1, 4]}]}))
    name: "m"
    input {
      name: "x"
      data_type: TYPE_FP32
      dims: -1
      dims: 4
    }
    <BLANKLINE>
    """
    return "".join(f"{line}\n" for line in _format_lines(fields))


def _format_lines(fields: Mapping[str, Any]) -> Iterator[str]:
    for key, content in fields.items():
        for item in content if isinstance(content, list) else [content]:
            if isinstance(item, Mapping):
                yield f"{key} {{"
                yield from (f"  {line}" for line in _format_lines(item))
                yield "}"
            elif isinstance(item, str) and not isinstance(item, Name):
                yield f"{key}: {json.dumps(item, ensure_ascii=False)}"
            else:
                yield f"{key}: {str(item).lower() if isinstance(item, bool) else item}"


def find_data_type(dtype: str) -> Name | None:
    """Return Triton's name of a type, None for types that it lacks.

    >>> find_data_type("tensor(float)"), find_data_type("seq(tensor(float))")
    ('TYPE_FP32', None)
    """
    element = dtype.removeprefix("tensor(").removesuffix(")")
    return Name(DATA_TYPES[element]) if dtype.startswith("tensor(") and element in DATA_TYPES else None


def describe_tensor(
    name: str, dtype: str, shape: Shape, *, optional: bool = False, is_batched: bool = False
) -> dict[str, Any]:
    """Return the entry of an input or output.

    A batched one leaves out its first dimension; if there is no other, it has the shape [1] for each request and row. A
    scalar has the shape [1], too: Triton has no scalars.
    """
    assert shape is not None, "checked before"
    sizes = [size if isinstance(size, int) and size > 0 else -1 for size in shape][is_batched:]
    entry: dict[str, Any] = {"name": name, "data_type": find_data_type(dtype), "dims": sizes or [1]}
    if not sizes and is_batched:
        entry["reshape"] = {}
    if optional:
        entry["optional"] = True
    return entry


def list_instance_groups(devices: Sequence[Device]) -> list[dict[str, Any]]:
    """Return one instance of a model for each device."""
    gpus = Counter(device.address.index for device in devices if device.kind == "cuda")
    groups: list[dict[str, Any]] = [
        {"kind": Name("KIND_GPU"), "count": count, "gpus": [gpu]} for gpu, count in gpus.items()
    ]
    if others := sum(device.kind != "cuda" for device in devices):
        groups.append({"kind": Name("KIND_CPU"), "count": others})
    return groups


def list_parameters(parameters: Mapping[str, str]) -> list[dict[str, Any]]:
    """Return entries of the field `parameters`."""
    return [{"key": key, "value": {"string_value": text}} for key, text in parameters.items()]
