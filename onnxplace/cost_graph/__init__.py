"""Cost graphs: placement problems without ONNX, read, written and generated."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
