"""Recomputation: the order of nodes, clones of nodes, and the model with them."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
