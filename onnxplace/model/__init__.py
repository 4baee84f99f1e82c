"""The door to ONNX: models, weights, nested graphs and carried state."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
