from onnxplace.training.batches import BatchSampler as BatchSampler
from onnxplace.training.loss_curve import LossCurve as LossCurve, require_plot_format as require_plot_format
from onnxplace.training.schedules import Schedule as Schedule, make_schedule as make_schedule
from onnxplace.training.trainer import StepResult as StepResult, Trainer as Trainer
