from onnxplace_training.array_files import (
    ArrayFile as ArrayFile,
    map_arrays as map_arrays,
    write_arrays as write_arrays,
)
from onnxplace_training.batches import BatchSampler as BatchSampler
from onnxplace_training.loss_curve import LossCurve as LossCurve, require_plot_format as require_plot_format
from onnxplace_training.torch.conversion import convert_to_onnx as convert_to_onnx
from onnxplace_training.torch.step_export import export_training_step as export_training_step
from onnxplace_training.trainer import (
    Schedule as Schedule,
    StepResult as StepResult,
    Trainer as Trainer,
    make_schedule as make_schedule,
)
