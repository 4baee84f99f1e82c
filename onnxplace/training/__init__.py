"""Running training steps: the trainer, checkpoints, batches, learning rates, loss curves."""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
    from onnxplace.training.batches import BatchSampler as BatchSampler
    from onnxplace.training.loss_curve import LossCurve as LossCurve, require_plot_format as require_plot_format
    from onnxplace.training.schedules import Schedule as Schedule, make_schedule as make_schedule
    from onnxplace.training.trainer import StepResult as StepResult, Trainer as Trainer

__getattr__, __dir__, __all__ = attach(
    __name__,
    {
        "batches": "BatchSampler",
        "loss_curve": "LossCurve require_plot_format",
        "schedules": "Schedule make_schedule",
        "trainer": "StepResult Trainer",
    },
)
