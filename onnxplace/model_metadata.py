"""What an ONNX file says of its model besides the graph: who made it, and of a training step what its parts are for."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from onnxplace.errors import FeedError, ModelError, format_names
from onnxplace.graph.op_graph import Bools, Ints

TRAINING_KEY = "onnxplace.training"
"""Key of the model's metadata."""
PHASE_KEY = "onnxplace.phase"
"""Key of a node's metadata: `forward`, `backward` or `update`."""
MODULE_KEY = "onnxplace.module"
"""Key of a node's metadata: path of the module that it comes from, as in `layers.0.attention`."""
PARAMETER_KEY = "onnxplace.parameter"
"""Key of a node's metadata: name of the only parameter whose gradient or new values the node computes."""
VERSION = 1
"""Of the record; a model with a higher one needs a newer onnxplace."""

Int64 = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)]
PhaseName = Literal["forward", "backward", "update"]


class ModelMetadata(BaseModel):
    """What an ONNX file says of its model, and its name: ONNX Runtime's `ModelMetadata`. No result depends on it."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    file_name: str = ""
    """Name of the file without its folder; empty if the model was given as an object."""
    producer_name: str = ""
    graph_name: str = ""
    domain: str = ""
    description: str = ""
    graph_description: str = ""
    version: int = 0
    custom_metadata_map: dict[str, str] = {}


class CarriedTensor(BaseModel):
    """A tensor that a step reads, and whose new value the next step reads."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    name: str
    """Its name for users: that of a parameter or buffer of the module, or of a moment, such as `exp_avg`."""
    input: str
    """Input of the model that takes its value."""
    output: str
    """Output of the model with its new value."""


class Parameter(CarriedTensor):
    """A parameter of the module, with its gradient and the optimiser's moments."""

    gradient: str = ""
    """Name of the value that is its gradient, as the optimiser uses it; empty if unknown."""
    moments: tuple[CarriedTensor, ...] = ()


class InferencePart(BaseModel):
    """The part of a step that inference needs."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    inputs: tuple[str, ...] = ()
    """Inputs of the model that the module takes."""
    outputs: tuple[str, ...] = ()
    """Values that the module returns; they need not be outputs of the model."""


class Labels(BaseModel):
    """An input of the model whose elements choose a class."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    input: str
    """Name of the input."""
    classes: Int64
    """Number of classes; labels are 0 or more and below it."""
    ignored: tuple[Int64, ...] = ()
    """Further values that are allowed, which the loss leaves out."""

    def check(self, arrays: Mapping[str, NDArray[Any]], where: str = "") -> None:
        """Raise FeedError for labels that are none, naming the first; ONNX would count those below 0 from the end."""
        array = arrays.get(self.input)
        if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
            return
        wrong = np.argwhere(((array < 0) | (array >= self.classes)) & ~np.isin(array, self.ignored))
        if len(wrong) == 0:
            return
        position = wrong[0].tolist()
        row = f" in row {position[0]}{f' at {position[1:]}' if position[1:] else ''}" if position else ""
        ignored = f", or {format_names(map(str, self.ignored), quoted=False)} to ignore it" if self.ignored else ""
        message = f"{self.input!r} has the label {array[tuple(position)]}{row}"
        hint = f"expected a class from 0 to {self.classes - 1}{ignored}"
        raise FeedError("F011", message, where=where or f"input {self.input!r}", hint=hint)


class TrainingStep(BaseModel):
    """What a model's inputs, outputs and values mean as a training step."""

    model_config = ConfigDict(frozen=True, extra="ignore", defer_build=True)

    version: int = VERSION
    loss: str
    """Output with the loss, a scalar."""
    learning_rate: str = ""
    """Input with the learning rate, a float32 scalar; empty for none."""
    step: str = ""
    """Input with the number of the step, an int64 scalar that begins with 1; empty for none."""
    seed: str = ""
    """Input with the seed of random numbers, an int64 scalar; empty for none."""
    metrics: tuple[str, ...] = ()
    """Further outputs for people, such as an accuracy."""
    parameters: tuple[Parameter, ...] = Field(min_length=1)
    buffers: tuple[CarriedTensor, ...] = ()
    """Tensors without gradient that a step changes, such as running statistics."""
    optimizer: dict[str, str | float | bool | None] = {}
    """Its `name`, and its options."""
    module: str = ""
    """Name of the module's class."""
    inference: InferencePart = InferencePart()
    labels: tuple[Labels, ...] = ()
    """Found in the model; requests and `train` refuse other values, which ONNX would count from the last class."""

    def list_states(self) -> Iterator[CarriedTensor]:
        """Yield all parameters, moments and buffers, in this order."""
        yield from self.parameters
        for parameter in self.parameters:
            yield from parameter.moments
        yield from self.buffers


def read_training_step(metadata: Mapping[str, str], where: str) -> TrainingStep | None:
    """Return the training step that a model's metadata describes, None for a model without such metadata.

    Raises ModelError for metadata that is malformed, or of a newer version.

    >>> text = '{"loss": "loss", "parameters": [{"name": "w", "input": "w", "output": "w.new"}]}'
    >>> read_training_step({TRAINING_KEY: text}, "step.onnx").parameters[0].output
    'w.new'
    """
    text = metadata.get(TRAINING_KEY)
    if text is None:
        return None
    place, hint = f"{where}, metadata {TRAINING_KEY!r}", "export the step again, or remove this metadata"
    try:
        step = TrainingStep.model_validate_json(text)
    except ValidationError as problem:
        _require_known_version(text, place)
        first = problem.errors()[0]
        field = ".".join(str(part) for part in first["loc"])
        position = f" at {field!r}" if field else ""
        message = f"expected a description of a training step, it is malformed{position}: {first['msg']}"
        raise ModelError("L040", message, where=place, hint=hint) from None
    _require_known_version(text, place)
    return step


def _require_known_version(text: str, where: str) -> None:
    """Raise ModelError for metadata of a newer version, which may have other fields."""
    try:
        version = json.loads(text)["version"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return
    if isinstance(version, int) and version > VERSION:
        message = f"expected version {VERSION} or older of the description of a training step, got {version}"
        raise ModelError("L040", message, where=where, hint="update onnxplace, or remove this metadata")


class Phase(IntEnum):
    """The part of a training step that a node belongs to."""

    FORWARD = 0
    """Computes the loss, metrics or buffers."""
    BACKWARD = 1
    """Computes gradients."""
    UPDATE = 2
    """Computes moments, and new values of parameters."""


@dataclass(frozen=True)
class TrainingRoles:
    """What each node of a training step is for."""

    step: TrainingStep
    """Loss, parameters, moments and buffers, by the model's metadata or by its flow of data."""
    phase: NDArray[np.uint8]
    """`Phase` per node."""
    parameter: Ints
    """Per node, the only parameter whose gradient, moments or new values it computes.

    An index into `step.parameters`; -1 for nodes that work for several parameters or for none.
    """
    owner: Ints
    """Per node, the forward node that a backward node belongs to; -1 for none and for nodes of other phases."""

    def spread(self, source: NDArray[np.integer], is_again: Bools | None = None) -> TrainingRoles:
        """Return the roles of a rewritten graph.

        Args:
            source: Per new node, the node that it is a part or copy of; -1 for none.
            is_again: Per new node, whether it computes something again for the backward pass. It is a backward node
                then, and belongs to the node that it is a copy of.
        """
        is_again = np.zeros(len(source), dtype=bool) if is_again is None else is_again
        is_copy, has_source = (source >= 0) & ~is_again, source >= 0
        # The first copy of a forward node stands for all of them.
        first = np.full(len(self.phase) + 1, -1, dtype=np.int64)  # the last one for no node
        copies = np.flatnonzero(is_copy)[::-1]
        first[source[copies]] = copies
        owner = np.where(is_copy, first[self.owner[source]], np.where(has_source, first[source], -1))
        phase = np.where(is_copy, self.phase[source], np.where(is_again, Phase.BACKWARD, Phase.FORWARD))
        return replace(
            self,
            phase=phase.astype(np.uint8),
            parameter=np.where(is_copy, self.parameter[source], -1).astype(np.int32),
            owner=owner.astype(np.int32),
        )

    def count(self, phase: Phase) -> int:
        """Return the number of nodes of a phase."""
        return int((self.phase == phase).sum())
