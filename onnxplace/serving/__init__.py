"""Serve many requests: streams, joining requests into batches, and copies of a bundle behind one session."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
