"""Recognise the roles of nodes in a training step, which of them belong together, and the labels among its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray
from onnx import NodeProto, TypeProto, helper, numpy_helper

from onnxplace.errors import Diagnostic
from onnxplace.graph.op_graph import Bools, Ints, OpGraph
from onnxplace.model.model import Model
from onnxplace.model.tensors import read_shape_entries
from onnxplace.model_metadata import PARAMETER_KEY, PHASE_KEY, Labels, Phase, TrainingRoles, TrainingStep
from onnxplace.passes.placement.grouping.node_groups import spread_owners
from onnxplace_training.find_step import Flow, find_training_step, report_unusable_loss
from onnxplace_training.role_kernels import MANY, NONE, assign_forward_nodes

# What only moves the elements of its first input, or converts them.
_MOVES = "Cast Flatten Gather Identity Pad Reshape Slice Split Squeeze Transpose Unsqueeze"
# Operator whose second input are classes -> the axis of classes in its first input, if no attribute says it.
_CHOICES = {"GatherElements": 0, "NegativeLogLikelihoodLoss": 1, "ScatterElements": 0, "SoftmaxCrossEntropyLoss": 1}

PHASES: Mapping[str, int] = {phase.name.lower(): int(phase) for phase in Phase}


def recognise(model: Model, graph: OpGraph) -> tuple[TrainingRoles | None, list[Diagnostic]]:
    """Return the roles of a model's nodes, None if it is no training step, and notes."""
    return recognise_training_step(model, graph), report_unusable_loss(model)


def find_labels(model: Model) -> tuple[Labels, ...]:
    """Return the inputs whose elements choose a class, with the classes and the values that the loss ignores.

    ONNX counts indices below 0 from the end, and torch refuses them in a loss, `gather` and `scatter`. Labels that the
    model replaces by its own condition, other than that for an ignored value, are left to the model.
    """
    producers = {name: node for node in model.nodes for name in node.output}
    labels: dict[Labels, None] = {}
    for node in model.nodes:
        if node.op_type in _CHOICES:
            attributes = {item.name: helper.get_attribute_value(item) for item in node.attribute}
            shape = read_shape_entries(model.types.get(node.input[0], TypeProto()))
            size = shape[attributes.get("axis", _CHOICES[node.op_type])] if shape else None
            source, ignored = _trace_source(node.input[1], model, producers)
            if source in model.input_names and isinstance(size, int):
                ignored |= {value for name, value in attributes.items() if name == "ignore_index"}
                labels[Labels(input=source, classes=size, ignored=tuple(sorted(ignored)))] = None
    return tuple(labels)


def _trace_source(name: str, model: Model, producers: Mapping[str, NodeProto]) -> tuple[str, set[int]]:
    """Return the value whose elements a value has, and those that are replaced on the way."""
    ignored: set[int] = set()
    while (node := producers.get(name)) is not None:
        if node.op_type == "Where" and (replacement := _read_replacement(node, model, producers)) is not None:
            name = replacement[0]
            ignored.add(replacement[1])
        elif node.op_type in _MOVES.split():
            name = node.input[0]
        else:
            break
    return name, ignored


def _read_replacement(node: NodeProto, model: Model, producers: Mapping[str, NodeProto]) -> tuple[str, int] | None:
    """Return the value of which `Where` replaces all elements of one value, and that one; None for other conditions."""
    condition, _, kept = producers.get(node.input[0]), *node.input[1:]
    if condition is not None and condition.op_type == "Not":
        condition, kept = producers.get(condition.input[0]), node.input[1]
    if condition is None or condition.op_type != "Equal" or condition.input[0] != kept:
        return None
    tensor = model.initializers.get(condition.input[1])
    array = None if tensor is None else numpy_helper.to_array(tensor, str(model.folder or ""))
    return (kept, int(array.item())) if array is not None and array.size == 1 and array.dtype.kind == "i" else None


def recognise_training_step(model: Model, graph: OpGraph) -> TrainingRoles | None:
    """Return the roles of a model's nodes, None if the model is no training step.

    The states come from the model's metadata, or from the flow of data (`find_training_step`). So do the phases:

    - Forward nodes are those that the loss depends on, and those that come from forward nodes and inputs alone and
      lead to no parameter, such as metrics and running statistics.
    - Update nodes come from moments or from inputs that the loss does not depend on, such as the learning rate; or
      from the gradients of several parameters, such as their norm; or they decay a parameter; or they have its new
      values or those of a moment as their result.
    - Backward nodes are the others.

    A node works for one parameter if it leads to the new values of that parameter and its moments alone. Numbers that
    all parameters share, such as bias corrections and the norm of all gradients, are not counted as such a way. Nodes
    that lead to no parameter work for the one whose nodes they come from. Near-linear.

    Args:
        model: A model with its states.
        graph: Its operator graph.
    """
    if not model.states:
        return None
    flow = Flow(model, graph)
    step = model.training or find_training_step(flow)
    if step is None or not _has_values(flow, step):
        return None
    return _Recognition(flow, step).run()


def _has_values(flow: Flow, step: TrainingStep) -> bool:
    """Return whether a model still has the loss and states of a step; a rewritten model may have others."""
    outputs = {output.name for output in flow.model.outputs}
    states = flow.model.states
    return step.loss in outputs and all(states.get(item.input) == item.output for item in step.list_states())


class _Recognition:
    """The roles of the nodes of one training step."""

    def __init__(self, flow: Flow, step: TrainingStep) -> None:
        self.flow, self.step = flow, step
        self.graph = flow.graph
        loss = np.array([flow.find_output(step.loss)], dtype=np.int32)
        self.is_forward, self.is_forward_value = flow.leads_to(loss)
        families = [(number, item) for number, p in enumerate(step.parameters) for item in (p, *p.moments)]
        self.family_labels = np.array([number for number, _ in families], dtype=np.int32)
        self.family_outputs = np.array([flow.find_output(item.output) for _, item in families], dtype=np.int32)
        self.parameter_inputs = np.array([flow.index[item.input] for item in step.parameters], dtype=np.int32)

    def run(self) -> TrainingRoles:
        parameter, origin = self._find_parameters()
        leads, value_leads = self.flow.leads_to(self.family_outputs)
        phase = self._find_phases(parameter, origin, leads, value_leads)
        gradients = self._find_gradients(phase, np.where(leads, parameter, NONE).astype(np.int32))
        phase = self._extend_updates(phase, parameter, gradients)
        phase, parameter = self._apply_metadata(phase, parameter)
        owner = self._find_owners(phase, parameter)
        step = replace_gradients(self.step, gradients).model_copy(update={"labels": find_labels(self.flow.model)})
        return TrainingRoles(step=step, phase=phase, parameter=parameter, owner=owner)

    def _find_parameters(self) -> tuple[Ints, Ints]:
        """Return, per node, the only parameter that it works for, and the label of those that it comes from."""
        leads, _ = self.flow.label_ends(self.family_outputs, self.family_labels, cut=True)
        own = np.where(self.is_forward, NONE, np.maximum(leads, NONE)).astype(np.int32)
        nothing = np.zeros(0, dtype=np.int32)
        origin = self.flow.label_origins(own, nothing, nothing)
        inherits = ~self.is_forward & (leads == NONE) & (origin >= 0)
        return np.where(inherits, origin, own).astype(np.int32), origin

    def _find_phases(self, parameter: Ints, origin: Ints, leads: Bools, value_leads: Bools) -> NDArray[np.uint8]:
        """Return the phase of each node, by the flow of data.

        `leads` and `value_leads` say which nodes and values new values of parameters and moments depend on.
        """
        flow, graph = self.flow, self.graph
        # Moments, learning rate, counter: the loss does not depend on them, but new values do.
        optimizer_inputs = np.flatnonzero((graph.producer < 0) & ~self.is_forward_value & value_leads).astype(np.int32)
        is_update = flow.comes_from(np.zeros(len(graph), dtype=bool), optimizer_inputs)
        is_update[graph.producer[self.family_outputs]] = True
        # Norms of all gradients, weight decay, and what leads to no new value but works for a parameter.
        is_update |= (origin == MANY) | ((parameter >= 0) & (self._decays() == parameter))
        is_update |= ~leads & (parameter >= 0)
        is_update &= ~self.is_forward
        is_backward = ~self.is_forward & ~is_update & leads
        is_backward |= ~self.is_forward & ~is_update & flow.comes_from(is_backward, np.zeros(0, dtype=np.int32))
        phase = np.full(len(graph), Phase.FORWARD, dtype=np.uint8)
        phase[is_backward] = Phase.BACKWARD
        phase[is_update] = Phase.UPDATE
        return phase

    def _decays(self) -> Ints:
        """Return, per node, the parameter whose elements it computes with element by element."""
        numbers = np.arange(len(self.parameter_inputs), dtype=np.int32)
        nothing = np.full(len(self.graph), NONE, dtype=np.int32)
        carries = self.flow.is_elementwise & ~self.is_forward
        return self.flow.label_origins(nothing, self.parameter_inputs, numbers, carries)

    def _apply_metadata(self, phase: NDArray[np.uint8], parameter: Ints) -> tuple[NDArray[np.uint8], Ints]:
        """Return phases and parameters with those that nodes have in their own metadata."""
        phases, parameters, forward = phase.tolist(), parameter.tolist(), int(Phase.FORWARD)
        number = {item.name: index for index, item in enumerate(self.step.parameters)}
        for index, node in enumerate(self.flow.model.nodes):
            for entry in node.metadata_props:
                if entry.key == PHASE_KEY:
                    phases[index] = PHASES.get(entry.value, phases[index])
                elif entry.key == PARAMETER_KEY and parameters[index] < 0:
                    parameters[index] = number.get(entry.value, NONE)
        phase = np.array(phases, dtype=np.uint8)
        return phase, np.where(phase == forward, NONE, parameters).astype(np.int32)

    def _find_owners(self, phase: NDArray[np.uint8], parameter: Ints) -> Ints:
        """Return the forward node of each backward node, -1 for others.

        Nodes that work for one parameter, or read one, belong to the forward node that reads it first.
        """
        graph, is_forward = self.graph, phase == Phase.FORWARD
        first_reader = np.full(len(self.parameter_inputs) + 1, -1, dtype=np.int32)  # the last one for no parameter
        for index, value in enumerate(self.parameter_inputs):
            nodes = [node for node in graph.readers[value].tolist() if is_forward[node]]
            first_reader[index] = min(nodes, key=graph.positions.__getitem__, default=-1)
        is_backward = phase == Phase.BACKWARD
        read = self._find_read_parameters()
        owner = np.where(is_backward, first_reader[np.where(parameter >= 0, parameter, read)], -1).astype(np.int32)
        owner = assign_forward_nodes(
            graph.order, is_forward, is_backward, owner, graph.producer, graph.value_bytes, *graph.inputs.arrays
        )
        return spread_owners(graph, is_backward, owner)

    def _find_read_parameters(self) -> Ints:
        """Return, per node, the first parameter that it reads, -1 for none."""
        number = np.full(len(self.graph.value_names), NONE, dtype=np.int32)
        number[self.parameter_inputs] = np.arange(len(self.parameter_inputs), dtype=np.int32)
        read = np.full(len(self.graph), NONE, dtype=np.int32)
        items, rows = self.graph.inputs.items[::-1], self.graph.inputs.rows[::-1]
        is_parameter = number[items] >= 0
        read[rows[is_parameter]] = number[items[is_parameter]]  # the last assignment, of the first input, stays
        return read

    def _find_gradients(self, phase: NDArray[np.uint8], parameter: Ints) -> list[str]:
        """Return the name of the gradient of each parameter, empty where it is not known.

        That is the latest value through which all of the parameter's backward nodes lead to its update nodes.
        """
        graph, names = self.graph, [item.gradient for item in self.step.parameters]
        rows, items = graph.inputs.rows, graph.inputs.items
        source = graph.producer[items]
        crosses = (source >= 0) & (phase[rows] == Phase.UPDATE) & (phase[source] == Phase.BACKWARD)
        crosses &= (parameter[rows] >= 0) & (parameter[rows] == parameter[source])
        frontiers: dict[int, set[int]] = {}
        for number, value in zip(parameter[rows[crosses]].tolist(), items[crosses].tolist()):
            frontiers.setdefault(number, set()).add(value)
        own = np.where(phase == Phase.BACKWARD, parameter, NONE).astype(np.int32)
        for number, values in frontiers.items():
            names[number] = names[number] or self._find_bottleneck(values, own, number)
        return names

    def _find_bottleneck(self, values: set[int], own: Ints, number: int) -> str:
        """Return the latest value through which nodes of a parameter lead to all of `values`; empty for none."""
        graph = self.graph
        waiting = sorted((-int(graph.positions[graph.producer[value]]), value) for value in values)
        pushed = set(values)
        while len(waiting) > 1:
            _, latest = heappop(waiting)
            for value in graph.inputs[int(graph.producer[latest])].tolist():
                source = int(graph.producer[value])
                if source >= 0 and own[source] == number and value not in pushed:
                    pushed.add(value)
                    heappush(waiting, (-int(graph.positions[source]), value))
        return graph.value_names[waiting[0][1]] if waiting else ""

    def _extend_updates(self, phase: NDArray[np.uint8], parameter: Ints, gradients: list[str]) -> NDArray[np.uint8]:
        """Return phases in which what comes from a parameter's gradient, and works for it, is part of its update."""
        values = [self.flow.index[name] for name in gradients if name in self.flow.index]
        producers = self.graph.producer[np.array(values, dtype=np.int64)]
        is_gradient = np.zeros(len(self.graph), dtype=bool)
        is_gradient[producers[producers >= 0]] = True
        later = self.flow.comes_from(is_gradient, np.zeros(0, dtype=np.int32)) & (parameter >= 0)
        return np.where(later & (phase == Phase.BACKWARD), np.uint8(Phase.UPDATE), phase)


def replace_gradients(step: TrainingStep, gradients: list[str]) -> TrainingStep:
    """Return a step with the names of its gradients."""
    parameters = tuple(
        item.model_copy(update={"gradient": name}) for item, name in zip(step.parameters, gradients, strict=True)
    )
    return step.model_copy(update={"parameters": parameters})
