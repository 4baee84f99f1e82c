"""Find out from the flow of data whether a model with carried states is a training step, and what its states are.

Labels flow along the values: backwards from outputs, to tell what leads to them, and forwards from inputs, to tell what
comes from them. A node with one label belongs to it alone; `MANY` marks what several share.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from onnx import TypeProto

from onnxplace.errors import Diagnostic
from onnxplace.graph.op_graph import Bools, Ints, OpGraph
from onnxplace.model.model import Model, declaration_of
from onnxplace.model.state_binding import FLOAT_TYPES, is_scalar
from onnxplace.model.tensors import read_shape_entries
from onnxplace.model_metadata import CarriedTensor, Parameter, TrainingStep
from onnxplace_training.role_kernels import MANY, NONE, label_ends, label_origins

# Operators whose results have the elements of an input at the places that it has them: those of an optimiser's updates.
ELEMENTWISE = frozenset(
    {
        *("Abs", "Add", "Cast", "Clip", "Div", "Exp", "Expand", "Identity", "Log", "Max", "Mean", "Min", "Mul"),
        *("Neg", "Pow", "Reciprocal", "Sign", "Sqrt", "Sub", "Sum", "Where"),
    }
)

# Size of the largest floating-point type of ONNX.
MAX_NUMBER_BYTES = 8

# Scalar outputs that are examined as the loss; models return few numbers.
MAX_CANDIDATES = 16


@dataclass(frozen=True)
class Flow:
    """The flow of data in a model with carried states."""

    model: Model
    graph: OpGraph

    @cached_property
    def index(self) -> dict[str, int]:
        """Return the index of each value by name."""
        return {name: value for value, name in enumerate(self.graph.value_names)}

    @cached_property
    def states(self) -> tuple[str, ...]:
        """Return the inputs of the states."""
        return tuple(self.model.states)

    @cached_property
    def state_inputs(self) -> Ints:
        return np.array([self.index[name] for name in self.states], dtype=np.int32)

    @cached_property
    def state_outputs(self) -> Ints:
        return np.array([self.find_output(name) for name in self.model.states.values()], dtype=np.int32)

    def find_output(self, name: str) -> int:
        """Return the value of an output."""
        return self.index[self.model.sources.get(name, name)]

    @cached_property
    def is_scalar(self) -> Bools:
        """Return which values are known to be one number."""
        types, names = self.model.types, self.graph.value_names
        result = np.zeros(len(names), dtype=bool)
        # Larger values are more than a number; no size is known of those with 0 bytes.
        small = np.flatnonzero(self.graph.value_bytes <= MAX_NUMBER_BYTES)
        result[small] = [bool(is_scalar(types.get(names[value]))) for value in small.tolist()]
        return result

    def has_float_type(self, name: str) -> bool:
        """Return whether a value is a tensor of floating-point numbers, as far as that is known."""
        kind = self.model.types.get(name, TypeProto())
        return kind.WhichOneof("value") is None or kind.tensor_type.elem_type in FLOAT_TYPES

    @cached_property
    def is_elementwise(self) -> Bools:
        """Return which nodes compute element by element."""
        return np.array([op in ELEMENTWISE for op in self.graph.ops], dtype=bool)

    def label_ends(self, ends: Ints, labels: Ints, *, cut: bool) -> tuple[Ints, Ints]:
        """Return, per node and per value, which of some values it leads to.

        Args:
            ends: Indices of values.
            labels: Labels of the ends.
            cut: Whether single numbers that lead to several ends connect them.
        """
        graph = self.graph
        value_label = np.full(len(graph.value_names), NONE, dtype=np.int32)
        value_label[ends] = labels
        result: tuple[Ints, Ints] = label_ends(
            graph.order, *graph.inputs.arrays, *graph.outputs.arrays, value_label,
            self.is_scalar if cut else np.zeros(len(value_label), dtype=bool),
        )  # fmt: skip
        return result

    def leads_to(self, ends: Ints) -> tuple[Bools, Bools]:
        """Return which nodes and which values some values depend on, themselves included."""
        node_label, value_label = self.label_ends(ends, np.zeros(len(ends), dtype=np.int32), cut=False)
        return node_label != NONE, value_label != NONE

    def label_origins(self, node_label: Ints, values: Ints, labels: Ints, carries: Bools | None = None) -> Ints:
        """Return, per node, which labelled nodes and values without producer it comes from.

        `carries`: the nodes that pass on what they come from, by default all.
        """
        graph = self.graph
        value_label = np.full(len(graph.value_names), NONE, dtype=np.int32)
        value_label[values] = labels
        carries = np.ones(len(graph), dtype=bool) if carries is None else carries
        inputs = graph.inputs.arrays
        result: Ints = label_origins(graph.order, graph.producer, *inputs, node_label, value_label, carries)
        return result

    def comes_from(self, nodes: Bools, values: Ints) -> Bools:
        """Return which nodes depend on some nodes or on some values without producer; those nodes are not included."""
        labels = np.where(nodes, 0, NONE).astype(np.int32)
        origin = self.label_origins(labels, values, np.zeros(len(values), dtype=np.int32))
        result: Bools = origin != NONE
        return result


@dataclass(frozen=True)
class LossCandidate:
    """An output that may be the loss."""

    name: str
    is_parameter: Bools
    """Per state."""

    @property
    def rank(self) -> tuple[int, int]:
        """Return what makes it the loss rather than another candidate: its name, then how many parameters it has."""
        words = self.name.lower().replace(".", "_").replace("/", "_").split("_")
        by_name = 2 if self.name.lower() == "loss" else int("loss" in words)
        return by_name, int(self.is_parameter.sum())


def find_training_step(flow: Flow) -> TrainingStep | None:
    """Return what the states of a model are, None if the model is no training step.

    The loss is an output of one number, of floating-point type. Parameters are states that the loss depends on, whose
    new values it does not depend on, and whose new values are computed from the old ones element by element, outside
    the forward pass. At least one of them depends on the forward pass. That excludes caches of decoders, which grow or
    are read again, and hidden states of recurrent networks, on which the results of the same step depend.
    """
    candidates = [candidate for name in _list_scalar_outputs(flow) if (candidate := _examine(flow, name))]
    best = max(candidates, key=lambda candidate: candidate.rank, default=None)  # the first of equals
    return _describe(flow, best) if best else None


def report_unusable_loss(model: Model) -> list[Diagnostic]:
    """Return a note if a model with states has a loss that is not a number, so that it is no training step."""
    for output in model.outputs if model.states and model.training is None else ():
        value = model.sources.get(output.name, output.name)
        kind = model.types.get(value, output.type)
        if output.name.lower() != "loss" or output.name in model.states.values() or is_scalar(kind) is not False:
            continue
        shape = read_shape_entries(kind) or ()
        text = ", ".join("?" if size is None else str(size) for size in shape)
        message = f"the model is not taken for a training step: expected the output {output.name!r} to be a scalar, "
        hint = "reduce the loss to one number, such as its mean over the batch"
        return [Diagnostic("L005", f"{message}it has the shape [{text}]", where=model.name, hint=hint)]
    return []


def _list_scalar_outputs(flow: Flow) -> list[str]:
    """Return the outputs that may be a loss, by name."""
    states = set(flow.model.states.values())
    names = []
    for output in flow.model.outputs:
        value = flow.model.sources.get(output.name, output.name)
        kind = flow.model.types.get(value, output.type)
        is_number = kind.WhichOneof("value") is not None and is_scalar(kind) and flow.has_float_type(value)
        if output.name not in states and is_number:
            names.append(output.name)
    return names[:MAX_CANDIDATES]


def _examine(flow: Flow, loss: str) -> LossCandidate | None:
    """Return an output with the parameters that it would be the loss of, None if there are none."""
    forward, read = flow.leads_to(np.array([flow.find_output(loss)], dtype=np.int32))
    graph, numbers = flow.graph, np.arange(len(flow.states), dtype=np.int32)
    producer = graph.producer[flow.state_outputs]
    is_parameter = read[flow.state_inputs] & ~forward[producer]
    is_parameter &= np.array([flow.has_float_type(name) for name in flow.states], dtype=bool)
    carried = flow.label_origins(
        np.full(len(graph), NONE, dtype=np.int32), flow.state_inputs, numbers, flow.is_elementwise & ~forward
    )
    is_parameter &= (carried[producer] == numbers) | (carried[producer] == MANY)
    learns = flow.comes_from(forward, np.zeros(0, dtype=np.int32))[producer]
    return LossCandidate(loss, is_parameter) if bool((is_parameter & learns).any()) else None


def _describe(flow: Flow, candidate: LossCandidate) -> TrainingStep:
    """Return the training step with a loss and parameters; its moments and buffers follow from them."""
    states, outputs = flow.states, dict(flow.model.states)
    parameters = np.flatnonzero(candidate.is_parameter)
    loss = np.array([flow.find_output(candidate.name)], dtype=np.int32)
    _, is_forward_value = flow.leads_to(loss)
    owner = _find_moments(flow, parameters.astype(np.int32), is_forward_value)
    # By parameter, its moments; under `NONE`, the states of no parameter: buffers.
    carried: dict[int, list[CarriedTensor]] = {}
    for state in np.flatnonzero(~candidate.is_parameter).tolist():
        tensor = CarriedTensor(name=states[state], input=states[state], output=outputs[states[state]])
        carried.setdefault(int(owner[state]), []).append(tensor)
    names = [(states[state], tuple(carried.get(number, ()))) for number, state in enumerate(parameters.tolist())]
    return TrainingStep(
        loss=candidate.name,
        learning_rate=_find_rate(flow, is_forward_value),
        step=_find_counter(flow, is_forward_value),
        parameters=tuple(
            Parameter(name=name, input=name, output=outputs[name], moments=own_moments) for name, own_moments in names
        ),
        buffers=tuple(carried.get(NONE, ())),
    )


def _find_moments(flow: Flow, parameters: Ints, is_forward_value: Bools) -> Ints:
    """Return, per state, the parameter whose new values alone it leads to, -1 for none; parameters have none."""
    numbers = np.arange(len(parameters), dtype=np.int32)
    _, label = flow.label_ends(flow.state_outputs[parameters], numbers, cut=True)
    owner = np.where(is_forward_value[flow.state_inputs], NONE, label[flow.state_inputs])
    owner[parameters] = NONE
    return np.maximum(owner, NONE).astype(np.int32)


def _list_other_scalars(flow: Flow, is_forward_value: Bools, dtypes: tuple[str, ...]) -> list[str]:
    """Return the inputs of one number that are no states and that the loss does not depend on."""
    others = [value for value in flow.model.inputs if value.name not in flow.model.states]
    return [
        item.name
        for item in (declaration_of(value, flow.model) for value in others)
        if item.dtype in dtypes and item.shape in ((), (1,)) and not is_forward_value[flow.index[item.name]]
    ]


def _find_rate(flow: Flow, is_forward_value: Bools) -> str:
    """Return the input that is the learning rate: the one with its name, or the only number of its type."""
    names = _list_other_scalars(flow, is_forward_value, ("tensor(float)",))
    named = [name for name in names if name.lower().replace("_", "") in ("lr", "learningrate", "rate")]
    return (named or (names if len(names) == 1 else []) or [""])[0]


def _find_counter(flow: Flow, is_forward_value: Bools) -> str:
    """Return the input that counts steps, of type int64."""
    names = _list_other_scalars(flow, is_forward_value, ("tensor(int64)",))
    return names[0] if len(names) == 1 else ""
