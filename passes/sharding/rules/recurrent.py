"""Rules of recurrent layers: by batch, and by direction."""

from __future__ import annotations

from collections.abc import Mapping

from onnxplace.passes.sharding.node_views import LocalNode, NodeView
from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule

# Weights, biases and peepholes, which have the directions first; then lengths and initial states.
_WEIGHTS = (1, 2, 3, 7)
_LENGTHS, _INITIAL = 4, (5, 6)


def recurrent(view: NodeView) -> list[AxisRule]:
    """LSTM, GRU and RNN: by batch, and a bidirectional one by its two directions.

    Time-major values are [time, directions, batch, ...], others [batch, time, directions, ...]; states are without
    the axis of time.
    """
    is_batch_major = bool(view.attribute("layout", 0))
    batch, direction = (0, 1) if is_batch_major else (1, 0)
    result_batch, result_direction = (0, 2) if is_batch_major else (2, 1)
    inputs = {0: batch, _LENGTHS: 0, **dict.fromkeys(_INITIAL, batch)}
    rules = [AxisRule(_present(view, inputs), _outputs(view, result_batch, batch))]
    # Activations with parameters are listed without gaps, so that it is not clear whose they are.
    has_parameters = any(view.attribute(name) is not None for name in ("activation_alpha", "activation_beta"))
    if view.attribute("direction", "forward") == "bidirectional" and not has_parameters:
        inputs = {**dict.fromkeys(_WEIGHTS, 0), **dict.fromkeys(_INITIAL, direction)}
        rules.append(
            AxisRule(_present(view, inputs), _outputs(view, result_direction, direction), edit=_take_direction)
        )
    return rules


def _present(view: NodeView, axes: Mapping[int, int]) -> dict[int, int]:
    return {position: axis for position, axis in axes.items() if view.has(position)}


def _outputs(view: NodeView, of_values: int, of_states: int) -> dict[int, int]:
    return {position: of_states if position else of_values for position in view.present_outputs()}


def _take_direction(local: LocalNode) -> None:
    """Make a device's copy compute one direction: the first device forward, the second one in reverse."""
    local.set_attribute("direction", "reverse" if local.device else "forward")
    names = local.view.attribute("activations")
    if names:
        half = len(names) // 2
        local.set_attribute("activations", names[half:] if local.device else names[:half])


RECURRENT: dict[tuple[str, str], Rule] = {("", op): recurrent for op in ("LSTM", "GRU", "RNN")}
