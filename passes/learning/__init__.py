"""Placers that learn: policies, their episodes in simulated time, and their training."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
