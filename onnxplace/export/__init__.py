"""Exports of bundles: one model again, and what other programs run."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
