from onnxplace.passes.placement.pipelining.backward_nodes import find_backward_nodes as find_backward_nodes
from onnxplace.passes.placement.pipelining.part_order import Cells as Cells, order_parts as order_parts
from onnxplace.passes.placement.pipelining.stage_cuts import (
    StageCuts as StageCuts,
    list_stage_cuts as list_stage_cuts,
)
from onnxplace.passes.placement.pipelining.step_layers import StepLayers as StepLayers, find_layers as find_layers
