"""Check what a model's metadata says about its training step, and list the states that follow from it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from onnx import TensorProto, TypeProto

from onnxplace.errors import ModelError, suggest_nearest
from onnxplace.feeds import Declared, describe_input
from onnxplace.model.value_types import format_type, read_shape_entries
from onnxplace.training_step import TRAINING_KEY, TrainingStep

if TYPE_CHECKING:
    from onnxplace.model.model import Model

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
            raise ModelError("S004", message, where=name_metadata(model), hint="export the step again: remove one")
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
    kind = next(value.type for value in model.outputs if value.name == name)
    if not kind.WhichOneof("value"):  # outputs need not declare a type
        inferred = model.types.get(model.sources.get(name, name))
        if inferred is None:
            return
        kind = inferred
    is_float = kind.tensor_type.elem_type in FLOAT_TYPES
    if is_float and is_scalar(kind) is not False:
        return
    described = describe_input(Declared(name, format_type(kind), read_shape_entries(kind)))
    message = f"expected the loss to be a scalar of floating-point type, got {described}"
    hint = "reduce it to one number, such as its mean over the batch, and export the step again"
    raise ModelError("L020", message, where=f"{model.name}, output {name!r}", hint=hint)


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
                raise ModelError("L021", message, where=name_metadata(model), hint=suggest_nearest(name, known))
