"""Training steps of PyTorch modules as ONNX models, and running them. The export needs the extra `[torch]`.

Names are loaded on first use.

>>> from onnxplace_training import Trainer, export_training_step  # doctest: +SKIP
>>> optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)  # doctest: +SKIP
>>> step = export_training_step(module, torch.nn.CrossEntropyLoss(), optimizer, (x, y))  # doctest: +SKIP
>>> bundle = onnxplace.compile(step, "step.bundle")  # doctest: +SKIP
>>> with Trainer(bundle) as trainer:  # doctest: +SKIP
...     trainer.step({"input": x, "target": y})
"""

from onnxplace.utils import attach

_get, __dir__, __all__ = attach(__name__, __file__)


def __getattr__(name: str) -> object:
    """Import a public name, and say which extra is missing."""
    try:
        return _get(name)
    except ModuleNotFoundError as error:
        if error.name not in ("torch", "onnxscript"):
            raise
        from onnxplace.errors import UsageError

        message = f"{'PyTorch' if error.name == 'torch' else error.name} is not installed"
        hint = "install onnxplace with its extra: pip install 'onnxplace[torch]'"
        raise UsageError("U110", message, where=f"onnxplace_training.{name}", hint=hint) from None
