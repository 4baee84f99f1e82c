"""Inputs of a model: declared types and sizes, checks, generated values, .npz files."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
