"""Rules of recurrent layers: by batch."""

from __future__ import annotations

from onnxplace.passes.sharding.node_views import NodeView
from onnxplace.passes.sharding.rules.axis_rules import AxisRule, Rule


def recurrent(view: NodeView) -> list[AxisRule]:
    """LSTM, GRU and RNN in the time-major layout: by batch."""
    if view.attribute("layout", 0):
        return []
    inputs = {position: axis for position, axis in ((0, 1), (4, 0), (5, 1), (6, 1)) if view.has(position)}
    outputs = {position: 2 if position == 0 else 1 for position in view.present_outputs()}
    return [AxisRule(inputs, outputs)]


RECURRENT: dict[tuple[str, str], Rule] = {("", op): recurrent for op in ("LSTM", "GRU", "RNN")}
