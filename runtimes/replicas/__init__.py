"""Copies of a bundle behind one session: which takes a request, and what happens when one dies."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
