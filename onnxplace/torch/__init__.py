"""PyTorch modules, programs and training steps as ONNX models. Needs the extra `[torch]`; loaded on first use.

>>> from onnxplace.torch import export_training_step  # doctest: +SKIP
>>> optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3)  # doctest: +SKIP
>>> step = export_training_step(module, torch.nn.CrossEntropyLoss(), optimizer, (x, y))  # doctest: +SKIP
>>> onnx.save(step, "step.onnx")  # doctest: +SKIP
"""

from onnxplace._lazy import attach

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
        raise UsageError("U110", message, where=f"onnxplace.torch.{name}", hint=hint) from None
