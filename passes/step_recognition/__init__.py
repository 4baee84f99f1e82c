"""Recognising training steps: phases, parameters, gradients, and the forward node of each backward node."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
