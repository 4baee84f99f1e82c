"""Subgraphs of If, Loop and Scan as models of their own, and what the node around them calls their values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from onnx import NodeProto, TensorProto, ValueInfoProto, helper

from onnxplace.model import Model, captured_names, is_tensor_constant, iterate_subgraphs
from onnxplace.passes.sharding.layouts import Layout
from onnxplace.passes.sharding.node_views import Shape

# Before this opset, a Scan has one more axis, of a batch.
_MIN_SCAN_OPSET = 9


class Port(NamedTuple):
    """What an operand or a result of a node is in one of its subgraphs."""

    graph: int
    name: str
    scanned: int = -1
    """The axis of the operand or result of which the subgraph sees one index at a time; -1 for none."""

    def enter(self, layout: Layout) -> Layout | None:
        """Return a layout as the subgraph sees it, None for a split of the axis that it does not see."""
        if not layout.is_split or self.scanned < 0:
            return layout
        return None if layout.axis == self.scanned else layout._replace(axis=layout.axis - (layout.axis > self.scanned))

    def leave(self, layout: Layout) -> Layout:
        if not layout.is_split or self.scanned < 0:
            return layout
        return layout._replace(axis=layout.axis + (layout.axis >= self.scanned))

    def enter_shape(self, shape: Shape) -> Shape:
        return shape if self.scanned < 0 else (*shape[: self.scanned], *shape[self.scanned + 1 :])


@dataclass(frozen=True)
class Interface:
    """How operands and results of a node are named in its subgraphs."""

    operands: Mapping[int, Sequence[Port]]
    results: Mapping[int, Sequence[Port]]
    states: Mapping[int, int]
    """Operand of a loop -> the result that it becomes."""
    shared: Sequence[Port] = ()
    """Results on which the devices must agree: whether a loop goes on."""


def read_interface(model: Model, index: int, shapes: Mapping[str, Shape]) -> Interface | None:
    """Return the interface of a node, None for operators and forms that are not followed."""
    node, operands = model.nodes[index], model.operands[index]
    graphs, own = [*iterate_subgraphs(node)], len(node.input)
    ports: dict[int, list[Port]] = defaultdict(list)
    for number, graph in enumerate(graphs):
        captured = {*captured_names(graph)}
        for position in range(own, len(operands)):
            if operands[position] in captured:
                ports[position].append(Port(number, operands[position]))
    if node.op_type == "If":
        results = {
            position: [Port(number, graph.output[position].name) for number, graph in enumerate(graphs)]
            for position in range(len(node.output))
        }
        return Interface(ports, results, {})
    if node.op_type not in ("Loop", "Scan") or (node.op_type == "Scan" and model.opset < _MIN_SCAN_OPSET):
        return None
    inputs, outputs = [value.name for value in graphs[0].input], [value.name for value in graphs[0].output]
    if node.op_type == "Loop":
        # A loop has a number of turns and a condition, its body also returns a condition.
        states = {position: position - 2 for position in range(2, own)}
        ports.update({position: [Port(0, inputs[position])] for position in states})
        results = {
            position: [Port(0, name, -1 if position < len(states) else 0)] for position, name in enumerate(outputs[1:])
        }
        return Interface(ports, results, states, (Port(0, outputs[0]),))
    attributes = {attribute.name: helper.get_attribute_value(attribute) for attribute in node.attribute}
    count = own - attributes["num_scan_inputs"]
    for names, inner, key, found in (
        (node.input, inputs, "scan_input_axes", ports),
        (node.output, outputs, "scan_output_axes", results := {}),
    ):
        axes = attributes.get(key, [0] * (len(inner) - count))
        for position, (name, inside) in enumerate(zip(names, inner)):
            # An axis is counted from the end only where the number of axes is known.
            axis = axes[position - count] if position >= count else -1
            if position >= count and axis < 0:
                if name not in shapes:
                    return None
                axis += len(shapes[name])
            found[position] = [Port(0, inside, axis)]
    return Interface(ports, results, {position: position for position in range(count)})


def build_body(
    model: Model, index: int, interface: Interface, number: int, shapes: Mapping[str, Shape], types: Mapping[str, int]
) -> Model | None:
    """Return a subgraph as a model at some sizes; None if the shape of an operand is unknown there."""
    operands, graph = model.operands[index], [*iterate_subgraphs(model.nodes[index])][number]
    # Those inputs of a loop that are no operands are its turn and its condition.
    inputs: dict[str, tuple[int, Shape]] = {value.name: (value.type.tensor_type.elem_type, ()) for value in graph.input}
    weights = {tensor.name: tensor for tensor in graph.initializer}
    for position, ports in interface.operands.items():
        for port in (port for port in ports if port.graph == number):
            name = operands[position]
            if name not in shapes or not types.get(name, 0):
                return None
            if port.name == name and name in model.initializers and not model.overridable(name):
                weights[name] = model.initializers[name]
            else:
                inputs[port.name] = types[name], port.enter_shape(shapes[name])
    for node in filter(is_tensor_constant, graph.node):
        weights[node.output[0]] = TensorProto()
        weights[node.output[0]].CopyFrom(node.attribute[0].t)
        weights[node.output[0]].name = node.output[0]
    return replace(
        model,
        nodes=tuple(node for node in graph.node if not is_tensor_constant(node)),
        initializers=MappingProxyType(weights),
        inputs=tuple(helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()),
        outputs=tuple(_without_shape(value) for value in graph.output),
        sources=MappingProxyType({}),
        states=MappingProxyType({}),
        samples=MappingProxyType({}),
    )


def _without_shape(value: ValueInfoProto) -> ValueInfoProto:
    result = ValueInfoProto()
    result.CopyFrom(value)
    result.type.tensor_type.ClearField("shape")
    return result


def is_steady(
    node: NodeProto, interface: Interface, number: int, outer: Mapping[str, Shape], inner: Mapping[str, Shape]
) -> bool:
    """Return whether states keep their shape, and results have the one that is expected of the node."""
    for operand, result in interface.states.items():
        (before,), (after,) = interface.operands[operand], interface.results[result]
        if inner.get(before.name) != inner.get(after.name) or after.name not in inner:
            return False
    results = [(name, port) for position, name in enumerate(node.output) for port in interface.results[position]]
    return all(
        port.enter_shape(outer[name]) == inner[port.name]
        for name, port in results
        if port.graph == number and name in outer and port.name in inner
    )
