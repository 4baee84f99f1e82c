"""Stages of a training step for micro-batches: where nodes lie in the forward pass, cuts, and the order of parts."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.placement.pipelining.backward_nodes import find_backward_nodes as find_backward_nodes
    from onnxplace.passes.placement.pipelining.part_order import Cells as Cells, order_parts as order_parts
    from onnxplace.passes.placement.pipelining.stage_cuts import (
        StageCuts as StageCuts,
        list_stage_cuts as list_stage_cuts,
    )
    from onnxplace.passes.placement.pipelining.step_layers import StepLayers as StepLayers, find_layers as find_layers

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "backward_nodes": "find_backward_nodes",
        "part_order": "Cells order_parts",
        "stage_cuts": "StageCuts list_stage_cuts",
        "step_layers": "StepLayers find_layers",
    },
)
