"""Simulated time and memory of a placed graph, and lower bounds on them."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
