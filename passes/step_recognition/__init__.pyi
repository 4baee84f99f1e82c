from onnxplace.passes.step_recognition.find_step import report_unusable_loss as report_unusable_loss
from onnxplace.passes.step_recognition.recognise_step import (
    list_parameter_members as list_parameter_members,
    recognise_training_step as recognise_training_step,
    spread_owners as spread_owners,
)
