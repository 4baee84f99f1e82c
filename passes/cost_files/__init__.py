"""Costs in files: the results of `profile` as JSON or CSV."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
