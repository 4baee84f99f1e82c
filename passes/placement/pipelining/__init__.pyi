from onnxplace.passes.placement.pipelining.part_order import Cells as Cells, order_parts as order_parts
from onnxplace.passes.placement.pipelining.step_stages import (
    StepLayers as StepLayers,
    find_backward_nodes as find_backward_nodes,
    find_layers as find_layers,
    list_stage_cuts as list_stage_cuts,
)
