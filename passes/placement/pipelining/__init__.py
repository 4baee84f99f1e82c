"""Stages of a training step for micro-batches: where nodes lie in the forward pass, cuts, and the order of parts."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
