"""Running training steps: the trainer, checkpoints, batches, learning rates, loss curves."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
