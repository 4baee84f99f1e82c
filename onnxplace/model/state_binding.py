"""Bind outputs of a model to inputs of its next call: by `--state OUT=IN`, and for training steps by metadata."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

from onnx import TensorProto, TypeProto

from onnxplace.errors import ModelError, UsageError, suggest_nearest
from onnxplace.feeds.feeds import Declared, describe_input
from onnxplace.model.model import Model, declaration_of
from onnxplace.model.tensors import format_type, read_shape_entries
from onnxplace.model_metadata import TRAINING_KEY, TrainingStep
from onnxplace.utils.names import match_stars

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
                raise UsageError("S001", message, where=OPTION, hint="leave one of them out")
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
        raise UsageError("S001", message, where=OPTION, hint=suggest_nearest(left, outputs))
    parts = right.split("*")
    candidates = [name for name in inputs if name.startswith(parts[0]) and name.endswith(parts[-1])]
    for output in matching:
        # A pattern with several * may match in several ways: the inputs tell which one is meant.
        matching_inputs = [name for name in candidates if match_stars(left, right, output, name) is not None]
        if not matching_inputs:
            fillings = match_stars(left, left, output, output) or ()
            name = "".join(part + filling for part, filling in zip(right.split("*"), [*fillings, ""]))
            message = f"the model has no input {name!r} for output {output!r}"
            raise UsageError("S001", message, where=OPTION, hint=suggest_nearest(name, inputs))
        yield from ((output, name) for name in matching_inputs)


def _require_fit(model: Model, output: str, name: str, where: str) -> None:
    """Raise ModelError unless an output can be fed to an input."""
    if model.sources.get(output, output) in model.input_names:
        message = f"output {output!r} returns an input, expected a computed value"
        raise ModelError("S001", message, where=where, hint="feed it again with each call")
    expected = declaration_of(next(value for value in model.inputs if value.name == name), model)
    if not expected.dtype.startswith("tensor("):
        message = f"input {name!r} has type {expected.dtype}, expected a tensor"
        hint = "only tensors can be states; feed it with each call"
        raise ModelError("S001", message, where=where, hint=hint)
    if (kind := _find_output_type(model, output)) is None:
        return
    returned = Declared(output, format_type(kind), read_shape_entries(kind))
    if returned.dtype != expected.dtype or not _are_compatible(returned.shape, expected.shape):
        message = f"the output is {describe_input(returned)}, the input takes {describe_input(expected)}"
        raise ModelError("S001", message, where=where, hint="bind values of one type and shape")


def _find_output_type(model: Model, name: str) -> TypeProto | None:
    """Return the type of an output, as it is declared or inferred; None if neither says it."""
    kind = next(value.type for value in model.outputs if value.name == name)
    return kind if kind.WhichOneof("value") else model.types.get(model.sources.get(name, name))


def _are_compatible(one: Shape, other: Shape) -> bool:
    """Return whether two shapes may be equal.

    They have the same rank and the same fixed sizes, as far as both are known.
    """
    if one is None or other is None:
        return True
    return len(one) == len(other) and all(
        a == b for a, b in zip(one, other) if isinstance(a, int) and isinstance(b, int)
    )


# ------------------------------------------------------------------------------------------------------- training steps


FLOAT_TYPES = frozenset({TensorProto.FLOAT, TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16})
"""Element types that a loss, a parameter or a moment can have."""


def list_training_states(model: Model) -> Iterator[tuple[str, str]]:
    """Yield (output, input) of each state in the metadata of a training step; none for other models.

    Raises:
        ModelError: The metadata names what the model does not have, binds an input twice, or its loss is no scalar.
    """
    if model.training is None:
        return
    _require_names(model, model.training)
    require_scalar_loss(model, model.training.loss)
    bound: dict[str, str] = {}
    for state in model.training.list_states():
        if bound.setdefault(state.input, state.output) != state.output:
            message = f"input {state.input!r} is bound twice: to output {bound[state.input]!r} and to {state.output!r}"
            raise ModelError("S001", message, where=name_metadata(model), hint="export the step again: remove one")
        yield state.output, state.input


def name_metadata(model: Model) -> str:
    """Return the place of a training step's metadata for error messages."""
    return f"{model.name}, metadata {TRAINING_KEY!r}"


def is_scalar(kind: TypeProto | None) -> bool | None:
    """Return whether a type is a scalar, or a vector of one element; None if its shape is unknown."""
    shape = None if kind is None else read_shape_entries(kind)
    if shape is None:
        return None
    return len(shape) == 0 or shape == (1,)


def require_scalar_loss(model: Model, name: str) -> None:
    """Raise ModelError unless an output can be a loss: a number of a floating-point type, as far as that is known."""
    kind = _find_output_type(model, name)
    if kind is None or (kind.tensor_type.elem_type in FLOAT_TYPES and is_scalar(kind) is not False):
        return
    described = describe_input(Declared(name, format_type(kind), read_shape_entries(kind)))
    message = f"expected the loss to be a scalar of floating-point type, got {described}"
    hint = "reduce it to one number, such as its mean over the batch, and export the step again"
    raise ModelError("L005", message, where=f"{model.name}, output {name!r}", hint=hint)


def _require_names(model: Model, step: TrainingStep) -> None:
    """Raise ModelError if the metadata names an input, output or value that the model does not have."""
    inputs = [value.name for value in model.inputs]
    outputs = [value.name for value in model.outputs]
    values = [*inputs, *(name for node in model.nodes for name in node.output if name), *model.initializers]
    states = [*step.list_states()]
    scalars = [name for name in (step.learning_rate, step.step, step.seed) if name]
    for role, names, known in (
        ("output", [step.loss, *step.metrics, *(state.output for state in states)], outputs),
        ("input", [*scalars, *(state.input for state in states), *step.inference.inputs], inputs),
        ("value", [*(p.gradient for p in step.parameters if p.gradient), *step.inference.outputs], values),
    ):
        known_names = frozenset(known)
        for name in names:
            if name not in known_names:
                message = f"it names {role} {name!r}, which the model does not have"
                raise ModelError("L040", message, where=name_metadata(model), hint=suggest_nearest(name, known))
