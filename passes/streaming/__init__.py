"""Weights that stream: which stay on their devices, where their nodes run, and how they come in time."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
