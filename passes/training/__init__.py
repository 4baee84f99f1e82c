"""Recognising training steps: phases, parameters, gradients, and the forward node of each backward node."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.passes.training.find_step import report_unusable_loss as report_unusable_loss
    from onnxplace.passes.training.members import list_parameter_members as list_parameter_members
    from onnxplace.passes.training.owners import spread_owners as spread_owners
    from onnxplace.passes.training.recognise import recognise_training_step as recognise_training_step

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "find_step": "report_unusable_loss",
        "members": "list_parameter_members",
        "owners": "spread_owners",
        "recognise": "recognise_training_step",
    },
)
