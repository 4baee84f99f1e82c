from onnxplace.passes.training.find_step import report_unusable_loss as report_unusable_loss
from onnxplace.passes.training.node_owners import (
    list_parameter_members as list_parameter_members,
    spread_owners as spread_owners,
)
from onnxplace.passes.training.recognise_step import recognise_training_step as recognise_training_step
