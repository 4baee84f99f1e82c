"""Bundles: the manifest, the files, and how they are written and checked."""

from onnxplace._lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
