from onnxplace.training.batches import BatchSampler as BatchSampler
from onnxplace.training.loss_curve import LossCurve as LossCurve, require_plot_format as require_plot_format
from onnxplace.training.trainer import (
    Schedule as Schedule,
    StepResult as StepResult,
    Trainer as Trainer,
    make_schedule as make_schedule,
)
