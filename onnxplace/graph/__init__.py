"""Graphs of nodes and values on plain arrays, without ONNX."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
