"""Rules of recurrent layers: by batch and directions; a single step of a single sample also by hidden units."""

from __future__ import annotations

from onnx import helper

from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule, by_letters
from onnxplace.passes.sharding.rules.node_views import LocalNode, NodeView

# Tensors that follow each other in weights, recurrent weights, and peepholes; biases hold those of both.
_GATES = {"LSTM": 4, "GRU": 3, "RNN": 1}
_INPUT, _WEIGHTS, _RECURRENCE, _BIAS, _LENGTHS, _STATE, _CELL, _PEEPHOLES = range(8)


def recurrent(view: NodeView) -> list[AxisRule]:
    """LSTM, GRU and RNN: by batch, a bidirectional one by its two directions, a single step by hidden units.

    Time-major values are [time, directions, batch, ...], others [batch, time, directions, ...]; states are without
    the axis of time.
    """
    signature = "-b-,d--,d--,d-,b,db-,db-,d-->-db-,db-,db-"
    if view.attribute("layout", 0):
        signature = "b--,d--,d--,d-,b,bd-,bd-,d-->b-d-,bd-,bd-"
    return [*by_letters(view, signature, "b"), *_by_direction(view, signature), *_by_hidden_units(view)]


def dynamic_quantised_lstm(view: NodeView) -> list[AxisRule]:
    """DynamicQuantizeLSTM: by direction; one scale of its input is that of the whole batch."""
    return _by_direction(view, "-b-,d--,d--,d-,,d--,d--,d-,d*,d*,d*,d*->-d--,d--,d--")


def _by_direction(view: NodeView, signature: str) -> list[AxisRule]:
    # Activations with parameters are listed without gaps, so that it is not clear whose they are.
    has_parameters = any(view.attribute(name) is not None for name in ("activation_alpha", "activation_beta"))
    is_splittable = view.attribute("direction", "forward") == "bidirectional" and not has_parameters
    return by_letters(view, signature, "d", edit=_take_direction) if is_splittable else []


def _take_direction(local: LocalNode) -> None:
    """Make a device's copy compute the direction that it has: forward is the first one, reverse the second."""
    direction = local.ranges[0][0]
    local.set_attribute("direction", ("forward", "reverse")[direction])
    names = local.view.attribute("activations")
    if names:
        half = len(names) // 2
        local.set_attribute("activations", names[direction * half :][:half])


def _by_hidden_units(view: NodeView) -> list[AxisRule]:
    """Return the rule of a decoder's step, one position of one sample, which reads each weight once.

    A unit needs the state of all units, so longer sequences would exchange states at every position. A GRU must apply
    its reset gate behind the product: before it, each unit would need the gates of all.
    """
    gates = _GATES[view.op]
    is_step = view.shape(_INPUT)[:2] == (1, 1) and view.shape(_WEIGHTS)[0] == 1 and not view.has(_LENGTHS)
    if not is_step or (view.op == "GRU" and not view.attribute("linear_before_reset", 0)):
        return []
    axes = {_WEIGHTS: 1, _RECURRENCE: 1, _BIAS: 1, _CELL: 2, _PEEPHOLES: 1}
    fused = {_WEIGHTS: gates, _RECURRENCE: gates, _BIAS: 2 * gates, _PEEPHOLES: 3}
    inputs = {position: axis for position, axis in axes.items() if view.has(position)}
    outputs = {position: 2 if position else 3 for position in view.present_outputs()}
    return [AxisRule(inputs, outputs, fused=fused, edit=_take_units)]


def _take_units(local: LocalNode) -> None:
    """Make a device's copy compute some units: their products with the whole state become part of the bias."""
    view, weights = local.view, local.inputs[_WEIGHTS]
    assert weights is not None
    rows = weights[1]
    units = rows // _GATES[view.op]
    value = helper.make_tensor("value", view.element_types[0], [1], [0.0])
    no_recurrence = local.make_node("ConstantOfShape", [local.make_ints([1, rows, units])], value=value)
    if view.has(_STATE):
        state = local.proto.input[_STATE]
        column = local.make_node("Reshape", [state, local.make_ints([1, -1, 1])])
        product = local.make_node("MatMul", [local.proto.input[_RECURRENCE], column])
        recurrent = local.make_node("Reshape", [product, local.make_ints([1, -1])])
        none = local.make_node("ConstantOfShape", [local.make_ints([1, rows])], value=value)
        bias = local.make_node("Concat", [none, recurrent], axis=1)
        if view.has(_BIAS):
            bias = local.make_node("Add", [local.proto.input[_BIAS], bias])
        local.set_input(_BIAS, bias)
        # Of the state itself, a GRU mixes the own units into its result.
        local.set_input(_STATE, local.take_part(state, 2) if view.op == "GRU" else "")
    local.set_input(_RECURRENCE, no_recurrence)
    local.set_attribute("hidden_size", units)


RECURRENT: dict[tuple[str, str], Rule] = {
    **{("", op): recurrent for op in _GATES},
    ("com.microsoft", "DynamicQuantizeLSTM"): dynamic_quantised_lstm,
}
