"""Bind outputs of a model to inputs of its next call.

The option is `--state OUT=IN`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from onnxplace.errors import ModelError, UsageError, suggest_nearest
from onnxplace.feeds import Declared, describe_input
from onnxplace.model.model import Model, declaration_of
from onnxplace.model.training_states import list_training_states, name_metadata
from onnxplace.model.value_types import format_type, read_shape_entries
from onnxplace.utils import match_stars

OPTION = "--state"

Shape = tuple[int | str | None, ...] | None

StateRequest = Mapping[str, str] | str | Sequence[str]
"""Output -> input, or texts `OUT=IN`; each `*` stands for the same text on both sides."""


def bind_states(model: Model, request: StateRequest) -> Model:
    """Return `model` with outputs bound to inputs of its next call.

    The states of a training step that the model's metadata describes are bound without being requested.

    Raises:
        UsageError: A pair is malformed, names an unknown input or output, or binds an input twice.
        ModelError: An output does not have the type or shape of its input, or the metadata of a training step does not
            fit the model.
    """
    states: dict[str, str] = {}
    for output, name in list_training_states(model):
        states[name] = output
        _require_fit(model, output, name, f"{name_metadata(model)}, {output}={name}")
    for left, right in _parse_pairs(request):
        for output, name in _expand_pair(left, right, model):
            if states.setdefault(name, output) != output:
                message = f"input {name!r} is bound twice: to output {states[name]!r} and to {output!r}"
                raise UsageError("S004", message, where=OPTION, hint="leave one of them out")
            _require_fit(model, output, name, f"{OPTION} {output}={name}")
    return replace(model, states=MappingProxyType(states))


def _parse_pairs(request: StateRequest) -> list[tuple[str, str]]:
    """Return the pairs of a request; raises UsageError for a malformed one."""
    if isinstance(request, Mapping):
        pairs = [(str(left), str(right)) for left, right in request.items()]
    else:
        parts = [text.partition("=") for text in ([request] if isinstance(request, str) else request)]
        pairs = [(left.strip(), right.strip()) for left, _, right in parts]
    for left, right in pairs:
        text = f"{left}={right}" if right else left
        if not left or not right:
            hint = "write it as OUTPUT=INPUT, such as present=past"
            raise UsageError("S001", f"expected OUTPUT=INPUT, got {text!r}", where=OPTION, hint=hint)
        if left.count("*") != right.count("*"):
            hint = "each * stands for the same text on both sides: present.*=past.*"
            raise UsageError("S001", f"one side of {text!r} has more * than the other", where=OPTION, hint=hint)
    return pairs


def _expand_pair(left: str, right: str, model: Model) -> Iterator[tuple[str, str]]:
    """Yield each output that a pair names, with its input.

    Raises UsageError for a side that matches nothing.
    """
    outputs = [value.name for value in model.outputs]
    inputs = [value.name for value in model.inputs]
    matching = [name for name in outputs if match_stars(left, left, name, name) is not None]
    if not matching:
        message = f"no output matches {left!r}" if "*" in left else f"the model has no output {left!r}"
        raise UsageError("S002", message, where=OPTION, hint=suggest_nearest(left, outputs))
    parts = right.split("*")
    candidates = [name for name in inputs if name.startswith(parts[0]) and name.endswith(parts[-1])]
    for output in matching:
        # A pattern with several * may match in several ways: the inputs tell which one is meant.
        matching_inputs = [name for name in candidates if match_stars(left, right, output, name) is not None]
        if not matching_inputs:
            name = _fill_stars(right, match_stars(left, left, output, output) or ())
            message = f"the model has no input {name!r} for output {output!r}"
            raise UsageError("S002", message, where=OPTION, hint=suggest_nearest(name, inputs))
        yield from ((output, name) for name in matching_inputs)


def _fill_stars(text: str, fillings: Sequence[str]) -> str:
    return "".join(part + filling for part, filling in zip(text.split("*"), [*fillings, ""]))


def _require_fit(model: Model, output: str, name: str, where: str) -> None:
    """Raise ModelError unless an output can be fed to an input."""
    source = model.sources.get(output, output)
    if source in model.input_names:
        message = f"output {output!r} returns an input, expected a computed value"
        raise ModelError("S003", message, where=where, hint="feed it again with each call")
    expected = declaration_of(next(value for value in model.inputs if value.name == name), model)
    if not expected.dtype.startswith("tensor("):
        message = f"input {name!r} has type {expected.dtype}, expected a tensor"
        hint = "only tensors can be states; feed it with each call"
        raise ModelError("S003", message, where=where, hint=hint)
    kind = next(value.type for value in model.outputs if value.name == output)
    if not kind.WhichOneof("value"):  # outputs need not declare a type
        kind = model.types.get(source, kind)
    if not kind.WhichOneof("value"):
        return
    returned = Declared(output, format_type(kind), read_shape_entries(kind))
    if returned.dtype != expected.dtype or not _are_compatible(returned.shape, expected.shape):
        message = f"the output is {describe_input(returned)}, the input takes {describe_input(expected)}"
        raise ModelError("S003", message, where=where, hint="bind values of one type and shape")


def _are_compatible(one: Shape, other: Shape) -> bool:
    """Return whether two shapes may be equal.

    They have the same rank and the same fixed sizes, as far as both are known.
    """
    if one is None or other is None:
        return True
    return len(one) == len(other) and all(
        a == b for a, b in zip(one, other) if isinstance(a, int) and isinstance(b, int)
    )
