"""Training steps of PyTorch modules as ONNX models, and running them. The export needs the extra `[torch]`.

Names are loaded on first use.

>>> from onnxplace_training import Trainer, export_training_step  # doctest: +SKIP
>>> optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)  # doctest: +SKIP
>>> step = export_training_step(module, torch.nn.CrossEntropyLoss(), optimizer, (x, y))  # doctest: +SKIP
>>> bundle = onnxplace.compile(step, "step.bundle")  # doctest: +SKIP
>>> with Trainer(bundle) as trainer:  # doctest: +SKIP
...     trainer.step({"input": x, "target": y})
"""

from typing import TYPE_CHECKING

from onnxplace._lazy import attach

if TYPE_CHECKING:
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
else:
    get_public, __dir__, __all__ = attach(__name__, __file__)

    def __getattr__(name: str) -> object:
        """Import a public name, and say which extra is missing."""
        try:
            return get_public(name)
        except ModuleNotFoundError as error:
            if error.name not in ("torch", "onnxscript"):
                raise
            from onnxplace.errors import UsageError

            message = f"{'PyTorch' if error.name == 'torch' else error.name} is not installed"
            hint = "install onnxplace with its extra: pip install 'onnxplace[torch]'"
            raise UsageError("U110", message, where=f"onnxplace_training.{name}", hint=hint) from None
