"""From a model to a bundle, and from a cost graph to a placement."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
