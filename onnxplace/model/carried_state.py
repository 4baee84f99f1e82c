"""Which outputs of a model are inputs of its next call: `--state OUT=IN`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from onnxplace.errors import ModelError, UsageError, nearest
from onnxplace.feeds import Declared, describe_input
from onnxplace.model.model import Model, declaration_of, shape_entries, type_name
from onnxplace.utils import match_stars

WHERE = "--state"

Shape = tuple[int | str | None, ...] | None

StateRequest = Mapping[str, str] | Sequence[str]
"""Output -> input, or texts `OUT=IN`; a `*` stands for the same text on both sides."""


def bind_states(model: Model, asked: StateRequest) -> Model:
    """Return `model` with outputs bound to inputs of its next call.

    Raises UsageError for a pair that is written wrong, names what the model does not have, or binds an input twice;
    ModelError for an output that cannot be that input.
    """
    found: dict[str, str] = {}
    for left, right in _pairs(asked):
        for output, name in _matches(left, right, model):
            if found.setdefault(name, output) != output:
                message = f"input {name!r} is bound twice: to output {found[name]!r} and to {output!r}"
                raise UsageError("S004", message, where=WHERE, hint="leave one of them out")
            _require_fit(model, output, name)
    return replace(model, states=MappingProxyType(found))


def _pairs(asked: StateRequest) -> list[tuple[str, str]]:
    if isinstance(asked, Mapping):
        pairs = list(asked.items())
    else:
        parts = [text.partition("=") for text in ([asked] if isinstance(asked, str) else asked)]
        pairs = [(left.strip(), right.strip()) for left, _, right in parts]
    for left, right in pairs:
        text = f"{left}={right}" if right else left
        if not left or not right:
            hint = "write it as OUTPUT=INPUT, such as present=past"
            raise UsageError("S001", f"not a state: {text!r}", where=WHERE, hint=hint)
        if left.count("*") != right.count("*"):
            hint = "each * stands for the same text on both sides: present.*=past.*"
            raise UsageError("S001", f"one side of {text!r} has more * than the other", where=WHERE, hint=hint)
    return pairs


def _matches(left: str, right: str, model: Model) -> Iterator[tuple[str, str]]:
    """Yield the outputs and inputs that a pair names; raises UsageError where there is none."""
    outputs = [value.name for value in model.outputs]
    inputs = [value.name for value in model.inputs]
    matching = [name for name in outputs if match_stars(left, left, name, name) is not None]
    if not matching:
        what = f"no output matches {left!r}" if "*" in left else f"the model has no output {left!r}"
        raise UsageError("S002", what, where=WHERE, hint=nearest(left, outputs))
    parts = right.split("*")
    candidates = [name for name in inputs if name.startswith(parts[0]) and name.endswith(parts[-1])]
    for output in matching:
        # A name with several * may be cut in several ways: the input says which one is meant.
        fitting = [name for name in candidates if match_stars(left, right, output, name) is not None]
        if not fitting:
            name = _filled(right, match_stars(left, left, output, output) or ())
            message = f"the model has no input {name!r} for output {output!r}"
            raise UsageError("S002", message, where=WHERE, hint=nearest(name, inputs))
        yield from ((output, name) for name in fitting)


def _filled(text: str, taken: Sequence[str]) -> str:
    return "".join(part + star for part, star in zip(text.split("*"), [*taken, ""]))


def _require_fit(model: Model, output: str, name: str) -> None:
    """Raise ModelError unless what `output` returns can be fed to the input `name`."""
    where = f"{WHERE} {output}={name}"
    source = model.sources.get(output, output)
    if source in model.input_names:
        hint = "feed it again with each call"
        raise ModelError("S003", f"output {output!r} hands an input back: nothing computes it", where=where, hint=hint)
    wanted = declaration_of(next(value for value in model.inputs if value.name == name), model)
    if not wanted.dtype.startswith("tensor("):
        raise ModelError("S003", f"input {name!r} is {wanted.dtype}: only tensors can be states", where=where)
    kind = next(value.type for value in model.outputs if value.name == output)
    if not kind.WhichOneof("value"):  # an output need not say what it is
        kind = model.types.get(source, kind)
    if not kind.WhichOneof("value"):
        return
    given = Declared(output, type_name(kind), shape_entries(kind))
    if given.dtype != wanted.dtype or not _same_shape(given.shape, wanted.shape):
        message = f"the output is {describe_input(given)}, the input takes {describe_input(wanted)}"
        raise ModelError("S003", message, where=where, hint="bind values of one type and shape")


def _same_shape(one: Shape, other: Shape) -> bool:
    """Return whether two shapes have one rank and the same fixed sizes, as far as both are known."""
    if one is None or other is None:
        return True
    return len(one) == len(other) and all(
        a == b for a, b in zip(one, other) if isinstance(a, int) and isinstance(b, int)
    )
