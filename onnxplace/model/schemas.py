"""Nodes held against the definition of their operator, so that whoever reads one may rely on its form."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

from onnx import AttributeProto, NodeProto, defs

from onnxplace.errors import ModelError

_ONNX = ("", "ai.onnx", "ai.onnx.ml")


@dataclass(frozen=True)
class Form:
    """What the definition of an operator demands of a node."""

    inputs: tuple[int, int]
    """Least and most."""
    outputs: tuple[int, int]
    attributes: Mapping[str, int]
    """Types by name."""
    required: tuple[str, ...]


@cache
def form_of(operator: str, domain: str, version: int) -> Form | None:
    """Return the form of an operator of ONNX's own in an opset; None for one that ONNX does not know there."""
    try:
        schema = defs.get_schema(operator, version, "" if domain == "ai.onnx" else domain)
    except (defs.SchemaError, TypeError):  # a version that is no 32-bit number is a TypeError
        return None
    return Form(
        (schema.min_input, schema.max_input),
        (schema.min_output, schema.max_output),
        {name: _number(attribute.type) for name, attribute in schema.attributes.items()},
        tuple(sorted(name for name, attribute in schema.attributes.items() if attribute.required)),
    )


def _number(kind: Any) -> int:
    """Return the number of a type of attributes, which onnx gives as an enumeration of its own."""
    return int(kind)


def require_form(nodes: Iterable[NodeProto], versions: Mapping[str, int], where: str) -> None:
    """Raise ModelError naming the first node with inputs, outputs or attributes that its operator does not have.

    `versions` are those of the opsets, by domain. Operators that ONNX does not know are left to ONNX Runtime.
    """
    for node in nodes:
        version = versions.get("" if node.domain == "ai.onnx" else node.domain)
        form = form_of(node.op_type, node.domain, version) if node.domain in _ONNX and version is not None else None
        if form is not None and (problem := _problem(node, form)):
            place = f"{where}, node {node.name!r}"
            hint = "the model is damaged, or declares another opset than it is written for; export it again"
            raise ModelError("M026", f"{node.op_type} of opset {version} {problem}", where=place, hint=hint)


def _problem(node: NodeProto, form: Form) -> str:
    """Return what is wrong with a node, or nothing."""
    for what, names, (least, most) in (("inputs", node.input, form.inputs), ("outputs", node.output, form.outputs)):
        if len(names) < least or _count(names) > most:
            expected = f"{least}" if least == most else f"{least} or more" if most > _MANY else f"{least} to {most}"
            return f"has {len(names)} {what}, expected {expected}"
    types = {attribute.name: attribute.type for attribute in node.attribute}
    for name, kind in types.items():
        if form.attributes.get(name, kind) != kind:
            return f"has {name!r} of type {_type(kind)}, expected {_type(form.attributes[name])}"
    missing = [name for name in form.required if name not in types]
    return f"lacks the attribute {missing[0]!r}" if missing else ""


def _count(names: Sequence[str]) -> int:
    """Return how many names there are, without empty ones at the end, which stand for what is left out."""
    return next((index for index in range(len(names), 0, -1) if names[index - 1]), 0)


# Operators that take any number of inputs say so by a number that none has.
_MANY = 1 << 20


def _type(number: int) -> str:
    """Return the name of a type of attributes."""
    return str(AttributeProto.AttributeType.Name(number)) if number in AttributeProto.AttributeType.values() else "?"
