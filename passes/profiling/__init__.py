"""What nodes cost: measured with ONNX Runtime, or estimated."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
